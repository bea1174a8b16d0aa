"""Running code when another package is imported, whichever of the two is imported first."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_waiting: dict[str, list[Callable[[], object]]] = {}


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call action() as soon as the module `name` is imported: at once if it is imported already.

    For plug-ins of packages that are slow to import and that the user may never import. An error of
    the action reaches whoever imports the module, which then counts as not imported.
    """
    if name in sys.modules:  # perhaps half loaded by another thread; importing it waits
        action()
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _waiting.setdefault(name, []).append(action)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the waited-for modules as the other finders do, with a loader that tells us."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads with the real loader, puts it back into the module, and runs what waited."""

    def __init__(self, real: importlib.abc.Loader) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        for action in _waiting.pop(module.__name__, []):
            action()


_FINDER = _Finder()
