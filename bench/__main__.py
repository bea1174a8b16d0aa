"""python -m bench [matmul | matrix-ops | norm | attention | tokens | quality | cells | …] ..."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from torch_metalmm import formats

from . import machine, shapes, tables
from .devices import CPU, Device
from .models import cache_cost, quality, weighed
from .ops import attention, experts, matmul, matrix_ops, norm
from .options import DTYPES, OF_A_CLONE, parse
from .problem import COLD_FACTOR, Setting
from .report import report
from .report.terminal import status
from .roofs import roof, roof_gpu
from .timing import Timing

Record = dict[str, Any]


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


def run_norm(args: argparse.Namespace) -> Iterator[Record]:
    setting = setting_of(args)
    wanted = [shapes.parse_shape(s) for s in args.shapes.split(",")]
    names = norm.named(args.formats)
    ms = shapes.parse_ints(args.m)
    yield from norm.run(wanted, names, ms, setting, args.repetitions, status)


def run_experts(args: argparse.Namespace) -> Iterator[Record]:
    sizes = experts.Sizes.parse(args.experts)
    names = norm.named(args.formats)
    of = [shapes.Shape("an expert", n, k) for n, k in ((sizes.n, sizes.k), (sizes.k, sizes.n))]
    check_formats(names, of)
    found, roof_record = measure_roof(args)
    yield roof_record
    tokens = shapes.parse_ints(args.tokens)
    yield from experts.run(sizes, names, tokens, setting_of(args), found, args.repetitions, status)


def run_attention(args: argparse.Namespace) -> Iterator[Record]:
    setting = setting_of(args)
    heads, counts = attention.Heads.parse(args.heads), shapes.parse_counts
    names = [formats.get(name).name for name in args.formats.split(",")]
    check_formats(names, [shapes.Shape("a head", heads.kv_heads, heads.size)])
    wanted = attention.cells(
        heads,
        shapes.parse_ints(args.batch),
        shapes.parse_ints(",".join(map(str, counts(args.context)))),
        args.prefill,
        counts(args.filled),
    )
    found, roof_record = measure_roof(args)
    yield roof_record
    times = args.repetitions, args.seconds
    yield from attention.run(wanted, names, setting, found, times, args.compile, status)


def run_tokens(args: argparse.Namespace) -> Iterator[Record]:
    from .models import contexts, overhead, ranks, tokens

    names = [formats.get(name).name for name in args.formats.split(",")]
    if args.overhead:
        yield from overhead.run(names, args)
        return
    device = Device.named(args.device)
    run = ranks.run if args.tp else contexts.run if args.cache else tokens.run
    yield from run(args, device, device.dtype, status)


def run_quality(args: argparse.Namespace) -> Iterator[Record]:
    names = [formats.get(name).name for name in args.formats.split(",")]
    if args.imatrix:
        yield from weighed.run(names, args.quick, status)
        return
    yield from quality.run(names, args.activations, args.quick, status)


def run_cache(args: argparse.Namespace) -> Iterator[Record]:
    names, parts = cache_cost.named(args.formats), args.parts.split(",")
    yield from cache_cost.run(parts, names, args.quick, Device.named(args.device).type, status)


def run_serve(args: argparse.Namespace) -> Iterator[Record]:
    from .models import served

    yield from served.run(args.quick, args.threads, status)


def run_roof(args: argparse.Namespace) -> Iterator[Record]:
    yield measure_roof(args)[1]


RUNNERS: dict[str, Callable[[argparse.Namespace], Iterator[Record]]] = {
    "matmul": run_matmul,
    "matrix-ops": run_matrix_op,
    "op-overhead": run_overhead,
    "norm": run_norm,
    "experts": run_experts,
    "attention": run_attention,
    "tokens": run_tokens,
    "quality": run_quality,
    "cache": run_cache,
    "serve": run_serve,
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


def predictions(args: argparse.Namespace) -> str:
    """The tables of `chips`; with --context or --cache that of tokens by both alone."""
    from .shaders import chips, token_chips

    if not args.tokens and (args.context or args.cache):
        raise ValueError("--context and --cache: only with --tokens")
    if not (args.context or args.cache):
        return (token_chips if args.tokens else chips).markdown()
    contexts = shapes.parse_counts(args.context) if args.context else token_chips.CONTEXTS
    caches = cache_cost.named(args.cache) if args.cache else token_chips.CACHES
    return tables.to_markdown(token_chips.contexts_table(contexts, caches))


def main(argv: list[str]) -> int:
    """0; 1 if a result was wrong; 2 for bad arguments."""
    try:
        args = parse(argv)
        if args.command in OF_A_CLONE:
            machine.need_clone(args.command)
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

            found = registers.tables(registers.all_registers())
            print(*map(tables.to_markdown, found), sep="\n\n")
            return 0
        if args.command == "tiles":
            from .shaders import tiles

            if args.write and not (args.ggml and args.mlx):
                raise ValueError("--write: needs --ggml and --mlx")
            block = tiles.markdown(args.ggml, args.mlx)
            print(tiles.write(block) if args.write else block)
            return 0
        if args.command == "chips":
            print(predictions(args))
            return 0
        if args.command == "plot-formats":
            from .report import format_plots

            print(*format_plots.write(), sep="\n")
            return 0
        if args.command == "plot":
            from .report import plots

            records = [r for file in args.file for r in report.read_records(file)]
            print(*plots.draw(records, args.output, args.prefix), sep="\n")
            return 0
        torch.set_num_threads(args.threads)
        device = Device.named(args.device)
        about = machine.describe(argv, args.threads, device.name, device.cache_bytes)
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
