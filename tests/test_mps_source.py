"""The text that Metal compiles: the shaders of metal/ without includes, one kernel at a time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from plan_cases import DTYPES, ROOT, STRATEGIES, codecs, strategy_rows
from shaders import SLOTS, args_of

from torch_metalmm import _C, formats
from torch_metalmm.msl_build import preprocess, unmark
from torch_metalmm.msl_source import Reader, Source
from torch_metalmm.testing import MetalSource

sys.path.insert(0, str(ROOT / "csrc" / "mps"))
import flatten

METAL = ROOT / "metal"
SHADERS = {name: "".join(parts) for name, parts in flatten.flatten(METAL).items()}
CONSTANTS = ("k", "group", "scale_type", "epilogue", "batch", "bounds")


def read(text: str, name: str) -> Source:
    return Reader(unmark(preprocess(text, name, []), name)[0]).read()


def kernel_of(i: int, strategy: str) -> str:
    """A kernel of the strategy: formats and dtypes take turns."""
    middle = f"_{codecs()[3 * i % 22]}" if strategy_rows()[strategy] in ("Matmul", "Rows") else ""
    return f"{strategy}{middle}_{DTYPES[i % 3]}"


KERNELS = [kernel_of(i, s) for i, s in enumerate(STRATEGIES)]


def test_every_shader_is_there() -> None:
    assert set(SHADERS) == {f.stem for f in METAL.glob("*.metal")}


@pytest.mark.parametrize("name", SHADERS)
def test_flattened_text(name: str) -> None:
    """ASCII, only the system's headers included, and word for word what the emulator compiles."""
    text = SHADERS[name]
    assert text.isascii()
    # <cstdint> is for hosts: abi.h asks for it where __METAL_VERSION__ is not defined.
    for what in set(re.findall(r"#\s*include\s*(.*)", text)) - {"<cstdint>"}:
        assert re.fullmatch(r"<metal_\w+>", what)
    assert "#pragma once" not in text
    file = f"{name}.metal"
    original = preprocess((METAL / file).read_text(), file, [METAL])
    ours, theirs = (unmark(t, file)[0].split() for t in (preprocess(text, file, []), original))
    assert ours == theirs


def test_lines_are_those_of_the_files() -> None:
    """Each chunk begins with the place of its first line: the compiler's messages name it."""
    for text in SHADERS.values():
        for number, file, line in re.findall(r'^#line (\d+) "(metal/[^"]+)"\n(.*)', text, re.M):
            assert (ROOT / file).read_text().splitlines()[int(number) - 1] == line


def test_all_kernels_and_their_constants() -> None:
    """The shaders make the kernels that plans name, each once, with the constants plans set."""
    made = [k.name for name, text in SHADERS.items() for k in read(text, name).kernels]
    assert sorted(made) == sorted(_C.kernel_names())
    header = (METAL / "abi.h").read_text()
    for name, text in SHADERS.items():
        constants = {c.name: c.index for c in read(text, name).constants}
        assert set(constants) == {f"fc_{c}" for c in CONSTANTS}
        for i, constant in enumerate(CONSTANTS):
            assert re.search(rf"{constants[f'fc_{constant}']} = {i},", header)
    plan = _C.plan(m=1, n=8, k=32, format="q4_0", chip="m1")
    assert tuple(plan["passes"][0]["constants"]) == CONSTANTS


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_kernel_compiles_alone(kernel: str) -> None:
    """Of each strategy, by the stand-in; of elementwise.metal the four of one dtype."""
    library = MetalSource(_C.metal_source(kernel), name=f"{kernel}.metal", checked=False)
    if kernel.startswith("elementwise"):
        dtype = kernel.rsplit("_", 1)[1]
        assert sorted(library.kernels) == [
            f"elementwise_{op}_{dtype}" for op in ("add", "div", "mul", "sub")
        ]
    else:
        assert library.kernels == [kernel]


@pytest.mark.parametrize("codec", codecs())
def test_each_format_selects_its_struct(codec: str) -> None:
    """The kernel of a format decodes that format: exact values of two rows."""
    name = f"{codec}_g64" if codec.startswith("affine") else codec
    kernel, f, k = f"dequantize_{codec}_f32", formats.get(name), 512
    packed, y = f.quantize(torch.linspace(-2, 3, 2 * k).reshape(2, k)), torch.full((2, k), 7.0)
    one = _C.plan("dequantize", n=2, k=k, format=name, dtype="f32", chip="m1")["passes"][0]
    assert one["kernel"] == kernel
    run = MetalSource(_C.metal_source(kernel)).function(
        kernel, dict(enumerate(one["constants"].values()))
    )
    args = torch.frombuffer(bytearray(args_of(one)), dtype=torch.uint8)
    operands = {"weight": packed, "y": y, "args": args}
    bound = {SLOTS.index(slot): operands[slot] for slot in one["slots"]}
    run(one["grid"], one["group"], bound, [one["threadgroup_bytes"]])
    assert torch.equal(y, f.dequantize(packed, k))


@pytest.mark.parametrize(
    "kernel", ["", "gemv", "gemv_q4_0", "gemv_q4_0_f64", "gemv_Q4_0_f16", "gemv_q4_0_f16 ", "dot"]
)
def test_no_such_kernel(kernel: str) -> None:
    with pytest.raises(ValueError, match=f"make '{kernel}'"):
        _C.metal_source(kernel)


def test_what_cannot_be_flattened(tmp_path: Path) -> None:
    """Text that Metal may refuse is an error when the module is built, with the file's name."""
    (tmp_path / "a.metal").write_text('#include "b.h"\n')
    (tmp_path / "b.h").write_text("// Wᵀ\n")
    with pytest.raises(ValueError, match=r"/b\.h: has a character outside ASCII"):
        flatten.flatten(tmp_path)
    (tmp_path / "b.h").unlink()
    with pytest.raises(FileNotFoundError):
        flatten.flatten(tmp_path)
