"""Reads what mmagx prints of a kernel: its code, the counts of its main loop, its registers.

Classes and pipes are those of Mesa's model of G13 (agx_performance.c): floats, bitwise operations,
selects and sums of integers have a pipe, a slot an instruction; shifts, conversions, products of
integers and functions have another, 4 to 8 cycles an instruction, and take a slot of the first as
well. Simdgroups fill both at once, so the longer one counts. Loads and waits take slots of
neither. A 64-bit addition is 4 slots (philipturner/metal-benchmarks).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from .ptx import Block, inner_loops

OPS = {
    "fma": "ffma fadd fmul hfma hadd hmul",
    "bitwise": "and or xor nor nand andn1 andn2 xnor orn1 orn2 bitop not",
    "integer": "iadd",
    "select": "icmpsel fcmpsel icmp fcmp",
    "move": "mov mov_imm",
    "shift": "bfi bfeil extr asr bitrev popcount ffs intl",
    "convert": "convert floor ceil trunc roundeven",
    "product": "imad",
    "function": "exp2 log2 rcp rsqrt srsqrt sin_pt_1 sin_pt_2",
    "load": "device_load local_load",
    "store": "device_store local_store atomic",
    "spill": "stack_load stack_store",
    "wait": "wait memory_barrier threadgroup_barrier",
}
CLASSES = (*OPS, "exchange", "control", "other")
_CLASS = {op: kind for kind, ops in OPS.items() for op in ops.split()}
_NO_SLOT = {"load", "store", "spill", "wait"}
_SLOTS = {"exchange": 2}  # 1 elsewhere
_WIDE_SLOTS = 4
_OTHER_PIPE = dict.fromkeys(("shift", "convert", "product", "function"), 4)
_OTHER_PIPE_OF = {"rcp": 6, "rsqrt": 8, "srsqrt": 8}  # and not as its class

_BEGIN, _END = re.compile(r"block(\d+) \{$"), re.compile(r"\}(?: -> ([block\d ]*))?")
_INSTRUCTION = re.compile(r"   (?:(.*?) = )?([a-z_0-9]+)(?:\.\w+)*(?: |$)")
_CONTROL = re.compile(r"jmp|pop|if|else|while|begin|break|logical|push|stop")
_EXCHANGE = re.compile(r"simd|shuffle|quad|ballot")
_RESULT = re.compile(r"^RESULT (.*)$", re.M)
_SPILLS = re.compile(r"(\d+):(\d+) spills:fills")


class Instruction(NamedTuple):
    """An instruction: what it writes, and its opcode without suffixes."""

    to: str
    op: str

    @property
    def kind(self) -> str:
        """The class of the instruction, of CLASSES."""
        if self.op in _CLASS:
            return _CLASS[self.op]
        if _CONTROL.match(self.op):
            return "control"
        return "exchange" if _EXCHANGE.search(self.op) else "other"

    @property
    def is_wide(self) -> bool:
        """Whether it adds 64 bits."""
        return self.op == "iadd" and re.fullmatch(r"r\d+:r\d+", self.to) is not None


@dataclass
class Code:
    """A kernel: one turn of its main loop (the largest loop that has none inside; empty: it has no
    loop), half registers, threads of a core that they leave, bytes of threadgroup memory that the
    code uses, spills and fills."""

    loop: list[Instruction]
    half_registers: int
    threads: int
    threadgroup_bytes: int
    spills: int
    counts: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = Counter(i.kind for i in self.loop)

    @property
    def wide(self) -> int:
        """64-bit additions."""
        return sum(i.is_wide for i in self.loop)

    @property
    def slots(self) -> int:
        """Slots of the pipe for floats, a 64-bit addition as one."""
        return sum(n * _SLOTS.get(k, 1) for k, n in self.counts.items() if k not in _NO_SLOT)

    @property
    def other_pipe(self) -> int:
        """Cycles of the pipe for shifts, conversions, products of integers and functions."""
        return sum(_OTHER_PIPE_OF.get(i.op, _OTHER_PIPE.get(i.kind, 0)) for i in self.loop)

    @property
    def cycles(self) -> int:
        """Cycles of the pipe that is busy longer, a 64-bit addition at its cost."""
        return max(self.slots + (_WIDE_SLOTS - 1) * self.wide, self.other_pipe)


def _programs(text: str) -> list[list[Block]]:
    """The programs printed, in order, as basic blocks."""
    out: list[list[Block]] = []
    place: dict[str, int] = {}
    following: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            if begin[1] == "0":
                out.append([])
                following = []
                place = {}
            place[begin[1]] = len(out[-1])
            out[-1].append(Block(begin[1]))
            inside = True
        elif inside and (end := _END.match(line)):
            following.append(re.findall(r"block(\d+)", end[1] or ""))
            inside = False
            if all(name in place for names in following for name in names):
                for block, names in zip(out[-1], following, strict=True):
                    block.following = [place[name] for name in names]
        elif inside and (instruction := _INSTRUCTION.match(line)):
            out[-1][-1].instructions.append(Instruction(instruction[1] or "", instruction[2]))
    return out


def read(printed: str) -> Code:
    """The code of a kernel as mmagx printed it. ValueError: mmagx printed no result."""
    result, spills = _RESULT.search(printed), _SPILLS.findall(printed)
    if not result or not spills:
        raise ValueError(f"mmagx printed no result: {printed[-400:]!r}")
    values = dict(part.split("=") for part in result[1].split())
    # A program is printed after three steps; a preamble beside the kernel is shorter.
    programs = _programs(printed)[2::3]
    kernel = max(programs, key=lambda p: sum(len(block.instructions) for block in p))
    loop = max(inner_loops(kernel), key=len, default=[])
    return Code(
        loop,
        int(values["regs"]),
        int(values["threads"]),
        int(values["local"]),
        sum(int(n) for pair in spills for n in pair),
    )
