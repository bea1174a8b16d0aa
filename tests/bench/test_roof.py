"""The ceilings that bench compares with."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bench import roofs
from bench.devices import Device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_the_loop_reads_cuda_memory() -> None:
    """All whole turns of a tensor, on the current stream; a tensor below one turn is refused."""
    data = torch.ones(1 << 26, device="cuda")
    loop = roofs.Reader(data)
    loop()
    torch.cuda.synchronize()
    assert 0.8 * data.nbytes < loop.bytes <= data.nbytes
    with pytest.raises(RuntimeError, match="data: 4 bytes, less than the"):
        roofs.Reader(data[:1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_the_roof_of_cuda_is_the_best_of_all() -> None:
    device = Device.named("cuda")
    found = roofs.of_gpu(device, repetitions=2, quick=True)
    assert "loop of 16-byte loads" in found.candidates
    memory = [rate for name, rate in found.candidates.items() if not name.startswith("f16 mm")]
    assert found.candidates[found.read[0].name] == max(memory)


def test_the_cases_of_kernels_need_no_pyelftools() -> None:
    """A machine with a GPU runs them without the packages that the emulator needs."""
    script = """
import sys
sys.modules["elftools"] = None  # importing it is an ImportError
sys.path[:0] = ["tests/support", "tests/support/experts"]
import kernel_cases
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
