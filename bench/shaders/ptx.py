"""The cost of the innermost loop of a function of PTX on an Apple GPU, in issue cycles.

PTX stands for what Apple's compiler would emit: both come from LLVM, of the same text, and both are
RISC with three operands. RULES says where they differ, and what an instruction costs there
(philipturner/metal-benchmarks, M1; register and load operands from dougallj/applegpu).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import networkx as nx

# Classes in the order of the report. A class of `FREE` costs nothing and is not reported.
CLASSES: tuple[str, ...] = ("bitwise", "shift", "convert", "fma", "special", "select", "integer")
CLASSES += ("branch", "load")
FREE = "free"

# (opcode and last operand, class, issue cycles); the first match counts.
RULES = tuple(
    (re.compile(pattern), kind, cycles)
    for kind, cycles, patterns in (
        # A 32-bit register is two 16-bit ones, each an operand of its own: halves are neither
        # shifted nor masked out, nor packed, but a constant half is written (_opens). Registers
        # are renamed, not moved.
        (FREE, 0, r"mov\.\S+ .*"),
        (FREE, 0, r"sh[lr]\.[bu]32 16|and\.b32 65535|prmt\.b32 (0x)?(5410|7632|5432|7610)U?"),
        # 16-bit operands widen within an instruction: halves to f32, integers to 32 and 64 bits.
        (FREE, 0, r"cvt\.f32\.f16 .*|cvt\.[us](16|32|64)\.[us](8|16|32) .*"),
        # Negation is a modifier of an operand.
        (FREE, 0, r"neg\.f(16|32) .*"),
        # IADD shifts its second operand left by up to 4: an index times 2 ... 16, and its sum with
        # an address, which PTX counts below, are one instruction.
        (FREE, 0, r"mul\.wide\.[us]32 (2|4|8|16)"),
        # bf16 is the upper half of f32: a move.
        ("convert", 1, r"cvt\.f32\.bf16 .*"),
        ("convert", 4, r"cvt\.\S+ .*"),
        ("bitwise", 1, r"(and|or|xor|not)\.b(16|32) .*"),
        ("bitwise", 2, r"(and|or|xor|not)\.b64 .*"),
        ("shift", 4, r"(shl|shr|shf|bfe|bfi|prmt)\.\S+ .*"),
        # No packed arithmetic: two halves are two instructions.
        ("fma", 2, r"(add|sub|mul|fma)(\.rn)?\.f16x2 .*"),
        ("fma", 1, r"(add|sub|mul|fma)(\.rn)?\.f(16|32) .*"),
        # RECIP and a correction; EXP2.
        ("special", 8, r"div(\.\w+)*\.f32 .*"),
        ("special", 4, r"ex2(\.\w+)*\.f32 .*"),
        ("special", 6, r"rcp(\.\w+)*\.f32 .*"),
        ("select", 1, r"(setp|selp|min|max)\.\S+ .*|(and|or|xor|not)\.pred .*"),
        ("integer", 1, r"(add|sub|neg)\.s(16|32|64) .*"),
        ("integer", 4, r"(mul|mad)\.(lo|hi|wide)\.\S+ .*"),
        ("branch", 1, r"bra(\.uni)? .*"),
        # Counted, not costed: a load is not an arithmetic instruction.
        ("load", 0, r"ld\.\S+ .*"),
    )
    for pattern in (patterns,)
)

_FUNCTION = re.compile(r"^\.(?:visible |weak )?\.?(?:func|entry) (\w+)\(.*?^\}", re.M | re.S)
_LABEL = re.compile(r"(\$\w+):")
_INSTRUCTION = re.compile(r"(?:@(!?%p\d+)\s+)?([a-z][a-z0-9_]*(?:\.[\w:]+)*)\s*(.*);$")


@dataclass(frozen=True)
class Instruction:
    """An instruction: opcode with its suffixes, operands, the predicate it runs under."""

    opcode: str
    operands: str
    predicate: str | None

    @property
    def target(self) -> str | None:
        """Where a branch goes."""
        return self.operands.strip() if self.opcode.startswith("bra") else None


@dataclass
class Block:
    """A basic block: its label, its instructions, the indices of the blocks that may follow."""

    label: str
    instructions: list[Any] = field(default_factory=list)
    following: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """Instructions and issue cycles of a loop, by class."""

    counts: Counter[str]
    by_class: Counter[str]

    @property
    def cycles(self) -> int:
        """The cycles of all classes."""
        return self.by_class.total()


def functions(ptx: str) -> dict[str, str]:
    """{name: text} of the functions and entries of a module."""
    return {m[1]: m[0] for m in _FUNCTION.finditer(ptx)}


def uses_local_memory(function: str) -> bool:
    """Whether a function keeps variables in memory: arrays whose index is no constant, spills."""
    return "__local_depot" in function


def read(line: str) -> Instruction | None:
    """The instruction of a line, without comment; None where there is none."""
    m = _INSTRUCTION.match(line)
    return Instruction(m[2], m[3], m[1]) if m else None


def blocks(function: str) -> list[Block]:
    """The basic blocks of a function, in the order of the text."""
    out = [Block("")]
    body = function[function.index("{") + 1 :]
    for line in (part.split("//")[0].strip() for part in body.splitlines()):
        if label := _LABEL.match(line):
            out.append(Block(label[1]))
        elif instruction := read(line):
            out[-1].instructions.append(instruction)
            if instruction.target or instruction.opcode == "ret":
                out.append(Block(""))
    at = {b.label: i for i, b in enumerate(out) if b.label}
    for i, b in enumerate(out):
        last = b.instructions[-1] if b.instructions else None
        if last and last.target:
            b.following.append(at[last.target])
        if not last or not (last.opcode == "ret" or (last.target and not last.predicate)):
            b.following += [i + 1] if i + 1 < len(out) else []
    return out


def _loops(graph: list[Block]) -> Iterator[set[int]]:
    """The natural loops: an edge back to a block on every path to its start, and all between."""
    edges = nx.DiGraph((i, j) for i, block in enumerate(graph) for j in block.following)
    edges.add_node(0)
    edges = edges.subgraph({0} | nx.descendants(edges, 0))
    above = nx.immediate_dominators(edges, 0)
    for end, head in sorted(edges.edges):
        at = end
        while at not in (0, head):
            at = above[at]
        if at == head:
            inside = edges.subgraph(edges.nodes - {head})
            yield {head, end} | (nx.ancestors(inside, end) if end != head else set())


def inner_loops(graph: list[Block]) -> list[list[Any]]:
    """The instructions of one turn of each loop that has none inside, of basic blocks.

    All blocks of a loop count: lanes that disagree at a branch make their simdgroup run both sides.
    """
    found = list(_loops(graph))
    inner = [loop for loop in found if not any(other < loop for other in found)]
    return [[x for i in sorted(loop) for x in graph[i].instructions] for loop in inner]


def main_loop(function: str) -> list[Instruction]:
    """The instructions of one turn of the largest of inner_loops() of a function.

    ValueError: there is no loop.
    """
    bodies = inner_loops(blocks(function))
    if not bodies:
        raise ValueError("a function without a loop")
    return max(bodies, key=len)


def classify(instruction: Instruction) -> tuple[str, int]:
    """(class, issue cycles). ValueError: an opcode that no rule knows."""
    key = f"{instruction.opcode} {instruction.operands.split(',')[-1].strip()}"
    for pattern, kind, cycles in RULES:
        if pattern.fullmatch(key):
            return kind, cycles
    raise ValueError(f"no rule of ptx.py for: {instruction.opcode} {instruction.operands}")


def _packs(instructions: list[Instruction]) -> Iterator[bool]:
    """Whether each instruction packs two halves: a | b << 16, a loaded or widened from 16 bits.

    LLVM writes some of the `mov {a, b}` that RULES calls free in this way.
    """
    low: set[str] = set()
    high: set[str] = set()
    for i in instructions:
        to, *of = re.findall(r"%\w+|\d+", i.operands) or [""]
        yield i.opcode == "or.b32" and any(a in low and b in high for a, b in permutations(of, 2))
        for halves, is_half in (
            (low, re.fullmatch(r"cvt\.u32\.u16|ld\.\w+\.[bu]16", i.opcode)),
            (high, i.opcode == "shl.b32" and of[1:] == ["16"]),
        ):
            (halves.add if is_half else halves.discard)(to)


def constant_halves(function: str) -> set[str]:
    """The 16-bit registers of a function that are only ever set to an immediate."""
    constants: set[str] = set()
    others: set[str] = set()
    for i in (i for block in blocks(function) for i in block.instructions):
        to = re.match(r"\{[^}]*\}|[^,]*", i.operands)
        is_constant = re.fullmatch(r"mov\.[bu]16", i.opcode) and i.operands.count("%") == 1
        (constants if is_constant else others).update(re.findall(r"%\w+", to[0] if to else ""))
    return constants - others


def _opens(i: Instruction, constants: Container[str]) -> bool:
    """Whether an instruction joins a half with a constant one, which must be written."""
    joined = re.fullmatch(r"%\w+, *\{(.*)\}", i.operands)
    if i.opcode != "mov.b32" or not joined:
        return False
    return any(half[0] != "%" or half in constants for half in re.split(r",\s*", joined[1]))


def cost(instructions: list[Instruction], constants: Container[str] = ()) -> Cost:
    """The cost of `instructions` by RULES; `constants`: constant_halves() of their function."""
    out = Cost(Counter(), Counter())
    for i, packs in zip(instructions, _packs(instructions), strict=True):
        opens = not packs and _opens(i, constants)
        kind, cycles = (FREE, 0) if packs else ("bitwise", 1) if opens else classify(i)
        out.counts[kind] += 1
        out.by_class[kind] += cycles
    return out
