"""Which torch a build uses: the one that is installed, else DEFAULT.

    python cmake/torch_version.py      prints it as a requirement: torch==2.13.0

The ops are linked against libtorch, whose C++ names and layouts change with each minor version. So
ops that were built against 2.13 require 2.13, and the metadata say which minors there are ops for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions

DEFAULT = "2.13.0"  # the torch that this repository is tested with
# The minors that the sources compile against; tests/macos_check.py tries each of them.
MINORS = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")


def requirement(minors: Sequence[str]) -> str:
    """torch>=2.10,<2.16,!=2.12.* of all but 2.12."""
    numbers = sorted(int(minor.split(".")[1]) for minor in minors)
    absent = sorted(set(range(numbers[0], numbers[-1])) - {*numbers})
    holes = "".join(f",!=2.{number}.*" for number in absent)
    return f"torch>=2.{numbers[0]},<2.{numbers[-1] + 1}{holes}"


def installed(folders: Iterable[str] | None = None) -> str | None:
    """The version of torch in the folders, by default of sys.path; None: there is none."""
    path = sys.path if folders is None else list(folders)
    return next((d.version for d in distributions(name="torch", path=path)), None)


def minor_of(version: str) -> str:
    """2.13 of 2.13.0+cpu. ValueError: the sources are not for that one."""
    found = re.match(r"\d+\.\d+", version)
    if not found or found[0] not in MINORS:
        supported = f"{MINORS[0]} to {MINORS[-1]}"
        raise ValueError(f"torch {version} is installed; torch_metalmm builds against {supported}")
    return found[0]


def cxx_standard(version: str) -> int:
    """The C++ that the headers of this torch are written in."""
    return 20 if tuple(map(int, version.split(".")[:2])) >= (2, 12) else 17


def to_build_with(folders: Iterable[str] | None = None) -> str:
    """The requirement of a build. ValueError: as minor_of()."""
    version = installed(folders)
    if version is None:
        return f"torch=={DEFAULT}"
    minor_of(version)
    return f"torch=={version.split('+')[0]}"


def to_run_with() -> str:
    """The requirement of what is built here. Any minor where no torch is installed, as for a source
    distribution. ValueError: as minor_of()."""
    version = installed()
    return requirement(MINORS) if version is None else f"torch=={minor_of(version)}.*"


if __name__ == "__main__":
    try:
        print(to_build_with())
    except ValueError as error:
        sys.exit(str(error))
