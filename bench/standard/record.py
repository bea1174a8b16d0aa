"""The record of a machine: what `metalmm bench` writes, others send, and `compare` reads.

It states the machine, not whose it is: no name of a user or a host, no path, no command line.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from torch_metalmm import _C, __version__
from torch_metalmm.files.blame import blaming
from torch_metalmm.files.staging import check_writable, replaced

from ..devices import Device, cpu_name, load_average
from ..tables import Record

PROGRAM, SCHEMA = "metalmm bench", 1
# {field: type of its value} of every record.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "program": str,
    "schema": int,
    "date": str,
    "package": str,
    "torch": str,
    "transformers": (str, type(None)),
    "python": str,
    "system": str,
    "chip": str,
    "cores": int,
    "cpu": str,
    "memory_gb": (int, float),
    "device": str,
    "dtype": str,
    "threads": int,
    "load_before": (int, float),
    "is_quick": bool,
    "model": (dict, type(None)),  # the chip that predictions are for
    "roofs": dict,
    "layer": dict,  # {shape: how often a layer has it}
    "products": list,
    "tokens": list,
    "skipped": list,
}


def chip_name(device: Device) -> str:
    """The chip that computes, as its maker calls it."""
    if device.type == "mps":
        return str(_C.mps_facts()["name"])
    return device.name if device.type == "cuda" else re.split(r" \(|,", device.name)[0]


def cores(device: Device) -> int:
    """The cores of the GPU, or the CPUs that the system shows; 0 where a GPU does not say."""
    if device.type == "mps":
        return int(_C.mps_facts()["cores"])
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties().multi_processor_count)
    return os.cpu_count() or 0


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def facts(device: Device, dtype: str, threads: int, memory: float, is_quick: bool) -> Record:
    """The record's head. memory: bytes that tensors of the device may take."""
    release = platform.mac_ver()[0]
    system = f"macOS {release}" if release else platform.system()
    return {
        "program": PROGRAM,
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "package": __version__,
        "torch": str(torch.__version__),
        "transformers": version_of("transformers"),
        "python": platform.python_version(),
        "system": f"{system} {platform.machine()}",
        "chip": chip_name(device),
        "cores": cores(device),
        "cpu": cpu_name(),
        "memory_gb": round(memory / 1e9, 1),
        "device": device.type,
        "dtype": dtype,
        "threads": threads,
        "load_before": round(load_average(), 2),
        "is_quick": is_quick,
    }


def file_name(head: Record) -> str:
    """The name of a record's file, without its ending."""
    chip = re.sub(r"[^a-z0-9]+", "-", str(head["chip"]).lower()).strip("-")
    return f"metalmm-bench-{chip}-{head['date']}"


def places(folder: Path, head: Record, force: bool) -> tuple[Path, Path]:
    """The record and its picture.

    ValueError: no such folder, or one is there and not force. OSError: it cannot be written to.
    """
    if not folder.is_dir():
        raise ValueError(f"--output: {folder} is no folder")
    found = tuple(folder / f"{file_name(head)}.{kind}" for kind in ("json", "png"))
    for path in found:
        if path.exists() and not force:
            raise ValueError(f"{path} exists: --force replaces it, --output takes another folder")
    check_writable(folder)  # before minutes of measurements
    return found[0], found[1]


def write(path: Path, record: Record) -> None:
    with replaced(path) as new:
        new.write_text(json.dumps(record, indent=1) + "\n")


def read(path: Path) -> Record:
    """A record that was written. ValueError: the file is none, or one of another schema.

    OSError: it cannot be read.
    """
    with blaming(path, "it is no JSON"):
        found = json.loads(path.read_text("utf-8"))
    if not isinstance(found, dict) or found.get("program") != PROGRAM:
        raise ValueError(f"{path}: not a record of {PROGRAM}")
    if found.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {found.get('schema')!r}; this version reads {SCHEMA}")
    if wrong := wrong_fields(found):
        raise ValueError(f"{path}: missing or of another type: {', '.join(wrong)}")
    with blaming(path, "it lacks what is compared"):
        wrong = [name for name, value in figures(found).items() if not 0 < value < math.inf]
        if wrong:
            raise ValueError(f"{wrong[0]}: must be more than 0 and finite")
    return found


def wrong_fields(record: Mapping[str, object]) -> list[str]:
    """The names of FIELDS that the record has not, or not of that type."""
    return [
        name
        for name, kind in FIELDS.items()
        if name not in record or not isinstance(record[name], kind)
    ]


# ---- the products, added up to those of a layer, and what records are compared by


@dataclass(frozen=True)
class Layer:
    """All products of a layer by one variant, M rows of x."""

    variant: str
    format: str
    m: int
    us: float
    spread: float  # distance of the quartiles, microseconds
    linear_us: float | None  # torch's own
    roof_us: float
    predicted_us: float | None
    weight_bytes: int

    @property
    def speedup(self) -> float | None:
        return self.linear_us / self.us if self.linear_us is not None else None

    @property
    def gb_s(self) -> float:
        return self.weight_bytes / self.us / 1e3

    @property
    def part_of_roof(self) -> float:
        return self.roof_us / self.us


def layers(record: Mapping[str, Any]) -> list[Layer]:
    """By M and variant; those that lack a product of the layer are left out."""
    cells = {(c["m"], c["variant"], c["shape"]): c for c in record["products"] if "us" in c}
    kinds = dict.fromkeys((m, variant) for m, variant, _ in cells)
    counts: dict[str, int] = record["layer"]
    found = []
    for m, variant in kinds:
        parts = [(n, cells.get((m, variant, shape))) for shape, n in counts.items()]
        if all(part is not None for _, part in parts):
            found.append(_sum(m, variant, [(n, part) for n, part in parts if part is not None]))
    return sorted(found, key=lambda layer: layer.m)


def _sum(m: int, variant: str, parts: list[tuple[int, Record]]) -> Layer:
    def total(name: str) -> float:
        return float(sum(n * part[name] for n, part in parts))

    has_linear = all("speedup" in part for _, part in parts)
    linear = sum(n * part["us"] * part["speedup"] for n, part in parts) if has_linear else None
    is_predicted = all(part["predicted_us"] is not None for _, part in parts)
    return Layer(
        variant=variant,
        format=parts[0][1]["format"],
        m=m,
        us=total("us"),
        spread=total("us_q3") - total("us_q1"),
        linear_us=linear,
        roof_us=total("roof_us"),
        predicted_us=total("predicted_us") if is_predicted else None,
        weight_bytes=int(total("weight_bytes")),
    )


def token_name(token: Mapping[str, Any]) -> str:
    """With the context, which is another on a CPU."""
    t = token
    return f"token after {t['context']}, {t['model']}, {t['format']}, {t['form']}, ms"


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures that records are compared by: {name: microseconds, or a rate with "/s"}."""
    roofs = record["roofs"]
    out = {"memory, GB/s": roofs["read_gb_s"], "arithmetic, GFLOP/s": roofs["gflop_s"]}
    out |= {f"torch.mm {name}, GFLOP/s": rate for name, rate in roofs["mm_gflop_s"].items()}
    out |= {f"layer, {x.variant}, M = {x.m}, µs": x.us for x in layers(record)}
    tokens = [t for t in record["tokens"] if "ms" in t]
    out |= {token_name(t): t["ms"] for t in tokens}
    return out
