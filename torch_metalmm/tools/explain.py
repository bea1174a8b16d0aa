"""The plan of the Metal engine for a matrix product, on a chip that need not be here."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from .. import _C, formats
from .cost_model import (
    DTYPE_BYTES,
    LAUNCH_US,
    REACHED,
    TORCH_REACHED,
    Chip,
    Prediction,
    cost,
    joins_in_place,
)

SHAPE_HELP = "MxNxK of y[M, N] = x[M, K] W[N, K]^T, for instance 1x4096x4096"
DTYPES = ("f16", "bf16", "f32")

_TORCH_NAMES = {str(d).removeprefix("torch."): name for name, d in formats.DTYPES.items()}
_NEAREST = "{name} is not in the table of chips: planned for as {row}"
# The bits of metal/abi.h in words, by the names of _C.EPILOGUE_BITS and _C.BOUNDS_BITS.
EPILOGUE = {
    "bias": "bias",
    "c": "beta * c",
    "alpha": "alpha",
    "partial": "f32 partial results",
    "norm": "x normalised",
    "norm_weight": "weight of the norm",
    "norm_offset": "offset of that weight",
    "factors": "y times factors",
    "softcap": "soft cap of y",
    "activation": "activation",
}
BOUNDS = {
    "n": "N has a tail",
    "m": "M may have a tail",
    "k": "K has a tail",
    "aligned_x": "x aligned",
    "aligned_weight": "weight aligned",
    "packed_rows": "rows of W packed",
    "word_blocks": "blocks read by 4 bytes",
    "long_blocks": "blocks read by 8 bytes",
    "subnormals": "codes as subnormal halves",
    "arranged_x": "x in the order of lanes",
}


def chips() -> list[str]:
    """Names of the chips that can be explained."""
    return [str(gpu["name"]) for gpu in _C.gpus()]


def parse_shape(text: str) -> tuple[int, int, int]:
    """(M, N, K) of "MxNxK". ValueError: not three sizes of at least 1."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(p.isascii() and p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"shape: {text!r} is not {SHAPE_HELP}")
    m, n, k = (int(p) for p in parts)
    return m, n, k


def explain(
    shape: str,
    format: str,
    chip: str,
    dtype: str = "f16",
    strategy: str | None = None,
    norm: bool = False,
) -> str:
    """The plan of y[M, N] = x[M, K] W[N, K]^T on a chip, in words and bytes; norm: of norm_linear.

    shape is "MxNxK", chip one of chips(), or another of Apple's ("m6-max"), which is planned for as
    the nearest of them; dtype that of x and y: f16, bf16, f32 or torch's name; strategy, if given,
    is forced. ValueError: an unknown name, a malformed shape, a K that is not a multiple of the
    block, a strategy that cannot compute it; each says what is allowed.
    """
    m, n, k = parse_shape(shape)
    fmt, gpu = formats.get(format), _C.gpu(chip)
    dtype = _TORCH_NAMES.get(dtype, dtype)
    sizes = {"m": m, "k": k, "dtype": dtype, "chip": chip}
    fused = norm and _norm_is_fused(m, format, chip, dtype, strategy)
    before = _C.plan("rms_norm", norm_weight=True, **sizes) if norm and not fused else None
    plan = _C.plan(**sizes, n=n, format=format, strategy=strategy, norm=fused, norm_weight=fused)
    passes = (before["passes"] if before else []) + plan["passes"]
    lines = [
        f"y[{m}, {n}] = x[{m}, {k}] W[{n}, {k}]^T    W in {fmt.name}, x and y in {dtype}",
        f"{gpu['name']}: {gpu['cores']} cores at about {gpu['clock_mhz']} MHz,"
        f" {gpu['bandwidth_gb_s']} GB/s, Apple{gpu['family']},"
        f" {gpu['max_threadgroup_memory']} bytes of threadgroup memory",
        *([] if gpu["name"] == gpu["row"] else [_NEAREST.format(**gpu)]),
        "",
        *([before["reason"]] if before else []),
        plan["reason"],
    ]
    at = 0
    for one, equal in groupby(passes):
        first, at = at + 1, at + len([*equal])
        numbers = f"pass {at}" if first == at else f"passes {first} to {at}"
        lines += ["", f"{numbers} of {len(passes)}: {one['kernel']}", *_pass_lines(one)]
        if plan["dense"] and one["kernel"].startswith("dequantize_"):
            lines += [_matmul_line(m, one["args"]["n"], k)]
    if plan["dense"] and not plan["dense"]["panels"]:
        lines += ["", _matmul_line(m, n, k)]
    if gpu["name"] == _C.CUDA:  # whose times are not those of its row
        return "\n".join([*lines, "", *_byte_lines(plan, m, n, k, fmt, dtype)])
    lines += ["", *_byte_lines(plan, m, n, k, fmt, dtype)]
    model = Chip.named(chip)
    return "\n".join(
        [*lines, "", *_prediction_lines(plan, len(passes), model, m * n * k, n * fmt.row_bytes(k))]
    )


def _norm_is_fused(m: int, format: str, chip: str, dtype: str, strategy: str | None) -> bool:
    if strategy:
        return bool(_C.strategy(strategy)["takes_norm"])
    return bool(_C.norm_is_fused(m=m, format=format, chip=chip, dtype=dtype))


def _pass_lines(one: dict[str, Any]) -> list[str]:
    grid, threads = one["grid"], one["group"][0] * one["group"][1] * one["group"][2]
    axes = {"split_": "", "dequan": "", "rms_no": ", one for each row of x"}.get(
        one["kernel"][:6], ", tiles of M x tiles of N x parts of K"
    )
    rows = [
        ("grid", f"{' x '.join(map(str, grid))} threadgroups{axes}"),
        ("group", f"{threads} threads, {threads // _C.SIMD_WIDTH} simdgroups"),
        ("memory", f"{one['threadgroup_bytes']} bytes per threadgroup"),
        ("constants", ", ".join(_constants(one["constants"])) or "none"),
        ("buffers", ", ".join(one["slots"])),
    ]
    return [f"  {name:10} {text}" for name, text in rows]


def _matmul_line(m: int, rows: int, k: int) -> str:
    return f"  then torch's matmul of x[{m}, {k}] and the {rows} rows, transposed"


def _constants(constants: dict[str, int]) -> list[str]:
    """Function constants by name; bits in words, zeros that mean "not used" left out."""
    words = {
        "scale_type": _C.SCALE_TYPES[constants["scale_type"]] if constants["group"] else "",
        "epilogue": _bits(constants["epilogue"], _C.EPILOGUE_BITS, EPILOGUE) or "none",
        "bounds": _bits(constants["bounds"], _C.BOUNDS_BITS, BOUNDS),
    }
    shown = {name: words.get(name, str(value or "")) for name, value in constants.items()}
    return [f"{name} = {text}" for name, text in shown.items() if text]


def _bits(value: int, bits: dict[str, int], words: dict[str, str]) -> str:
    return " + ".join(words[name] for name, bit in bits.items() if value & bit)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _byte_lines(
    plan: dict[str, Any], m: int, n: int, k: int, fmt: formats.Format, dtype: str
) -> list[str]:
    row_bytes, value, dense = fmt.row_bytes(k), DTYPE_BYTES[dtype], plan["dense"]
    tiles_m, tiles_n, _ = (1, 1, 1) if dense else plan["passes"][plan["main"]]["grid"]
    panels = max(dense["panels"], 1) if dense else tiles_n
    rows = [
        ("weights", n * row_bytes, f"{row_bytes} a row; read {_times(tiles_m)}"),
        ("x", m * k * value, f"read {_times(panels)}, from cache after the first"),
        ("y", m * n * value, f"written {_times(1 + bool(dense and joins_in_place(plan)))}"),
    ]
    if dense and dense["panels"]:
        panel = dense["rows"] * k * value
        rows.append(("panel", panel, f"{dtype}, written and read {_times(panels)}"))
    if plan["arranged_bytes"]:
        rows.append(("x in order", plan["arranged_bytes"], f"written once, read {_times(tiles_n)}"))
    if plan["workspace_bytes"]:
        rows.append(("partials", plan["workspace_bytes"], "f32, written and read once"))
    width = max(len(f"{count:,}") for _, count, _ in rows)
    return ["bytes", *(f"  {name:10} {count:{width},}  {note}" for name, count, note in rows)]


def _multiply_rows(
    plan: dict[str, Any], p: Prediction, moved: str, bandwidth: str
) -> list[tuple[str, float, str]]:
    if not plan["dense"]:
        cycles = f"{p.cycles:.2f} cycles per weight and tile of x"
        return [("memory", p.memory, f"{moved}, at {bandwidth}"), ("issue", p.issue, cycles)]
    return [
        ("decoding", p.decoding, f"{p.cycles:.2f} cycles per weight; in all {moved}"),
        ("memory", p.memory, f"of torch's matmul, at {bandwidth}"),
        ("issue", p.issue, f"of torch's matmul, at {TORCH_REACHED:.0%} of its matrix units"),
    ]


def _prediction_lines(
    plan: dict[str, Any], passes: int, chip: Chip, products: int, weight_bytes: int
) -> list[str]:
    p = cost(plan, chip)
    before = passes - len(plan["passes"])
    p = replace(p, launch=p.launch + LAUNCH_US * before)
    launched = f"{passes} {'pass' if passes == 1 else 'passes'}"
    bandwidth = f"{REACHED:.0%} of {chip.bandwidth_gb_s} GB/s"
    moved = f"{p.moved_bytes / 1e6:.2f} MB, each byte once"
    rows = [
        *_multiply_rows(plan, p, moved, bandwidth),
        ("launch", p.launch, launched + (" and torch's matmul" if plan["dense"] else "")),
        ("time", p.total, f"{p.bound} bound: {weight_bytes / p.total / 1e3:.0f} GB/s of weights,"
         f" {2 * products / p.total / 1e6:.2f} TFLOP/s"),
    ]  # fmt: skip
    return [
        "prediction (torch_metalmm.tools.cost_model: a model, nothing was measured on this chip)",
        *(f"  {name:10} {us:9.1f} us  {note}" for name, us, note in rows),
    ]
