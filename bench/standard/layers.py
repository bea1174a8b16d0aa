"""The products of a record, added up to those of a layer, and what records have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..tables import Record


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
