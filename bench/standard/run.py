"""`metalmm bench`: one run of one to three minutes, its tables, its record and its picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torch_metalmm.tools.chat.screen import harmless, one_line
from torch_metalmm.tools.doctor.large import memory_of

from ..devices import Device
from ..options import COMMANDS, OF_A_CLONE, parser
from ..problem import LABELS
from ..tables import Record, print_tables, status
from . import products, record, show, stack

SENT_TO = (
    "to send it: attach what was written to an issue of the repository, with what surprises you"
)


@dataclass(frozen=True)
class Asked:
    """The choices of the command line."""

    device: str | None
    threads: int | None
    formats: str | None
    folder: Path
    force: bool
    quick: bool


def measure(asked: Asked, head: Record, setting: Any, memory: float) -> Record:
    """The whole record: roofs, a layer's products, a token."""
    device, quick = setting.device, asked.quick
    layer = products.QUICK_LAYER if quick else products.LAYER
    names = products.FORMATS if asked.formats is None else asked.formats.split(",")
    chosen = products.check_formats(names, layer)
    status("roofs")
    found = products.measure_roofs(device, setting.threads, quick)
    ms = products.QUICK_MS if quick else products.MS
    cells = [*products.run(chosen, layer, ms, setting, found, quick, status)]
    chip = products.chip_of(device)
    if find_spec("transformers") is None:
        tokens: list[Record] = [_skipped("tokens", "transformers is not installed")]
    else:
        tokens = _tokens(lambda: stack.run(setting, memory, found[1], chip, quick, status))
    status("\n" if sys.stderr.isatty() else "done")
    return {
        **head,
        "model": None if chip is None else asdict(chip),
        "roofs": found[1],
        "layer": layer,
        "products": _without_kind(cells),
        "tokens": _without_kind(tokens),
        "skipped": [r for r in (*cells, *tokens) if r.get("kind") == "skipped"],
    }


def _tokens(run: Callable[[], Iterable[Record]]) -> list[Record]:
    """The records of the run, or one of its failure, by which minutes of products are not lost."""
    try:
        return [*run()]
    except (ImportError, RuntimeError, MemoryError) as error:
        # Not into the record: the messages of imports have paths.
        print(f"\na token: {one_line(error)}", file=sys.stderr)
        return [_skipped("tokens", f"failed, {type(error).__name__}") | {"ok": False}]


def _skipped(what: str, why: str) -> Record:
    return {"kind": "skipped", "what": what, "why": why}


def _without_kind(records: Iterable[Record]) -> list[Record]:
    measured = [r for r in records if r.get("kind") != "skipped"]
    return [{name: value for name, value in r.items() if name != "kind"} for r in measured]


def standard(asked: Asked) -> int:
    """0; 1 where a result was wrong or failed.

    ValueError, OSError: bad arguments, before anything is measured.
    """
    device = Device.named(asked.device or Device.default())
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    threads, memory = torch.get_num_threads(), memory_of(device.type)
    head = record.facts(device, LABELS[device.dtype], threads, memory, asked.quick)
    written, picture = record.places(asked.folder, head, asked.force)
    with torch.inference_mode():
        setting = products.setting_of(device, threads, memory, asked.quick)
        found = measure(asked, head, setting, memory)
    record.write(written, found)
    print(*show.head(found), "", sep="\n")
    tables = (show.roof_table(found), show.layer_table(found), show.token_table(found))
    print_tables([table for table in tables if table.rows])
    print(*show.remarks(found), sep="\n")
    print(f"record: {written}")
    print(drawn(found, picture), SENT_TO, sep="\n")
    kinds = (found["products"], found["tokens"], found["skipped"])
    return int(any(not r.get("ok", True) for records in kinds for r in records))


def drawn(found: Record, picture: Path) -> str:
    """Draws; what became of it, in a line."""
    try:
        show.draw(found, picture)
    except (ImportError, ValueError) as error:
        return str(error)
    return f"picture: {picture}"


def compare(paths: Sequence[str]) -> None:
    """The ratios of two records. ValueError: not two, or one is none."""
    if len(paths) != 2:
        raise ValueError(f"compare: two records, as A.json B.json; given {len(paths)}")
    first, second = (record.read(Path(path)) for path in paths)
    table = show.comparison(first, second)
    print(harmless(f"first:  {show.named(first)}"))
    print(harmless(f"second: {show.named(second)}"))
    print_tables([table])


def pass_on(name: str, arguments: Sequence[str]) -> int:
    """One of `python -m bench`, with its own options. ValueError: none of this name."""
    if name not in COMMANDS:
        raise ValueError(f"bench: unknown {name!r}; allowed: compare, {', '.join(COMMANDS)}")
    from ..__main__ import main

    return main([name, *arguments])


def listing() -> str:
    """All commands, and which of them an installation lacks."""
    lacks = f"In a clone of the repository alone: {', '.join(OF_A_CLONE)}, quality --imatrix."
    return f"{parser().format_help()}\n{lacks}"
