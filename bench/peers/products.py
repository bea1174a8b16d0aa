"""Everything that multiplies by W: torch_metalmm, torch, ggml.

A peer is a function of (problem, formats) that yields its variants, under @engine: the name that
--engines has for it, and why a device cannot run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from torch_metalmm import _C, formats
from torch_metalmm.formats.activations import BLOCK, TOP_CODES

from ..devices import CPU, Device
from ..problem import LABELS, Problem, Rounding, Variant
from . import ggml

GROUP = 64  # values per scale, where a peer lets us choose
INNER_K_TILES = 8
ops, aten = torch.ops.metalmm, torch.ops.aten

Variants = Iterator[Variant]
Missing = Callable[[Device], str | None]


class Engine(NamedTuple):
    """missing(device): why it cannot run there; None if it can. W is quantized in variants()."""

    variants: Callable[[Problem, Sequence[str]], Variants]
    missing: Missing


ENGINES: dict[str, Engine] = {}  # by the name of --engines


def engine(name: str, missing: Missing = lambda device: None) -> Callable[[Any], Any]:
    def register(variants: Any) -> Any:
        ENGINES[name] = Engine(variants, missing)
        return variants

    return register


@engine("metalmm")
def metalmm(problem: Problem, names: Sequence[str]) -> Variants:
    """x in the dtype of the setting; on the CPU also rounded in blocks."""
    setting, shape = problem.setting, problem.shape
    dtype, forced = setting.dtype, setting.strategy
    in_f32 = dtype is torch.float32
    for name in problem.fits(names):
        for activations in (None, *TOP_CODES) if setting.device == CPU and in_f32 else (None,):
            if activations and not _C.has_integer_codes(name):
                continue

            def product(
                x: Tensor, w: Tensor, name: str = name, kind: str | None = activations
            ) -> Tensor:
                return ops.linear(x, w, None, name, forced, activations=kind)

            def strategy(m: int, name: str = name) -> str:
                of = {"format": name, "dtype": LABELS[dtype], "strategy": forced}
                return setting.device.strategy(m=m, n=shape.n, k=shape.k, **of)

            packed = problem.packed(name)
            label = " ".join(filter(None, ("metalmm", name, activations, forced)))
            label += "" if in_f32 else f" {dtype}".replace("torch.", "")
            decoded = partial(problem.decoded, packed, name)
            rounds = Rounding.to(dtype)
            if activations:
                rounds = Rounding.blocks(BLOCK, torch.float32, TOP_CODES[activations])
            about = {"format": name, "strategy": strategy, "rounding": rounds}
            yield problem.variant("metalmm", label, [packed], product, dtype, decoded, **about)


def _dense(dtype: torch.dtype, problem: Problem, names: Sequence[str]) -> Variants:
    w, name = problem.w.to(dtype), f"F.linear {LABELS[dtype]}"
    yield problem.variant("torch", name, [w], linear, dtype, lambda: w[problem.rows].double())


def _mv(dtype: torch.dtype, problem: Problem, names: Sequence[str]) -> Variants:
    """For one row of x."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        return torch.mv(w, x[0]).unsqueeze(0)

    w, name = problem.w.to(dtype), f"torch.mv {LABELS[dtype]}"
    decoded = lambda: w[problem.rows].double()  # noqa: E731
    yield problem.variant("torch", name, [w], product, dtype, decoded, max_m=1)


for _dtype, _label in LABELS.items():
    _slow = "slow on the CPU" if _label == "f16" else None
    for _name, _of in (("linear", _dense), ("mv", _mv)):
        _missing = partial(lambda slow, device: slow if device == CPU else None, _slow)
        engine(f"{_name}_{_label}", _missing)(partial(_of, _dtype))


@engine("dequantize_mm")
def dequantize_mm(problem: Problem, names: Sequence[str]) -> Variants:
    """W dequantized and multiplied by torch, as a loader without fused kernels does."""
    dtype, k = problem.setting.dtype, problem.shape.k
    for name in problem.fits(names):

        def product(x: Tensor, w: Tensor, name: str = name) -> Tensor:
            return linear(x, ops.dequantize(w, name, k, dtype=dtype))

        packed, label = problem.packed(name), f"dequantize {name} + F.linear"
        decoded = partial(problem.decoded, packed, name)
        about = {"format": name, "rounding": Rounding.to(dtype, times=2)}
        yield problem.variant("torch", label, [packed], product, dtype, decoded, **about)


# ---- integers


@engine("int4pack")
def int4pack(problem: Problem, names: Sequence[str]) -> Variants:
    """aten::_weight_int4pack_mm: 4-bit codes, bf16 scale and zero per 64, x in bf16."""
    device = problem.setting.device
    if problem.shape.k % (16 * INNER_K_TILES) or problem.shape.n % 16:
        return
    codes, scales, zeros = quantize_int4(problem.w)
    packed, op = pack_int4(codes, device)
    planes = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous()

    def decoded() -> Tensor:
        rows = problem.rows
        steps = (codes[rows] - 8).double().unflatten(1, (-1, GROUP))
        scale, zero = (plane[rows].double().unsqueeze(-1) for plane in (scales, zeros))
        return (steps * scale + zero).flatten(1)

    def product(x: Tensor, w: Tensor, of: Tensor) -> Tensor:
        return op(x, w, GROUP, of)

    name = f"torch int4pack g{GROUP} bf16"
    yield problem.variant("torch", name, [packed, planes], product, torch.bfloat16, decoded)


def pack_int4(codes: Tensor, device: Device) -> tuple[Tensor, Callable[..., Tensor]]:
    """Codes int32 0..15 [N, K] as torch packs them for the device, and the op that multiplies."""
    if device == CPU:
        packed = aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        return packed, aten._weight_int4pack_mm_for_cpu
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(device.type, torch.uint8)
    return aten._convert_weight_to_int4pack(pairs, INNER_K_TILES), aten._weight_int4pack_mm


def quantize_int4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W -> codes int32 [N, K], scales, zeros bf16 [N, K / 64]; w = (code - 8) scale + zero."""
    groups = w.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp_min_(1e-8).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    codes = ((groups - zeros.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round_()
    return codes.clamp_(-8, 7).add_(8).int().flatten(1), scales, zeros


def _without_int8(device: Device) -> str | None:
    op = aten._weight_int8pack_mm.default
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), device.type.upper())
    return None if has_kernel else f"this torch has no int8 kernel for {device.type}"


@engine("int8pack", _without_int8)
def int8pack(problem: Problem, names: Sequence[str]) -> Variants:
    """A bf16 scale per row, x in bf16."""
    if problem.shape.n % 32 or problem.shape.k % 32:
        return
    scales = (problem.w.abs().amax(1) / 127).bfloat16()
    codes = (problem.w / scales.float().unsqueeze(1)).round_().clamp_(-128, 127).char()

    def decoded() -> Tensor:
        return codes[problem.rows].double() * scales[problem.rows].double().unsqueeze(1)

    given = ([codes, scales], aten._weight_int8pack_mm, torch.bfloat16, decoded)
    yield problem.variant("torch", "torch int8pack bf16", *given)


# ---- other programs


@engine("ggml", ggml.missing)
def of_ggml(problem: Problem, names: Sequence[str]) -> Variants:
    """One ggml_mul_mat per call, on the bytes torch_metalmm packs; int8 activations, weights
    repacked where ggml can, as llama.cpp uses them."""
    from gguf import GGMLQuantizationType as Types

    k, setting = problem.shape.k, problem.setting
    for name in problem.fits(names):
        block, type = formats.get(name).block_values, getattr(Types, name.upper(), None)
        if type is None or block not in ggml.BLOCKS:
            continue
        packed = ops.quantize(problem.w, name)
        weights = ggml.Weights(int(type), packed, k, setting.copies(packed.nbytes))
        yield Variant(
            engine="ggml",
            name=f"ggml {name}" + " repacked" * weights.repacked,
            format=name,
            weight_bytes=packed.nbytes,
            copies=len(weights.tensors),
            bind=partial(ggml.Products, weights, threads=setting.threads),
            decoded=partial(problem.decoded, packed, name),
            rounding=Rounding.blocks(block),
        )
