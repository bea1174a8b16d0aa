"""Mach-O files, as far as the tests of the Metal engine read them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC_64, _SEGMENT_64, _SYMTAB = 0xFEEDFACF, 0x19, 0x2
_EXTERNAL, _TYPE = 0x01, 0x0E


class MachO:
    """A 64-bit file: the external symbols it defines and needs, the selectors it sends.

    ValueError: it is none.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        if struct.unpack_from("<I", data)[0] != _MAGIC_64:
            raise ValueError("not a 64-bit Mach-O file")
        self.defined: set[str] = set()
        self.undefined: set[str] = set()
        self.selectors: set[str] = set()
        for command, at in self._commands():
            if command == _SYMTAB:
                self._read_symbols(at)
            elif command == _SEGMENT_64:
                self._read_selectors(at)

    def _commands(self) -> Iterator[tuple[int, int]]:
        (count,) = struct.unpack_from("<I", self._data, 16)
        at = 32
        for _ in range(count):
            command, size = struct.unpack_from("<2I", self._data, at)
            yield command, at
            at += size

    def _read_symbols(self, command: int) -> None:
        table, count, strings, _ = struct.unpack_from("<4I", self._data, command + 8)
        for i in range(count):
            name, kind = struct.unpack_from("<IB", self._data, table + 16 * i)
            if kind & _EXTERNAL:
                end = self._data.index(b"\0", strings + name)
                text = self._data[strings + name : end].decode()
                (self.defined if kind & _TYPE else self.undefined).add(text)

    def _read_selectors(self, command: int) -> None:
        (count,) = struct.unpack_from("<I", self._data, command + 64)
        for i in range(count):
            section = command + 72 + 80 * i
            if self._data[section : section + 16].rstrip(b"\0") == b"__objc_methname":
                size, offset = struct.unpack_from("<QI", self._data, section + 40)
                names = self._data[offset : offset + size].split(b"\0")
                self.selectors |= {name.decode() for name in names if name}


def listed(version: str) -> list[list[str]]:
    """The rows of mps_symbols.txt for a version of torch: kind, where it is declared, name."""
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    lines = (Path(__file__).parent / "mps_symbols.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    out = []
    for kind, where, name in rows:
        kind, *limit = re.split(r"(<|>=)2\.", kind)
        if not limit[1:] or (release < (2, int(limit[1]))) == (limit[0] == "<"):
            out.append([kind, where, name])
    return out
