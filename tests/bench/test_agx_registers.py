"""The reader of metal-tt's files, on files made here: Mach-O by clang, FlatBuffers by a library."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import flatbuffers
import pytest
from macos_build import compile_for_macos

from bench.shaders import agx_registers as agx
from torch_metalmm import _C


def metadata(registers: int, spilled: int) -> bytes:
    """A root whose field 0 is a table of 42 fields, after a string as long as a kernel's name."""
    builder = flatbuffers.Builder(0)
    name = builder.CreateString("gemv_q4_k_f16")
    builder.StartObject(42)
    builder.PrependUint8Slot(0, registers, 0)
    builder.PrependUint16Slot(3, 7, 0)
    builder.PrependUint32Slot(14, spilled, 0)
    table = builder.EndObject()
    builder.StartObject(3)
    builder.PrependUOffsetTRelativeSlot(2, name, 0)
    builder.PrependUOffsetTRelativeSlot(0, table, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def macho(folder: Path, sections: dict[str, bytes]) -> bytes:
    """A Mach-O file with these sections, "segment,section", behind one of code."""
    text = ["int code(int x) { return 2 * x; }"]
    for i, (name, data) in enumerate(sections.items()):
        values = ",".join(map(str, data))
        attributes = f'section("{name}"), used'
        text.append(f"__attribute__(({attributes})) const unsigned char d{i}[] = {{{values}}};")
    source, made = folder / "file.cpp", folder / "file.o"
    source.write_text("\n".join(text))
    assert compile_for_macos(source, made) == ""
    return made.read_bytes()


def translated(folder: Path, *kernels: bytes) -> bytes:
    """What metal-tt writes: objects back to back in a section of another file."""
    inner = b"".join(macho(folder, {"__GPU_METADATA,__compute": k}) for k in kernels)
    return macho(folder, {"__TEXT,__compute": inner})


@pytest.mark.parametrize("values", [(0, 0), (84, 0), (128, 784), (255, 70000)])
def test_registers_and_spills(values: tuple[int, int], tmp_path: Path) -> None:
    assert agx.read(translated(tmp_path, metadata(*values))) == values


def test_what_is_no_file_of_one_kernel(tmp_path: Path) -> None:
    one = metadata(84, 0)
    for file, message in (
        (b"", "no section __TEXT,__compute"),
        (b"\xca\xfe\xba\xbe" + bytes(60), "no section __TEXT,__compute"),
        (macho(tmp_path, {"__TEXT,__other": b"1"}), "no section __TEXT,__compute"),
        (translated(tmp_path), "0 sections __GPU_METADATA"),
        (translated(tmp_path, one, one), "2 sections __GPU_METADATA"),
        (translated(tmp_path, b"\xff" * 64), "no FlatBuffer"),
        (translated(tmp_path, one[:20]), "no FlatBuffer"),
    ):
        with pytest.raises(ValueError, match=message):
            agx.read(file)


XCRUN = """#!{python}
# metal copies its text; metal-tt writes the file recorded for as many floats as the text has.
import pathlib, re, sys
arguments, out = sys.argv[1:], pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
if "metal" in arguments:
    out.write_text(next(pathlib.Path(a).read_text() for a in arguments if a.endswith(".metal")))
else:
    text = pathlib.Path(arguments[-1]).read_text()
    floats = re.search(r"float v\\[(\\d+)\\]", text)
    if "applegpu_g99s" in arguments:
        sys.exit("metal-tt: unknown architecture")
    name = floats[1] if floats else "8"
    out.write_bytes(pathlib.Path(__file__).with_name(name).read_bytes())
"""


@pytest.mark.parametrize(
    ("spilled", "wrong"), [(784, ""), (0, "8 live floats are read as (12, 0)")]
)
def test_the_command(
    spilled: int,
    wrong: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With an xcrun that answers from recorded files: a row, or what is wrong with the reading."""
    for name, values in (("8", (12, 0)), ("192", (128, spilled))):
        (tmp_path / name).write_bytes(translated(tmp_path, metadata(*values)))
    xcrun = tmp_path / "xcrun"
    xcrun.write_text(XCRUN.format(python=sys.executable))
    xcrun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    texts = [(name, "") for name in ("gemv_q4_0_f16", "gemv_q8_0_f16")]
    monkeypatch.setattr(agx, "texts", lambda: texts)

    def ended(architecture: str) -> tuple[int, str]:
        command = ["agx_registers", "--kernels", "gemv_q4_0_f16", "--arch", architecture]
        monkeypatch.setattr(sys, "argv", command)
        return agx.main(), capsys.readouterr().out

    status, printed = ended("g13s")
    if wrong:
        assert status == 1 and wrong in printed
        return
    assert status == 0 and printed.splitlines()[1:] == ["gemv_q4_0_f16\t12 +0"]
    status, printed = ended("g99s")
    assert status == 1 and "g99s: metal-tt: metal-tt: unknown architecture" in printed


def test_every_kernel_gets_its_constants() -> None:
    """Values in place of all function constants: those of its plan, where it has a format."""
    texts = dict(agx.texts())
    assert set(texts) == set(_C.kernel_names())
    constants = r"static constant uint fc_(\w+) = (\d+);"
    for text in texts.values():
        assert "function_constant(" not in text
    values = dict(re.findall(constants, texts["gemv_batched_q4_k_f16"]))
    assert set(values) <= set(_C.CONSTANTS) and values["k"] == "4096" and int(values["batch"]) > 1
