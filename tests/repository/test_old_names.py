"""The second names of modules, in pickles and in other code, give the modules themselves."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from places import ROOT

import torch_metalmm
from torch_metalmm import QuantEmbedding, QuantLinear
from torch_metalmm.old_names import PLACES

PACKAGE = "torch_metalmm"


def run(*arguments: str) -> str:
    """What a Python of its own prints."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("first", ["old", "new"])
def test_an_old_name_gives_the_module_itself(first: str) -> None:
    """Whichever of the two is imported first; the module keeps its own spec."""
    script = f"""
import sys
from importlib import import_module
from importlib.util import find_spec
from torch_metalmm.old_names import PLACES
for old, new in PLACES.items():
    if old == "sentences" and find_spec("sentence_transformers") is None:
        continue
    names = ["torch_metalmm." + old, "torch_metalmm." + new]
    assert names[0] not in sys.modules, old
    modules = [import_module(name) for name in names[:: {1 if first == "old" else -1}]]
    assert modules[0] is modules[1] is sys.modules[names[0]] is sys.modules[names[1]], old
    assert modules[0].__spec__.name == modules[0].__name__ == names[1], old
    assert modules[0].__spec__.loader is modules[0].__loader__, old
    assert getattr(sys.modules["torch_metalmm"], old) is modules[0], old
"""
    run("-c", script)


def test_they_are_attributes_and_hold_what_they_held() -> None:
    assert torch_metalmm.fuse.fuse_ is torch_metalmm.fuse_
    assert torch_metalmm.linear.QuantEmbedding is QuantEmbedding
    from torch_metalmm.checkpoint import is_packed, load_packed, save_packed  # noqa: F401
    from torch_metalmm.generate import demo_model, load_model  # noqa: F401
    from torch_metalmm.hf_config import MetalMMConfig, stored_config  # noqa: F401

    from torch_metalmm.hf import MetalMMQuantizer, attach, tie  # noqa: F401

    assert MetalMMConfig is torch_metalmm.MetalMMConfig
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        import_module(f"{PACKAGE}.hf").Nothing  # noqa: B018


def test_a_module_of_another_name_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match="torch_metalmm.nothing"):
        import_module(f"{PACKAGE}.nothing")
    with pytest.raises(ModuleNotFoundError):
        import_module(f"{PACKAGE}.formats.linear")


@pytest.mark.parametrize(
    "layer",
    [QuantLinear(32, 2, True, "q8_0"), QuantEmbedding(2, 32, "q8_0")],
    ids=lambda layer: type(layer).__name__,
)
def test_a_pickle_of_before_loads(layer: torch.nn.Module) -> None:
    now = type(layer).__module__
    data = pickle.dumps(layer, protocol=0)
    assert f"c{now}\n".encode() in data
    loaded = pickle.loads(data.replace(f"c{now}\n".encode(), b"ctorch_metalmm.linear\n"))
    assert type(loaded) is type(layer) and torch.equal(loaded.weight, layer.weight)


def test_python_m_runs_them() -> None:
    old, new = (run("-m", f"{PACKAGE}.{n}") for n in ("format_table", "tools.format_table"))
    assert old == new != ""


def test_importing_the_package_imports_none_of_them() -> None:
    script = "import sys, torch_metalmm; print(*sys.modules)"
    names = {f"{PACKAGE}.{name}" for pair in PLACES.items() for name in pair}
    assert names.isdisjoint(run("-c", script).split())


def test_the_repository_does_not_use_them() -> None:
    names = "|".join(PLACES)
    pattern = re.compile(rf"\b{PACKAGE}\.(?:{names})\b|\b{PACKAGE}/(?:{names})\.py\b")
    folders = ("bench", "cmake", "csrc", "docs", "metal", "tests", PACKAGE, ".github")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.is_file()]
    files += [f for f in ROOT.iterdir() if f.is_file()]
    kinds = {".py", ".md", ".toml", ".yml", ".h", ".cpp", ".mm", ".metal", ".sh", ".in", ""}
    found = {
        f"{file.relative_to(ROOT)}: {use}"
        for file in files
        if file.suffix in kinds and file != Path(__file__)
        for use in pattern.findall(file.read_text())
    }
    assert not found
