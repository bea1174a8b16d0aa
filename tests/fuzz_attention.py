"""Random calls of attention against float64, each known by its number, on one engine.

    python tests/fuzz_attention.py --count 100000
    python tests/fuzz_attention.py --count 2000 --engine emulator --slots 130

Queries 1 to 40, 0 to 700 filled slots, masks with empty rows, windows, sinks, soft caps, groups,
any two formats, caches and queries of any strides. What is demanded of each call:
tests/support/attention/random_calls.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time

import support  # noqa: F401  (its modules by their plain names)

# isort: split
import torch
from backends import BACKENDS, DESCENDING
from random_calls import check_call, random_call

import torch_metalmm  # noqa: F401  (registers torch.ops.metalmm)

ENGINES = BACKENDS | {DESCENDING.name: DESCENDING}
CHUNK = 1000  # calls between two lines of the report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="calls (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--engine", choices=ENGINES, default="cpu")
    parser.add_argument("--slots", type=int, default=700, help="filled at most (%(default)s)")
    given = parser.parse_args()
    backend = ENGINES[given.engine]
    if backend.absent():
        parser.error(f"--engine: {given.engine} is absent: {backend.absent()}")
    torch.set_num_threads(1)
    failed, worst, began = 0, 0.0, time.monotonic()
    numbers = range(given.first, given.first + given.count)
    with backend.entered():
        for done, number in enumerate(numbers, 1):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    call = random_call(number, given.slots)
                    worst = max(worst, check_call(call, backend, f"call {number}"))
            except Exception as error:
                failed += 1
                print(f"call {number}: {type(error).__name__}: {error}", flush=True)
            if done % CHUNK == 0 or done == given.count:
                minutes = (time.monotonic() - began) / 60
                print(
                    f"{done} calls on {given.engine}: {failed} failed, largest error / bound "
                    f"{worst:.3f}, {minutes:.1f} min",
                    flush=True,
                )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
