"""Which code mutants.py changes, and the tests that shall notice: by the code's room."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from places import ROOT, TESTS

_BUILT = "-k 'not emulator'"  # tests of ops whose native code is built
_EMULATED = "-k '(emulator or metal) and not descending'"
_ON_GPU = "ops attention -k 'mps or emulator and not descending'"
_REPLAYS = "attention/test_replay*.py"

# {room of the code, or a file: where in tests/ it is tested, and pytest's choice among the tests}.
# What has no row is tested in the folder of its name: choice_of().
ROOMS = {
    "torch_metalmm/nn": "nn models/fuse models/test_importance.py cpu/test_int8_ops.py"
    f" hf/test_exact_rows.py {_BUILT}",
    "torch_metalmm/nn/collective.py": "models/shard",
    "torch_metalmm/nn/sharded.py": "models/shard",
    "torch_metalmm/models/integers": "files/others models/test_adopt_integers.py",
    "torch_metalmm/models/ggml.py": "files/gguf models/test_adopt.py",
    "torch_metalmm/models/lora": "models/lora models/test_embedding_scale.py",
    "torch_metalmm/models/mtp.py": "files hf/test_mtp_drafts.py",
    "torch_metalmm/files": "files hf",
    "torch_metalmm/hf": "hf attention",
    "torch_metalmm/hf/diffusers": "hf/test_images*.py models/test_adopt_images.py",
    "torch_metalmm/hf/caches": f"attention hf/test_drafts.py tools/serve {_BUILT}",
    "torch_metalmm/hf/parallel.py": "models/shard",
    "torch_metalmm/hf/replay.py": f"{_REPLAYS} hf/test_graphs.py {_BUILT}",
    "torch_metalmm/hf/unchanged.py": f"{_REPLAYS} {_BUILT}",
    "torch_metalmm/tools/serve": "tools/serve hf/test_drafts.py",
    "torch_metalmm/tools/format_table.py": "formats/test_table.py",
    "torch_metalmm/tools/doctor": "tools/test_doctor.py",
    "csrc/ops": f"ops {_BUILT}",
    "csrc/ops/attention": f"attention ops {_BUILT}",
    "csrc/ops/experts": f"ops/experts ops/test_layouts.py {_BUILT}",
    "csrc/ops/replay": f"{_REPLAYS} {_BUILT}",
    "csrc/python": f"plan emulator mps cpu {_REPLAYS} ops/test_errors.py",
    "csrc/python/emulator.cpp": "emulator msl",
    "csrc/gpu": f"mps {_ON_GPU}",
    "csrc/hooks": "packaging/test_core.py mps",
    "csrc/cpu": f"cpu ops hf/test_exact_rows.py {_BUILT}",
    "csrc/cpu/attention": f"attention ops {_BUILT}",
    "csrc/cpu/quantize": "formats/test_quantizers.py formats/test_weighted.py ops/test_layouts.py"
    " -k 'quantizers or weighted or beyond'",
    "csrc/emulator": "emulator msl",
    "csrc/msl": "msl emulator",
    "torch_metalmm/msl": "msl emulator",
    "torch_metalmm/msl/entries.py": "repository/test_adding.py",
    "metal/attention": f"attention {_EMULATED}",
    "metal/formats": f"metal emulator ops/test_exact.py {_EMULATED}",
    "metal/kernels": f"metal ops {_EMULATED}",
    "metal/layer": f"ops attention/test_rope_append.py {_EMULATED}",
}
# Code that tests compile from its text, and that of Python; of csrc/ all other .cpp that are built.
_COMPILED_BY_TESTS = (
    "metal/*/*.h", "csrc/msl/language/*.h", "csrc/msl/library/*.h", "csrc/msl/host/*.h",
    "csrc/emulator/runtime/*", "csrc/mps/pipelines.h",
)  # fmt: skip
_PYTHON = ("torch_metalmm/*/*.py",)
# Macros of PTX and SPIR-V, and of the emulator under its sanitizer.
_OF_OTHERS = (
    "MM_CONVERTS_HALVES|MM_ALL_ROWS_AT_ONCE|MM_ONE_ADDRESS|MM_MATRIX_LANES"
    "|__SPIRV__|__NVPTX__|__SANITIZE_ADDRESS__"
)
# Tables; what no test here runs; the roots of code that is compiled once per instruction set.
_LEFT_OUT = ("*/__init__.py", "*/grids/table_*", "csrc/cuda/*", "*/isa.cpp", "*/isa_*.cpp")


def is_any_of(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def is_mutated(file: str) -> bool:
    of_it = (*_PYTHON, *_COMPILED_BY_TESTS, "csrc/*.cpp")
    return is_any_of(file, of_it) and not is_any_of(file, _LEFT_OUT)


def is_built(file: str) -> bool:
    """Whether a mutant of the file is in what setup.py makes."""
    return file.endswith(".cpp") and not is_any_of(file, _COMPILED_BY_TESTS)


def compiled(lines: list[str]) -> Iterator[bool]:
    """Whether each line of a shader or of its runtime is compiled for the emulator."""
    open_: list[bool | None] = []  # None: an #if that says nothing of targets
    for line in lines:
        if found := re.match(r"#\s*(if|ifdef|ifndef|else|endif)\b(.*)", line):
            word, asked = found.groups()
            if word == "endif":
                open_.pop()
            elif word == "else":
                open_[-1] = None if open_[-1] is None else not open_[-1]
            else:
                is_not = word == "ifndef" or "!defined" in asked
                open_.append(is_not if re.search(_OF_OTHERS, asked) else None)
        yield False not in open_


def choice_of(file: str) -> str:
    """The row of the nearest room, or the folder of tests whose path ends as the file's."""
    for place in (file, *map(str, Path(file).parents)):
        if place in ROOMS:
            return ROOMS[place]
        if place and (TESTS / (room := place.partition("/")[2] or place)).is_dir():
            return room
    raise KeyError(file)


@cache
def test_files(places: str) -> dict[Path, set[str]]:
    """{file: its words}, of the places of a row of ROOMS."""
    found = (path for place in places.split() for path in TESTS.glob(place))
    files = {f for path in found for f in (path.rglob("test_*.py") if path.is_dir() else [path])}
    return {f: set(re.findall(r"\w+", f.read_text())) for f in sorted(files)}


def tests_of(file: str) -> tuple[list[str], str]:
    """For a file: the tests of its room, first those that name most of it; pytest's choice there.

    Of a name that the file calls or defines counts a share: one by as many tests as have it.
    Tests that bear the file's name come before all others.
    """
    places, is_chosen, choice = choice_of(file).partition("-k")
    tests = test_files(places)
    text = (ROOT / file).read_text()
    names = {*re.findall(r"\b(\w+)\(", text), *re.findall(r"class (\w+)", text), Path(file).stem}
    often = Counter(name for words in tests.values() for name in names & words)
    near = {t: sum(1 / often[name] for name in names & words) for t, words in tests.items()}
    near |= {t: n + len(tests) * (Path(file).stem in t.stem) for t, n in near.items()}
    ordered = sorted(tests, key=near.__getitem__, reverse=True)
    return [str(t.relative_to(ROOT)) for t in ordered], is_chosen + choice
