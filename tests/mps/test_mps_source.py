"""The text that Metal compiles: what a kernel needs of metal/, without includes."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest
import torch
from inputs import random_weight
from places import ROOT
from plan_cases import STRATEGIES, codecs, dtypes_of, formats_of
from shaders import SLOTS, args_of

from torch_metalmm import _C, formats
from torch_metalmm.msl import ptx
from torch_metalmm.msl.build import LANGUAGE, preprocess, zig
from torch_metalmm.msl.kernels import alone
from torch_metalmm.msl.markers import unmark
from torch_metalmm.msl.source import Reader, Source
from torch_metalmm.testing import MetalSource

sys.path.insert(0, str(ROOT / "csrc" / "mps"))
import flatten

METAL = ROOT / "metal"
FILES = {f.stem: f.relative_to(METAL) for f in METAL.rglob("*.metal")}
ROWS = re.findall(r"^MM_\w+ *\((\w+), *(\w+)", (METAL / "formats.def").read_text(), re.M)
STRUCTS = dict(ROWS)


@functools.cache
def shaders() -> dict[str, flatten.Shader]:
    return flatten.flatten(METAL)


def read(text: str, name: str) -> Source:
    return Reader(unmark(preprocess(text, name, [METAL]), name)[0]).read()


def format_of(kernel: str) -> str:
    """The format in a kernel's name; the first of formats.def where it has none."""
    return next((name for name in STRUCTS if f"_{name}_" in kernel), ROWS[0][0])


def only(kernel: str) -> str:
    """What tells a shader to make one kernel."""
    name, dtype = format_of(kernel), kernel.rpartition("_")[2]
    words = {"DTYPE": dtype, "FORMAT": name, "STRUCT": STRUCTS[name]}
    return "".join(f"#define MM_ONLY_{word} {value}\n" for word, value in words.items())


def shader_of(kernel: str) -> flatten.Shader:
    return shaders()[alone(kernel).file.stem]


def kernel_of(i: int, strategy: str) -> str:
    """A kernel of the strategy: formats and dtypes take turns."""
    of, dtypes = formats_of(strategy), dtypes_of(strategy)
    return f"{strategy}{f'_{of[3 * i % len(of)]}' if of else ''}_{dtypes[i % len(dtypes)]}"


KERNELS = [kernel_of(i, s) for i, s in enumerate(STRATEGIES)]


def test_every_shader_is_there() -> None:
    assert set(shaders()) == set(FILES)


def test_every_kernel_gets_the_snippets_of_its_format() -> None:
    """What the module holds is what flatten() says, of all kernels."""
    rows, texts = list(STRUCTS), set()
    for kernel in _C.kernel_names():
        text = shader_of(kernel).text(rows.index(format_of(kernel)))
        assert _C.metal_source(kernel) == only(kernel) + text
        texts.add(text)
    for text in texts:  # of kernels of every dtype
        assert text.isascii()
        # Grids are lines of numbers, which only their formats have.
        grid = sum(len(line) for line in text.splitlines() if line.count("0x") > 2)
        assert len(text) - grid < 66_000 and grid < 24_000
        assert "#pragma once" not in text
        # <cstdint> is for hosts: abi.h asks for it where __METAL_VERSION__ is not defined.
        for what in set(re.findall(r"#\s*include\s*(.*)", text)) - {"<cstdint>"}:
            assert re.fullmatch(r"<metal_\w+>", what)


@pytest.mark.parametrize("name", STRUCTS)
def test_a_text_has_its_own_format_only(name: str) -> None:
    """No struct of another format, but where the format is made of one, and keys beside values."""
    others = set(STRUCTS.values()) - {STRUCTS[name], STRUCTS["f16"]}
    others -= {"Q4_0"} if name == "iq4_nl" else set()
    for shader in shaders().values():
        text = re.sub(r"//.*", "", shader.text(list(STRUCTS).index(name)))
        assert not others & set(re.findall(r"\w+", text))


def compiled(text: str, entries: str) -> str:
    """LLVM's text of a kernel, as clang's front end makes it: before optimisations, with no choice
    of the CUDA engine; without the offsets of assembly in the text."""
    options = [*LANGUAGE, *ptx._TARGET, "-DMM_MATRIX_LANES", "-O1", "-w"]
    options += ["-Xclang", "-disable-llvm-passes"]
    done = zig("clang", *options, "-S", "-emit-llvm", "-", "-o", "-", text=text + entries)
    assert done.returncode == 0, done.stderr
    return re.sub(r"^(![0-9]+ = !)\{i64 [0-9]+\}", r"\1", done.stdout, flags=re.M)


@pytest.mark.parametrize("kernel", KERNELS)
def test_code_is_that_of_the_whole_shader(kernel: str) -> None:
    """What is left out makes no difference, of a kernel of every strategy."""
    whole = alone(kernel).text
    entries = ptx._entries(read(whole, kernel))
    code = compiled(_C.metal_source(kernel), entries)
    assert code == compiled(whole, entries) and "define" in code


def test_lines_are_those_of_the_files() -> None:
    """Each declaration begins with the place of its first line: messages name it."""
    text = "".join({part.text for shader in shaders().values() for part in shader.snippets})
    found = re.findall(r'^#line (\d+) "(metal/[^"]+)"\n(.*)', text, re.M)
    lines = {file: (ROOT / file).read_text().splitlines() for _, file, _ in found}
    assert found and all(lines[file][int(number) - 1] == line for number, file, line in found)


def test_all_kernels_and_their_constants() -> None:
    """The shaders make the kernels that plans name, each once, with the constants plans set."""
    text = "".join(f'#include "{file}"\n' for file in FILES.values())
    made = re.findall(r"\bkernel void (\w+)\(", preprocess(text, "all.metal", [METAL]))
    assert sorted(made) == sorted(_C.kernel_names())
    header = (METAL / "abi.h").read_text()
    for kernel in KERNELS[::8]:
        found = read(_C.metal_source(kernel), kernel).constants
        assert {c.namespace for c in found} == {""}  # none is known to work in a namespace
        constants = {c.name: c.index for c in found}
        assert set(constants) == {f"fc_{c}" for c in _C.CONSTANTS}
        for i, constant in enumerate(_C.CONSTANTS):
            assert re.search(rf"{constants[f'fc_{constant}']} = {i},", header)
    plan = _C.plan(m=1, n=8, k=32, format="q4_0", chip="m1")
    assert tuple(plan["passes"][0]["constants"]) == _C.CONSTANTS


@pytest.fixture(scope="module")
def decoding() -> MetalSource:
    """The text that decodes each format, in a namespace of its own: compiled together."""
    parts = []
    for codec in codecs():
        text = re.sub(r"^#include .*", "", _C.metal_source(f"dequantize_{codec}_f32"), flags=re.M)
        undefined = "".join(f"#undef MM_ONLY_{word}\n" for word in ("DTYPE", "FORMAT", "STRUCT"))
        parts.append(f"namespace of_{codec} {{\n{text}}}\n{undefined}")
    slots = f"using namespace of_{codecs()[0]};\n"  # equal in all, and named outside
    return MetalSource("".join(["#include <metal_stdlib>\n", *parts, slots]))


@pytest.mark.parametrize("codec", codecs())
def test_each_format_selects_its_struct(codec: str, decoding: MetalSource) -> None:
    """The kernel of a format decodes that format: exact values of two rows."""
    name = f"{codec}_g64" if codec.startswith("affine") else codec
    kernel, f, k = f"dequantize_{codec}_f32", formats.get(name), 512
    packed, y = random_weight(name, 2, k), torch.full((2, k), 7.0)
    one = _C.plan("dequantize", n=2, k=k, format=name, dtype="f32", chip="m1")["passes"][0]
    assert one["kernel"] == kernel
    run = decoding.function(kernel, dict(enumerate(one["constants"].values())))
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


def folder_with(folder: Path, **files: str) -> Path:
    (folder / "formats.def").write_text("MM_DENSE (a, A, 4)\nMM_DENSE (b, B, 4)\n")
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_what_is_left_out(tmp_path: Path) -> None:
    """Declarations that the format does not reach: by a name in code, with all of its overloads."""
    text = """// head, helper
#if defined(MM_ONLY_FORMAT)
MM_FORMAT(MM_ONLY_FORMAT, MM_ONLY_STRUCT)
#else
MM_FORMAT(a, A)
#endif
#define MACRO(x) \\
  in_a_macro(x)
namespace n {
METAL_FUNC int helper(int x) { return x; }
METAL_FUNC float helper(float x) {
  return x;  // }
}
METAL_FUNC int in_a_macro(int x) { return x; }
METAL_FUNC int nowhere(int x) { return x; }
MM_CONST int kOne = 1, kTwo[2] = {1,
                                  2};
struct A {
  MM_CONST int k = kTwo[0];  // nowhere, B
};
template <class F>
struct Short {};
template <>
struct Short<B> {};
template <>
struct Short<int> {};
template <class T, int n>
struct B {
  static int f() { return helper(1); }
  Short<B> s;
};
static_assert(sizeof(int) == 4, "nowhere {");
}  // namespace n
"""
    shader = flatten.flatten(folder_with(tmp_path, s_metal=text))["s"]
    a, b = (re.sub(r"#line.*\n", "", shader.text(row)) for row in (0, 1))
    always = ("MM_FORMAT(MM_ONLY_FORMAT", "#define MACRO", "int in_a_macro", "static_assert")
    for some, there in ((a, ("kTwo", "struct A")), (b, ("struct B", "Short<B>", "Short<int>"))):
        assert all(part in some for part in (*always, *there))
        assert "nowhere(" not in some
        assert "MM_FORMAT(a" not in some
    assert a.count("helper(") == a.count("Short") == a.count("struct B") == 0
    assert b.count("METAL_FUNC int helper") == b.count("METAL_FUNC float helper") == 1
    assert "kTwo" not in b


def test_what_cannot_be_flattened(tmp_path: Path) -> None:
    """Text that Metal may refuse is an error when the module is built, with the file's name."""
    folder = folder_with(tmp_path, a_metal='#include "b.h"\n', b_h="// Wᵀ\n")
    with pytest.raises(ValueError, match=r"/b\.h: has a character outside ASCII"):
        flatten.flatten(folder)
    for text, what in {"struct A {\n": "line 1 begins what does not end: struct A {"}.items():
        folder_with(tmp_path, b_h=text)
        with pytest.raises(ValueError, match=what):
            flatten.flatten(folder)
    (tmp_path / "b.h").unlink()
    with pytest.raises(FileNotFoundError):
        flatten.flatten(folder)
