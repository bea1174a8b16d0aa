"""Qwen3.5 and Qwen3-Next of mlx-lm, and heads that quantizers for MLX keep beside models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from converted_models import write_record
from drafters import Fixed
from gguf_files import load_quietly
from layer_models import ids
from mlx_files import from_mlx, logits_of_mlx_lm, quantize_by_mlx_lm
from mtp_models import FAMILIES, folder_with_head, trunk
from safetensors.torch import load_file, save_file
from spoiled_folders import refused, tensor
from torch import Tensor, nn

from bench.models.llamas import dense_state
from torch_metalmm import (
    PackedCache,
    QuantExperts,
    QuantLinear,
    load_mlx,
    load_mtp,
    load_packed,
    quantize_,
    save_mlx,
)
from torch_metalmm.files.heads import HEAD_FILE, of_heads
from torch_metalmm.hf.decoding import decode
from torch_metalmm.models.cache_argument import cache_of_generate
from torch_metalmm.tools import cli

pytest.importorskip("mlx_lm.utils")  # it needs Python 3.11

# {family: what mlx-lm calls it}
QWEN = {
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
}


def model_of(family: str, **options: Any) -> Any:
    own = FAMILIES["qwen3_next"] if family == "qwen3_5_moe_text" else {}
    own = own | ({"full_attention_interval": 2} if family in QWEN else {})
    model = trunk(family, **(own | options))
    model.config._experts_implementation = "eager"  # f64, too
    return model


def converted(family: str, folder: Path, **options: Any) -> Path:
    """The model as mlx-lm converts and quantizes a published one."""
    dense = folder / "dense"
    save_mlx(model_of(family, **options), None, dense)
    quantize_by_mlx_lm(dense, folder / "mlx", 32)
    return folder / "mlx"


def error_of(family: str) -> Tensor:
    """8 times what rounding to f32 changes in the dense model: sums in another order, twice."""
    tokens = ids(2, 12)
    exact = model_of(family).double()(tokens).logits
    return 8 * (model_of(family)(tokens).logits - exact).abs().max().detach()


@pytest.mark.parametrize("family", QWEN)
def test_models_of_other_numbers(family: str, tmp_path: Path) -> None:
    folder, tokens = converted(family, tmp_path), ids(2, 12)
    weights = load_file(folder / "model.safetensors")
    want = logits_of_mlx_lm(folder, tokens)
    seen = {"vision_tower.blocks.0.weight": torch.ones(2)}  # mlx-vlm keeps it
    save_file(weights | seen, folder / "model.safetensors")
    model, _ = load_mlx(folder)
    assert (model(tokens).logits - want).abs().max() <= error_of(family)
    stored = next(t for n, t in weights.items() if n.endswith("model.norm.weight"))
    assert torch.equal(model.model.norm.weight, stored - 1)


def quantize(value: Tensor, mode: str) -> tuple[dict[str, Tensor], Tensor]:
    """(the planes that mlx makes of it, what they decode to)."""
    sizes = {"group_size": 32, "bits": 4, "mode": mode}
    planes = mx.quantize(mx.array(value.numpy()), **sizes)
    decoded = from_mlx(mx.dequantize(*planes, **sizes, dtype=mx.float32))
    parts = {n: from_mlx(p) for n, p in zip(("weight", "scales", "biases"), planes, strict=False)}
    return parts, decoded


def head_of(published: Path, sums: bool, mode: str | None) -> dict[str, Tensor]:
    """The folder's head as quantizers for MLX write it; the folder then has what it decodes to."""
    tensors = load_file(published / "model.safetensors")
    head, experts = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name in sorted(of_heads(tensors)):
        parts, owner = {"weight": tensors[name]}, name.removesuffix(".weight")
        if mode is not None and owner.endswith("_proj"):
            parts, tensors[name] = quantize(tensors[name], mode)
        before, expert, rest = owner.partition(".experts.")
        for leaf, value in parts.items() if owner != name else ():
            if expert and mode is not None:
                stack = f"{before}.switch_mlp.{rest.partition('.')[2]}.{leaf}"
                experts.setdefault(stack, []).append(value)
            else:
                if sums and owner.endswith(("norm", "norm_embedding", "norm_hidden")):
                    value = value + 1
                    tensors[name] = value - 1
                head[f"{owner}.{leaf}"] = value
        if owner == name:
            head[name] = tensors[name]
    save_file(tensors, published / "model.safetensors")
    return head | {name: torch.stack(parts) for name, parts in experts.items()}


# {who writes it: (family, file, prefix, whether 1 is added to norms, mode)}
KEPT: dict[str, tuple[str, str, str, bool, str | None]] = {
    "oMLX": ("qwen3_5_text", "model-00002-of-2.safetensors", "language_model.mtp.", True, "mxfp4"),
    "vllm-mlx": ("qwen3_next", "mtp/weights.safetensors", "mtp.", True, "affine"),
    "MTPLX": ("qwen3_5_text", "mtp.safetensors", "mtp.", False, None),
    "MTPLX, later": ("qwen3_next", "mtp.safetensors", "mtp.", True, None),
    "mlx-vlm": ("qwen3_5_text", "../head/model.safetensors", "", True, "affine"),
    "GLM": ("glm4_moe", "model-2.safetensors", "mtp.", False, "affine"),
    "DeepSeek": ("deepseek_v3", "model-2.safetensors", "mtp.", False, "affine"),
}
FORMATS = {"affine": "affine4_g32_f32", "mxfp4": "mxfp4"}
SHARED = ("block.lm_head", "block.model.embed")  # with the model


def folders(who: str, path: Path, **options: Any) -> tuple[Path, Path, dict[str, Tensor]]:
    """(the published folder, that of MLX, the head of the latter)."""
    family, file, prefix, sums, mode = KEPT[who]
    published = folder_with_head(model_of(family, **options), path / "published")
    folder = converted(family, path, **options)
    head = {n.replace("mtp.", prefix): t for n, t in head_of(published, sums, mode).items()}
    (folder / file).parent.mkdir(exist_ok=True)
    save_file(head, folder / file)
    return published, folder, head


@pytest.mark.parametrize("who", KEPT)
def test_heads(who: str, tmp_path: Path) -> None:
    family, file, prefix, _, mode = KEPT[who]
    published, folder, head = folders(who, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / file).parent.joinpath("config.json").write_text(json.dumps(values))
    model, _ = load_mlx(folder)
    place = (folder / file).parent if prefix == "" else folder
    got = load_mtp(model, place)
    if mode is None:  # packed as the model is
        want = load_mtp(model, published).state_dict()
        assert got.state_dict().keys() == want.keys()
        assert all(torch.equal(t, want[n]) for n, t in got.state_dict().items())
    else:
        same(got, load_mtp(model_of(family), published), FORMATS[mode], rounds=False)
    pace, prompt = Fixed(3), ids(1, 9)
    given: dict[str, Any] = {cache_of_generate(): PackedCache(model.config, "f32")}
    given |= {"max_new_tokens": 30, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    drafted = model.generate(prompt, **given, custom_generate=decode, draft=got, pace=pace)
    given[cache_of_generate()] = PackedCache(model.config, "f32")
    assert torch.equal(drafted, model.generate(prompt, **given)) and pace.drafted > 15
    for missing in ("self_attn.o_proj.weight", "fc.weight" if prefix != "mtp." else "norm.weight"):
        found = next(n for n in sorted(head) if n.endswith(missing))
        save_file({n: t for n, t in head.items() if n != found}, folder / file)
        named = "eh_proj.weight" if "fc." in missing else missing.rpartition(".")[0]
        with pytest.raises(ValueError, match=rf"(no|missing).*{named}|{named}.* missing"):
            load_mtp(model, place)


@pytest.mark.parametrize("who", [who for who in KEPT if who != "mlx-vlm"])
def test_quantize_keeps_the_head_in_a_folder(
    who: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that MLX packed keeps its bits, a dense one is packed as the model."""
    family, mode, out = KEPT[who][0], KEPT[who][-1], tmp_path / "out"
    published, folder, _ = folders(who, tmp_path)
    assert cli.main(["quantize", str(folder), "--format", "q8_0", "--output", str(out)]) == 0
    assert "without the head" not in capsys.readouterr().err
    got, want = load_mtp(load_packed(out)[0], out), load_mtp(model_of(family), published)
    if mode is None:
        same(got, want, "q8_0")
    else:
        same(got, want, FORMATS[mode], rounds=False)


def test_quantize_packs_the_head_again_for_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no option reaches a head that GGUF has no format for, the file is without."""
    like, tokenizer, _ = load_quietly(write_record(tmp_path / "m.gguf", "glm4-moe"))
    sizes, file = {"vocab_size": like.config.vocab_size}, tmp_path / "x.gguf"
    published, folder, _ = folders("GLM", tmp_path, **sizes)
    tokenizer.save_pretrained(folder)
    assert cli.main(["quantize", str(folder), "--format", "q8_0", "--output", str(file)]) == 0
    want = load_mtp(model_of("glm4_moe", **sizes), published)
    same(load_mtp(load_quietly(file)[0], file), want, "q8_0")
    between, other = tmp_path / "packed", tmp_path / "other.gguf"
    assert cli.main(["quantize", str(folder), "--format", "q8_0", "--output", str(between)]) == 0
    assert "without the head" not in capsys.readouterr().err
    option = "--pattern=lm_head=q4_0"
    assert cli.main(["quantize", str(between), option, "--output", str(other)]) == 0
    said = capsys.readouterr().err
    assert "without the head for later tokens of" in said and "which GGUF does not have" in said


@pytest.mark.parametrize("format", [None, "affine4_g32_f32", "mxfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_saved_with_its_head(family: str, format: str | None, tmp_path: Path) -> None:
    """By the published names, and the head's bits, whatever mlx-lm makes of the model's norms."""
    model, tokens, out = model_of(family), ids(2, 12), tmp_path / "out"
    published = folder_with_head(model, tmp_path / "published")
    if format is not None:
        quantize_(model, format, progress=False)
    head = load_mtp(model, published)
    save_mlx(model, None, out, head=head)
    ours = re.compile(
        r"experts|switch_mlp|embed_(q|tokens)|unembed|kv_b|shared_head\.head|\.(scales|biases)$"
    )
    given = of_heads(load_file(published / "model.safetensors"))
    written = load_file(out / HEAD_FILE)
    assert {n for n in written if not ours.search(n)} == {n for n in given if not ours.search(n)}
    again, _ = load_mlx(out)
    same(load_mtp(again, out), load_mtp(model_of(family), published), format)
    assert (model(tokens).logits - logits_of_mlx_lm(out, tokens)).abs().max() <= error_of(family)
    save_mlx(again, None, out)  # a head of another model would stay
    assert not (out / HEAD_FILE).exists()
    with pytest.raises(ValueError, match="head must be the model's own, of load_mtp, got MtpHead"):
        save_mlx(again, None, out, head=head)


@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        ("unembed_out.weight", None, "has no tensor for model.layers.1.self_attn.unembed_out"),
        (
            "embed_q.weight",
            lambda t: t[:-1],
            r"embed_q.weight is .* \[3, 32, 32\], no floats \[4,",
        ),
    ],
)
def test_damaged_latents(leaf: str, change: Any, message: str, tmp_path: Path) -> None:
    save_mlx(quantize_(trunk("deepseek_v3"), "affine4_g32", progress=False), None, tmp_path)
    refused(load_mlx, tmp_path, tensor(f"model.layers.1.self_attn.{leaf}", change), message)


def test_full_attention_at_no_interval(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "full_attention"]
    model = model_of("qwen3_5_text", num_hidden_layers=3, layer_types=kinds)
    with pytest.raises(ValueError, match=r"layer_types .*; allowed: full attention at an interval"):
        save_mlx(model, None, tmp_path / "out")


def rounded(value: Tensor, format: str) -> Tensor:
    packed = torch.ops.metalmm.quantize(value.flatten(0, -2), format)
    return torch.ops.metalmm.dequantize(packed, format, value.shape[-1]).view(value.shape)


def same(packed: nn.Module, dense: nn.Module, format: str | None, rounds: bool = True) -> None:
    """Whether the packed head is of that format, and has the numbers of the dense one, rounded.

    None: only experts are of a format, f32.
    """
    modules = {n: m for n, m in packed.named_modules() if not n.startswith(SHARED)}
    layers = {n: m for n, m in modules.items() if isinstance(m, QuantLinear)}
    experts = {n: m for n, m in modules.items() if isinstance(m, QuantExperts)}
    # mlx-lm splits kv_b_proj, and a load decodes it.
    formats = {m.format for n, m in layers.items() if not n.endswith("kv_b_proj")}
    formats |= {format for m in experts.values() for format in m.formats.values()}
    state = dense_state(packed)
    for name, value in dense.state_dict().items():
        if not name.startswith(SHARED):
            if name.rpartition(".")[0] in layers | experts and rounds and format is not None:
                value = rounded(value, format)
            assert torch.equal(state[name], value), name
    assert formats == {format} if format else formats <= {"f32"}
