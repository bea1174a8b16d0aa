"""Which errors of other code are blamed on a file: those that its contents may cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import random_model

from torch_metalmm import load_packed, quantize_, save_packed
from torch_metalmm.files.blame import blaming

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    NotImplementedError("Could not run 'aten::empty.memory_format' with arguments from the 'MPS'"),
    MemoryError(),
    ImportError("no torchvision"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_is_of_the_machine_keeps_its_type(error: BaseException) -> None:
    with pytest.raises(type(error)) as found, blaming("a", "b"):
        raise error
    assert found.value is error


def test_memory_and_devices_are_not_blamed_on_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_packed(quantize_(random_model("llama"), "q8_0", progress=False), None, tmp_path)
    for device in ("nonsense", "mps" if torch.cuda.is_available() else "cuda"):
        with pytest.raises((RuntimeError, AssertionError), match=device.upper() + "|Expected one"):
            load_packed(tmp_path, device)

    def full(*_: Any, **__: Any) -> None:
        raise ERRORS[0]

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_packed(tmp_path)
