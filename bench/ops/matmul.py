"""The matrix of shapes × M × variants: each cell checked, then timed beside the roofs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..devices import Device
from ..engines import ENGINES
from ..problem import Checker, Problem, Setting, Variant
from ..roofs.roof import Roof
from ..shapes import Shape
from ..timing import Timing, interleave

Record = dict[str, Any]
Progress = Callable[[str], None]
REFERENCE = {"cpu": "F.linear f32", "cuda": "F.linear f16", "mps": "F.linear f16"}


def choose_engines(names: Sequence[str], device: Device) -> tuple[list[str], dict[str, str]]:
    """The engines that can run here, and why the others cannot. "auto" is all that are installed.

    ValueError: a name that is no engine, or one asked for by name that cannot run.
    """
    absent = {name: why for name, e in ENGINES.items() if (why := e.missing(device))}
    if tuple(names) == ("auto",):
        return [name for name in ENGINES if name not in absent], absent
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"engine {name!r}; must be auto or of {', '.join(ENGINES)}")
        if name in absent:
            raise ValueError(f"engine {name!r} cannot run: {absent[name]}")
    return list(names), {}


def build(problem: Problem, formats: Sequence[str], names: Sequence[str]) -> list[Variant]:
    """All variants of the engines named, weights quantized and copied."""
    return [v for name in names for v in ENGINES[name].variants(problem, formats)]


def describe_cell(variant: Variant, shape: Shape, m: int) -> Record:
    return {
        "kind": "matmul",
        "shape": shape.name,
        "n": shape.n,
        "k": shape.k,
        "m": m,
        "variant": variant.name,
        "engine": variant.engine,
        "format": variant.format,
        "weight_bytes": variant.weight_bytes,
        "copies": variant.copies,
        "strategy": variant.strategy(m),
    }


def timing_fields(t: Timing) -> Record:
    scaled = {"us": t.median, "us_q1": t.q1, "us_q3": t.q3}
    return {**{key: round(value * 1e6, 3) for key, value in scaled.items()}, "count": t.count}


def rates(record: Record, t: Timing, roofs: tuple[float, float]) -> Record:
    """Weight bytes and flops per second, and what part of the roofs (GB/s, GFLOP/s) that is."""
    roof_gbs, roof_gflops = roofs
    gbs = record["weight_bytes"] / t.median / 1e9
    gflops = 2.0 * record["m"] * record["n"] * record["k"] / t.median / 1e9
    return {
        "gbs": gbs,
        "gflops": gflops,
        "roof_gbs": roof_gbs,
        "roof_gflops": roof_gflops,
        "percent_read": 100 * gbs / roof_gbs,
        "percent_peak": 100 * gflops / roof_gflops,
    }


def run_cell(
    problem: Problem,
    variants: Sequence[Variant],
    checker: Checker,
    m: int,
    roof: Roof,
    repetitions: int,
    seconds: float,
) -> list[Record]:
    """One record per variant at this M. A wrong variant is not timed."""
    x = problem.x(m)
    cells: list[Record] = []
    timed = roof.timed()
    for v in variants:
        if v.max_m is not None and m > v.max_m:
            continue
        call = v.bind(x)
        check = checker(v, x, call)
        cells.append({**describe_cell(v, problem.shape, m), **check.record()})
        if check.ok:
            timed[v.name] = v.device.timed(call, v.copies)
    timings = interleave(timed, repetitions, seconds)
    roofs = roof.reached(timings)
    reference = timings.get(REFERENCE[problem.setting.device.type])
    for cell in cells:
        t = timings.get(cell["variant"])
        if t is not None:
            cell.update(timing_fields(t), **rates(cell, t, roofs))
            if reference is not None:
                cell["speedup"] = reference.median / t.median
    return cells


def run(
    shapes: Sequence[Shape],
    formats: Sequence[str],
    ms: Sequence[int],
    names: Sequence[str],
    setting: Setting,
    roof: Roof,
    repetitions: int,
    seconds: float,
    progress: Progress,
) -> Iterator[Record]:
    """The records of every cell, shape by shape."""
    for shape in shapes:
        problem = Problem(shape, setting)
        progress(f"{shape}: packing")
        variants = build(problem, formats, names)
        checker = Checker(problem)
        for m in ms:
            progress(f"{shape} M={m}")
            yield from run_cell(problem, variants, checker, m, roof, repetitions, seconds)


def sweep(
    shape: Shape,
    formats: Sequence[str],
    ms: Sequence[int],
    names: Sequence[str],
    setting: Setting,
    repetitions: int,
    progress: Progress,
) -> Iterator[Record]:
    """Time against M: the variants one after another, all M of one interleaved."""
    problem = Problem(shape, setting)
    checker = Checker(problem)
    for name in names:
        progress(f"{shape} {name}: packing")
        for variant in ENGINES[name].variants(problem, formats):  # made one by one, as they come
            yield from sweep_variant(problem, variant, checker, ms, repetitions, progress)


def sweep_variant(
    problem: Problem,
    variant: Variant,
    checker: Checker,
    ms: Sequence[int],
    repetitions: int,
    progress: Progress,
) -> list[Record]:
    """One record for each M that the variant takes."""
    shape, timed, cells = problem.shape, {}, []
    for m in ms:
        if variant.max_m is not None and m > variant.max_m:
            continue
        progress(f"{shape} {variant.name} M={m}: check")
        x = problem.x(m)
        call: Callable[[int], Tensor] = variant.bind(x)
        check = checker(variant, x, call)
        cells.append({**describe_cell(variant, shape, m), **check.record(), "kind": "sweep"})
        if check.ok:
            timed[str(m)] = variant.device.timed(call, variant.copies)
    progress(f"{shape} {variant.name}: timing {len(timed)} M, interleaved")
    timings = interleave(timed, repetitions) if timed else {}
    for cell in cells:
        if (t := timings.get(str(cell["m"]))) is not None:
            flops = 2.0 * cell["m"] * shape.n * shape.k
            cell.update(timing_fields(t), gflops=flops / t.median / 1e9)
    return mark_inversions(cells)


def mark_inversions(cells: list[Record]) -> list[Record]:
    """Adds "slower_m": a smaller M that takes longer, the quartiles of both apart; the longest."""
    done = [c for c in cells if "us" in c]
    for i, cell in enumerate(done):
        slower = [c for c in done[:i] if c["us_q1"] > cell["us_q3"]]
        if slower:
            cell["slower_m"] = max(slower, key=lambda c: c["us"])["m"]
    return cells
