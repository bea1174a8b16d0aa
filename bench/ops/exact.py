"""What several rows of x cost beside one: by the fastest kernels, and with the bits of single rows.

A cell is a packed W: all numbers of rows, of both, by turns in one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_metalmm.nn.activations import KINDS
from torch_metalmm.nn.exact import exact_rows

from ..problem import Checker, Problem, Variant
from ..runner import Cell, Record, Run, Way, check_formats, run_cell
from ..shapes import parse_ints, parse_names, parse_shape
from ..tables import status
from .matmul import build, of_problem, way


def run(run: Run) -> Iterator[Record]:
    """A record per W, format and number of rows."""
    args = run.args
    wanted, ms = [parse_shape(s) for s in args.shapes.split(",")], parse_ints(args.m)
    names = parse_names(args.formats)
    check_formats(names, [s.k for s in wanted])
    for shape in wanted:
        problem = Problem(shape, run.setting)
        for variant in build(problem, names, ["metalmm"]):
            status(f"{shape}, {variant.name}")
            cell = of_rows(problem, variant, sorted({1, *ms}))
            records = {
                r["variant"]: r for r in run_cell(cell, None, args.repetitions, args.seconds)
            }
            for m in ms:
                yield of_m(f"{shape}, {run.device.type}, x {problem.setting.dtype}", m, records)


def of_m(model: str, m: int, records: dict[str, Record]) -> Record:
    """Times of m rows, and over that of one."""
    one, fastest = records["fastest 1"], records[f"fastest {m}"]
    exact = records.get(f"exact {m}", fastest if m == 1 else {"ok": True})
    found = {"kind": "exact", "model": model, "m": m, "format": fastest["of"]}
    found |= {"ok": fastest["ok"] and exact["ok"]}
    for name, r in (("fastest", fastest), ("exact", exact)):
        if "us" in r and "us" in one:
            found[f"{name}_of_one"] = r["us"] / one["us"]
            found[f"{name}_us"] = r["us"]
    return found


def of_rows(problem: Problem, variant: Variant, ms: Sequence[int]) -> Cell:
    """All numbers of rows of one packed W."""
    checker, ways = Checker(problem), list[Way]()
    for m in ms:
        ways.append(way(problem, variant, checker, m, f"fastest {m}"))
        # Rows rounded in blocks have no exact form.
        if m > 1 and not any(kind in variant.name for kind in KINDS):
            ways.append(exactly(problem, variant, m, ways[-1]))
    return of_problem(
        problem, "exact", [named(w, variant.name.removeprefix("metalmm ")) for w in ways]
    )


def named(way: Way, of: str) -> Way:
    return replace(way, against={}, facts=way.facts | {"variant": way.name, "of": of})


def exactly(problem: Problem, variant: Variant, m: int, fastest: Way) -> Way:
    """The same rows; right where they are to the bit what each is alone."""
    call, x = fastest.call, problem.x(m)

    def exact(i: int) -> Tensor:
        with exact_rows():
            return torch.as_tensor(call(i))

    def check() -> Record:
        alone = torch.cat([variant.bind(x[i : i + 1])(0) for i in range(m)])
        return {"ok": torch.equal(exact(0), alone)}

    return replace(fastest, name=f"exact {m}", call=exact, check=check)
