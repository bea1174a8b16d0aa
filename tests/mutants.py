"""Small faults, one at a time, and whether the tests notice: `make mutants`, not in CI.

    python tests/mutants.py [--count 100] [--seed 0] [--only gguf_file] [--minutes 60]

A mutant is a copy of the tree with one operator, number, condition or call changed in one of the
files of TARGETS; the tests of that row run on it until one fails. Faults are drawn evenly over the
rows, by the seed. The copy lies in build/mutants; what changes there is put back after each mutant.
Prints each mutant, then the score by room and language.

All C++ mutants of a run cost one compilation: the copy is built with each, METALMM_MUTANT in the
environment chooses one. A condition, an initial value or a statement of one line is changed
so. Left out are mutants that do not compile, those of code that the preprocessor or the compiler
leaves out, throws of std::logic_error, which no caller can reach, and grains of parallel_for,
which change the time alone. A mutant of a shader is compiled for the emulator.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import support  # noqa: F401  (its modules by their plain names)

# isort: split
from places import ROOT, TESTS

TREE = ROOT / "build" / "mutants"
SECONDS = 900  # seconds for the tests of one mutant: a mutant that hangs is noticed, too

_EMULATED = "-k 'emulator and not descending'"
_REPLAYS = "test_replay.py test_replay_faults.py"
_PLANS = (
    *("plan", "passes", "check", "route", "recurrent", "matmul/dense", "matmul/experts"),
    *("cache/append", "cache/attention", "cache/sdpa"),
)

# {file to mutate: the tests that shall notice, in whatever room they are, and pytest's choice among
# them}. Checks, loaders, savers, the plan, the CPU kernels, the shaders.
TARGETS = {
    "torch_metalmm/files/gguf/file.py": "test_gguf_file.py test_gguf_header.py",
    "torch_metalmm/files/gguf/save.py": "test_gguf_save.py test_gguf_save_config.py",
    "torch_metalmm/files/gguf/derive.py": "test_converted.py test_gguf_save.py",
    "torch_metalmm/tools/serve/ollama.py": "test_serve_replies.py test_serve_clients.py -k ollama",
    "torch_metalmm/tools/serve/pictures.py": "test_serve_images.py",
    "torch_metalmm/tools/serve/seeing.py": "test_serve_images.py",
    "torch_metalmm/tools/serve/writing.py": "test_serve_drafts.py test_serve_images.py",
    "torch_metalmm/files/gguf/layout.py": "test_gguf_file.py test_gguf_hostile.py",
    "torch_metalmm/files/limits.py": "test_odd_folders.py",
    "torch_metalmm/files/untrusted.py": "test_untrusted.py",
    "torch_metalmm/files/owned.py": "test_saves.py test_checkpoint.py",
    "torch_metalmm/files/staging.py": "test_saves.py test_checkpoint.py",
    "torch_metalmm/files/mlx/layout.py": "test_mlx.py test_mlx_hostile.py",
    "torch_metalmm/hf/decoding.py": "test_decoding.py test_drafts.py",
    "torch_metalmm/hf/answer.py": "test_decoding.py test_drafts.py",
    "torch_metalmm/hf/drafts.py": "test_drafts.py",
    "torch_metalmm/hf/mtp.py": "test_mtp_drafts.py",
    "torch_metalmm/models/mtp.py": "test_mtp.py test_mtp_drafts.py",
    "torch_metalmm/files/mtp.py": "test_mtp.py test_mlx_heads.py",
    "torch_metalmm/files/heads.py": "test_mtp.py test_mlx_heads.py",
    "torch_metalmm/files/mlx/shifted.py": "test_mlx_heads.py",
    "torch_metalmm/files/gguf/nextn.py": "test_mtp.py",
    "torch_metalmm/nn/awaiting.py": "test_ends.py",
    "torch_metalmm/models/fuse/ends.py": "test_ends.py",
    "torch_metalmm/nn/again.py": "test_drafts.py test_serve_drafts.py",
    "torch_metalmm/hf/caches/hybrid.py": "test_hybrid_cache.py test_drafts.py test_serve_drafts.py",
    "torch_metalmm/nn/exact.py": "test_exact_rows.py test_drafts.py",
    "torch_metalmm/hf/graphs.py": "test_graphs.py",
    "torch_metalmm/hf/replay.py": f"{_REPLAYS} test_graphs.py -k 'not emulator'",
    "torch_metalmm/hf/unchanged.py": f"{_REPLAYS} -k 'not emulator'",
    "torch_metalmm/hf/caches/recorded.py": f"{_REPLAYS} -k 'not emulator'",
    "torch_metalmm/models/quantize.py": "test_quantize.py",
    "torch_metalmm/models/fuse/read.py": "test_fuse_read.py test_fuse.py -k cpu",
    "torch_metalmm/models/fuse/alike.py": "test_layers_confirm.py -k alike",
    "torch_metalmm/models/fuse/mixtures.py": "test_mixtures_fused.py test_layers_families.py",
    "torch_metalmm/models/fuse/rotations.py": "test_rotations.py",
    "torch_metalmm/nn/delta.py": "test_layers_recurrent.py",
    "torch_metalmm/nn/mixture.py": "test_mixtures_fused.py",
    "torch_metalmm/models/routers.py": "test_routers.py",
    "torch_metalmm/nn/rotation.py": "test_rotations.py",
    "torch_metalmm/nn/router.py": "test_routers.py",
    "torch_metalmm/nn/step.py": "test_layers.py test_layers_growth.py test_layers_cache.py",
    "torch_metalmm/tools/serve/forms.py": "test_serve_forms.py",
    "torch_metalmm/tools/serve/schema.py": "test_serve_refuses.py test_serve_fields.py",
    "torch_metalmm/tools/serve/weights.py": "test_serve_fields.py",
    "torch_metalmm/tools/serve/access.py": "test_serve_access.py",
    "torch_metalmm/hf/caches/pooled.py": "test_serve_prefixes.py test_serve_saved.py "
    "-k 'qwen35 or states or recurrent'",
    "torch_metalmm/tools/serve/batch.py": "test_serve_steps.py test_serve_drafts.py",
    "torch_metalmm/tools/serve/guessing.py": "test_serve_drafts.py",
    "torch_metalmm/tools/serve/saved.py": "test_serve_saved.py",
    "torch_metalmm/nn/fused.py": "test_fuse.py test_fuse_waiting.py -k cpu",
    "torch_metalmm/nn/linear.py": "test_linear.py test_errors.py -k cpu",
    "torch_metalmm/formats/kquants.py": "test_formats.py",
    "torch_metalmm/formats/affine.py": "test_formats_affine.py",
    "csrc/cpu/experts/experts.cpp": "test_expert_ops.py test_expert_gradients.py test_layouts.py "
    "-k 'cpu and expert or beyond'",
    "csrc/cpu/experts/route.cpp": "test_route.py test_layouts.py -k 'cpu and route or beyond'",
    "csrc/ops/checks.cpp": "test_errors.py test_ops.py test_layouts.py "
    "-k '(cpu or meta or 64_bits) and not (of_x or independent or buffer)'",
    "csrc/python/guard.cpp": f"{_REPLAYS} -k 'change or seen or freed'",
    "csrc/cpu/matmul.cpp": "test_matmul.py test_expert_ops.py test_exact_rows.py test_layouts.py "
    "-k cpu",
    "csrc/cpu/int8/matmul.cpp": "test_int8.py test_layouts.py -k 'int8 or beyond'",
    "csrc/cpu/attention/matrix.cpp": "test_attention.py test_pages.py test_layouts.py "
    "-k 'cpu and (attention or pages) or beyond'",
    "csrc/cpu/quantize/k.cpp": "test_quantizers.py test_layouts.py -k 'quantizers or beyond'",
    "metal/kernels/gemv_core.h": "test_matmul.py test_layer.py -k 'emulator-gemv- or "
    "(emulator and gated_down)'",
    "metal/layer/rope.h": "test_layer.py test_rope_append.py -k 'rope and emulator and not "
    "descending'",
    "metal/layer/hadamard.h": "test_hadamard.py -k emulator",
    "csrc/cpu/hadamard.cpp": "test_hadamard.py test_layouts.py -k 'cpu and hadamard or beyond'",
    "metal/layer/gated_delta.h": f"test_recurrent.py test_recurrent_states.py {_EMULATED}",
    "metal/layer/ssm_scan.h": f"test_ssm_scan.py test_recurrent_states.py {_EMULATED}",
    "metal/layer/lane_sums.h": "test_recurrent.py test_ssm_scan.py test_recurrent_states.py "
    f"{_EMULATED}",
    "csrc/ops/composed_recurrent.cpp": "test_layer_gradients.py -k 'cpu and recurrent'",
    "metal/formats/block32.h": "test_exact.py test_shader_widths.py test_subnormal_codes.py "
    "-k '(emulator or every_width or form) and not descending and "
    "(gemv or form) and (q4_0 or q4_1 or q5_0 or q5_1 or q8_0 or other_form)'",
    **{f"csrc/plan/{name}.cpp": "tests/plan" for name in _PLANS},
}

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
    for i, line in enumerate(lines):
        if not line.lstrip().startswith(("#", "template")):
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


def of_cpp(file: str) -> Iterator[Mutant]:
    """Mutants whose `text` is the line with both: `chosen(0) ? (changed) : (what it was)`."""
    for i, line in enumerate((ROOT / file).read_text().split("\n")):
        if re.match(r"\s+(throw (?!std::logic_error)|reject\(|TORCH_CHECK).*;$", line):
            yield Mutant(file, i + 1, "left out: " + line.strip(), f"  if (!{_ID}) {{ {line} }}")
        for form in _CHOSEN:
            if not re.search("constexpr|[gG]rain", line) and (parts := re.fullmatch(form, line)):
                before, value, after = parts.groups()
                for new in _changed(value):
                    both = f"{before}{_ID} ? ({new}) : ({value}){after}"
                    yield Mutant(file, i + 1, f"{before}{new}{after}".strip(), both)
                break


_ID = 'mm_mutant("mutant @;")'  # @: the number of the mutant; the text is found in what is compiled
_MUTANT = (
    "#include <cstdlib>\n"
    "#include <cstring>\n"
    "[[gnu::noinline]] static bool mm_mutant(const char* text) {\n"
    '  static const char* chosen = getenv("METALMM_MUTANT");\n'
    "  return chosen && !strcmp(chosen, text);\n"
    "}\n"
)


def mutants_of(file: str) -> Iterator[Mutant]:
    by_suffix = {".py": of_python, ".cpp": of_cpp, ".h": of_shader}
    return by_suffix[file[file.rindex(".") :]](file)


def drawn(seed: int, only: str) -> Iterator[Mutant]:
    """Mutants without end or repetition, the rows in turn."""
    pick = random.Random(seed)
    rows = []
    for file in TARGETS:
        if only in file:
            mutants = list(mutants_of(file))
            pick.shuffle(mutants)
            rows.append(mutants)
    for turn in itertools.zip_longest(*rows):
        yield from (mutant for mutant in turn if mutant)


def tests_of(file: str) -> str:
    """The row of a file, its tests as paths from ROOT."""
    return re.sub(
        r"test_\w+\.py",
        lambda name: str(next(TESTS.rglob(name[0])).relative_to(ROOT)),
        TARGETS[file],
    )


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, shell=True, cwd=TREE, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def copy_tree() -> None:
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")
    for room in ("torch_metalmm", "tests", "bench"):  # which may have lost files; C++ is kept built
        shutil.rmtree(TREE / room, ignore_errors=True)
    for file in filter(None, files):
        to = TREE / file
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / file).is_dir():  # a link to a room
            to.unlink(missing_ok=True)
            to.symlink_to((ROOT / file).readlink())
        elif not to.exists() or to.read_bytes() != (ROOT / file).read_bytes():
            shutil.copy(ROOT / file, to)
    for module in (ROOT / "torch_metalmm").glob("*.so"):
        shutil.copy(module, TREE / "torch_metalmm")
    (TREE / "build").mkdir(exist_ok=True)
    if not (TREE / "build" / "msl").exists():  # compiled shaders, by their content
        (TREE / "build" / "msl").symlink_to(ROOT / "build" / "msl")


def build(mutants: list[Mutant]) -> dict[Mutant, int]:
    """Compiles the copy with all of them; the numbers of those that are in what it makes."""
    left = mutants
    while left:
        numbers = {mutant: i + 1 for i, mutant in enumerate(left)}
        for file in {mutant.file for mutant in mutants}:
            lines = (ROOT / file).read_text().split("\n")
            for mutant, i in numbers.items():
                if mutant.file == file:
                    lines[mutant.line - 1] = mutant.text.replace("@", str(i))
            (TREE / file).write_text(_MUTANT + f'#line 1 "{file}"\n' + "\n".join(lines))
        done = run(f"{sys.executable} setup.py -q build_ext --inplace")
        if not done.returncode:
            made = b"".join(module.read_bytes() for module in TREE.glob("torch_metalmm/*.so"))
            found = {int(n) for n in re.findall(rb"mutant (\d+);", made)}
            return {mutant: n for mutant, n in numbers.items() if n in found}
        said = set(re.findall(r"([\w/]+\.cpp):(\d+):\d+: error", done.stdout + done.stderr))
        wrong = [m for m in left if any(m.file.endswith(f) and m.line == int(n) for f, n in said)]
        if not wrong:
            raise RuntimeError(done.stderr[-2000:])
        left = [m for m in left if m not in wrong]
    return {}


def verdict(mutant: Mutant, number: int) -> str:
    """noticed or survives; number: of a C++ mutant, which is built already."""
    file = TREE / mutant.file
    before = file.read_text()
    if not number:
        file.write_text(mutant.text)
    try:
        return "noticed" if fails(mutant.file, number) else "survives"
    finally:
        file.write_text(before)


def fails(file: str, number: int = 0) -> str:
    """Why the tests of the file's row do not pass: one fails, or they end or hang; "": they do."""
    try:
        chosen = f"METALMM_MUTANT='mutant {number};'"
        done = run(f"{chosen} {sys.executable} -m pytest -x -q {tests_of(file)}")
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS} s"
    if done.returncode in (3, 4, 5):  # pytest itself, its options, no tests
        raise RuntimeError(f"pytest: {done.stdout[-800:]}{done.stderr[-800:]}")
    said = done.stdout.strip().rpartition("\n")[2]
    return f"status {done.returncode}: {said}" if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of files")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which none is begun")
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    copy_tree()
    # A line takes one mutant of C++.
    mutants: list[Mutant] = []
    for mutant in drawn(asked.seed, asked.only):
        if mutant.file.endswith(".cpp") and (mutant.file, mutant.line) in {
            (m.file, m.line) for m in mutants
        }:
            continue
        mutants.append(mutant)
        if len(mutants) == asked.count:
            break
    native = build([m for m in mutants if m.file.endswith(".cpp")])
    broken = {file: why for file in sorted({m.file for m in mutants}) if (why := fails(file))}
    for file, why in broken.items():
        print(f"left out: without a fault the tests of {file} fail: {why}", flush=True)
    mutants = [mutant for mutant in mutants if mutant.file not in broken]
    scores: dict[str, list[bool]] = {}
    for mutant in mutants:
        if mutant.file.endswith(".cpp") and mutant not in native:
            continue
        if time.monotonic() > end:
            break
        said = verdict(mutant, native.get(mutant, 0))
        for part in (str(Path(mutant.file).parent), f"all {Path(mutant.file).suffix}"):
            scores.setdefault(part, []).append(said == "noticed")
        print(f"{said:9} {mutant.file}:{mutant.line}: {mutant.what}", flush=True)
    for part, of in scores.items():
        print(f"{part:28} {sum(of)} of {len(of)} noticed")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
