"""Experts of GGUF files: what is missing or contradicts the model, other layouts, saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf_cases import EXPERTS, Case
from gguf_files import load_quietly, mapped, tensors_of, write_gguf
from gguf_models import convert, random_hf
from test_gguf import check_equals_reference
from test_gguf_more import metadata_of

from torch_metalmm import QuantExperts, load_gguf, quantize_, save_gguf

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.usefixtures("quiet_transformers"),
]

Tensors = dict[str, tuple[np.ndarray, str]]
GATE, UP, DOWN = (f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "good.gguf"
    return convert(random_hf("qwen3moe"), "qwen3moe", path, ("q8_0",))


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latent") / "good.gguf"
    return convert(random_hf("deepseek2+"), "deepseek2+", path, ("q8_0",))


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.pop(name) and None


def cut(name: str, part: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        data, format = tensors[name]
        tensors[name] = np.ascontiguousarray(data[part]), format

    return change


def one_by_one(tensors: Tensors) -> None:
    for name in [n for n in tensors if "_exps" in n]:
        data, format = tensors.pop(name)
        for i, expert in enumerate(data):
            tensors[name.replace("_exps", f".{i}")] = expert, format


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        (without(UP), {}, f"no tensor {UP}, for the model's model.layers.1.mlp.experts of 8"),
        (without(DOWN), {}, f"no tensor {DOWN}, for the model's"),
        (cut(GATE, slice(0, 7)), {}, rf"tensor '{GATE}' is \[7, 256, 256\], but .*\[8, 256, 256\]"),
        (cut(UP, np.s_[:, :255]), {}, rf"tensor '{UP}' is \[8, 255, 256\], but the model's"),
        (cut(DOWN, 0), {}, rf"tensor '{DOWN}' is \[256, 256\], but the model's"),
        (
            None,
            {"expert_count": 9},
            r"ffn_\w+_exps.weight' is \[8, 256, 256\], but .*\[9, 256, 256\]",
        ),
        (None, {"expert_feed_forward_length": 512}, r"is \[8, 256, 256\], but .*\[8, 512, 256\]"),
        (None, {"expert_count": 0}, "qwen3moe.expert_count = 0; allowed: integers from 1 on"),
        (None, {"expert_used_count": 0}, "expert_used_count = 0; allowed: integers from 1 to 8"),
        (None, {"expert_used_count": 9}, "expert_used_count = 9; allowed: integers from 1 to 8"),
        (one_by_one, {}, r"has its experts one by one \(blk.0.ffn_down.0.weight\)"),
    ],
)
def test_files_that_do_not_fit(
    good: Path,
    tmp_path: Path,
    change: Callable[[Tensors], None] | None,
    values: dict[str, Any],
    message: str,
) -> None:
    tensors = dict(tensors_of(good))
    if change is not None:
        change(tensors)
    bad = write_gguf(
        tmp_path / "bad.gguf", "qwen3moe", tensors, metadata_of(good, "qwen3moe") | values
    )
    with pytest.raises(ValueError, match=message) as caught:
        load_gguf(bad)
    assert str(bad) in str(caught.value)


def test_shared_experts_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    """Granite's files with one have the name of those without."""
    path = convert(random_hf("granitemoe"), "granitemoe", tmp_path / "good.gguf", ("f32",))
    wanted = {
        "expert_shared_feed_forward_length": "no tensor for the model's .*shared_mlp",
        "expert_shared_count": "granitemoe.expert_shared_count is known for other architectures",
    }
    for key, message in wanted.items():
        values = metadata_of(path, "granitemoe") | {key: 2}
        bad = write_gguf(tmp_path / "bad.gguf", "granitemoe", dict(tensors_of(path)), values)
        with pytest.raises(ValueError, match=message):
            load_gguf(bad)


@pytest.mark.parametrize("count", [4, 5, 1.0, True, "1"])
def test_layers_that_predict_further_tokens(good: Path, tmp_path: Path, count: Any) -> None:
    values = metadata_of(good, "qwen3moe") | {"nextn_predict_layers": count}
    bad = write_gguf(tmp_path / "bad.gguf", "qwen3moe", dict(tensors_of(good)), values)
    want = rf"qwen3moe.nextn_predict_layers = {count!r}; allowed: integers from 0 to 3"
    with pytest.raises(ValueError, match=want):
        load_gguf(bad)


def test_another_choice_of_experts_is_refused(tmp_path: Path) -> None:
    """A file of GLM that says softmax, where transformers' model has a sigmoid."""
    path = convert(random_hf("glm4moe"), "glm4moe", tmp_path / "good.gguf", ("f32",))
    values = metadata_of(path, "glm4moe") | {"expert_gating_func": 1}
    bad = write_gguf(tmp_path / "bad.gguf", "glm4moe", dict(tensors_of(path)), values)
    with pytest.raises(ValueError, match="glm4moe.expert_gating_func is 1; it must be 2"):
        load_gguf(bad)


LATENT_SIZES = "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla"


GROUPS = "allowed: 0 and divisors of expert_count, 8, that leave 2 or more experts in each group"
ROUTING = [
    ("group_count", (3, f"group_count = 3; {GROUPS}")),
    ("group_count", (8, f"group_count = 8; {GROUPS}")),
    ("group_count", (2.0, "group_count = 2.0; allowed: integers from 0 on")),
    ("group_used_count", (0, "group_used_count = 0; allowed: integers from 1 to 2")),
    ("group_used_count", (9, "group_used_count = 9; allowed: integers from 1 to 2")),
    ("used_count", (0, "expert_used_count = 0; allowed: integers from 1 to 8")),
    ("used_count", (99, "expert_used_count = 99; allowed: integers from 1 to 8")),
    ("weights_scale", (float("inf"), "weights_scale = inf; allowed: finite numbers")),
    ("weights_scale", ("x", "weights_scale = 'x'; allowed: finite numbers")),
]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, 0, f"{key} = 0; allowed: integers from 1 on") for key in LATENT_SIZES),
        ("attention.kv_lora_rank", None, "kv_lora_rank = None; allowed: integers from 1 on"),
        ("attention.kv_lora_rank", "x", "kv_lora_rank = 'x'; allowed: integers from 1 on"),
        ("attention.kv_lora_rank", 128, r"is \[320, 256\], but the model's .* is \[192, 256\]"),
        ("rope.dimension_count", 128, "_mla is 128; it must be more than .*count, 128"),
        (
            "attention.value_length_mla",
            32,
            r"attn_k_b.* and .*attn_v_b.*, which makes \[512, 256\]",
        ),
        (
            "attention.q_lora_rank",
            0,
            "has no tensor for the model's model.layers.0.self_attn.q_proj.weight",
        ),
        ("attention.temperature_scale", 0.1, "temperature_scale is .*; it must be 0"),
        ("rope.scaling.yarn_log_multiplier", 0.0, "multiplier is 0.0, .* is 'yarn'; without"),
        ("rope.scaling.yarn_log_multiplier", None, "multiplier is None, .* is 'yarn'; without"),
        (
            "expert_gating_func",
            1,
            "func is 1, but blk.1.exp_probs_b.bias corrects scores; .* has 2",
        ),
        ("expert_gating_func", None, "func is missing, but blk.1.exp_probs_b.bias corrects scores"),
        *((f"expert_{key}", *bad) for key, bad in ROUTING),
    ],
)
def test_sizes_of_a_latent_that_do_not_fit(
    latent: Path, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    values = metadata_of(latent, "deepseek2")
    if value is None:
        del values[key]
    else:
        values[key] = value
    bad = write_gguf(tmp_path / "bad.gguf", "deepseek2", dict(tensors_of(latent)), values)
    with pytest.raises(ValueError, match=message) as caught:
        load_gguf(bad)
    assert str(bad) in str(caught.value)


def test_one_stack_of_a_latent_without_the_other(latent: Path, tmp_path: Path) -> None:
    tensors = dict(tensors_of(latent))
    del tensors["blk.2.attn_v_b.weight"]
    values = metadata_of(latent, "deepseek2")
    bad = write_gguf(tmp_path / "bad.gguf", "deepseek2", tensors, values)
    with pytest.raises(
        ValueError, match=r"'blk.2.attn_k_b.weight' is .*, which makes nothing, but"
    ):
        load_gguf(bad)


@pytest.mark.parametrize("left", [("attn_k_b", "attn_v_b"), ("attn_v_b",)])
def test_both_layouts_of_a_latent(latent: Path, tmp_path: Path, left: tuple[str, ...]) -> None:
    tensors = dict(tensors_of(latent))
    rows = load_quietly(latent)[0].get_parameter("model.layers.2.self_attn.kv_b_proj.weight")
    tensors["blk.2.attn_kv_b.weight"] = rows.detach().numpy().copy(), "f32"
    for gone in {"attn_k_b", "attn_v_b"} - set(left):
        del tensors[f"blk.2.{gone}.weight"]
    values = metadata_of(latent, "deepseek2")
    bad = write_gguf(tmp_path / "bad.gguf", "deepseek2", tensors, values)
    others = ", ".join(f"'blk.2.{leaf}.weight'" for leaf in left)
    with pytest.raises(
        ValueError,
        match=rf"'blk.2.attn_kv_b.weight' alone makes the model's model.layers.2.self_attn."
        rf"kv_b_proj.weight, for which the file has {others} too",
    ) as caught:
        load_gguf(bad)
    assert str(bad) in str(caught.value)


def test_a_latent_that_turns_without_scaling(tmp_path: Path) -> None:
    original = random_hf("deepseek2", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    path = convert(original, "deepseek2", tmp_path / "new.gguf", ("q8_0",))
    values = metadata_of(path, "deepseek2")
    plain = {key: value for key, value in values.items() if "rope.scaling" not in key}
    path = write_gguf(tmp_path / "plain.gguf", "deepseek2", dict(tensors_of(path)), plain)
    model, _, _ = load_quietly(path)
    check_equals_reference(model, original, torch.tensor([[5, 6, 7, 8, 9]]))


UNSET = {"group_count": 0, "group_used_count": 0, "weights_scale": 0.0}


@pytest.mark.parametrize("zeros", [False, True])
def test_values_that_older_files_leave_out(tmp_path: Path, zeros: bool) -> None:
    """Read as llama.cpp reads them, not as the defaults of the model's class."""
    alone = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False}
    original = random_hf("deepseek2+", **alone)
    path = convert(original, "deepseek2+", tmp_path / "new.gguf", ("q8_0",))
    values = metadata_of(path, "deepseek2")
    for key in (*UNSET, "weights_norm"):
        del values[f"expert_{key}"]
    if zeros:
        values |= {f"expert_{key}": zero for key, zero in UNSET.items()}
    old = write_gguf(tmp_path / "old.gguf", "deepseek2", dict(tensors_of(path)), values)
    model, _, _ = load_quietly(old)
    check_equals_reference(model, original, torch.tensor([[5, 6, 7, 8, 9]]))


def test_an_older_file_does_not_say_how_it_scores(tmp_path: Path) -> None:
    """Files of the version before corrections leave the key out; llama.cpp takes a softmax."""
    original = random_hf("deepseek2")
    path = convert(original, "deepseek2", tmp_path / "new.gguf", ("q8_0",))
    values = metadata_of(path, "deepseek2")
    del values["expert_gating_func"]
    old = write_gguf(tmp_path / "old.gguf", "deepseek2", dict(tensors_of(path)), values)
    model, _, _ = load_quietly(old)
    check_equals_reference(model, original, torch.tensor([[5, 6, 7, 8, 9]]))


def test_a_correction_of_scores_that_is_missing_is_told(tmp_path: Path) -> None:
    path = convert(random_hf("glm4moe"), "glm4moe", tmp_path / "good.gguf", ("f32",))
    tensors = {n: t for n, t in dict(tensors_of(path)).items() if "exp_probs_b" not in n}
    bad = write_gguf(tmp_path / "bad.gguf", "glm4moe", tensors, metadata_of(path, "glm4moe"))
    with pytest.warns(
        UserWarning, match=r"no tensor for model.layers.\*.*correction_bias \(3\); as"
    ):
        load_gguf(bad)


def test_gate_and_up_in_one_tensor(good: Path, tmp_path: Path) -> None:
    """A stack of both is the model's own, and a view too."""
    tensors = dict(tensors_of(good))
    for name in [n for n in tensors if "ffn_gate_exps" in n]:
        (gate, format), (up, _) = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = np.concatenate((gate, up), 1), format
    path = write_gguf(tmp_path / "one.gguf", "qwen3moe", tensors, metadata_of(good, "qwen3moe"))
    model, _, warned = load_quietly(path)
    apart, _, _ = load_quietly(good)
    assert warned == []
    experts = [m for m in model.modules() if isinstance(m, QuantExperts)]
    assert {tuple(m.formats) for m in experts} == {("gate_up_proj", "down_proj")}
    assert all(mapped(path, m.get_parameter("gate_up_proj")) for m in experts)
    reference = apart.dequantize()
    reference.set_experts_implementation("eager")  # the others take no float64
    check_equals_reference(model, reference, torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize("case", EXPERTS)
@pytest.mark.parametrize("packed", [True, False])
def test_models_of_transformers_are_saved(tmp_path: Path, case: str, packed: bool) -> None:
    """Stacks of both, as quantize_ makes them, and dense ones."""
    original = random_hf(case)
    if packed:
        quantize_(original, "q8_0", progress=False)
    save_gguf(original, None, tmp_path / "a.gguf")
    found = {t.name: t for t in GGUFReader(tmp_path / "a.gguf").tensors}
    for name, module in original.named_modules():
        if not name.endswith(".experts"):
            continue
        block = f"blk.{name.split('.')[2]}"
        for part in ("gate", "up", "down"):
            stored = found[f"{block}.ffn_{part}_exps.weight"]
            assert stored.tensor_type.name == ("Q8_0" if packed else "F32")
            want = _matrices(module, part, EXPERTS[case])
            assert np.array_equal(np.array(stored.data), want.numpy())


def _matrices(module: Any, part: str, case: Case) -> torch.Tensor:
    """[E, rows, ...] of gate, up or down, as the file has them."""
    leaf = "down_proj" if part == "down" else "gate_up_proj"
    value = module.get_parameter(leaf).detach()
    if (case.alternating or case.columns) and not isinstance(module, QuantExperts):
        value = value.transpose(1, 2)
    if part == "down":
        return value
    pair = (value[:, ::2], value[:, 1::2]) if case.alternating else value.chunk(2, 1)
    return pair[part == "up"]
