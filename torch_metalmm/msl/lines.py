"""Machine addresses to source lines, from the DWARF of a compiled shader."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from .source import TABLES

_STAND_IN = "csrc/msl/"


@functools.cache
def _units(library: Path) -> list[tuple[Any, Any, list[tuple[int, int, int, bool]]]]:
    """(unit, line program, rows (address, file index, line, end)) of each compilation unit."""
    from elftools.elf.elffile import ELFFile  # shaders of a GPU need no pyelftools

    with library.open("rb") as f:
        elf = ELFFile(f)
        if not elf.has_dwarf_info():
            return []
        dwarf = elf.get_dwarf_info()
        units = []
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            if program is None:
                continue
            rows = [
                (e.state.address, e.state.file, e.state.line, e.state.end_sequence)
                for e in program.get_entries()
                if e.state is not None and (e.state.end_sequence or _in_source(program, e.state))
            ]
            list(unit.iter_DIEs())  # read while the file is open
            units.append((unit, program, rows))
        return units


def _file_name(program: Any, index: int) -> str:
    header = program.header
    version5 = header["version"] >= 5
    entry = header["file_entry"][index if version5 else index - 1]
    name = entry.name.decode() if isinstance(entry.name, bytes) else str(entry.name)
    folder = entry.dir_index
    if name.startswith("/") or (folder == 0):
        return name
    directories = header["include_directory"]
    base = directories[folder if version5 else folder - 1]
    return f"{base.decode() if isinstance(base, bytes) else base}/{name}"


def _in_source(program: Any, state: Any) -> bool:
    """Code without a line, and code of the tables (an argument reloaded in a loop of the kernel
    that was inlined there), counts as the line before it."""
    return state.line > 0 and _file_name(program, state.file) != TABLES


def _ranges(unit: Any, die: Any) -> list[tuple[int, int]]:
    if "DW_AT_low_pc" in die.attributes and "DW_AT_high_pc" in die.attributes:
        low = int(die.attributes["DW_AT_low_pc"].value)
        high = die.attributes["DW_AT_high_pc"]
        return [(low, high.value if high.form == "DW_FORM_addr" else low + int(high.value))]
    if "DW_AT_ranges" not in die.attributes:
        return []
    lists = unit.dwarfinfo.range_lists()
    top = unit.get_top_DIE().attributes
    base = int(top["DW_AT_low_pc"].value) if "DW_AT_low_pc" in top else 0
    found = []
    for r in lists.get_range_list_at_offset(die.attributes["DW_AT_ranges"].value, cu=unit):
        if hasattr(r, "base_address"):
            base = int(r.base_address)
        else:
            offset = 0 if getattr(r, "is_absolute", False) else base
            found.append((r.begin_offset + offset, r.end_offset + offset))
    return found


def _callers(unit: Any, program: Any, address: int) -> list[tuple[str, int]]:
    """Where the functions inlined at `address` were called, innermost first."""
    calls = []
    for die in unit.iter_DIEs():
        inlined = die.tag == "DW_TAG_inlined_subroutine"
        if inlined and any(low <= address < high for low, high in _ranges(unit, die)):
            file = die.attributes["DW_AT_call_file"].value
            line = die.attributes["DW_AT_call_line"].value
            calls.append((_file_name(program, file), int(line)))
    return calls[::-1]


@functools.cache
def line_of(library: str, address: int) -> tuple[str, int] | None:
    """(file, line) of the call that returns to `address`, outside the stand-in's headers."""
    address -= 1
    for unit, program, rows in _units(Path(library)):
        before: tuple[int, int, int, bool] | None = None
        for row in rows:
            if before and not before[3] and before[0] <= address < row[0]:
                places = [(_file_name(program, before[1]), before[2])]
                places += _callers(unit, program, address)
                own = [p for p in places if _STAND_IN not in p[0] and p[1] > 0]
                return (own or places)[0]
            before = row
    return None
