"""The matrix of shapes × M × engines; and several rows of x beside one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_metalmm.nn.exact import exact_rows

from .devices import Device
from .peers.products import ENGINES
from .problem import Checker, Problem, Variant, parse_ints, parse_names, parse_shape
from .runner import Cell, Record, Run, Way, check_formats
from .tables import status

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


def way(problem: Problem, v: Variant, checker: Checker, m: int, name: str | None = None) -> Way:
    """A variant with m rows of x, under another name where one is given."""
    x, shape = problem.x(m), problem.shape
    call = v.bind(x)
    facts = {"variant": v.name, "m": m, "engine": v.engine, "format": v.format}
    facts |= {"weight_bytes": v.weight_bytes, "copies": v.copies, "strategy": v.strategy(m)}
    return Way(
        name or v.name,
        call,
        v.copies,
        lambda: checker(v, x, call),
        read=float(v.weight_bytes),
        flops=2.0 * m * shape.n * shape.k,
        against={"speedup": REFERENCE[problem.setting.device.type]},
        facts=facts,
    )


def cell(problem: Problem, variants: Sequence[Variant], checker: Checker, m: int) -> Cell:
    """All variants that take m rows of x."""
    fit = [v for v in variants if v.max_m is None or m <= v.max_m]
    return of_problem(problem, "matmul", [way(problem, v, checker, m) for v in fit])


def of_problem(problem: Problem, kind: str, ways: Sequence[Way]) -> Cell:
    shape = problem.shape
    about = {"shape": shape.name, "n": shape.n, "k": shape.k}
    return Cell(kind, f"W {shape.n}×{shape.k}", about, ways, problem.setting.device)


def run(run: Run) -> Iterator[Record]:
    """The records of every cell, shape by shape; with --exact of every W, its rows beside one."""
    args = run.args
    wanted = [parse_shape(s) for s in args.shapes.split(",")]
    ms, names = parse_ints(args.m), parse_names(args.formats)
    check_formats(names, [s.k for s in wanted])
    chosen = ("metalmm",) if args.exact else parse_names(args.engines)
    engines, absent = choose_engines(chosen, run.device)
    yield from ({"kind": "skipped", "what": name, "why": why} for name, why in absent.items())

    def cells() -> Iterator[Cell]:
        for shape in wanted:
            problem = Problem(shape, run.setting)
            status(f"{shape}: packing")
            variants, checker = build(problem, names, engines), Checker(problem)
            if args.exact:
                yield from (of_rows(problem, v, checker, sorted({1, *ms})) for v in variants)
            else:
                yield from (cell(problem, variants, checker, m) for m in ms)

    yield from run.cells(cells(), has_roof=not args.exact)


# ---- several rows of x beside one


def of_rows(problem: Problem, variant: Variant, checker: Checker, ms: Sequence[int]) -> Cell:
    """All numbers of rows of one packed W, by the fastest kernels and with the bits of single rows,
    by turns; "of_one": the time of one row over theirs."""
    ways = list[Way]()
    for m in ms:
        fastest = way(problem, variant, checker, m, f"{variant.name} {m}")
        ways.append(replace(fastest, against={"of_one": f"{variant.name} 1"}))
        if m > 1:
            ways.append(exactly(problem, variant, m, ways[-1]))
    return of_problem(problem, "exact", ways)


def exactly(problem: Problem, variant: Variant, m: int, fastest: Way) -> Way:
    """`fastest` with exact rows; right where each row has the bits that it has alone."""
    call, x, name = fastest.call, problem.x(m), f"{variant.name}, exact"

    def exact(i: int) -> Tensor:
        with exact_rows():
            return torch.as_tensor(call(i))

    def check() -> Record:
        alone = torch.cat([variant.bind(x[i : i + 1])(0) for i in range(m)])
        return {"ok": torch.equal(exact(0), alone)}

    facts = fastest.facts | {"variant": name}
    return replace(fastest, name=f"{name} {m}", call=exact, check=check, facts=facts)
