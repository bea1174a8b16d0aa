"""Importance matrices: llama.cpp's two file formats, and what `metalmm imatrix` measures."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import finish, random_model
from quantized_files import layouts, write

from torch_metalmm import QuantLinear, load_gguf, load_quantized
from torch_metalmm.files.gguf.map import gguf_names
from torch_metalmm.files.imatrix import Entry, Imatrix, read_imatrix, write_imatrix
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.imatrix import measure

RANDOM = np.random.default_rng(0)
Q, EXPERTS = "blk.0.attn_q.weight", "blk.1.ffn_up_exps.weight"


def matrix() -> Imatrix:
    """A dense weight, and four experts of which one saw nothing."""
    return Imatrix(
        {
            Q: Entry(RANDOM.random((1, 64), np.float32), np.array([1024], np.float32)),
            EXPERTS: Entry(
                RANDOM.random((4, 32), np.float32), np.array([700, 0, 300, 24], np.float32)
            ),
        },
        ("wiki.train.raw", "code.txt"),
        2,
        512,
    )


def same(a: Imatrix, b: Imatrix) -> bool:
    return a.entries.keys() == b.entries.keys() and all(
        np.array_equal(a.entries[n].sums, b.entries[n].sums)
        and np.array_equal(a.entries[n].counts, b.entries[n].counts)
        for n in a.entries
    )


def test_gguf_there_and_back(tmp_path: Path) -> None:
    made = matrix()
    write_imatrix(tmp_path / "x.gguf", made)
    again = read_imatrix(tmp_path / "x.gguf")
    assert same(made, again)
    assert (again.datasets, again.chunks, again.chunk_size) == (made.datasets, 2, 512)


def test_gguf_is_what_llama_cpp_reads(tmp_path: Path) -> None:
    """The keys, names, types and shapes that its load_imatrix asks for."""
    made = matrix()
    write_imatrix(tmp_path / "x.gguf", made)
    file = gguf.GGUFReader(tmp_path / "x.gguf")
    assert file.get_field("general.type").contents() == "imatrix"
    assert file.get_field("imatrix.datasets").contents() == list(made.datasets)
    for key, value in (("chunk_count", 2), ("chunk_size", 512)):
        field = file.get_field(f"imatrix.{key}")
        assert field.types == [gguf.GGUFValueType.UINT32] and field.contents() == value
    tensors = {t.name: t for t in file.tensors}
    assert {t.tensor_type for t in file.tensors} == {gguf.GGMLQuantizationType.F32}
    assert list(tensors[f"{EXPERTS}.in_sum2"].shape) == [32, 4]  # ggml: the columns first
    assert list(tensors[f"{EXPERTS}.counts"].shape) == [1, 4]
    assert np.array_equal(tensors[f"{Q}.in_sum2"].data, made.entries[Q].sums)
    assert len(tensors) == 4


def dat(entries: dict[str, tuple[int, np.ndarray]], tail: bytes = b"") -> bytes:
    """A file as save_imatrix_legacy writes it."""
    out = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        out += struct.pack("<i", len(name)) + name.encode()
        out += struct.pack("<ii", calls, values.size) + values.astype("<f4").tobytes()
    return out + tail


def test_dat_is_read(tmp_path: Path) -> None:
    values = RANDOM.random(64, np.float32)
    tail = struct.pack("<ii", 9, 8) + b"wiki.raw"
    (tmp_path / "new").write_bytes(dat({Q: (8, values)}, tail))
    (tmp_path / "old").write_bytes(dat({Q: (8, values)}))
    for name, datasets, chunks in (("new", ("wiki.raw",), 9), ("old", (), 0)):
        found = read_imatrix(tmp_path / name)
        assert np.array_equal(found.entries[Q].means()[0], values / np.float32(8))
        assert (found.datasets, found.chunks) == (datasets, chunks)


def test_dat_is_written(tmp_path: Path) -> None:
    """Means times chunks, rounded up; a mean of 1 for what saw nothing."""
    made = matrix()
    write_imatrix(tmp_path / "x.dat", made)
    sums, counts = made.entries[EXPERTS].sums, made.entries[EXPERTS].counts[:, None]
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.float32(1))
    want = {
        Q: (2, made.entries[Q].sums / np.float32(1024) * np.float32(2)),
        EXPERTS: (2, means * np.float32(2)),
    }
    tail = struct.pack("<ii", 2, 8) + b"code.txt"
    assert (tmp_path / "x.dat").read_bytes() == dat(want, tail)


GOOD = dat({Q: (8, np.ones(64, np.float32))}, struct.pack("<ii", 9, 8) + b"wiki.raw")
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "runs past the end"),
    "no entries": (struct.pack("<i", 0), "has no entries"),
    "truncated": (GOOD[:100], "attn_q.weight runs past the end"),
    "truncated at the end": (GOOD[:-3], "its dataset runs past the end"),
    "long name": (struct.pack("<ii", 1, 2**30), "a name of 1073741824 bytes"),
    "negative name": (struct.pack("<ii", 1, -1), "a name of -1 bytes"),
    "no chunks": (dat({Q: (0, np.ones(4))}), "4 values of 0 chunks"),
    "huge count": (
        struct.pack("<ii", 1, 1) + b"q" + struct.pack("<ii", 1, 2**31 - 1),
        "q runs past",
    ),
    "negative": (dat({Q: (1, -np.ones(4))}), "must be finite and not negative"),
    "NaN": (dat({Q: (1, np.full(4, np.nan))}), "must be finite and not negative"),
    "safetensors": (b"\x80\0\0\0\0\0\0\0{}", "a name of 0 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_dat_files(tmp_path: Path, case: str) -> None:
    data, message = HOSTILE[case]
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_imatrix(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_hostile_gguf_files(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", "llama")
    with pytest.raises(ValueError, match="general.type must be 'imatrix'"):
        read_imatrix(path)
    made = matrix()
    bad = Entry(made.entries[Q].sums, np.ones(2, np.float32))
    write_imatrix(tmp_path / "x.gguf", Imatrix({Q: bad}))
    with pytest.raises(ValueError, match=r"attn_q.weight must have in_sum2 and counts"):
        read_imatrix(tmp_path / "x.gguf")
    write_imatrix(tmp_path / "x.gguf", Imatrix({Q: Entry(-made.entries[Q].sums, bad.counts[:1])}))
    with pytest.raises(ValueError, match="in_sum2 of .*attn_q.weight must be finite and not neg"):
        read_imatrix(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("key", "add", "value", "message"),
    [
        ("chunk_size", "add_uint32", 0, "chunk_size = 0; allowed: integers from 1 on"),
        ("chunk_size", "add_string", "512", "chunk_size = '512'"),
        ("chunk_size", "add_bool", True, "chunk_size = True"),
        ("chunk_count", "add_int32", -1, "chunk_count = -1; allowed: integers from 0 on"),
        ("chunk_count", "add_float32", 2.0, "chunk_count = 2.0"),
        ("chunk_count", None, None, "chunk_count = None"),
        ("datasets", "add_string", "wiki", "datasets must be an array of strings"),
        ("datasets", "add_array", [1, 2], "datasets must be an array of strings"),
    ],
)
def test_hostile_facts(tmp_path: Path, key: str, add: str | None, value: Any, message: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "imatrix")
    writer.add_type("imatrix")
    for name, least in (("chunk_count", 0), ("chunk_size", 1)):
        if name != key:
            writer.add_uint32(f"imatrix.{name}", least)
    if add is not None:
        getattr(writer, add)(f"imatrix.{key}", value)
    writer.add_tensor(f"{Q}.in_sum2", np.ones((1, 64), np.float32))
    writer.add_tensor(f"{Q}.counts", np.ones((1, 1), np.float32))
    finish(writer, tmp_path / "x.gguf")
    with pytest.raises(ValueError, match=message) as caught:
        read_imatrix(tmp_path / "x.gguf")
    assert str(tmp_path / "x.gguf") in str(caught.value)


@pytest.mark.parametrize("name", ["x.dat", "x.gguf"])
@pytest.mark.parametrize("changes", [{"chunk_size": 0}, {"chunk_size": 1.5}, {"chunks": -1}])
def test_facts_that_are_not_written(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be an integer of at least"):
        write_imatrix(tmp_path / name, dataclasses.replace(matrix(), **changes))
    assert not (tmp_path / name).exists()


TEXT = "Three rivers run through it, and none of them is long. " * 2


def command(model: Path, tmp_path: Path) -> list[str]:
    """The arguments for chunks of 16 tokens of TEXT, and x.gguf."""
    (tmp_path / "text").write_text(TEXT)
    names = ["--model", str(model), "--text", str(tmp_path / "text")]
    return ["imatrix", *names, "--output", str(tmp_path / "x.gguf"), "--chunk", "16"]


def is_measured(found: Imatrix, model: Any, tokenizer: Any) -> None:
    """Two chunks and more of 16 tokens: the sums of the inputs that each layer was given."""
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[0]
    chunks = len(ids) // 16
    assert found.chunks == chunks >= 2 and found.chunk_size == 16
    seen: dict[str, list[torch.Tensor]] = {}
    names = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | QuantLinear) and name != "lm_head":
            (names[name],) = gguf_names(model, [name])
            module.register_forward_hook(
                lambda _, x, y, name=name: seen.setdefault(name, []).append(x[0][0])
            )
    whole = ids[: chunks * 16].reshape(-1, 16).clone()
    if ids[0] == tokenizer.bos_token_id:
        whole[:, 0] = ids[0]
    with torch.inference_mode():
        for chunk in whole:
            model(chunk[None])
    assert found.entries.keys() == set(names.values()) and len(names) == 7 * len(model.model.layers)
    layers = "blk.0.ffn_down.weight", "blk.0.attn_output.weight"
    assert set(layers) <= found.entries.keys()
    for name, owner in names.items():
        x = torch.cat(seen[name])
        want = x.double().square().sum(0)
        slack = (len(x) + 2) * 2.0**-24 * want  # 2 roundings and the sums of each chunk, in f32
        sums = torch.from_numpy(found.entries[owner].sums[0].copy()).double()
        assert found.entries[owner].counts == len(x) and ((sums - want).abs() <= slack).all()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_command(tmp_path: Path, architecture: str, capsys: Any) -> None:
    path = random_model(tmp_path / "m.gguf", architecture)
    assert main(command(path, tmp_path)) == 0, capsys.readouterr().err
    is_measured(read_imatrix(tmp_path / "x.gguf"), *load_gguf(path))


def test_layers_that_order_their_columns(tmp_path: Path, capsys: Any) -> None:
    """Act-order: the columns of x, as in the model that is converted; a packed one is refused."""
    folder = tmp_path / "gptq"
    write(folder, layouts(4, 64)["gptq"], 4, 64, shuffled=True)
    load_gguf(random_model(tmp_path / "m.gguf", "llama"))[1].save_pretrained(folder)
    assert main(command(folder, tmp_path)) == 0, capsys.readouterr().err
    model, tokenizer = load_quantized(folder)
    assert model.model.layers[0].mlp.down_proj.input_order is not None
    is_measured(read_imatrix(tmp_path / "x.gguf"), model, tokenizer)

    (tmp_path / "x.gguf").unlink()
    model.save_pretrained(tmp_path / "packed")
    tokenizer.save_pretrained(tmp_path / "packed")
    assert main(command(tmp_path / "packed", tmp_path)) == 1
    assert "packed: model.layers.0.mlp.down_proj has an input_order" in capsys.readouterr().err
    assert not (tmp_path / "x.gguf").exists()


def test_columns_of_gguf_files_keep_their_order(tmp_path: Path) -> None:
    """A layer of a GGUF file that orders its columns has x's columns in that order."""
    model, tokenizer = load_gguf(random_model(tmp_path / "m.gguf", "llama"))
    layer = model.model.layers[0].mlp.down_proj
    order = torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(0))
    layer.input_order = order
    of_x, of_file = (
        measure(model, tokenizer, TEXT, 16, "text", as_packed=packed).entries
        for packed in (False, True)
    )
    for name, entry in of_x.items():
        sums = entry.sums[:, order.numpy()] if name == "blk.0.ffn_down.weight" else entry.sums
        assert np.array_equal(of_file[name].sums, sums)


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = random_model(tmp_path / "m.gguf", "llama")
    (tmp_path / "text").write_text("short")
    command = ["imatrix", "--model", str(path), "--text", str(tmp_path / "text"), "--output"]
    assert main([*command, str(tmp_path / "x")]) == 1
    assert "fewer than a chunk of 512" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "x"), "--chunk", "1"]) == 1
    assert "--chunk must be at least 2, got 1" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
