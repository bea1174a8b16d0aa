"""The packages of the extra "hf": who needs which, and how they are installed."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata

HF = ("transformers", "safetensors")


def require(what: str, *packages: str) -> None:
    """ImportError that names what needs the packages, those that are missing and the command."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(_requirement(name) for name in missing)
        raise ImportError(f"{what} needs {' and '.join(missing)}: pip install {wanted}")


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
