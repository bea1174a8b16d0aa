"""What importing the package costs, and that torch.ops.metalmm is there in any order of imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torch_metalmm

COMMANDS = ("generate", "quantize", "explain", "doctor", "bench")
PRINTED = [["--version"], ["info"], ["--help"], *([name, "--help"] for name in COMMANDS)]


def python(*arguments: str) -> str:
    """What a Python of its own prints."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arguments", PRINTED, ids=" ".join)
def test_what_only_prints_imports_no_torch(arguments: list[str]) -> None:
    """Through the console script's import; the first of them also as a module."""
    script = (
        "import atexit, sys; from torch_metalmm.tools.cli import main; "
        "atexit.register(lambda: print(*sys.modules)); "
        f"sys.exit(main({arguments}))"
    )
    *printed, modules = python("-c", script).splitlines()
    assert {"torch", "numpy", "transformers"}.isdisjoint(modules.split())
    if arguments == PRINTED[0]:
        assert python("-m", "torch_metalmm", *arguments).splitlines() == printed
    if arguments[0] in ("generate", "quantize", "doctor", "bench"):
        assert "--device DEVICE cpu, mps, cuda" in " ".join(" ".join(printed).split())


@pytest.mark.quick
@pytest.mark.parametrize(
    "first", ["torch", *(f"torch_metalmm{m}" for m in ("", "._C", ".files.gguf.load", ".ops"))]
)
def test_importing_the_package_registers_the_ops(first: str) -> None:
    """Whatever is imported first: torch's import registers the ops where another is under way."""
    script = f"import {first}, torch, torch_metalmm; print(torch.ops.metalmm.linear)"
    assert python("-c", script) == "metalmm.linear\n"


def test_public_names_are_there() -> None:
    """Two of them need transformers."""
    assert all(getattr(torch_metalmm, name) for name in torch_metalmm.__all__)
    assert {*torch_metalmm.__all__} == {*torch_metalmm._MODULE_OF}


def test_the_emulator_of_a_wheel_says_that_it_needs_a_checkout() -> None:
    """A wheel has no torch_metalmm.msl."""
    script = """
import sys
class Wheel:
    def find_spec(name, path, target=None):
        if name == "torch_metalmm.msl":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Wheel)
try:
    import torch_metalmm.testing
except ImportError as error:
    print(error)
"""
    assert python("-c", script).startswith(
        "torch_metalmm.testing: the emulator works in a checkout"
    )
