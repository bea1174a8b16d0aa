"""What the tests of several measurements read: the records of a short run."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.__main__ import main
from bench.roofs import roof

# roof.measure() compiles a program and reads memory for a second: at its first call alone.
measured_once = cache(roof.measure)


def records_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """`python -m bench` of these arguments, quick and on one thread: what its file has."""
    out = folder / "out.jsonl"
    options = ("--quick", "--threads", "1", "--repetitions", "1", "--json", str(out))
    with patch.object(roof, "measure", measured_once):
        assert main([*arguments, *options]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]
