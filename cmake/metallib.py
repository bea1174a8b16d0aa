"""Compiles the shaders ahead of time: what metallib.cmake runs.

    python cmake/metallib.py metalmm.metallib [--strict]

A shader that Apple's compiler rejects is reported and left out: its kernels are compiled when they
are used, from the same text. With --strict it is an error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent / "metal" / "library"
# plan() never chooses these: whoever forces one waits for its compilation. They would be 312 of
# 1,798 kernels and 4.5 of 26 MB, by an estimate from bitcode.
LEFT_OUT = frozenset({"gemm_naive", "gemm_tiled", "gemv_coalesced", "elementwise", "dot"})
_MACOS = "-mmacosx-version-min=14.0"
# The options of metal.mm: the language of macOS 14, no fast math; no contraction (entry.h). Two
# warnings are off: `if constexpr` is of C++17, which every Metal compiler takes in C++14; and a
# compiler older than Metal 3.2 does not know the pragmas for what two of these options say.
OPTIONS = ["-std=metal3.1", _MACOS, "-fno-fast-math", "-ffp-contract=off", "-Wall", "-Wextra"]
OPTIONS += ["-Wno-c++17-extensions", "-Wno-unknown-pragmas"]


def shaders() -> list[Path]:
    """The files of the library."""
    return sorted(f for f in LIBRARY.rglob("*.metal") if f.stem not in LEFT_OUT)


def run(command: list[str]) -> str:
    """The words of a command that failed, "" if it did not fail. Its warnings are passed on."""
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        return str(error)
    if done.returncode:
        return done.stderr or f"exit status {done.returncode}"
    sys.stderr.write(done.stderr)
    return ""


def build(out: Path, compiler: list[str], more: list[str]) -> dict[str, str]:
    """Makes `out` of the shaders that compile, or no file. {name: message} of what failed.

    more: options beside OPTIONS.
    """
    out.unlink(missing_ok=True)  # left by an earlier text of the shaders
    files = shaders()
    with tempfile.TemporaryDirectory() as folder:
        airs = [Path(folder, f"{shader.stem}.air") for shader in files]
        commands = [
            [*compiler, *OPTIONS, *more, "-c", str(s), "-o", str(a)]
            for s, a in zip(files, airs, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            said = list(pool.map(run, commands))
        failed = {s.name: text for s, text in zip(files, said, strict=True) if text}
        made = [str(air) for air, text in zip(airs, said, strict=True) if not text]
        if made and (text := run([*compiler, _MACOS, *made, "-o", str(out)])):
            out.unlink(missing_ok=True)
            failed[out.name] = text
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--compiler",
        default="xcrun;-sdk;macosx;metal",
        type=lambda s: s.split(";"),
        help="words; of CMake",
    )
    parser.add_argument("--strict", action="store_true", help="a warning is an error, too")
    a = parser.parse_args()
    failed = build(a.out, a.compiler, ["-Werror"] if a.strict else [])
    for name, text in failed.items():
        kind = "error" if a.strict else "warning"
        print(f"{kind}: Apple's compiler rejects {name}:\n{text}", file=sys.stderr)
    if failed and a.strict:
        a.out.unlink(missing_ok=True)
        return 1
    if failed:
        left_out = f"left out: {', '.join(failed)}; kernels are compiled at their first use"
        print(f"warning: {left_out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
