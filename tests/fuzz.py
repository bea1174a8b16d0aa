"""Random cases, each known by its number, against what is demanded of them.

    python tests/fuzz.py attention --count 100000   # calls, against float64
    python tests/fuzz.py attention --count 2000 --engine emulator --slots 130
    python tests/fuzz.py caches --count 10000       # steps of fused models on a PackedCache, with
                                                    # faults and changes between them
    python tests/fuzz.py gguf --count 100000        # damaged GGUF files

Calls: queries 1 to 40, 0 to 700 filled slots, masks with empty rows, windows, sinks, soft caps,
groups, any two formats, caches and queries of any strides. What is demanded:
tests/support/attention/random_calls.py, random_steps.py, tests/support/damaged_gguf.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import support  # noqa: F401  (its modules by their plain names)

# isort: split
import torch
from backends import BACKENDS, DESCENDING
from damaged_gguf import checks
from random_calls import check_call, random_call
from random_steps import check_sequence

import torch_metalmm  # noqa: F401  (registers torch.ops.metalmm)

ENGINES = BACKENDS | {DESCENDING.name: DESCENDING}
CHUNK = 500  # cases between two lines of the report


@contextlib.contextmanager
def checks_of(given: Any) -> Iterator[Callable[[int], float | str]]:
    """What checks the case of a number: the largest error / bound, or what became of a file."""
    if given.what == "caches":
        yield check_sequence
    elif given.what == "gguf":
        with tempfile.TemporaryDirectory() as folder:
            yield checks(Path(folder))
    else:
        backend = ENGINES[given.engine]

        def check(number: int) -> float:
            with contextlib.redirect_stdout(io.StringIO()):
                return check_call(random_call(number, given.slots), backend, f"call {number}")

        with backend.entered():
            yield check


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("attention", "caches", "gguf"))
    parser.add_argument("--count", type=int, default=1000, help="cases (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--engine", choices=ENGINES, default="cpu", help="of attention")
    parser.add_argument("--slots", type=int, default=700, help="filled at most (%(default)s)")
    given = parser.parse_args()
    backend = ENGINES[given.engine]
    if backend.absent():
        parser.error(f"--engine: {given.engine} is absent: {backend.absent()}")
    torch.set_num_threads(1)
    failed, worst, began = 0, 0.0, time.process_time()
    with checks_of(given) as check:
        for done, number in enumerate(range(given.first, given.first + given.count), 1):
            try:
                found = check(number)
                worst = max(worst, 0.0 if isinstance(found, str) else found)
            except Exception as error:
                failed += 1
                print(f"case {number}: {type(error).__name__}: {error}", flush=True)
            if done % CHUNK == 0 or done == given.count:
                minutes = (time.process_time() - began) / 60
                bound = f"largest error / bound {worst:.3f}, " if worst else ""
                print(
                    f"{done} cases: {failed} failed, {bound}{minutes:.1f} minutes of a processor",
                    flush=True,
                )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
