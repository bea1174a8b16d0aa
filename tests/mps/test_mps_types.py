"""The Objective-C++ of csrc/mps on Linux: compiled for arm64 macOS, every name it takes accounted
for. Apple's headers are not here; apple_stubs declares the few types used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from macho import MachO, listed
from macos_build import TORCH, compile_for_macos, is_of_macos
from places import ROOT

MPS = ROOT / "csrc" / "mps"
ROWS = listed(torch.__version__)


def names(*kinds: str) -> set[str]:
    return {name for kind, _, name in ROWS if kind in kinds}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MachO]:
    """{file: its object} of every .mm file, and of the plain C++ that it calls."""
    folder = tmp_path_factory.mktemp("objects")
    out = {}
    plain = (MPS / f"{name}.cpp" for name in ("facts", "source"))
    for file in [*sorted(MPS.glob("*.mm")), *sorted(MPS.glob("decisions/*.cpp")), *plain]:
        target = folder / f"{file.name}.o"
        assert compile_for_macos(file, target) == "", file.name
        out[file.name] = MachO(target.read_bytes())
    return out


def test_every_name_is_accounted_for(objects: dict[str, MachO]) -> None:
    """A symbol is of this directory, of the language's runtime, or in the list, and no more are.
    What a message names is declared in the stubs: else it does not compile."""
    sources = {name: obj for name, obj in objects.items() if name.endswith(".mm")}
    defined = set().union(*(obj.defined for obj in objects.values()))
    needed = set().union(*(obj.undefined for obj in sources.values())) - defined
    assert {name for name in needed if not is_of_macos(name)} == names("torch", "class")


def test_torch_names_are_in_the_headers() -> None:
    for kind, header, name in ROWS:
        if kind == "torch":
            words = re.findall(r"\d+([A-Za-z_]\w*?)(?=\d|E|$)", name)
            text = (TORCH / "include" / header).read_text()
            assert any(re.search(rf"\b{w}\b", text) for w in words if w not in ("at", "mps")), name


def test_nothing_ends_or_waits_and_torch_commits(objects: dict[str, MachO]) -> None:
    """Command buffers are torch's: nothing is called that ends one or waits, and what commits is
    torch's stream, once, on its queue, without waiting."""
    text = "".join(f.read_text() for f in (*MPS.glob("*.mm"), MPS / "profile.h"))
    text = text.replace("[set commit]", "")  # of what is resident
    words = ("endEncoding", "waitUntil", "commandBuffer", "getDefault", "commit]", "AndContinue")
    for word in (*words, "AND_WAIT", "AND_CONTINUE"):
        assert word not in text, word
    (queued,) = re.findall(
        r"dispatch_sync_with_rethrow\(stream->queue\(\), \^\{(.*?)^ +\}\);$", text, re.S | re.M
    )
    for where in (text, queued):
        assert re.findall(r"\w+->synchronize\(.*?\)", where) == [
            "stream->synchronize(at::mps::SyncType::COMMIT)"
        ]
    assert names("encoder") <= objects["launch.mm"].selectors
    assert not names("encoder") & objects["metal.mm"].selectors


def test_the_ops_compile(tmp_path: Path) -> None:
    """The ops, and the functions that Python calls, are C++ that only macOS builds."""
    for file in (MPS / "ops.cpp", ROOT / "csrc" / "python" / "mps.cpp"):
        assert compile_for_macos(file, tmp_path / "ops.o", more=("-O0",)) == "", file


def test_the_untested_surface_is_small() -> None:
    """What no machine here can run stays below 280 lines."""
    files = [*MPS.glob("*.mm"), MPS / "metal.h", MPS / "profile.h"]
    lines = [line.strip() for f in files for line in f.read_text().splitlines()]
    assert sum(1 for line in lines if line and not line.startswith("//")) < 280
