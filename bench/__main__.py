"""python -m bench COMMAND ..."""

from __future__ import annotations

import json
import os
import sys
from itertools import chain
from typing import Any

import torch

from . import report
from .devices import describe, need_clone
from .options import MEASURES, OF_A_CLONE, parse, work_of
from .runner import Record, Run
from .tables import status


def collect(run: Run, records_of: Any, about: Record) -> list[Record]:
    """All records, each also written to --json as it comes; Ctrl-C keeps what there is."""
    records: list[Record] = []
    with open(run.args.json or os.devnull, "w") as file:
        try:
            for r in chain([about], records_of(run)):
                records.append(r)
                file.write(json.dumps(r) + "\n")
                file.flush()
        except KeyboardInterrupt:
            status("interrupted")
    status("\n" if sys.stderr.isatty() else "done")
    return records


def main(argv: list[str]) -> int:
    """0; 1 if a result was wrong; 2 for bad arguments."""
    try:
        args = parse(argv)
        if args.command in OF_A_CLONE:
            need_clone(args.command)
        work = work_of(args)
        if args.command not in MEASURES:
            work(args)
            return 0
        torch.set_num_threads(args.threads)
        run = Run(args)
        about = describe(argv, args.threads, run.device.name, run.device.cache_bytes)
        about["quick"] = args.quick
        if (load := about["load_before"]) > 0.5:
            status(f"load average {load}: other programs run, times are noisy\n")
        with torch.inference_mode():
            records = collect(run, work, about)
    except (ValueError, OSError) as e:
        print(f"bench: {e}", file=sys.stderr)
        return 2
    report.show(records, args.markdown)
    return 0 if all(r.get("ok", True) for r in records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
