"""Registers and spilled bytes of every kernel by Apple's own back end, without its GPU.

    python -m bench.shaders.agx_registers [--arch g13s g16s] [--kernels 'gemv_*_f16']

On a Mac with Xcode: `xcrun metal` compiles the text that the Metal engine gives to the driver, with
the function constants of the pass that plan() makes of the kernel, and `xcrun metal-tt` translates
it for each architecture, one kernel at a time: what it writes has no names. The file is Mach-O; its
section __TEXT,__compute holds another, and there __GPU_METADATA,__compute is a FlatBuffer. Field 0
of its root is a table whose field 0 has the registers, and field 14 the spilled bytes. No document
of Apple's says so: two kernels with 8 and 192 live floats are read first, of which the second must
spill and the first must not.

The reader was written without a Mac, after what others published: no file of Apple's has met it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCHITECTURES = ("g13s", "g14s", "g15s", "g16s", "g17s")  # M1 to M5
_MAGIC, _SEGMENT = b"\xcf\xfa\xed\xfe", 0x19
_REGISTERS, _SPILLED = 0, 14  # fields
_OPTIONS = ["-std=metal3.1", "-O2", "-fno-fast-math", "-ffp-contract=off", "-w"]
_CONSTANT = re.compile(r"constant uint (fc_(\w+)) \[\[function_constant\(\w+\)\]\];")


def section(file: bytes, segment: str, name: str) -> bytes | None:
    """A section of a 64-bit Mach-O file; None: it has none of that name, or is no such file."""
    if file[:4] != _MAGIC:
        return None
    (count,) = struct.unpack_from("<I", file, 16)
    at = 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", file, at)
        n_sections = struct.unpack_from("<I", file, at + 64)[0] if command == _SEGMENT else 0
        for row in range(at + 72, at + 72 + 80 * n_sections, 80):
            found = [file[i : i + 16].rstrip(b"\0").decode() for i in (row + 16, row)]
            if found == [segment, name]:
                length, offset = struct.unpack_from("<QI", file, row + 40)
                return file[offset : offset + length]
        at += size
    return None


def _field(buffer: bytes, table: int, index: int) -> int | None:
    """Where a field of a FlatBuffer's table is; None: it has the default value."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    (size,) = struct.unpack_from("<H", buffer, vtable)
    if size < 6 + 2 * index:
        return None
    (offset,) = struct.unpack_from("<H", buffer, vtable + 4 + 2 * index)
    return table + offset if offset else None


def read(translated: bytes) -> tuple[int, int]:
    """(registers, spilled bytes) of the one kernel in a file of metal-tt. ValueError: it has none,
    or is built in another way."""
    outer = section(translated, "__TEXT", "__compute")
    if outer is None:
        raise ValueError("no section __TEXT,__compute")
    starts = [m.start() for m in re.finditer(re.escape(_MAGIC), outer)]
    parts = [section(outer[at:], "__GPU_METADATA", "__compute") for at in starts]
    metadata = [part for part in parts if part]
    if len(metadata) != 1:
        raise ValueError(f"{len(metadata)} sections __GPU_METADATA,__compute, not 1")
    (buffer,) = metadata
    try:
        reference = _field(buffer, struct.unpack_from("<I", buffer)[0], 0)
        if reference is None:
            raise ValueError("the root of __GPU_METADATA has no field 0")
        kernel = reference + struct.unpack_from("<I", buffer, reference)[0]
        registers, spilled = (_field(buffer, kernel, i) for i in (_REGISTERS, _SPILLED))
        return (
            buffer[registers] if registers else 0,  # fewer than 256
            struct.unpack_from("<I", buffer, spilled)[0] if spilled else 0,
        )
    except (struct.error, IndexError) as error:
        raise ValueError(f"__GPU_METADATA is no FlatBuffer: {error}") from None


def _run(*command: str) -> None:
    done = subprocess.run(["xcrun", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{command[0]}: {done.stderr.strip()}")


def measure(
    text: str, kernel: str, architectures: Sequence[str]
) -> dict[str, tuple[int, int] | str]:
    """{architecture: (registers, spilled bytes), or what went wrong} of a kernel of `text`."""
    out: dict[str, tuple[int, int] | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        source, library, script, made = (
            Path(folder, f"k.{end}") for end in ("metal", "metallib", "mtlp-json", "gpubin")
        )
        source.write_text(text)
        pipelines = {"compute_pipelines": [{"compute_function": kernel}]}
        script.write_text(json.dumps({"pipelines": pipelines}))
        for name in architectures:
            made.unlink(missing_ok=True)
            try:
                if not library.exists():
                    _run("-sdk", "macosx", "metal", *_OPTIONS, str(source), "-o", str(library))
                arch = f"applegpu_{name}"
                _run("metal-tt", "-arch", arch, "-o", str(made), str(script), str(library))
                out[name] = read(made.read_bytes())
            except (ValueError, OSError) as error:
                out[name] = str(error)
    return out


def texts() -> Iterator[tuple[str, str]]:
    """(kernel, text with its function constants as plain ones) of each kernel."""
    from torch_metalmm import _C

    from .passes import passes

    planned = passes()
    for kernel in _C.kernel_names():
        constants = dict.fromkeys(_C.CONSTANTS, 0) | {"k": 4096}  # a kernel without a format
        if kernel in planned:
            constants = planned[kernel]["constants"]
        yield kernel, with_constants(_C.metal_source(kernel), constants)


def with_constants(text: str, constants: Mapping[str, int]) -> str:
    """`text` with values for its function constants, for a compiler that is given none."""
    return _CONSTANT.sub(lambda m: f"static constant uint {m[1]} = {constants[m[2]]};", text)


def probe(n: int) -> str:
    """A kernel with n floats alive at once, in an array."""
    return f"""#include <metal_stdlib>
kernel void probe(device float* y, device const float* x, uint i [[thread_position_in_grid]]) {{
  float v[{n}];
  for (int j = 0; j < {n}; ++j) v[j] = x[i * {n} + j];
  for (int r = 0; r < 3; ++r)
    for (int j = 0; j < {n}; ++j) v[j] = metal::fma(v[j], v[(j + 5) % {n}], v[(j + 7) % {n}]);
  float sum = 0;
  for (int j = 0; j < {n}; ++j) sum += v[j];
  y[i] = sum;
}}
"""


def calibration(architectures: Sequence[str]) -> list[str]:
    """Errors in the registers read of kernels of 8 and of 192 live floats."""
    few, many = (measure(probe(n), "probe", architectures) for n in (8, 192))
    wrong = []
    for name in architectures:
        a, b = few[name], many[name]
        if isinstance(a, str) or isinstance(b, str):
            wrong.append(f"{name}: {a if isinstance(a, str) else b}")
        elif not (8 <= a[0] < b[0] and a[1] == 0 < b[1]):
            wrong.append(f"{name}: 8 live floats are read as {a}, 192 as {b}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), metavar="NAME")
    parser.add_argument("--kernels", default="*", metavar="PATTERN")
    a = parser.parse_args()
    if wrong := calibration(a.arch):
        print("The layout of metal-tt's files is not the one that is read:", *wrong, sep="\n  ")
        return 1
    print("registers, + spilled bytes", *a.arch, sep="\t")
    chosen = [(k, text) for k, text in texts() if fnmatch.fnmatch(k, a.kernels)]
    failed = 0
    with ThreadPoolExecutor() as pool:
        rows = pool.map(lambda job: measure(job[1], job[0], a.arch), chosen)
        for (kernel, _), row in zip(chosen, rows, strict=True):
            said = [f"{r[0]} +{r[1]}" if not isinstance(r, str) else "failed" for r in row.values()]
            print(kernel, *said, sep="\t", flush=True)
            for name, r in row.items():
                if isinstance(r, str):
                    failed += 1
                    print(f"{kernel}, {name}: {r}", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
