"""load_gguf on files that are damaged or hold types without a format; test_converted_refused.py has
those that contradict themselves."""

from __future__ import annotations

import struct
from pathlib import Path

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


def test_a_file_without_a_tokenizer(tmp_path: Path, tiny_llama: Path) -> None:
    tensors = dict(tensors_of(tiny_llama))
    values = ARCHITECTURES["llama"]
    path = write_gguf(tmp_path / "x.gguf", "llama", tensors, values, tokenizer=False)
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_gguf(path)
