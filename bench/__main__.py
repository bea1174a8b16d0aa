"""python -m bench [matmul | matrix-ops | op-overhead | tokens | quality | roof | cells | …] ..."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from torch_metalmm import formats
from torch_metalmm.engines import DEVICES

from . import machine, shapes, tables
from .devices import CPU, Device
from .engines import ENGINES
from .models import quality
from .ops import matmul, matrix_ops
from .problem import COLD_FACTOR, Setting
from .report import report
from .roofs import roof, roof_gpu
from .timing import Timing

Record = dict[str, Any]
COMMANDS: tuple[str, ...] = (
    "matmul",
    "matrix-ops",
    "op-overhead",
    "tokens",
    "quality",
    "roof",
    "report",
    "plot",
)
COMMANDS += ("cells", "chips", "registers")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
QUICK: Record = {
    "shapes": "tiny",
    "m": "1,8,64",
    "formats": "q4_0,q4_k",
    "engines": "metalmm,linear_f32,linear_bf16,int4pack",
    "repetitions": 5,
    "seconds": 0.0,
    "prompt": 48,
    "new_tokens": 4,
}
NORMAL: Record = {
    "shapes": ",".join(shapes.DEFAULT_SHAPES),
    "m": ",".join(map(str, shapes.DEFAULT_M)),
    "formats": ",".join(shapes.DEFAULT_FORMATS),
    "engines": "auto",
    "repetitions": 20,
    "seconds": 1.0,
    "prompt": 512,
    "new_tokens": 8,
}
OWN_FORMATS = {"tokens": "q4_0,q4_k,q6_k,q8_0", "quality": quality.FORMATS}


def common_options() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--repetitions", type=int, help="at least this many timed calls (20)")
    p.add_argument("--formats", help="comma-separated, of torch_metalmm.formats.names()")
    p.add_argument("--json", type=Path, help="also write the records here, as JSON lines")
    p.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    p.add_argument("--quick", action="store_true", help="small and short: does it run at all?")
    return p


def device_option() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument("--device", help=f"{', '.join(DEVICES)}; default: mps on a Mac, else cpu")
    return p


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    sub = p.add_subparsers(dest="command", required=True)
    common = [common_options()]
    on_device = [*common, device_option()]
    mm = sub.add_parser("matmul", parents=on_device, help="cold matmul against peers and roofs")
    mm.add_argument("--shapes", help=f"NxK or of {', '.join(shapes.NAMED)}")
    mm.add_argument("--m", help="rows of x, as 1,4,8-16")
    mm.add_argument("--engines", help=f"auto = all installed; or of {', '.join(ENGINES)}")
    mm.add_argument("--dtype", choices=DTYPES, help="of x, for torch_metalmm (cpu f32, else f16)")
    mm.add_argument("--strategy", help="force one of torch_metalmm's: gemv, gemv_batched, gemm")
    mm.add_argument("--seconds", type=float, help="time budget of a cell, beyond repetitions (1)")
    mm.add_argument(
        "--sweep-m",
        action="store_true",
        help="time against M of the first shape, by metalmm unless --engines",
    )
    one = sub.add_parser("matrix-ops", parents=on_device, help="one operation: result, check, time")
    one.add_argument("operation", choices=matrix_ops.OPERATIONS)
    one.add_argument("sizes", type=int, nargs="+", help="N; gemv: N K; gemm: M N K")
    one.add_argument("--format", default="q4_0", help="of W, for gemv and gemm (q4_0)")
    one.add_argument("--dtype", choices=DTYPES, help="of x (cpu f32, else f16)")
    sub.add_parser("op-overhead", parents=common, help="microseconds a call costs by itself")
    tok = sub.add_parser("tokens", parents=common, help="tokens per second of a random Llama")
    tok.add_argument("--no-peers", action="store_true", help="leave llama.cpp out")
    tok.add_argument("--fuse", action="store_true", help="the packed models after fuse_, too")
    tok.add_argument("--prompt", type=int, help="tokens of the prefill (512)")
    tok.add_argument("--new-tokens", type=int, help="tokens decoded in a round (8)")
    sub.add_parser("quality", parents=common, help="what packing costs and saves, on real models")
    sub.add_parser("roof", parents=on_device, help="DRAM read and f32 multiply-add, all candidates")
    cell = sub.add_parser("cells", help="kernels, lines of Metal, issue cycles per weight of gemv")
    cell.add_argument("--write", action="store_true", help="bring the committed figures up to date")
    reg = sub.add_parser("registers", help="registers and spills of every kernel, by ptxas")
    reg.add_argument("--write", action="store_true", help="bring the committed figures up to date")
    sub.add_parser("chips", help="what the chip model predicts, beside what others measured")
    rep = sub.add_parser("report", help="print the tables of a JSON file")
    rep.add_argument("file", type=Path)
    rep.add_argument("--markdown", action="store_true")
    rep.add_argument("--baseline", type=Path, help="JSON of another run to compare with")
    plot = sub.add_parser("plot", help="draw the PNG plots of JSON files")
    plot.add_argument("file", type=Path, nargs="+", help="of one machine; the later ones win")
    plot.add_argument("--output", type=Path, default=Path("."), help="folder")
    plot.add_argument("--prefix", default="", help="of the file names, as h200-")
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments, defaults filled in by --quick."""
    named = argv and (argv[0] in COMMANDS or argv[0] in ("-h", "--help"))
    args = parser().parse_args(argv if named else ["matmul", *argv])
    if args.command in OWN_FORMATS and args.formats is None and not args.quick:
        args.formats = OWN_FORMATS[args.command]
    if getattr(args, "sweep_m", False):
        args.engines = args.engines or "metalmm"
        args.m = args.m or ",".join(map(str, shapes.SWEEP_M))
    for name, value in (QUICK if getattr(args, "quick", False) else NORMAL).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.command in RUNNERS and getattr(args, "device", None) is None:
        # The other commands take no --device: they measure the CPU.
        args.device = Device.default() if "device" in vars(args) else "cpu"
    if args.command in RUNNERS and (args.threads < 1 or args.repetitions < 1):
        raise ValueError("--threads and --repetitions must be positive")
    return args


def status(text: str) -> None:
    """Progress, on stderr; one line that is overwritten on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def setting_of(args: argparse.Namespace) -> Setting:
    """What the options say; with --quick, copies of W that fit a cache."""
    device = Device.named(args.device)
    return Setting(
        threads=args.threads,
        cold_bytes=(4 << 20) if args.quick else device.cache_bytes * COLD_FACTOR,
        dtype=DTYPES[args.dtype] if args.dtype else device.dtype,
        device=device,
        strategy=getattr(args, "strategy", None),
    )


def measure_roof(args: argparse.Namespace) -> tuple[roof.Roof, Record]:
    status("roofs")
    device = Device.named(args.device)
    if device == CPU:
        found = roof.measure(args.threads, device.cache_bytes, quick=args.quick)
    else:
        found = roof_gpu.measure(device, quick=args.quick)
    record: Record = {"kind": "roof", "native": found.native, "candidates": found.candidates}
    for kind, probes in (("read", found.read), ("fma", found.fma)):
        record[kind] = {p.name: found.candidates[p.name] for p in probes}
    return found, record


def roof_range(cells: Iterable[Record]) -> Record:
    """Quartiles of the roofs measured beside the cells."""
    done = [c for c in cells if "roof_gbs" in c]
    quartiles = {}
    for name in ("gbs", "gflops"):
        t = Timing.of([c["roof_" + name] for c in done])
        quartiles[name] = (t.q1, t.median, t.q3)
    return {"kind": "roof_range", **quartiles}


def check_formats(names: Iterable[str], wanted: Iterable[shapes.Shape]) -> None:
    """ValueError: an unknown format, or one whose block does not divide a K."""
    for name in names:
        block = formats.get(name).block_values
        for shape in wanted:
            if shape.k % block:
                raise ValueError(f"{name}: K = {shape.k} is not a multiple of its block, {block}")


def run_matmul(args: argparse.Namespace) -> Iterator[Record]:
    setting = setting_of(args)
    wanted = [shapes.parse_shape(s) for s in args.shapes.split(",")]
    ms, names = shapes.parse_ints(args.m), shapes.parse_names(args.formats)
    check_formats(names, wanted)
    engines, absent = matmul.choose_engines(shapes.parse_names(args.engines), setting.device)
    yield from ({"kind": "skipped", "what": name, "why": why} for name, why in absent.items())
    if args.sweep_m:
        yield from matmul.sweep(wanted[0], names, ms, engines, setting, args.repetitions, status)
        return
    found, roof_record = measure_roof(args)
    yield roof_record
    times = (args.repetitions, args.seconds, status)
    cells = []
    for cell in matmul.run(wanted, names, ms, engines, setting, found, *times):
        cells.append(cell)
        yield cell
    if any("roof_gbs" in c for c in cells):
        yield roof_range(cells)


def run_matrix_op(args: argparse.Namespace) -> Iterator[Record]:
    found, roof_record = measure_roof(args)
    yield roof_record
    yield from matrix_ops.run(args, setting_of(args), found)


def run_overhead(args: argparse.Namespace) -> Iterator[Record]:
    from .ops import overhead

    yield from overhead.run(args.quick)


def run_tokens(args: argparse.Namespace) -> Iterator[Record]:
    from .models import tokens

    for name in args.formats.split(","):
        formats.get(name)
    yield from tokens.run(args, status)


def run_quality(args: argparse.Namespace) -> Iterator[Record]:
    names = [formats.get(name).name for name in args.formats.split(",")]
    yield from quality.run(names, args.quick, status)


def run_roof(args: argparse.Namespace) -> Iterator[Record]:
    yield measure_roof(args)[1]


RUNNERS: dict[str, Callable[[argparse.Namespace], Iterator[Record]]] = {
    "matmul": run_matmul,
    "matrix-ops": run_matrix_op,
    "op-overhead": run_overhead,
    "tokens": run_tokens,
    "quality": run_quality,
    "roof": run_roof,
}


def collect(args: argparse.Namespace, about: Record) -> list[Record]:
    """All records, each also written to --json as it comes; Ctrl-C keeps what there is."""
    records: list[Record] = []
    with open(args.json or os.devnull, "w") as file:
        try:
            for r in chain([about], RUNNERS[args.command](args)):
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
        if args.command == "report":
            before = report.read_records(args.baseline) if args.baseline else ()
            report.show(report.read_records(args.file), args.markdown, before)
            return 0
        if args.command == "cells":
            from .shaders import cells

            if args.write:
                print(*cells.write(), sep="\n")
                return 0
            print(tables.to_markdown(cells.size_table()), cells.markdown(), sep="\n\n")
            return 0
        if args.command == "registers":
            from .shaders import registers

            found = registers.all_registers()
            if args.write:
                print(*registers.write(found), sep="\n")
                return 0
            print(*map(tables.to_markdown, registers.tables(found)), sep="\n\n")
            return 0
        if args.command == "chips":
            from .shaders import chips

            print(chips.markdown())
            return 0
        if args.command == "plot":
            from .report import plots

            records = [r for file in args.file for r in report.read_records(file)]
            print(*plots.draw(records, args.output, args.prefix), sep="\n")
            return 0
        torch.set_num_threads(args.threads)
        device = Device.named(args.device)
        about = machine.describe(args.threads, device.name, device.cache_bytes)
        about["quick"] = args.quick
        busy = about["load_before"] > 0.5
        if busy:
            status(f"load average {about['load_before']}: other programs run, times are noisy\n")
        with torch.inference_mode(args.command != "op-overhead"):
            records = collect(args, about)
    except (ValueError, OSError) as e:
        print(f"bench: {e}", file=sys.stderr)
        return 2
    report.show(records, args.markdown)
    return 0 if all(r.get("ok", True) for r in records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
