"""Records of whole models, of layers of tiny weights and of norms before products -> tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tables import ABSENT, Table, digits, percent, scientific

Record = dict[str, Any]
KINDS = ("packed", "ours", "attention", "others")


def all_tables(records: Sequence[Record]) -> list[Table]:
    of_ops = norm_tables(records) + experts_tables(records)
    return tokens_tables(records) + layer_tables(records) + of_ops


def by_model(records: Sequence[Record], kind: str) -> dict[str, list[Record]]:
    out: dict[str, list[Record]] = {}
    for r in records:
        if r["kind"] == kind:
            out.setdefault(r["model"], []).append(r)
    return out


def tokens_tables(records: Sequence[Record]) -> list[Table]:
    """For each model, tokens per second of every system, and where a token's time goes."""
    tables = []
    for model, cells in by_model(records, "tokens").items():
        tables.append(_rates(model, cells))
        parts = [r for r in cells if "packed_launches" in r]
        if parts:
            tables.append(parts_table(model, parts))
    return tables


def _rates(model: str, cells: Sequence[Record]) -> Table:
    prompt = cells[0]["prompt"]
    columns = ["MB", "decode tok/s", "quartiles", f"prefill {prompt}", "quartiles"]
    gain = ["by fuse_", "quartiles"] if any("gain" in r for r in cells) else []
    busy = ["prefill, GPU ms"] if any("prefill_gpu_ms" in r for r in cells) else []
    table = Table(model, ["system", *columns, *busy, *gain, "error"])
    for r in cells:
        row = [r["system"], digits(r["weight_bytes"] / 1e6)]
        for part in ("decode", "prefill"):
            quartiles = f"{digits(r[part + '_q1'])}–{digits(r[part + '_q3'])}" if part in r else ""
            row += [digits(r.get(part)), quartiles]
        if busy:
            row.append(digits(r.get("prefill_gpu_ms")))
        if "gain" in r:
            row += [f"× {r['gain']:.3f}", f"{r['gain_q1']:.3f}–{r['gain_q3']:.3f}"]
        elif gain:
            row += ["", ""]
        table.rows.append([*row, "WRONG" if not r["ok"] else scientific(r["error"])])
    return table


def parts_table(model: str, cells: Sequence[Record]) -> Table:
    """Milliseconds and numbers of the products of packed weights, of our other kernels, of
    attention and of other kernels, and our passes on a GPU. The host: on a CPU what is beside the
    kernels, else the time until the step has been given to the GPU."""
    on_cpu = cells[0].get("device", "cpu") == "cpu"
    title = f"{model}: ms of a token after {cells[0]['context']}, and launches"
    columns = ["system", "ms", "quartiles", "packed ms", "ours ms", "attn ms", "others ms"]
    columns += ["host ms", "packed", "ours", "attn", "others", "passes"]
    table = Table(title, columns)
    for r in cells:
        row = [r["system"], digits(r["ms"]), f"{digits(r['ms_q1'])}–{digits(r['ms_q3'])}"]
        times = [r[f"{kind}_ms"] for kind in KINDS]
        host = r["host_ms"]
        if on_cpu:
            host = None if None in times else max(0.0, r["ms"] - sum(times))
        row += [digits(ms) if ms else _count(ms) for ms in times] + [digits(host)]
        row += [_count(r[f"{kind}_launches"]) for kind in KINDS] + [_count(r["passes"])]
        table.rows.append(row)
    return table


def _count(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.0f}"


def layer_tables(records: Sequence[Record]) -> list[Table]:
    """What a layer costs where nothing is computed, how much of it in ops, which ones, and what the
    rest of a step costs. Views are ops that compute nothing."""
    tables = []
    for model, cells in by_model(records, "layers").items():
        columns = ["system", "µs a layer", "quartiles", "in ops", "beside", "of unfused"]
        columns += ["our ops", "other ops", "views"]
        table = Table(model, columns)
        for r in cells:
            row = [r["system"], digits(r["layer_us"]), f"{digits(r['q1'])}–{digits(r['q3'])}"]
            row += [digits(r["ops_us"]), digits(r["beside_us"])]
            row.append(f"{100 * r['of_unfused']:.0f} %" if "of_unfused" in r else "")
            row += [
                digits(r[name]) if r[name] else _count(r[name])
                for name in ("our_ops", "other_ops", "views")
            ]
            table.rows.append(row)
        tables.append(table)
    return tables


def norm_tables(records: Sequence[Record]) -> list[Table]:
    """Ops with a norm or a residual against the ops that they replace."""
    cells = [r for r in records if r["kind"] == "norm"]
    if not cells:
        return []
    columns = ["format", "N×K", "M", "linear", "rms_norm", "norm_linear", "of two ops", "quartiles"]
    columns += ["with residual", "of two ops", "quartiles", "error of bound"]
    table = Table(f"µs, x in {cells[0]['dtype']}", columns)
    for r in cells:
        row = [r["format"], f"{r['n']}×{r['k']}", str(r["m"])]
        if r["ok"]:
            row += [digits(r["linear_us"]), digits(r["rms_norm_us"]), digits(r["norm_linear_us"])]
            row += [_ratio(r["norm_ratio"]), _quartiles(r["norm_ratio"]), digits(r["residual_us"])]
            row += [_ratio(r["residual_ratio"]), _quartiles(r["residual_ratio"])]
        else:
            row += ["WRONG", *[ABSENT] * 7]
        table.rows.append([*row, percent(100 * r["worst"])])
    return [table]


def experts_tables(records: Sequence[Record]) -> list[Table]:
    """Experts: bytes read of those chosen beside the roof, prompts beside linear."""
    cells = [r for r in records if r["kind"] == "experts"]
    if not cells:
        return []
    columns = ["format", "tokens", "gate and up", "GB/s", "down", "GB/s", "roof"]
    columns += ["linear of the same work", "of one expert", "error of bound"]
    table = Table(f"µs, {cells[0]['sizes']}, x in {cells[0]['dtype']}", columns)
    for r in cells:
        row = [r["format"], str(r["tokens"])]
        if r["ok"]:
            row += [digits(r["swiglu_us"]), digits(r["swiglu_gbs"]), digits(r["down_us"])]
            row += [digits(r["down_gbs"]), digits(r["roof_gbs"])]
            for name in ("of_same_work", "of_one_expert"):
                row.append(_ratio(r[name]) if name in r else ABSENT)
        else:
            row += ["WRONG", *[ABSENT] * 6]
        table.rows.append([*row, percent(100 * r["worst"])])
    return [table]


def _ratio(quartiles: Sequence[float]) -> str:
    return f"{quartiles[1]:.2f}"


def _quartiles(quartiles: Sequence[float]) -> str:
    return f"{quartiles[0]:.2f}–{quartiles[2]:.2f}"
