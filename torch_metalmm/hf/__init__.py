"""Plug-ins of transformers, diffusers and sentence-transformers.

None is imported before the library that it belongs to; see torch_metalmm/__init__.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_OF_QUANTIZER = ("MetalMMQuantizer", "attach", "tie")


def __getattr__(name: str) -> Any:
    """What this module was before quantizer.py: a pickled model has its quantizer from here."""
    if name not in _OF_QUANTIZER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".quantizer", __name__), name)
