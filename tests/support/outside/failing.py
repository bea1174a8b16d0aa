"""Commands that fail, as the shell sees them."""

from __future__ import annotations

import pytest

from torch_metalmm.tools.cli import main


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one-line message of a command that fails with status 1, and prints nothing else."""
    assert main([str(a) for a in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("metalmm: error: ") and err.count("\n") == 1
    return err
