"""Taking over the quantized layers of other libraries, in place and without decoding them.

The layers are known by the tensors they store, not by their classes, so no other library is
imported here: GGML blocks with the number of their type, MLX's codes, scales and biases, integers
with scales and zeros.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from ..nn import QuantEmbedding, QuantExperts, QuantLinear
from ..nn.experts import DOWN, GATE_UP
from ..nn.gate import Gate
from .attach import attach
from .ggml import type_names
from .integers.affine import NoFormat, Rows
from .integers.modules import check_computes, integer_rows
from .replace import check_model, replaceable, summary
from .structure import activation_of

# Names that libraries give the number of a GGML type: on the layer, or on its weight.
_GGML_ON_LAYER = ("ggml_type",)
_GGML_ON_WEIGHT = ("quant_type", "tensor_type")


class _Unsupported(Exception):
    """The layer is quantized in a way that no format here has."""


@dataclass(frozen=True)
class _Stored:
    """The weight, made when asked for, and the bias of a quantized layer of K inputs."""

    k: int
    rows: Callable[[], Rows]
    bias: Tensor | None


@dataclass
class _Job:
    """One layer, the names it has in the model, and what it holds, or the experts in its place."""

    module: Any
    stored: _Stored | QuantExperts
    names: list[str]


def adopt_(
    model: nn.Module, filter_fn: Callable[[str, nn.Module], bool] | None = None
) -> nn.Module:
    """Replace the quantized layers that other libraries made by packed ones, in place.

    Taken over: GGML blocks as transformers (GgufLinear, GgufEmbedding, GgufExperts), diffusers
    (GGUFLinear) and ComfyUI-GGUF keep them; MLX affine codes, scales and biases as transformers'
    MetalLinear does; the integers of GPTQ, AWQ, compressed-tensors, HQQ and torchao (Int4Tensor,
    Int8Tensor, IntxUnpackedToInt8Tensor), as load_quantized reads them; and frozen dense subclasses
    of nn.Linear that compute what it computes. GGML and dense bytes are shared, not copied;
    other tensors become one. Layers that share a weight still share it.
    filter_fn(name, module) -> False leaves a layer alone.

    A layer stays, with a warning, if its type has no format here, if the model reads its weight
    itself, or if it is GPTQ's or AWQ's and does not compute here what its tensors say. Where no
    layer stays, a model of transformers or diffusers can be saved as any packed one. Returns
    `model`.
    ValueError, before anything is changed: model is no module, tensors that contradict each other
    or their layer, a weight on the meta device, patches (ComfyUI's LoRA) not merged into it.
    """
    check_model(model)
    jobs, left = _plan(model, filter_fn)
    if any("" in job.names for job in jobs):
        raise ValueError(f"model is itself a {type(model).__name__}: nothing to replace it in")
    _replace(model, jobs)
    if left:
        parts = "; ".join(f"{reason}: {summary(names)}" for reason, names in left.items())
        warnings.warn(f"left as they are: {parts}", stacklevel=2)
    else:
        attach(model)  # the model forgets the quantizer that made the layers, and can be saved
    return model


def _plan(
    model: nn.Module, filter_fn: Callable[[str, nn.Module], bool] | None
) -> tuple[list[_Job], dict[str, list[str]]]:
    """The layers to replace, and {why not: names} of quantized layers that stay."""
    jobs: dict[int, _Job] = {}
    left: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if filter_fn is not None and not filter_fn(name, module):
            continue
        if id(module) in jobs:
            jobs[id(module)].names.append(name)
            continue
        try:
            stored = _stored(module)
            if stored is not None and name and not replaceable(model, name):
                raise _Unsupported("the model reads their weight itself")
        except _Unsupported as reason:
            left.setdefault(str(reason), []).append(name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        else:
            if stored is not None:
                jobs[id(module)] = _Job(module, stored, [name])
    return list(jobs.values()), left


def _replace(model: nn.Module, jobs: list[_Job]) -> None:
    """Do the jobs one by one, so that each old layer is freed once its new one exists."""
    weights: dict[int, Tensor] = {}  # by the id of the weight that several layers share
    while jobs:
        job = jobs.pop(0)
        new: Any
        if isinstance(job.stored, QuantExperts):
            new = job.stored.train(job.module.training)
        else:
            new = _layer(job.module, job.stored)
            own = job.module._parameters.get("weight")
            new.weight = weights.setdefault(id(job.module if own is None else own), new.weight)
        for name in job.names:
            model.set_submodule(name, new)


def _layer(module: Any, stored: _Stored) -> QuantLinear | QuantEmbedding:
    new: QuantLinear | QuantEmbedding
    rows = stored.rows()
    if hasattr(module, "num_embeddings"):
        new = QuantEmbedding.from_packed(
            rows.weight, stored.k, rows.format, dtype=module.compute_dtype
        )
    else:
        new = QuantLinear.from_packed(rows.weight, stored.k, rows.format, stored.bias)
        new.input_order = rows.input_order
    return new.train(module.training)


def _stored(module: Any) -> _Stored | QuantExperts | None:
    """The quantized layer's weight and bias, or experts; None: the layer is none to take over.

    ValueError: the layer contradicts itself. _Unsupported: no format here has its values.
    """
    if isinstance(getattr(module, "gate_up_type", None), int):
        return _experts(module)
    if isinstance(module, QuantLinear | QuantEmbedding | QuantExperts):
        return None
    if (integers := _integers(module)) is not None:
        return integers
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    if torch.nn.parameter.is_lazy(weight) or _shape(module) is None:
        return None
    return _ggml(module, weight) or _affine(module, weight) or _dense(module, weight)


def _shape(module: Any) -> tuple[int, int] | None:
    """(N, K) of a linear or embedding layer."""
    for names in (("out_features", "in_features"), ("num_embeddings", "embedding_dim")):
        n, k = (getattr(module, name, None) for name in names)
        if isinstance(n, int) and isinstance(k, int):
            return n, k
    return None


def _refuse_meta(weight: Tensor | None) -> None:
    if weight is not None and weight.is_meta:
        raise ValueError("its weight is on the meta device and has no data")


# ---- GGML blocks


def _ggml(module: Any, weight: Tensor) -> _Stored | None:
    kind = _ggml_type(module, weight)
    if kind is None:
        return None
    n, k = _shape(module) or (0, 0)
    if hasattr(module, "num_embeddings") and not hasattr(module, "ggml_type"):
        raise _Unsupported("embeddings whose callers choose the dtype")
    bias = module._parameters.get("bias")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if getattr(tensor, "patches", None):
            raise ValueError(f"its {name} has patches that are not merged")
    logical = getattr(weight, "tensor_shape", None)
    if logical is not None and tuple(logical) != (n, k):
        raise ValueError(f"its tensor_shape is {list(logical)}, the layer is [{n}, {k}]")
    _refuse_meta(weight)
    plain = _plain(weight) if logical is None else _in_rows(_plain(weight), _format_of(kind), n, k)
    plain = _checked(plain, _format_of(kind), n, k)
    order = module._buffers.get("input_permutation")
    values = None if bias is None else _values(bias)
    return _Stored(k, lambda: Rows(_format_of(kind), plain, order), values)


def _experts(module: Any) -> QuantExperts:
    """The experts of transformers' GgufExperts, whose bytes are shared."""
    activation = activation_of(module.act_fn)
    if activation is None:
        raise _Unsupported("experts of an activation that no op has")
    kinds = {GATE_UP: module.gate_up_type, DOWN: module.down_type}
    formats = {stack: _format_of(kind) for stack, kind in kinds.items()}
    sizes = module.num_experts, module.hidden_dim, module.intermediate_dim
    made = QuantExperts(*sizes, formats, Gate(activation), device="meta")
    for stack, format in formats.items():
        weight = _plain(module.get_parameter(stack))
        _refuse_meta(weight)
        made.put(stack, weight, format)
    return made


def _ggml_type(module: Any, weight: Tensor) -> int | None:
    names = [getattr(module, name, None) for name in _GGML_ON_LAYER]
    names += [getattr(weight, name, None) for name in _GGML_ON_WEIGHT]
    # bitsandbytes has a quant_type too: "nf4".
    return next((int(kind) for kind in names if isinstance(kind, int)), None)


def _format_of(kind: int) -> str:
    name = type_names().get(kind)
    if name is None:
        raise ValueError(f"its GGML type {kind} is unknown")
    if name not in formats.names():
        raise _Unsupported(f"there is no format {name}")
    return name


def _in_rows(weight: Tensor, format: str, n: int, k: int) -> Tensor:
    """The blocks of [N, K] in N rows, where a ComfyUI file has them in rows of 256 values.

    ComfyUI's converter stores such rows if 256 does not divide K (SD1, SDXL). Other bytes are given
    back as they are.
    """
    spec = formats.get(format)
    if (
        weight.dtype != torch.uint8
        or weight.numel() * spec.block_values != n * k * spec.block_bytes
    ):
        return weight
    if k % spec.block_values:
        raise _Unsupported(f"a row ends inside a block of {format}")
    return weight.reshape(n, spec.row_bytes(k))


def _checked(weight: Tensor, format: str, n: int, k: int) -> Tensor:
    if weight.dtype in formats.DTYPE_NAMES:
        want = [n, k] if formats.DTYPE_NAMES[weight.dtype] == format else None
    else:
        want = [n, formats.get(format).row_bytes(k)] if weight.dtype == torch.uint8 else None
    if list(weight.shape) != want:
        raise ValueError(
            f"its weight is {weight.dtype} {list(weight.shape)}; {format} [{n}, {k}] is uint8 "
            f"[{n}, {formats.get(format).row_bytes(k)}]"
        )
    return weight


def _values(bias: Tensor) -> Tensor:
    """A bias as floats; GGUF files keep some in blocks."""
    kind = next((getattr(bias, a) for a in _GGML_ON_WEIGHT if hasattr(bias, a)), None)
    plain = _plain(bias)
    if plain.is_floating_point() or kind is None:
        return plain
    out: Tensor = torch.ops.metalmm.dequantize(plain.reshape(1, -1), _format_of(int(kind)))
    return out[0]


def _plain(t: Tensor) -> Tensor:
    """The tensor as torch's own class, on the same memory, whatever methods its class overrides."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(t).as_subclass(Tensor)


# ---- integers with scales


def _integers(module: Any) -> _Stored | None:
    try:
        found = integer_rows(module)
        if found is None:
            return None
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            _refuse_meta(tensor)
        rows = found.pack()  # and once more to replace it: the packed bytes of all layers are many
        if hasattr(module, "qweight"):
            check_computes(module, rows, found.k)
    except NoFormat as error:
        raise _Unsupported(str(error)) from None
    return _Stored(found.k, found.pack, getattr(module, "bias", None))


# ---- MLX affine


def _affine(module: Any, weight: Tensor) -> _Stored | None:
    if weight.dtype != torch.uint32:
        return None
    scales, biases = module._parameters.get("scales"), module._parameters.get("qbiases")
    bits, group = (getattr(module, name, None) for name in ("bits", "group_size"))
    if scales is None or biases is None or not isinstance(bits, int) or not isinstance(group, int):
        return None
    n, k = _shape(module) or (0, 0)
    _refuse_meta(weight)
    try:
        spec = formats.affine(bits, group, scales.dtype)
    except ValueError as error:
        raise _Unsupported(str(error)) from None
    planes = [t.detach() for t in (weight, scales, biases)]
    shape = spec.pack(*(t.to("meta") for t in planes)).shape  # checks them against each other
    if shape != (n, spec.row_bytes(k)):
        raise ValueError(f"its weight is {list(weight.shape)}, the layer is [{n}, {k}]")
    return _Stored(k, lambda: Rows(spec.name, spec.pack(*planes)), module.bias)


# ---- dense


def _dense(module: Any, weight: Tensor) -> _Stored | None:
    if not isinstance(module, nn.Linear) or type(module) is nn.Linear:
        return None
    own = type(weight) in (nn.Parameter, Tensor) and weight.dtype in formats.DTYPE_NAMES
    if not own or weight.requires_grad or tuple(weight.shape) != _shape(module):
        return None
    if weight.is_meta or not _computes_linear(module):
        return None
    name = formats.DTYPE_NAMES[weight.dtype]
    return _Stored(module.in_features, lambda: Rows(name, weight.detach()), module.bias)


def _computes_linear(module: nn.Linear) -> bool:
    """Whether the layer gives what nn.Linear would, bit for bit."""
    x = torch.randn(2, module.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(module.weight)
    try:
        with torch.no_grad():
            y = module(x)
            return torch.equal(y, nn.functional.linear(x, module.weight, module.bias))
    except Exception:
        return False  # the layer does not take x alone, or does not run on this machine
