"""torch.ops.metalmm: importing this module registers the ops and their fake implementations.

The kernels, autograd and autocast are native, and so are the checks of a fake implementation: it
returns what the op would, same shape, dtype and strides, same errors. A fake implementation also
runs for meta tensors. A call with some arguments on meta is an error, not a result without data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from . import _C

_native: Any = _C  # mypy does not see into the module
_FROM_SOURCE = "pip install --force-reinstall --no-deps --no-binary torch_metalmm torch_metalmm"

PROBES = ("add", "sub", "mul", "div", "dot")


def library_of(version: str, folder: Path) -> Path:
    """The library of the ops for a torch: each minor version has a C++ interface of its own.

    folder: of the libraries. ImportError that names the versions it has: none for that one.
    """
    major, minor = version.split(".")[:2]
    path = folder / f"_ops_t{major}_{minor}.so"
    if path.exists():
        return path
    found = [re.fullmatch(r"_ops_t(\d+)_(\d+)\.so", f.name) for f in folder.glob("_ops_t*.so")]
    there = ", ".join(f"{a}.{b}" for a, b in sorted((int(m[1]), int(m[2])) for m in found if m))
    raise ImportError(
        f"torch_metalmm: no ops for torch {version}; this installation has those for torch "
        f"{there or 'none'}. To build them: {_FROM_SOURCE}"
    )


def _load() -> None:
    path = library_of(torch.__version__, Path(__file__).parent)
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:  # a torch that was built in another way
        raise ImportError(
            f"torch_metalmm: the ops do not load into torch {torch.__version__}: {error}. "
            f"To build them: {_FROM_SOURCE}"
        ) from error


def _register_fake(op: str, results: str) -> None:
    """The fake implementation of an op: tensors of the sizes that csrc/ops/shapes.cpp computes.

    results: their kind, of csrc/ops/args.h.
    """
    shape_of = getattr(torch.ops.metalmm, f"_{op}_shape").default

    def fake(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...] | None:
        with no_dispatch():  # the checks see the fake tensors themselves, with their devices
            shape = shape_of(*args, **kwargs)
        if shape is None:
            return None
        first: Tensor = args[0]
        if results == "Routed":
            weights, ids = shape
            return first.new_empty(weights, dtype=torch.float32), first.new_empty(
                ids, dtype=torch.int64
            )
        decoded = kwargs.get("dtype") or torch.float32
        if isinstance(shape, tuple):
            dtype = decoded if results == "Tables" else first.dtype
            return tuple(first.new_empty(each, dtype=dtype) for each in shape)
        if results == "Decoded":
            return first.new_empty(shape, dtype=decoded)
        return first.new_empty(shape, dtype=torch.uint8 if results == "Bytes" else first.dtype)

    torch.library.register_fake(f"metalmm::{op}", fake)


_load()
for _op, _results in _native.TORCH_OPS.items():
    _register_fake(_op, _results)
