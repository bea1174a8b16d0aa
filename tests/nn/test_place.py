"""Weights of a file, written into the memory of MPS: recorded here, with memory of the CPU."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_metalmm.nn import place as room
from torch_metalmm.nn.place import place


def test_the_cpu_writes_once_where_the_gpu_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what is queued, into the storage itself, at its offset; no other memory is made."""
    calls: list[str] = []
    rows, memory = torch.arange(12, dtype=torch.uint8).view(3, 4), torch.zeros(16).to(torch.uint8)
    out = memory[4:].view(3, 4)

    def alias(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        calls.append("alias")
        assert storage.data_ptr() == memory.data_ptr()
        return storage

    monkeypatch.setattr(torch.mps, "_host_alias_storage", alias)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: calls.append("synchronize"))
    assert room._copied(rows, out) is out
    assert calls == ["synchronize", "alias"]
    assert memory.tolist() == [0, 0, 0, 0, *range(12)]
    assert room._copied(rows[:0], out[:0]).shape == (0, 4) and len(calls) == 2


def test_only_mps_is_written_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device, none, and a torch that does not tell: torch's own copy."""
    copied: list[Tensor] = []
    monkeypatch.setattr(room, "_copied", lambda rows, out: copied.append(rows) or out)
    rows = torch.ones(2, 3)
    assert place(rows, "cpu") is rows and place(rows, None) is rows and not copied
    with FakeTensorMode() as mode:
        assert place(mode.from_tensor(rows), "mps").device.type == "mps"
    assert len(copied) == 1
    monkeypatch.delattr(torch.mps, "_host_alias_storage")
    given = Mock(is_mps=False)
    assert place(given, "mps") is given.to.return_value and len(copied) == 1
