"""Several rows of x timed beside one: by the fastest kernels, and with the bits of single rows.

A cell is a packed W: all numbers of rows, of both, by turns in one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_metalmm.nn.exact import exact_rows

from ..problem import Checker, Problem, Variant
from ..runner import Cell, Record, Run, Way, check_formats
from ..shapes import parse_ints, parse_names, parse_shape
from .matmul import build, of_problem, way


def run(run: Run) -> Iterator[Record]:
    """The records of every W, format and number of rows."""
    args = run.args
    wanted, ms = [parse_shape(s) for s in args.shapes.split(",")], parse_ints(args.m)
    names = parse_names(args.formats)
    check_formats(names, [s.k for s in wanted])
    cells = (
        of_rows(problem, variant, sorted({1, *ms}))
        for problem in (Problem(shape, run.setting) for shape in wanted)
        for variant in build(problem, names, ["metalmm"])
    )
    yield from run.cells(cells, has_roof=False)


def of_rows(problem: Problem, variant: Variant, ms: Sequence[int]) -> Cell:
    """All numbers of rows of one packed W; "of_one": the time of one row over theirs."""
    checker, ways = Checker(problem), list[Way]()
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
