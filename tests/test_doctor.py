"""metalmm doctor: what it reports of engines that work, and of one that does not."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import Backend, absences

from torch_metalmm import _C, doctor
from torch_metalmm.cli import main


def test_an_engine_that_works(backend: Backend) -> None:
    """Every check passes, with its times and the share of the bound that was used."""
    head, *rest = doctor.examine(backend.device)
    assert torch.__version__ in head.text
    assert all(result.ok for result in rest)
    checks = [result.text for result in rest if result.text.startswith("ok")]
    assert len(checks) > 15
    for text in checks:
        assert re.search(r"first +[\d.]+ ms  then +[\d.]+ ms  error ", text)


def test_wrong_results_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that computes nothing fails where it is compared, and the exit status says so."""
    torch.full((1 << 20,), 1e30)  # what empty() may find again
    _C.install_recorder()
    try:
        assert main(["doctor", "--device", "cpu"]) == 1
    finally:
        _C.remove_recorder()
    out, err = capsys.readouterr()
    failed = out.count("\nFAIL")
    assert failed > 15
    assert f"metalmm: error: {failed} checks failed" in err


def test_an_exception_is_a_failed_check() -> None:
    """Its message is in the report, as long as a compiler's may be; the checks after it run."""

    def prepare() -> doctor._Prepared:
        raise RuntimeError("metalmm: Metal cannot compile gemv:\n" + "metal/a.h:1: no\n" * 99)

    result = doctor._perform(doctor.Check("gemv", prepare), "cpu")
    assert not result.ok
    lines = result.text.splitlines()
    assert lines[0] == "FAIL  gemv: RuntimeError: metalmm: Metal cannot compile gemv:"
    assert len(lines) == 60 and set(lines[1:]) == {"      metal/a.h:1: no"}


def test_a_device_without_engine() -> None:
    assert set(doctor.engines()) == {"cpu", "mps", "cuda"}
    for device in ("tpu", *(d for d in ("mps", "cuda") if absences()[d])):
        with pytest.raises(ValueError, match=f"device: {device}: "):
            list(doctor.examine(device))
