"""Settings of modules beside tensors: their numbers, and the code of their classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn

# Attributes that fused forwards read when they run, or that decide nothing outside of training.
_READ = frozenset(("training", "layer_idx", "gradient_checkpointing"))
_SIZES = frozenset(("in_features", "out_features", "index"))  # packed layers': weights have them
_NUMBERS = (bool, int, float)


class Settings:
    """Recorded numbers of modules, forwards of their classes, functions that these forwards name.

    A number is eps of a norm or the scale of attention; a forward may be replaced for all modules
    of a class, and a function, say the rotation, in the module of Python that has the class.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._numbers = [
            {n: v for n, v in vars(m).items() if isinstance(v, _NUMBERS) and _counts(n)}
            for m in self._modules
        ]
        self._record()

    def _record(self) -> None:
        """All but the numbers."""
        pairs = zip(map(vars, self._modules), self._numbers, strict=True)
        found: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (d, seen) for d, seen in pairs if seen
        ]
        kinds: Any = dict.fromkeys(map(type, self._modules))
        self._forwards = [(kind, kind.forward) for kind in kinds]
        for forward in (f for _, f in self._forwards):
            of_file, seen = named_functions(forward)
            if seen:
                found.append((of_file, seen))
        self._seen = [(d, itemgetter(*s), itemgetter(*s)(s)) for d, s in found]

    def same(self) -> bool:
        """Whether all are what they were; of a graph that is traced, the numbers."""
        if torch.compiler.is_compiling():  # knows no itemgetter, and guards the numbers
            return all(
                getattr(module, name, None) == value
                for module, numbers in zip(self._modules, self._numbers, strict=True)
                for name, value in numbers.items()
            )
        try:
            for values, of, seen in self._seen:
                if of(values) != seen:
                    return False
        except KeyError:  # an attribute was taken away
            return False
        for kind, forward in self._forwards:  # noqa: SIM110  (all() takes twice the time)
            if kind.forward is not forward:
                return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        # Functions are code of the process that loads; what has changed here stays changed.
        return {"_modules": self._modules, "_numbers": self._numbers, "_changed": not self.same()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        changed = state.pop("_changed")
        self.__dict__.update(state)
        self._record()
        if changed:
            self._forwards = [(nn.Module, None)]


def named_functions(forward: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the names of the file that has the forward, those of functions that the forward names)."""
    forward = inspect.unwrap(forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    of_file = getattr(forward, "__globals__", {})
    return of_file, {n: of_file[n] for n in names if isinstance(of_file.get(n), FunctionType)}


def _counts(name: str) -> bool:
    return name not in _READ and name not in _SIZES and not name.startswith("_")
