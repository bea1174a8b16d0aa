"""What the bytecode of a class says of the weights that it reads."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType


def reads(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """(owner, use) of each read of `owner.weight`: what was loaded before, and what comes next."""
    if "weight" not in code.co_names:
        return
    steps = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    for owner, weight, use in zip(steps, steps[1:], [*steps[2:], steps[-1]], strict=False):
        if weight.opname == "LOAD_ATTR" and weight.argval == "weight":
            yield owner, use
