"""docs/adding.md, carried out on copies of the tree: its places are all that there are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from places import COMPILER, ROOT

from torch_metalmm import testing
from torch_metalmm.msl.entries import shaders

HERE = Path(__file__).parent
PAGE = (ROOT / "docs" / "adding.md").read_text("utf-8")
COPIED = ("csrc", "metal", "torch_metalmm", "docs", "pyproject.toml")
COPIED += ("tests/conftest.py", "tests/support", "tests/formats")  # of check_table()
KERNEL = ("q8_x", "2", "48", "160")  # a problem of adding_kernel.py, for adding_plan.cpp


class Place(NamedTuple):
    """A text of the page; it goes before or after the line that begins with `line`, if any."""

    file: str
    where: str
    line: str
    text: str


def places(title: str) -> list[Place]:
    """The places of a section, in order."""
    (section,) = re.findall(rf"^## {title}.*?(?=^## |\Z)", PAGE, re.M | re.S)
    found = re.findall(
        r"^ +(?:New file `(.*?)`|In `(.*?)`, (before|after) the (?:last )?line(?: `(.*?)`)?):\n\n"
        r"```\w+\n(.*?)^```$",
        section,
        re.M | re.S,
    )
    assert len(found) == section.count("\n```") / 2 == len(re.findall(r"^\d\. ", section, re.M))
    return [Place(new or file, *rest) for new, file, *rest in found]


FORMAT, STRATEGY = places("A format"), places("A strategy")


def apply(place: Place, tree: Path) -> None:
    file = tree / place.file
    if not place.where:
        file.write_text(place.text)
        return
    lines = file.read_text().splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if line.startswith(place.line)]
    assert len(at) == 1 or not place.line, f"{place.file}: lines {place.line}: {at}"
    blank = "\n\n" if place.text.startswith("class ") else ""
    lines.insert(at[-1] + (place.where == "after"), blank + place.text)
    file.write_text("".join(lines))


def run(tree: Path, *command: str, data: bytes = b"") -> bytes:
    """The output of a command in the tree. AssertionError with what it says if it fails."""
    env = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin", "HOME": str(tree)}
    done = subprocess.run(command, cwd=tree, env=env, input=data, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout


def python(tree: Path, *arguments: str, data: bytes = b"") -> bytes:
    return run(tree, sys.executable, *arguments, data=data)


def compile_host(tree: Path, *arguments: str) -> None:
    run(tree, *COMPILER, "-std=c++17", "-ffp-contract=off", "-Icsrc", "-I.", *arguments)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What git knows of COPIED, the module that is built, the emulator's own objects."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    out = tmp_path / "tree"
    command = ["git", "ls-files", "-z", *COPIED]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, out / name, follow_symlinks=False)
    for module in (ROOT / "torch_metalmm").glob("*.so"):
        (out / "torch_metalmm" / module.name).symlink_to(module)
    (out / "build" / "msl").mkdir(parents=True)
    for ours in (ROOT / "build" / "zig", *(ROOT / "build" / "msl").glob("runtime-*")):
        if ours.exists():
            (out / ours.relative_to(ROOT)).symlink_to(ours)
    return out


def write_shaders(tree: Path) -> None:
    """As `python -m torch_metalmm.msl.entries` of the tree does."""
    for file, text in shaders(tree / "metal"):
        file.write_text(text)


def planned(tree: Path) -> bytes:
    """The pass of KERNEL, by the plan of the tree; what has not changed is not compiled again."""
    objects = []
    for file in (HERE / "adding_plan.cpp", *sorted((tree / "csrc" / "plan").rglob("*.cpp"))):
        objects.append(tree / f"{file.stem}.o")
        if not objects[-1].exists() or objects[-1].stat().st_mtime < file.stat().st_mtime:
            compile_host(tree, "-c", str(file), "-o", str(objects[-1]))
    compile_host(tree, *map(str, objects), "-o", "planned")
    return run(tree, "./planned", *KERNEL)


def check_table(tree: Path) -> None:
    """Those of test_table.py that ask no module which the copy would have to build."""
    chosen = "read_whole or specification_has_the_formats"
    test = ["tests/formats/test_table.py", "-k", chosen, "-p", "no:cacheprovider"]
    python(tree, "-m", "pytest", "-q", *test)


def check_codec(tree: Path) -> None:
    """Quantizer and scalar codec against the Python class, and every kernel of the codec's type."""
    compile_host(
        *(tree, "-DMM_ISA=scalar", "-DMM_SCALAR", "-DCODEC=Q8_X", "-DQUANTIZE=quantize_q8_x"),
        *(str(HERE / "adding_codec.cpp"), "csrc/cpu/quantize/block32.cpp", "-o", "codec"),
    )
    compile_host(tree, "-DMM_ISA=scalar", "-DMM_SCALAR", "-fsyntax-only", "csrc/cpu/isa.cpp")
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    got = run(tree, "./codec", data=bytes(x.view(torch.uint8).flatten().tolist()))
    spec = (
        "import sys, torch; from torch_metalmm import formats; f = formats.get('q8_x');"
        "x = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.float32)[None];"
        "p = f.quantize(x); w = f.dequantize(p, 32).view(torch.uint8);"
        "sys.stdout.buffer.write(bytes(p[0].tolist()) + bytes(w[0].tolist()))"
    )
    want = python(tree, "-c", spec, data=bytes(x.view(torch.uint8).flatten().tolist()))
    assert got == want


def check_kernel(tree: Path, plan: bytes) -> None:
    out = python(tree, str(HERE / "adding_kernel.py"), data=plan)
    assert out == b"right\n"


emulator = pytest.mark.skipif(bool(testing.absence()), reason=testing.absence())


def test_the_shaders_are_those_of_the_rows() -> None:
    assert [file.name for file, text in shaders() if file.read_text() != text] == []


@emulator
def test_both_examples(tree: Path) -> None:
    """The strategy's kernel decodes the new format: one kernel shows both. Without the arm of the
    plan, which is the last place, another strategy is planned."""
    *places, arm = (*FORMAT, *STRATEGY)
    for place in places:
        apply(place, tree)
    python(tree, "-m", "torch_metalmm.msl.entries")
    assert planned(tree).startswith(b"gemv_batched_q8_x_f32\n")
    apply(arm, tree)
    plan = planned(tree)
    assert plan.startswith(b"gemm_pairs_q8_x_f32\n1 1 1\n64\n")
    check_table(tree)
    check_codec(tree)
    check_kernel(tree, plan)


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("metal/formats.def", r"diff: Row\(name=.{1,2}q8_x"),
        ("metal/formats/block32.h", "Q8_X"),
        ("csrc/cpu/codecs/block.h", "Q8_X"),
        ("csrc/cpu/quantize/block32.cpp", "quantize_q8_x"),
        ("torch_metalmm/formats/blocks32.py", r"!= Row\(name=.{1,2}q8_x"),
        ("metal/kernels/gemm_pairs.h", "GemmPairs: a Kernel of strategies.def"),
        ("metal/strategies.def", "member.*gemm_pairs|gemm_pairs.*member"),
        ("metal/geometry.h", "GemmPairsTile"),
    ],
)
def test_a_place_that_is_left_out_is_named(tree: Path, left_out: str, said: str) -> None:
    example = FORMAT if left_out in {place.file for place in FORMAT} else STRATEGY
    for place in example:
        if place.file != left_out:
            apply(place, tree)
    with pytest.raises((AssertionError, ValueError), match=said):
        if example is STRATEGY:
            apply(FORMAT[0], tree)
            write_shaders(tree)
            compile_host(tree, "-fsyntax-only", "csrc/plan/plan.cpp")
        elif left_out in ("metal/formats.def", "torch_metalmm/formats/blocks32.py"):
            check_table(tree)
        elif left_out.startswith("metal/"):
            check_kernel(tree, b"gemm_naive_q8_x_f32" + b"\n" * 6)
        else:
            check_codec(tree)
