"""Without the packages of the extra, every entry point names what to install."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from forked import forked
from places import ROOT

from torch_metalmm.extras import uncollected

CALLS = {
    "load_gguf": "('x.gguf')",
    "load_packed": "('x')",
    "load_mlx": "('x')",
    "load_quantized": "('x')",
    "save_packed": "(model, None, 'x')",
    "save_gguf": "(model, None, 'x')",
    "save_mlx": "(model, None, 'x')",
    "MetalMMConfig": "('q8_0')",
}
SCRIPT = """
import sys
import torch

def run(hidden, calls, root):
    sys.modules |= dict.fromkeys(hidden)
    import torch_metalmm
    model = torch_metalmm.quantize_(torch.nn.Sequential(torch.nn.Linear(32, 32)), "q8_0")
    for name, call in calls.items():
        try:
            eval(f"torch_metalmm.{name}{call}")
        except ImportError as error:
            print(name, error)
        except (OSError, ValueError):
            pass
    from torch_metalmm.tools.cli import main
    for command in ("generate x --model x", "quantize x --format q8_0 --output y"):
        main(command.split())
    sys.path.append(root)
    import bench.__main__  # of the kernels: it needs none of the extra
"""
Said = Callable[..., tuple[dict[str, str], list[str]]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Said]:
    """said(*packages): ({entry point: its message}, messages of the commands) without them."""
    folder = tmp_path_factory.mktemp("extras")
    with pytest.MonkeyPatch.context() as patch, forked(SCRIPT, {}) as calls:
        patch.chdir(folder)

        def said(*hidden: str) -> tuple[dict[str, str], list[str]]:
            file = tmp_path_factory.mktemp("said") / "said"
            assert calls(file, hidden, CALLS, str(ROOT)) == 0, file.read_text()
            assert not list(folder.iterdir())
            lines = file.read_text().splitlines()
            words = [line.partition(" ") for line in lines]
            errors = [line for line in lines if line.startswith("metalmm: error")]
            return {name: text for name, _, text in words if name in CALLS}, errors

        yield said


def test_nothing_of_the_extra_is_there(said: Said) -> None:
    messages, errors = said("transformers", "safetensors", "gguf")
    assert messages.keys() == CALLS.keys()
    for name, message in messages.items():
        assert message.startswith(f"{name} needs ") and "transformers" in message
        assert ": pip install " in message and "torch_metalmm" not in message
    assert "gguf and transformers and safetensors: pip install" in messages["load_gguf"]
    assert "'gguf>=" in messages["load_gguf"] and "'transformers>=" in messages["load_packed"]
    assert len(errors) == 2 and all("this command needs gguf and transf" in e for e in errors)


@pytest.mark.parametrize("package", ["safetensors", "gguf"])
def test_one_package_is_missing(package: str, said: Said) -> None:
    messages, errors = said(package)
    assert messages["load_gguf"].startswith(f"load_gguf needs {package}: pip install ")
    assert len(errors) == 2
    if package == "safetensors":
        assert messages.keys() == CALLS.keys() - {"MetalMMConfig"}


def test_garbage_is_collected_again() -> None:
    """Also after an error, and not by who had said that none is."""
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            with pytest.raises(KeyError), uncollected():
                assert not gc.isenabled()
                raise KeyError
            assert gc.isenabled() is before
        finally:
            gc.enable()
