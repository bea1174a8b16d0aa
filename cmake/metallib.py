"""Compiles the shaders ahead of time: what metallib.cmake runs.

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


def run(command: list[str]) -> str:
    """What a command that failed said, "" if it did not fail. Its warnings are passed on."""
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        return str(error)
    if done.returncode:
        return done.stderr or f"exit status {done.returncode}"
    sys.stderr.write(done.stderr)
    return ""


def build(out: Path, shaders: list[Path], compiler: list[str], linker: list[str]) -> dict[str, str]:
    """Makes `out` of the shaders that compile, or no file. {name: message} of what failed."""
    out.unlink(missing_ok=True)  # of an earlier text of the shaders
    with tempfile.TemporaryDirectory() as folder:
        airs = [Path(folder, f"{shader.stem}.air") for shader in shaders]
        commands = [
            [*compiler, "-c", str(s), "-o", str(a)] for s, a in zip(shaders, airs, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            said = list(pool.map(run, commands))
        failed = {s.name: text for s, text in zip(shaders, said, strict=True) if text}
        made = [str(air) for air, text in zip(airs, said, strict=True) if not text]
        if made and (text := run([*linker, *made, "-o", str(out)])):
            out.unlink(missing_ok=True)
            failed[out.name] = text
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("shaders", type=Path, nargs="+")
    for name in ("compiler", "linker"):
        parser.add_argument(
            f"--{name}", required=True, type=lambda s: s.split(";"), help="words; of CMake"
        )
    parser.add_argument("--strict", action="store_true")
    a = parser.parse_args()
    failed = build(a.out, a.shaders, a.compiler, a.linker)
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
