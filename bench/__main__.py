"""python -m bench [matmul | matrix-ops | norm | attention | tokens | quality | cells | …] ..."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from itertools import chain
from typing import Any

import torch

from . import machine
from .options import MEASURES, OF_A_CLONE, parse, place_of
from .report import report
from .runner import Record, Run
from .tables import status


def module_of(args: argparse.Namespace) -> Any:
    """Where a command is: run(Run) -> records measures, print_(args) prints something else."""
    return import_module(f".{place_of(args)}", __package__)


def collect(args: argparse.Namespace, about: Record) -> list[Record]:
    """All records, each also written to --json as it comes; Ctrl-C keeps what there is."""
    records: list[Record] = []
    with open(args.json or os.devnull, "w") as file:
        try:
            for r in chain([about], module_of(args).run(Run(args))):
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
            machine.need_clone(args.command)
        if args.command not in MEASURES:
            module_of(args).print_(args)
            return 0
        torch.set_num_threads(args.threads)
        device = Run(args).device
        about = machine.describe(argv, args.threads, device.name, device.cache_bytes)
        about["quick"] = args.quick
        if about["load_before"] > 0.5:
            load = about["load_before"]
            status(f"load average {load}: other programs run, times are noisy\n")
        with torch.inference_mode(args.command != "op-overhead"):
            records = collect(args, about)
    except (ValueError, OSError) as e:
        print(f"bench: {e}", file=sys.stderr)
        return 2
    report.show(records, args.markdown)
    return 0 if all(r.get("ok", True) for r in records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
