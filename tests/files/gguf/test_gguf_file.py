"""What load_gguf makes of the tensors and the metadata of a file, and how layouts are found."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import ARCHITECTURES, MIXED, H, load_quietly, random_model, tensors_of, write_gguf
from torch import Tensor

from torch_metalmm import QuantEmbedding, QuantLinear, formats, load_gguf
from torch_metalmm.files.gguf.file import GgufFile
from torch_metalmm.files.gguf.layout import Layout, TensorMap


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    return random_model(tmp_path / "tiny.gguf", "llama")


def test_every_type_stays_packed_in_one_file(tiny_llama: Path) -> None:
    model, _, _ = load_quietly(tiny_llama)
    kinds = {m.format for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)}
    entries = GgufFile(tiny_llama).tensors.values()
    assert kinds == {entry.format for entry in entries if len(entry.shape) == 2}
    assert len(kinds) >= 14 and kinds <= set(MIXED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_is_that_of_activations_and_norms(tiny_llama: Path, dtype: torch.dtype) -> None:
    model, _, _ = load_quietly(tiny_llama, dtype=dtype)
    exact, _, _ = load_quietly(tiny_llama)
    assert model.dtype == model.config.dtype == dtype
    assert model.model.norm.weight.dtype == dtype and model.model.embed_tokens.dtype == dtype
    ids = torch.arange(12)[None]
    y = model(ids).logits
    assert y.dtype == dtype
    size = exact(ids).logits.abs().max()
    assert (y.float() - exact(ids).logits).abs().max() < 16 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize(
    ("architecture", "formats", "dtype"),
    [
        ("llama", ("q4_k", "q6_k"), torch.float16),
        ("llama", ("q4_k", "bf16"), torch.bfloat16),
        ("gemma3", ("q4_k",), torch.bfloat16),
    ],
)
def test_the_dtype_on_mps_has_16_bits(
    tmp_path: Path,
    architecture: str,
    formats: tuple[str, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights are left out: no other step takes the device."""
    path = random_model(
        tmp_path / f"{architecture}{len(formats)}.gguf", architecture, kinds=formats
    )
    monkeypatch.setattr("torch_metalmm.files.gguf.load._fill", lambda *_: None)
    assert load_quietly(path, device="mps")[0].dtype == dtype
    assert load_quietly(path, device="mps", dtype=torch.float32)[0].dtype == torch.float32
    assert load_quietly(path)[0].dtype == torch.float32


def test_rope_divisors_that_shorten_no_frequency_are_no_scaling(tmp_path: Path) -> None:
    """Llama 3's formula with a factor of 1 gives ones; below 1 it would speed frequencies up."""
    tensors = dict(tensors_of(random_model(tmp_path / "a.gguf", "llama")))
    for divisors in (np.ones(32, np.float32), np.full(32, 0.5, np.float32)):
        tensors["rope_freqs.weight"] = (divisors, "f32")
        path = write_gguf(tmp_path / "b.gguf", "llama", tensors, ARCHITECTURES["llama"])
        model, _, warned = load_quietly(path)
        assert model.config.rope_parameters["rope_type"] == "default"
        assert warned == ["not used by the model: rope_freqs.weight"]


def test_unknown_rope_divisors_and_spare_tensors_are_named(tmp_path: Path) -> None:
    tensors = dict(tensors_of(random_model(tmp_path / "a.gguf", "llama")))
    tensors["rope_freqs.weight"] = (np.linspace(1, 5, 32, dtype=np.float32), "f32")
    tensors["blk.0.spare.weight"] = (np.zeros((2, 32), np.float32), "f32")
    path = write_gguf(tmp_path / "b.gguf", "llama", tensors, ARCHITECTURES["llama"])
    model, _, warned = load_quietly(path)
    assert warned == ["not used by the model: rope_freqs.weight, blk.0.spare.weight"]
    assert model.config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize("divisors", [None, [1, 8.0, 1e30, 1e30], [1e30, 1, 1e30, 1e30]])
def test_divisors_that_are_no_proportional_rotation(tmp_path: Path, divisors: Any) -> None:
    embedding = {"token_embd.weight": (np.zeros((320, H), np.float32), "f32")}
    if divisors is not None:
        embedding["rope_freqs.weight"] = np.float32(divisors), "f32"
    path = write_gguf(
        tmp_path / "g.gguf", "gemma4", embedding, ARCHITECTURES["gemma4"] | {"block_count": 1}
    )
    with pytest.raises(ValueError, match=r"rope_freqs.weight is \[.*; it must be ones, then"):
        load_gguf(path)


def test_missing_biases_are_zero_and_missing_weights_an_error(tmp_path: Path) -> None:
    tensors = dict(tensors_of(random_model(tmp_path / "a.gguf", "qwen2")))
    del tensors["blk.1.attn_q.bias"]
    values = ARCHITECTURES["qwen2"]
    model, _, _ = load_quietly(write_gguf(tmp_path / "b.gguf", "qwen2", tensors, values))
    assert not model.model.layers[1].self_attn.q_proj.bias.any()
    assert model.model.layers[0].self_attn.q_proj.bias.any()
    del tensors["blk.1.attn_v.weight"]
    path = write_gguf(tmp_path / "b.gguf", "qwen2", tensors, values)
    with pytest.raises(ValueError, match="no tensor for the model's model.layers.1.self_attn.v"):
        load_gguf(path)


# How layouts are found


class _FakeMap(TensorMap):
    def names(self) -> dict[str, str]:
        return {}

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def target(self, name: str) -> str:
        return name

    def convert(self, name: str, value: np.ndarray) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(self.change(value)))}


def counting_columns(value: np.ndarray) -> np.ndarray:
    return value.reshape(value.shape[0], 8, 2).swapaxes(1, 2).reshape(value.shape)


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        (lambda w: w, Layout()),
        (lambda w: w.T, Layout(transposed=True)),
        (lambda w: w[::-1], Layout(rows=np.arange(12)[::-1])),
        (counting_columns, Layout(columns=np.arange(16).reshape(8, 2).T.ravel())),
        (lambda w: w - 1, None),
        (lambda w: w.astype(float), None),
        (lambda w: w.T[::-1], None),
        (lambda w: w[::-1, ::-1], None),
        (lambda w: w[:6], None),
        (lambda w: w[np.zeros(len(w), int)], None),
        (lambda w: w.reshape(12, 16).T.reshape(w.shape), None),
    ],
)
def test_layout_of_a_conversion(change: Any, layout: Layout | None) -> None:
    found = _FakeMap(change).layout({"blk.0.x.weight": (12, 16)})
    assert (found is None) == (layout is None)
    if found is not None and layout is not None:
        assert found.transposed == layout.transposed
        assert np.array_equal(found.rows, layout.rows)
        assert np.array_equal(found.columns, layout.columns)


def test_what_makes_nothing_has_no_layout() -> None:
    """Such as a tensor that waits for another, even one of a single value."""

    class Waits(_FakeMap):
        def convert(self, name: str, value: np.ndarray) -> dict[str, Tensor]:
            return {}

    assert Waits(None).layout({"x.weight": (1, 1)}) is None
    assert _FakeMap(lambda w: w).layout({"x.weight": (1, 1)}) == Layout()


@pytest.mark.parametrize("shape", [(2, 8), (8, 8), (8, 256), (128, 8), (300, 8), (8, 20000)])
@pytest.mark.parametrize("small", [(4, 10**6), (10**6, 4), (127, 10**6), (10**6, 16383)])
def test_the_layout_of_a_small_matrix_says_nothing_of_a_large_one(
    shape: tuple[int, int], small: tuple[int, int]
) -> None:
    """Reorders that are the identity up to some size, as those of groups and heads are."""

    def as_seen_by_the_model(value: np.ndarray, axis: int) -> np.ndarray:
        if value.shape[0] <= small[0] and value.shape[1] <= small[1]:
            return value
        return np.roll(np.flip(value, axis), 1, axis)

    value = np.random.default_rng(0).standard_normal(shape)
    for axis in (0, 1):
        found = _FakeMap(lambda w, a=axis: as_seen_by_the_model(w, a)).layout({"x.weight": shape})
        assert found is not None and not found.transposed
        rows = slice(None) if found.rows is None else found.rows
        columns = slice(None) if found.columns is None else found.columns
        assert np.array_equal(value[rows][:, columns], as_seen_by_the_model(value, axis))


def test_a_large_matrix_that_stays_as_it_is_needs_no_memory() -> None:
    class Same(_FakeMap):
        def convert(self, name: str, value: np.ndarray) -> dict[str, Tensor]:
            return {name: torch.from_numpy(value)}

    tracemalloc.start()
    assert Same(None).layout({"token_embd.weight": (2**15, 2**13)}) == Layout()
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()


def test_dense_decodes_as_the_specification(tiny_llama: Path) -> None:
    file = GgufFile(tiny_llama)
    for name, entry in file.tensors.items():
        if len(entry.shape) == 2:
            decoded = formats.get(entry.format).dequantize(file.packed(name), entry.shape[1])
            assert torch.equal(file.dense(name), decoded)
