"""`metalmm bench`: what this machine does, beside torch and the chip model.

The benchmark lies beside the package, and is a room of it in a wheel; this is the one module that
imports it, when the command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import OF_DEVICE, positive_int

COMPARE = "compare"


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure this machine: its roofs, the products of a layer and a token of Llama 3.1 8B, "
        "beside torch's own product and what the chip model predicts. One to three minutes. "
        "Writes metalmm-bench-CHIP-DATE.json, a record without names of users, hosts or paths, "
        "and a picture of it, .png. Exit status 1 if a result was wrong or failed."
    )
    parser.add_argument("--device", help=f"{OF_DEVICE}; default: mps on a Mac, else cpu")
    parser.add_argument("-t", "--threads", type=positive_int, metavar="N", help="CPU threads")
    parser.add_argument("--formats", help="comma-separated; default: q4_0,q4_k,q8_0,affine4_g64")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the files; default: here")
    parser.add_argument("--force", action="store_true", help="replace the files that are there")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run at all?")
    parser.add_argument("--list", action="store_true", help="the other measurements, and end")
    of = "with their own options: one that --list names, or compare A.json B.json"
    parser.add_argument("measurement", nargs="?", help=of)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    """ValueError: wrong arguments. SystemExit: a result was wrong, or a measurement refuses."""
    named = ("device", "threads", "formats", "output", "force", "quick")
    given = [f"--{name}" for name in named if getattr(args, name)]
    if args.measurement is not None and (given or args.list):
        raise ValueError(
            f"{(given or ['--list'])[0]}: before {args.measurement}, which takes options after it"
        )
    from ..bench.standard import run

    if args.list:
        print(run.listing())
    elif args.measurement == COMPARE:
        run.compare(args.arguments)
    elif args.measurement is not None:
        _end(run.pass_on(args.measurement, args.arguments))
    else:
        chosen = (args.device, args.threads, args.formats)
        _end(run.standard(run.Asked(*chosen, args.output or Path(), args.force, args.quick)))


def _end(status: int) -> None:
    if status:
        raise SystemExit(status)
