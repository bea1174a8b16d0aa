"""load_gguf on files that are damaged, contradict themselves or hold types without a format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import ARCHITECTURES, H, random_model, tensors_of, write_gguf

from torch_metalmm import load_gguf


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama")


def patched(path: Path, to: Path, offset: int, data: bytes) -> Path:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    to.write_bytes(content)
    return to


def test_a_missing_file_a_folder_and_a_wrong_dtype(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such GGUF file: .*nothing.gguf"):
        load_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(IsADirectoryError, match="is a folder without GGUF files"):
        load_gguf(tmp_path)
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16"):
        load_gguf(tiny_llama, dtype=torch.float64)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"GGML", "does not start with the GGUF magic"),
        (4, struct.pack("<I", 1), "GGUF version 1; versions 2 and 3"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**62), "claims .* tensors in"),
        (16, struct.pack("<Q", 2**62), "claims .* metadata values"),
        (8, struct.pack("<Q", 2000), "truncated|is not UTF-8|dimensions|not a power|appears twice"),
        (24, struct.pack("<Q", 2**60), "truncated"),
    ],
)
def test_a_wrong_header(
    tmp_path: Path, tiny_llama: Path, offset: int, data: bytes, message: str
) -> None:
    path = patched(tiny_llama, tmp_path / "bad.gguf", offset, data)
    with pytest.raises(ValueError, match=f"cannot read {path}: it .*({message})|{message}"):
        load_gguf(path)


@pytest.mark.parametrize("keep", [0, 3, 23, 24, 500, 5000, -1])
def test_a_truncated_file(tmp_path: Path, tiny_llama: Path, keep: int) -> None:
    content = tiny_llama.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(content[:keep])
    with pytest.raises(ValueError, match="truncated|shorter than a GGUF header"):
        load_gguf(path)


def test_a_tensor_type_without_a_format(tmp_path: Path, tiny_llama: Path) -> None:
    content = tiny_llama.read_bytes()
    name = b"blk.0.attn_v.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8
    for type_id, said in ((9, "Q8_1"), (15, "Q8_K"), (26, "I32"), (999, "#999")):
        path = patched(tiny_llama, tmp_path / "t.gguf", kind, struct.pack("<I", type_id))
        with pytest.raises(ValueError, match=f"'blk.0.attn_v.weight' has the type {said}.*Q4_K"):
            load_gguf(path)
    path = patched(tiny_llama, tmp_path / "t.gguf", kind + 4, struct.pack("<Q", 2**40))
    with pytest.raises(ValueError, match="truncated: tensor 'blk.0.attn_v.weight' ends at byte"):
        load_gguf(path)


def test_an_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    embedding = {"token_embd.weight": (np.zeros((320, H), np.float32), "f32")}
    path = write_gguf(tmp_path / "x.gguf", "bert", embedding, {})
    with pytest.raises(
        ValueError, match="no model is known for .* 'bert'; supported: .*llama.*qwen3"
    ):
        load_gguf(path)


def reshaped(path: Path, architecture: str, to: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """The file with these tensors as zeros of another shape; () leaves one out."""
    tensors = dict(tensors_of(path))
    for name, shape in shapes.items():
        del tensors[name]
        if shape:
            tensors[name] = (np.zeros(shape, np.float32), "f32")
    return write_gguf(to, architecture, tensors, ARCHITECTURES[architecture])


WRONG_SHAPES: list[tuple[str, dict[str, tuple[int, ...]], str]] = [
    (
        "llama",
        {"output_norm.weight": (H, 1)},
        r"'output_norm.weight' is \[256, 1\], but the model's model.norm.weight is \[256\]",
    ),
    ("llama", {"output_norm.weight": (1, H)}, r"'output_norm.weight' is \[1, 256\], but"),
    ("llama", {"blk.1.attn_norm.weight": (2, H // 2)}, r"'blk.1.attn_norm.weight' is \[2, 128\]"),
    ("llama", {"blk.0.attn_output.weight": (H, 1, H)}, r"_output.weight' is \[256, 1, 256\], but"),
    ("llama", {"blk.0.ffn_up.weight": (H, 512)}, r"'blk.0.ffn_up.weight' is \[256, 512\], but"),
    ("qwen2", {"blk.1.attn_q.bias": (H, 1)}, r"'blk.1.attn_q.bias' is \[256, 1\], but"),
    ("gpt2", {"blk.0.ffn_down.weight": (512, H)}, r"\[512, 256\], which makes \[256, 512\], but"),
    ("mamba", {"blk.0.ssm_conv1d.weight": (4, 512)}, r"\[4, 512\], which makes \[4, 1, 512\], but"),
    (
        "qwen3moe",
        {"blk.0.ffn_gate_inp.weight": (8, H)},
        r"'blk.0.ffn_gate_inp.weight' is \[8, 256\]",
    ),
    (
        "qwen35moe",
        {"blk.1.ffn_up_exps.weight": ()},
        r"has no tensor blk.1.ffn_up_exps.weight, for the model's .*experts of 4 experts",
    ),
]


@pytest.mark.parametrize(("architecture", "shapes", "message"), WRONG_SHAPES)
def test_tensors_of_another_shape_are_named_before_a_model_is_built(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    shapes: dict[str, tuple[int, ...]],
    message: str,
) -> None:
    good = random_model(tmp_path / "good.gguf", architecture)
    path = reshaped(good, architecture, tmp_path / "bad.gguf", shapes)
    built = []
    monkeypatch.setattr("torch_metalmm.files.gguf.load.tokenizer", lambda *args: built.append(args))
    with pytest.raises(ValueError, match=message) as caught:
        load_gguf(path)
    assert str(caught.value).startswith(str(path)) and not built


def test_a_file_without_a_tokenizer(tmp_path: Path, tiny_llama: Path) -> None:
    tensors = dict(tensors_of(tiny_llama))
    values = ARCHITECTURES["llama"]
    path = write_gguf(tmp_path / "x.gguf", "llama", tensors, values, tokenizer=False)
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 2**31, "block_count = 2147483648, but it has 20 tensors"),
        ("block_count", 3, "no tensor for the model's model.layers.2"),
        ("embedding_length", 2**31, "embedding_length = 2147483648, but token_embd.weight is"),
        ("feed_forward_length", 1024, r"is \[512, 256\], but the model's .* is \[1024, 256\]"),
        ("attention.head_count", 0, "attention.head_count = 0; allowed: integers from 1 to 256"),
        ("attention.head_count", 2**30, "1073741824; allowed: integers from 1 to 256"),
        ("block_count", "text", "block_count = 'text', but it has 20 tensors"),
        ("embedding_length", "text", "embedding_length = text, but token_embd.weight is"),
        ("attention.layer_norm_rms_epsilon", "text", "no config of its metadata|no model fits"),
    ],
)
def test_metadata_that_contradicts_the_tensors(
    tmp_path: Path, tiny_llama: Path, key: str, value: Any, message: str
) -> None:
    values = ARCHITECTURES["llama"] | {key: value}
    path = write_gguf(tmp_path / "x.gguf", "llama", dict(tensors_of(tiny_llama)), values)
    with pytest.raises(ValueError, match=message):
        load_gguf(path)


def test_metadata_that_asks_for_memory_without_tensors(tmp_path: Path) -> None:
    tensors = dict(tensors_of(random_model(tmp_path / "good.gguf", "qwen35")))
    values = ARCHITECTURES["qwen35"] | {"rope.dimension_count": 2**31}
    path = write_gguf(tmp_path / "x.gguf", "qwen35", tensors, values)
    with pytest.raises(ValueError, match=r"buffer .*inv_freq alone is \[1073741824\], 4294967296"):
        load_gguf(path)
