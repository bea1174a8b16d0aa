"""Small faults, one at a time, and whether the tests notice: `make mutants`, not in CI.

    python tests/mutants.py [--count 100] [--seed 0] [--only gguf_file] [--minutes 60]

A mutant is a copy of the tree with one operator, number, condition or call changed in a file that
is_mutated() takes; the tests of tests_of() run on it until one fails, for SECONDS. At the end the
failed ones have to pass without a fault. Faults are drawn evenly over the folders of the code, and
in each over its files, by the seed. The copy lies in build/mutants; what changes there is put back
after each mutant. Prints each mutant, then the score by room and language.

All C++ mutants of a run cost one compilation: the copy is built with each, METALMM_MUTANT in the
environment chooses one. A condition, an initial value or a statement of one line is changed
so. Left out are mutants that do not compile, also of shaders ("invalid"), those of code that the
preprocessor or the compiler leaves out, throws of std::logic_error, which no caller can reach, and
grains of parallel_for, which change the time alone. A mutant of a shader, or of the emulator's
language and runtime, is compiled for the emulator. Headers of csrc/cpu, which is the loops of its
instruction sets, are not mutated: they would ask for their mutant in each step.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import support  # noqa: F401  (its modules by their plain names)

# isort: split
from mutated import compiled, is_built, is_mutated, tests_of
from places import ROOT

TREE = ROOT / "build" / "mutants"
SECONDS = 300  # for the tests of one mutant, after which it survives, unless they hang by the fault
# What a test fails with whose shader does not compile.
_NO_SHADER = r"^E +torch_metalmm\.msl\.\w+\.(BuildError|MetalSyntaxError): "
_FAILED = r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$"
NO_TESTS = 5  # pytest's status where an expression leaves no test

_SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
_CPP = {
    r" < ": " <= ", r" <= ": " < ", r" > ": " >= ", r" >= ": " > ", r" == ": " != ",
    r" != ": " == ", r" && ": " || ", r" \|\| ": " && ", r" \+ ": " - ", r" - ": " + ",
    r" \* ": " + ", r" % ": " * ", r"\b1\b": "2", r"\b0\b": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    what: str
    text: str  # of the whole file


class _Change(ast.NodeTransformer):
    """Changes the `wanted`-th place that can be changed; `place` says which that was."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.count, self.place = wanted, 0, (0, "")

    def _take(self, node: ast.AST, what: str) -> bool:
        self.count += 1
        if self.count - 1 != self.wanted:
            return False
        self.place = (getattr(node, "lineno", 0), what)
        return True

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return node  # a docstring
        if isinstance(node, ast.AnnAssign | ast.arg):
            return node  # types are not run
        if isinstance(node, ast.FunctionDef):
            node.body = [self.visit(n) for n in node.body]  # neither defaults nor annotations
            return node
        self.generic_visit(node)
        ops = getattr(node, "ops", None) or [getattr(node, "op", None)]
        if type(ops[0]) in _SWAPS and self._take(node, f"{type(ops[0]).__name__} swapped"):
            new = _SWAPS[type(ops[0])]()
            if isinstance(node, ast.Compare):
                node.ops[0] = new
            else:
                node.op = new  # type: ignore[attr-defined]
        if isinstance(node, ast.If) and self._take(node, "condition negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        if isinstance(node, ast.Raise) and self._take(node, "raise left out"):
            return ast.Pass()
        if isinstance(node, ast.Expr) and self._take(node, "call left out"):
            return ast.Pass()
        number = isinstance(node, ast.Constant) and isinstance(node.value, int)
        if number and self._take(node, f"{node.value} changed"):
            is_bool = isinstance(node.value, bool)
            return ast.Constant(not node.value if is_bool else node.value + 1)
        return node


def of_python(file: str) -> Iterator[Mutant]:
    source = (ROOT / file).read_text()
    for wanted in itertools.count():
        change = _Change(wanted)
        tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
        if not change.place[1]:
            return
        yield Mutant(file, *change.place, ast.unparse(tree) + "\n")


def _changed(line: str) -> Iterator[str]:
    """The line with one operator or number changed; texts and comments stay."""
    code = line.split("//")[0]
    code = re.sub(r'"[^"]*"', lambda m: "'" * len(m[0]), code)
    for pattern, new in _CPP.items():
        for match in re.finditer(pattern, code):
            yield line[: match.start()] + new + line[match.end() :]


def of_shader(file: str) -> Iterator[Mutant]:
    lines = (ROOT / file).read_text().split("\n")
    for i, (line, is_compiled) in enumerate(zip(lines, compiled(lines), strict=True)):
        if is_compiled and not re.match(r"\s*(#|template|static_assert)", line):
            for changed in _changed(line):
                text = "\n".join([*lines[:i], changed, *lines[i + 1 :]])
                yield Mutant(file, i + 1, changed.strip(), text)


# Lines whose second group may be chosen while the program runs.
_CHOSEN = (
    r"(\s+return )([^{}\[\]]+)(;)",
    r"(\s+(?:\} else )?if \()([^;{}\[\]]+)(\)(?: \{| return[^;]*;| continue;| break;))",
    r"(\s+for \([^;]*; )([^;]+)(; .*)",
    r"(\s+(?:const )?(?:u?int\w*|size_t|bool|double|float|auto)[ &]*\w+ = )([^{}\[\]]+)(;)",
    r"(\s+[\w.>()-]+ [-+*/|&]?= )([^{}\[\]]+)(;)",
)


_SEVERAL = r", \w+ = "  # variables of one declaration


def of_cpp(file: str) -> Iterator[Mutant]:
    """Mutants whose `text` is the line with both: `chosen(0) ? (changed) : (what it was)`."""
    for i, line in enumerate((ROOT / file).read_text().split("\n")):
        if re.match(r"\s+(throw (?!std::logic_error)|reject\(|TORCH_CHECK).*;$", line):
            yield Mutant(file, i + 1, "left out: " + line.strip(), f"  if (!{_ID}) {{ {line} }}")
        for form in _CHOSEN:
            if not re.search("constexpr|[gG]rain", line) and (parts := re.fullmatch(form, line)):
                before, value, after = parts.groups()
                for new in () if re.search(_SEVERAL, value) else _changed(value):
                    both = f"{before}{_ID} ? ({new}) : ({value}){after}"
                    yield Mutant(file, i + 1, f"{before}{new}{after}".strip(), both)
                break


_ID = 'mm_mutant("mutant @;")'  # @: the number of the mutant; the text is found in what is compiled
_MUTANT = (
    "#ifndef MM_MUTANTS\n"  # several files may be compiled as one
    "#define MM_MUTANTS\n"
    "#include <cstdlib>\n"
    "#include <cstring>\n"
    "[[gnu::noinline]] static bool mm_mutant(const char* text) {\n"
    '  static const char* chosen = getenv("METALMM_MUTANT");\n'
    "  return chosen && !strcmp(chosen, text);\n"
    "}\n"
    "#endif\n"
)


def mutants_of(file: str) -> Iterator[Mutant]:
    return (of_python if file.endswith(".py") else of_cpp if is_built(file) else of_shader)(file)


def in_turn(iterators: Iterable[Iterator[Mutant]]) -> Iterator[Mutant]:
    left = deque(iterators)
    while left:
        one = left.popleft()
        if mutant := next(one, None):
            yield mutant
            left.append(one)


def shuffled(file: str, seed: int) -> Iterator[Mutant]:
    """By seed and file alone: a change of another file leaves the order."""
    mutants = list(mutants_of(file))
    random.Random(f"{seed} {file}").shuffle(mutants)
    yield from mutants


def drawn(seed: int, only: str) -> Iterator[Mutant]:
    """Mutants without end or repetition: the rooms in turn, and in each its files."""
    pick = random.Random(seed)
    rooms: dict[str, list[str]] = {}
    for file in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n"):
        if re.search(only, file) and is_mutated(file) and not (ROOT / file).is_symlink():
            rooms.setdefault(str(Path(file).parent), []).append(file)
    for files in rooms.values():
        pick.shuffle(files)
    of_rooms = [in_turn([shuffled(file, seed) for file in files]) for files in rooms.values()]
    pick.shuffle(of_rooms)
    yield from in_turn(of_rooms)


def run(command: str, seconds: float | None = None) -> tuple[int | None, str]:
    """What a command returns, or None: it was not done after `seconds`; and what it said."""
    with subprocess.Popen(
        command,
        shell=True,
        cwd=TREE,
        env=os.environ | {"PYTHONPATH": str(TREE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that its tests have started
            return None, ""
    return process.returncode, said


def copy_tree(built: set[str]) -> None:
    """A copy of the tree; the files of `built` stay as they are where they are there."""
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")
    for room in ("torch_metalmm", "tests", "bench"):  # which may have lost files; C++ is kept built
        shutil.rmtree(TREE / room, ignore_errors=True)
    for file in filter(None, files):
        to = TREE / file
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / file).is_dir():  # a link to a room
            to.unlink(missing_ok=True)
            to.symlink_to((ROOT / file).readlink())
        elif not to.exists() or file not in built and to.read_bytes() != (ROOT / file).read_bytes():
            shutil.copy(ROOT / file, to)
    for module in (ROOT / "torch_metalmm").glob("*.so"):
        shutil.copy(module, TREE / "torch_metalmm")
    (TREE / "build").mkdir(exist_ok=True)
    if not (TREE / "build" / "msl").exists():  # compiled shaders, by their content
        (TREE / "build" / "msl").symlink_to(ROOT / "build" / "msl")


def build(mutants: list[Mutant]) -> dict[Mutant, int]:
    """Compiles the copy with all of them; the numbers of those that are in what it makes."""
    numbers = {mutant: i + 1 for i, mutant in enumerate(mutants)}
    while numbers:
        for file in {mutant.file for mutant in mutants}:
            lines = (ROOT / file).read_text().split("\n")
            for mutant, i in numbers.items():
                if mutant.file == file:
                    lines[mutant.line - 1] = mutant.text.replace("@", str(i))
            text = _MUTANT + f'#line 1 "{file}"\n' + "\n".join(lines)
            if (TREE / file).read_text() != text:  # a run that is begun again compiles nothing
                (TREE / file).write_text(text)
        status, said = run(f"{sys.executable} setup.py -q build_ext --inplace")
        if status == 0:
            made = b"".join(module.read_bytes() for module in TREE.glob("torch_metalmm/*.so"))
            found = {int(n) for n in re.findall(rb"mutant (\d+);", made)}
            return {mutant: n for mutant, n in numbers.items() if n in found}
        at = set(re.findall(r"([\w/]+\.cpp):(\d+):\d+: error", said))
        wrong = [m for m in numbers if any(m.file.endswith(f) and m.line == int(n) for f, n in at)]
        if not wrong:
            raise RuntimeError(said[-2000:])
        numbers = {m: n for m, n in numbers.items() if m not in wrong}
    return {}


def pytest(arguments: str, seconds: float, number: int = 0) -> tuple[int | None, str]:
    """As run(). number: the C++ mutant that is chosen."""
    chosen = f"METALMM_MUTANT='mutant {number};'"
    return run(f"{chosen} {sys.executable} -m pytest -q {arguments}", seconds)


@cache
def sound_seconds(tests: str) -> float:
    """How long tests take without a fault; infinity: they fail, or take a third of SECONDS."""
    begun = time.monotonic()
    status = pytest(f"-x {tests}", SECONDS / 3)[0]
    return time.monotonic() - begun if status == 0 else math.inf


def failing(tests: set[str]) -> set[str]:
    """Those of these tests that fail without a fault; one that is not there has failed by it."""
    asked = TREE / "build" / "tests.txt"
    while tests:
        asked.write_text("\n".join(sorted(tests)))
        said = pytest(f"--tb=no @{asked}", 60 * SECONDS)[1]
        absent = set(re.findall(r"^ERROR: not found: .*/(tests/[^\[\n]*)", said, re.M))
        if not absent:
            return tests & set(re.findall(_FAILED, said, re.M))
        tests = {test for test in tests if test.partition("[")[0] not in absent}
    return set()


def with_fault(mutant: Mutant, number: int, tests: str, seconds: float) -> tuple[int | None, str]:
    file = TREE / mutant.file
    before, times = file.read_text(), file.stat()
    if not number:
        file.write_text(mutant.text)
    try:
        return pytest(f"-x {tests}", seconds, number)
    finally:
        file.write_text(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # parsed headers are known by it


def verdict(mutant: Mutant, number: int) -> tuple[str, str]:
    """noticed, and by which test; survives; broken: pytest ends by no fault; invalid: no shader.

    number: of a C++ mutant, which is built already. The nearest file of tests runs alone, then
    twice as many each time: a process that reads all tests of a room takes up to a minute.
    """
    files, options = tests_of(mutant.file)
    end = time.monotonic() + SECONDS
    size = 1
    while files and (left := end - time.monotonic()) > 0:
        tests = " ".join([*files[:size], options])
        files, size = files[size:], 2 * size
        status, said = with_fault(mutant, number, tests, left)
        if status == 1:
            of_it = rf"{Path(mutant.file).name}:\d+:\d+: error: "
            if not mutant.file.endswith(".py") and re.search(f"{_NO_SHADER}|{of_it}", said, re.M):
                return "invalid", ""
            return "noticed", re.findall(_FAILED, said, re.M)[0]
        if status is None:  # they hang, or are many
            return "noticed" if 3 * sound_seconds(tests) < left else "survives", ""
        if status not in (0, NO_TESTS):  # pytest itself ended
            return "noticed" if sound_seconds(tests) < math.inf else "broken", ""
    return "survives", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="an expression: a part of the names of files")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which none is begun")
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    # A line takes one mutant of C++.
    mutants = {}
    for mutant in drawn(asked.seed, asked.only):
        mutants.setdefault((mutant.file, mutant.line if is_built(mutant.file) else mutant), mutant)
        if len(mutants) == asked.count:
            break
    in_cpp = [m for m in mutants.values() if is_built(m.file)]
    copy_tree({m.file for m in in_cpp})
    native = build(in_cpp)
    verdicts = {}
    for mutant in mutants.values():
        if is_built(mutant.file) and mutant not in native:
            continue
        if time.monotonic() > end:
            break
        begun = time.monotonic()
        said, by = verdicts[mutant] = verdict(mutant, native.get(mutant, 0))
        place = f"{mutant.file}:{mutant.line}: {mutant.what}"
        print(f"{said:9} {time.monotonic() - begun:3.0f} s {place}", by and f"[{by}]", flush=True)
    broken = failing({by for _, by in verdicts.values() if by})
    scores: dict[str, list[bool]] = {}
    for mutant, (said, by) in verdicts.items():
        if by in broken:
            print(f"broken: {mutant.file}:{mutant.line} [{by}]")
        elif said in ("noticed", "survives"):
            for part in (str(Path(mutant.file).parent), f"all {Path(mutant.file).suffix}", "all"):
                scores.setdefault(part, []).append(said == "noticed")
    for part, of in sorted(scores.items()):
        print(f"{part:28} {sum(of)} of {len(of)} noticed")


if __name__ == "__main__":
    main()
