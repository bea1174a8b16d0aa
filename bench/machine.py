"""The facts of the machine and the code that a run must state: the first line of its JSON."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import torch_metalmm
from torch_metalmm import _C

# The folder that this one lies in: a clone, or an installation, whose bench has no pages.
ROOT = Path(__file__).resolve().parents[1]
# As it was called: bench of a clone, or the package's, which is the same folder by a link.
PROGRAM = "python -m bench" if __package__ == "bench" else "metalmm bench"
# The folder that either is imported from.
IMPORTED_FROM = Path(torch_metalmm.__file__).parents[1]

UNKNOWN_CACHE = 96 << 20  # larger than most: cold stays cold where the size cannot be read
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def need_clone(what: str) -> None:
    """ValueError: this is an installation, which lacks what `what` reads."""
    if not (ROOT / "bench" / "README.md").is_file():
        raise ValueError(f"{what}: works in a clone of the repository, not in an installation")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def last_level_cache() -> int:
    """Bytes of the largest cache of a core; UNKNOWN_CACHE if the system does not say."""
    sizes = [0]
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*/size"):
        if found := re.fullmatch(r"(\d+)([KMG])", _read(index)):
            sizes.append(int(found[1]) * _UNITS[found[2]])
    return max(sizes) or UNKNOWN_CACHE


def cpu_name() -> str:
    """The CPU for people: its name, cores, and the instruction set in use."""
    if sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
        return f"{name}, {os.cpu_count()} cores, {_C.cpu_isa()}"
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE))
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return f"{name}, {os.cpu_count()} cores, {_C.cpu_isa()}"


def load_average() -> float:
    """Runnable processes of the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def describe(argv: Sequence[str], threads: int, name: str, cache_bytes: int) -> dict[str, Any]:
    """Date, commit, command, machine and versions of this run."""
    dirty = bool(_output("git", "status", "--porcelain", "--untracked-files=no"))
    return {
        "kind": "run",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": (_output("git", "rev-parse", "--short", "HEAD") or "unknown") + "+" * dirty,
        "command": shlex.join([*PROGRAM.split(), *argv]),
        "machine": name,
        "threads": threads,
        "cache_bytes": cache_bytes,
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": round(load_average(), 2),
    }
