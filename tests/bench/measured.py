"""What the tests of several measurements read: the records of a short run."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench import roofs, runner
from bench.__main__ import main

# The roofs of a CPU are a program to compile and a second of reading: at the first call alone.
measured_once = cache(roofs.of_cpu)


def records_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """`python -m bench` of these arguments, quick and on one thread: what its file has."""
    out = folder / "out.jsonl"
    options = ("--quick", "--threads", "1", "--repetitions", "1", "--json", str(out))
    with patch.object(runner, "of_cpu", measured_once):
        assert main([*arguments, *options]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]
