"""The packages of the extra "hf": who needs which, how they are installed, and a quick import."""

from __future__ import annotations

import gc
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

HF = ("transformers", "safetensors")


def require(what: str, *packages: str) -> None:
    """ImportError that names what needs the packages, those that are missing and the command."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(_requirement(name) for name in missing)
        raise ImportError(f"{what} needs {' and '.join(missing)}: pip install {wanted}")


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python looks for no garbage: what an import of transformers makes stays, and each
    look is at all of it. A process that loads SmolLM2's file takes 2.9 s of CPU time, else 3.4."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _requirement(package: str) -> str:
    """The package as this distribution asks for it, quoted for a shell."""
    try:
        asked = metadata.requires("torch_metalmm") or []
    except metadata.PackageNotFoundError:
        asked = []
    for line in asked:
        requirement = line.partition(";")[0].strip()
        if re.split(r"[^\w.-]", requirement)[0] == package:
            return package if requirement == package else f"'{requirement}'"
    return package
