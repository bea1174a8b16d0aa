"""Random steps of fused models on a PackedCache, with faults and changes between them.

    python tests/fuzz_caches.py --count 10000

What happens in a sequence and what is demanded: tests/support/attention/random_steps.py.
"""

from __future__ import annotations

import argparse
import sys
import time

import support  # noqa: F401  (its modules by their plain names)

# isort: split
import torch
from random_steps import check_sequence

CHUNK = 500  # sequences between two lines of the report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="sequences (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first sequence")
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed, worst, began = 0, 0.0, time.process_time()
    for done, number in enumerate(range(given.first, given.first + given.count), 1):
        try:
            worst = max(worst, check_sequence(number))
        except Exception as error:
            failed += 1
            print(f"sequence {number}: {type(error).__name__}: {error}", flush=True)
        if done % CHUNK == 0 or done == given.count:
            minutes = (time.process_time() - began) / 60
            print(
                f"{done} sequences: {failed} failed, largest error / bound {worst:.3f}, "
                f"{minutes:.1f} minutes of a processor",
                flush=True,
            )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
