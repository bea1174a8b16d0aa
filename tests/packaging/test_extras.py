"""Without the packages of the extra, every entry point names what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

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
for name in {hidden!r}:
    sys.modules[name] = None
import torch
import torch_metalmm
model = torch_metalmm.quantize_(torch.nn.Sequential(torch.nn.Linear(32, 32)), "q8_0")
for name, call in {calls!r}.items():
    try:
        eval(f"torch_metalmm.{{name}}{{call}}")
    except ImportError as error:
        print(name, error)
    except (OSError, ValueError):
        pass
from torch_metalmm.tools.cli import main
for command in ("generate x --model x", "quantize x --format q8_0 --output y"):
    main(command.split())
sys.path.append({root!r})
import bench.__main__  # of the kernels: it needs none of the extra
"""


def said(tmp_path: Path, *hidden: str) -> tuple[dict[str, str], list[str]]:
    """({entry point: its message}, messages of the commands) in a process without the packages."""
    script = SCRIPT.format(hidden=hidden, calls=CALLS, root=str(ROOT))
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = [line.partition(" ") for line in run.stdout.splitlines()]
    errors = [line for line in run.stderr.splitlines() if line.startswith("metalmm: error")]
    return {name: message for name, _, message in lines}, errors


def test_nothing_of_the_extra_is_there(tmp_path: Path) -> None:
    messages, errors = said(tmp_path, "transformers", "safetensors", "gguf")
    assert messages.keys() == CALLS.keys()
    for name, message in messages.items():
        assert message.startswith(f"{name} needs ") and "transformers" in message
        assert ": pip install " in message and "torch_metalmm" not in message
    assert "gguf and transformers and safetensors: pip install" in messages["load_gguf"]
    assert "'gguf>=" in messages["load_gguf"] and "'transformers>=" in messages["load_packed"]
    assert len(errors) == 2 and all("this command needs gguf and transf" in e for e in errors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["safetensors", "gguf"])
def test_one_package_is_missing(package: str, tmp_path: Path) -> None:
    messages, errors = said(tmp_path, package)
    assert messages["load_gguf"].startswith(f"load_gguf needs {package}: pip install ")
    assert len(errors) == 2
    if package == "safetensors":
        assert messages.keys() == CALLS.keys() - {"MetalMMConfig"}
