"""The mutants that `make mutants` tries: faults that change what runs, and no text."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest

PYTHON = '''"""A text with 1 < 2."""
LIMIT: int = 3

def first(values: list[int], least: int = 0) -> int:
    """Not 4."""
    if not values:
        raise ValueError("no values, 5")
    check(values)
    return values[0] + least if values[0] >= least and True else 7
'''
CPP = """// 1 < 2
int64_t half(int64_t n) {
  TORCH_CHECK_VALUE(n >= 0, "n: 0 < ", n);
  return n == 1 ? 0 : n - 1;
}
"""


@pytest.mark.parametrize("name", ["a.py", "a.cpp"])
def test_what_is_mutated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text(PYTHON)
    (tmp_path / "a.cpp").write_text(CPP)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    made = list(mutants.of_python(name) if name == "a.py" else mutants.of_cpp(name))
    texts = [mutant.text for mutant in made]
    assert len(set(texts)) == len(texts) and (PYTHON if name == "a.py" else CPP) not in texts
    if name == "a.py":
        assert sorted(m.what for m in made) == [
            "0 changed", "0 changed", "7 changed", "Add swapped", "And swapped", "GtE swapped",
            "True changed", "call left out", "condition negated", "raise left out",
        ]  # fmt: skip
        for text in texts:
            assert "1 < 2" in text and "Not 4" in text and "LIMIT: int = 3" in text
    else:
        changed = [t.split("\n")[m.line - 1].strip() for t, m in zip(texts, made, strict=True)]
        check = 'TORCH_CHECK_VALUE(n >= 0, "n: 0 < ", n);'
        assert changed == [
            check.replace(">=", ">"), check.replace(">= 0", ">= 1"), "",
            "return n != 1 ? 0 : n - 1;", "return n == 1 ? 0 : n + 1;",
            "return n == 2 ? 0 : n - 1;", "return n == 1 ? 0 : n - 2;",
            "return n == 1 ? 1 : n - 1;",
        ]  # fmt: skip


def test_every_row_can_be_mutated() -> None:
    """The files and the tests of each row are there."""
    for file in mutants.TARGETS:
        some = mutants.of_python(file) if file.endswith(".py") else mutants.of_cpp(file)
        assert next(some).file == file
        for test in mutants.tests_of(file).split(" -k ")[0].split():
            assert (mutants.ROOT / test).is_file()
