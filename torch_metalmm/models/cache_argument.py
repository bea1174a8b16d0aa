"""The argument by which models of transformers take a cache: `cache`, before 5.24 another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

NAMES = ("cache", "past_key_values")


@cache
def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name in the signature of a model's forward; None: it takes no cache."""
    takes = inspect.signature(forward).parameters
    return next((name for name in NAMES if name in takes), None)


def cache_of_generate() -> str:
    """The name under which generate() gives a model its cache."""
    from transformers import GenerationMixin

    return cache_argument(GenerationMixin.prepare_inputs_for_generation) or NAMES[-1]


def with_cache(model: Any, given: Any) -> dict[str, Any]:
    """The keyword argument that gives a model of transformers this cache."""
    return {cache_argument(type(model).forward) or NAMES[-1]: given}


def cache_in(values: Any) -> Any:
    """The cache among keyword arguments, or in what a model returned; None: there is none."""
    if not isinstance(values, Mapping):
        return None
    found = [values[name] for name in NAMES if values.get(name) is not None]
    return found[0] if found else None
