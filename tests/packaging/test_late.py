"""when_imported: code that waits for another package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_metalmm.late import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package late_probe with a module `inner`, neither imported."""
    folder = tmp_path / "late_probe"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "late_probe.inner"
    for name in ("late_probe", "late_probe.inner"):
        sys.modules.pop(name, None)


def test_runs_once_after_the_import(package: str) -> None:
    seen: list[int] = []
    when_imported(package, lambda: seen.append(sys.modules[package].value))
    when_imported(package, lambda: seen.append(4))
    importlib.import_module("late_probe")
    assert seen == []
    module = importlib.import_module(package)
    importlib.import_module(package)
    assert seen == [3, 4]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__ and module.__spec__.origin.endswith(
        "inner.py"
    )


def test_runs_at_once_if_imported_before(package: str) -> None:
    importlib.import_module(package)
    seen: list[int] = []
    when_imported(package, lambda: seen.append(1))
    assert seen == [1]


def test_what_it_raises_fails_the_import_only(package: str) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    when_imported(package, fail)
    with pytest.raises(RuntimeError, match="no"):
        importlib.import_module(package)
    assert importlib.import_module(package).value == 3


def test_a_module_that_does_not_exist_stays_missing() -> None:
    when_imported("late_probe_nowhere", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("late_probe_nowhere")
