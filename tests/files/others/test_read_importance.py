"""read_importance, and the ways to quantize with a file: quantize_, the command, MetalMMConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from converted_models import CASES, records
from converted_models import random_model as recorded_model
from gguf_files import random_model as random_gguf
from hf_models import random_model

from torch_metalmm import (
    MetalMMConfig,
    formats,
    load_gguf,
    load_packed,
    quantize_,
    read_importance,
)
from torch_metalmm.files.gguf.map import gguf_names
from torch_metalmm.files.imatrix import Entry, Imatrix, write_imatrix
from torch_metalmm.models.replace import dense_weight
from torch_metalmm.tools.cli import main


def linear_layers(model: Any) -> dict[str, int]:
    """{name: K} of every linear layer."""
    return {n: m.in_features for n, m in model.named_modules() if hasattr(m, "in_features")}


def entries(model: Any, names: dict[str, str]) -> dict[str, Entry]:
    """An entry of 10 rows for each layer, under its name in `names`."""
    random = np.random.default_rng(1)
    return {
        names[layer]: Entry(random.random((1, k), np.float32), np.array([10], np.float32))
        for layer, k in linear_layers(model).items()
    }


def names_of(model: Any) -> dict[str, str]:
    """{linear layer: its tensor in a GGUF file}."""
    return {layer: name for name, layer in gguf_names(model, linear_layers(model)).items()}


@pytest.mark.parametrize("suffix", [".gguf", ".dat"])
@pytest.mark.parametrize("kind", ["gguf", "layer", "weight"])
def test_names(tmp_path: Path, suffix: str, kind: str) -> None:
    model = random_model("llama")
    layers = linear_layers(model)
    names = {
        "gguf": names_of(model),
        "layer": {n: n for n in layers},
        "weight": {n: f"{n}.weight" for n in layers},
    }[kind]
    given = entries(model, names)
    stacked = Entry(np.ones((4, 32), np.float32), np.ones(4, np.float32))
    others = {"blk.0.ffn_up_exps.weight": stacked, "blk.900.attn_q.weight": given[min(given)]}
    path = tmp_path / f"x{suffix}"
    write_imatrix(path, Imatrix(given | others, ("text",), 1, 10))
    found = read_importance(path, model)
    assert found.keys() == layers.keys()
    for layer in layers:
        assert np.array_equal(found[layer].numpy(), given[names[layer]].means()[0])


# Without linear layers, of an architecture that gguf knows by another type, or by other names.
UNNAMED = ("gpt2", "mt5", "umt5", "solar-open")
NAMED = [
    case
    for case, (_, values) in CASES.items()
    if "text_config" not in values and not case.startswith(UNNAMED)
]


@pytest.mark.parametrize("case", NAMED)
def test_names_of_every_architecture(case: str) -> None:
    """Those of llama.cpp's converter, which calls Mixtral llama, Phi phi2, Ministral 3 mistral3."""
    model, tensors = recorded_model(case), records()[case]["tensors"]
    layers = linear_layers(model)
    found = gguf_names(model, layers)
    assert layers.keys() - {*found.values()} <= {"lm_head"}
    # A head may be tied; keys and values of a latent are two stacks in the record.
    found = {name: n for name, n in found.items() if n != "lm_head" and "attn_kv_b" not in name}
    # Of tensors that the converter left as they are, a record has the model's names.
    unchanged = {source: name for name, (_, source, _) in tensors.items()}
    assert found and found.keys() <= tensors.keys()
    assert all(unchanged.get(f"{layer}.weight", name) == name for name, layer in found.items())
    assert {name for name in tensors if "attn_gate" in name} <= found.keys()


def test_a_matrix_of_2025_names_one_tensor() -> None:
    """ssm_in of Qwen3-Next, which files have had in two tensors since."""
    model = recorded_model("qwen3-next")
    layer = next(n for n in linear_layers(model) if n.endswith("in_proj_qkvz"))
    names = gguf_names(model, [layer], whole=True)
    assert [*names] == [f"blk.0.{leaf}.weight" for leaf in ("attn_qkv", "attn_gate", "ssm_in")]
    assert {*names.values()} == {layer} and len(gguf_names(model, [layer])) == 2


def test_columns_of_a_packed_file(tmp_path: Path) -> None:
    model, _ = load_gguf(random_gguf(tmp_path / "m.gguf", "llama"))
    layer = model.model.layers[0].mlp.down_proj
    order = torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(0))
    given = entries(model, names_of(model))
    write_imatrix(tmp_path / "x.gguf", Imatrix(given, ("text",), 1, 10))
    plain = read_importance(tmp_path / "x.gguf", model, as_packed=True)
    layer.input_order = order
    of_file = read_importance(tmp_path / "x.gguf", model, as_packed=True)
    of_x = read_importance(tmp_path / "x.gguf", model)
    for name, columns in plain.items():
        assert torch.equal(of_x[name], columns)
        ordered = name == "model.layers.0.mlp.down_proj"
        assert torch.equal(of_file[name][order] if ordered else of_file[name], columns)


def test_files_of_other_models(tmp_path: Path) -> None:
    model = random_model("llama")
    given = entries(model, names_of(model))
    other = {"blk.900.attn_q.weight": given["blk.0.attn_q.weight"]}
    write_imatrix(tmp_path / "other.gguf", Imatrix(other, ("text",), 1, 10))
    with pytest.raises(ValueError, match=r"other.gguf has no entry for a linear layer"):
        read_importance(tmp_path / "other.gguf", model)
    given["blk.0.attn_q.weight"] = Entry(np.ones((1, 32), np.float32), np.ones(1, np.float32))
    write_imatrix(tmp_path / "small.gguf", Imatrix(given, ("text",), 1, 10))
    with pytest.raises(ValueError, match=r"small.gguf: blk.0.attn_q.weight has 32 columns, model"):
        read_importance(tmp_path / "small.gguf", model)


def folder_and_file(tmp_path: Path) -> tuple[Any, Path, Path]:
    """A dense model, its folder, and a file of its importance."""
    model = random_model("llama")
    model.save_pretrained(tmp_path / "dense")
    given = entries(model, names_of(model))
    write_imatrix(tmp_path / "x.gguf", Imatrix(given, ("text",), 1, 10))
    return model, tmp_path / "dense", tmp_path / "x.gguf"


def is_weighed(packed: Any, dense: Any, path: Path, name: str) -> None:
    """The linear layers have the bytes of the specification with the file's importance."""
    found = read_importance(path, dense)
    assert found
    for layer, columns in found.items():
        made = packed.get_submodule(layer)
        w = dense_weight(dense.get_submodule(layer))
        assert made.format == name and torch.equal(
            made.weight, formats.get(name).quantize(w, columns)
        )
        assert not torch.equal(made.weight, formats.get(name).quantize(w))


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    dense, folder, path = folder_and_file(tmp_path)
    out = ["--output", str(tmp_path / "packed"), "--imatrix", str(path)]
    assert main(["quantize", str(folder), "--format", "q4_0", *out]) == 0, capsys.readouterr().err
    is_weighed(load_packed(tmp_path / "packed")[0], dense, path, "q4_0")


def test_the_command_of_gguf_files(tmp_path: Path, capsys: Any) -> None:
    """The columns are those of the file; without a format there is nothing to weigh."""
    source = random_gguf(tmp_path / "m.gguf", "llama", kinds=("q8_0",))
    dense, _ = load_gguf(source)
    given = entries(dense, names_of(dense))
    write_imatrix(tmp_path / "x.gguf", Imatrix(given, ("text",), 1, 10))
    out = ["--output", str(tmp_path / "packed"), "--imatrix", str(tmp_path / "x.gguf")]
    assert main(["quantize", str(source), *out]) == 1
    assert "give --format, --pattern or both" in capsys.readouterr().err
    assert main(["quantize", str(source), "--format", "iq4_nl", *out]) == 0
    is_weighed(load_packed(tmp_path / "packed")[0], dense, tmp_path / "x.gguf", "iq4_nl")
    other = ["--output", str(tmp_path / "other"), "--imatrix", str(source)]
    assert main(["quantize", str(source), "--format", "q4_0", *other]) == 1
    assert "general.type must be 'imatrix'" in capsys.readouterr().err


def test_from_pretrained(tmp_path: Path) -> None:
    """The file is read while the weights are packed, and is no part of the stored config."""
    dense, folder, path = folder_and_file(tmp_path)
    config = MetalMMConfig("affine4_g32", importance=path)
    assert config.to_dict()["importance"] == str(path)
    packed = type(dense).from_pretrained(folder, quantization_config=config)
    is_weighed(packed, dense, path, "affine4_g32")
    packed.save_pretrained(tmp_path / "packed")
    assert "importance" not in (tmp_path / "packed" / "config.json").read_text()
    path.unlink()
    again = type(dense).from_pretrained(tmp_path / "packed")
    layer = "model.layers.0.mlp.up_proj"
    assert torch.equal(again.get_submodule(layer).weight, packed.get_submodule(layer).weight)
    with pytest.raises(FileNotFoundError, match=r"x\.gguf"):
        type(dense).from_pretrained(folder, quantization_config=config)


def test_the_config_wants_a_path() -> None:
    with pytest.raises(ValueError, match="importance must be a path, got dict"):
        MetalMMConfig("q4_0", importance={"a": torch.ones(3)})  # type: ignore[arg-type]


def test_a_model_is_quantized_with_a_file(tmp_path: Path) -> None:
    dense, _, path = folder_and_file(tmp_path)
    model = random_model("llama")
    quantize_(model, "q4_1", progress=False, importance=read_importance(path, model))
    is_weighed(model, dense, path, "q4_1")
