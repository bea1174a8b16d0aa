"""The layers of a model that packed ones can replace, and the replacement of one."""

from __future__ import annotations

import copy
import inspect
import re
from functools import cache
from types import FunctionType

import torch
from torch import Tensor, nn

from .. import formats
from ..nn import QuantEmbedding, QuantLinear
from ..nn.embedding import embedding_scale
from .experts import Stack
from .trial import reads, weights_read

# Linear layers in all but name: transformers' classes that compute x · W (Conv1D), x · Wᵀ + bias.
_LINEAR_CLASSES = {
    ("transformers.pytorch_utils", "Conv1D"),
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"),
}
# Read on paths that do not run here: pretraining_tp > 1 (Bloom), a fused training kernel (Mamba).
_READ_ELSEWHERE = {
    ("BloomAttention", "dense"),
    ("BloomMLP", "dense_4h_to_h"),
    ("MambaMixer", "x_proj"),
    ("MambaMixer", "out_proj"),
    ("Mamba2Mixer", "out_proj"),
    ("BambaMixer", "out_proj"),
    ("FalconH1Mixer", "out_proj"),
    ("GraniteMoeHybridMambaLayer", "out_proj"),
    ("NemotronHMamba2Mixer", "out_proj"),
    ("Zamba2MambaMixer", "out_proj"),
}


def check_model(model: object) -> None:
    """ValueError: it is no module, as a pipeline of diffusers, which only holds some."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; of a pipeline give one "
            "of its models"
        )


def packable(module: nn.Module) -> bool:
    """Whether a packed layer can compute what this one does."""
    if isinstance(module, QuantLinear | QuantEmbedding):
        return True
    if isinstance(module, nn.Embedding):
        plain = type(module) is nn.Embedding or _only_scales(module)
        return plain and module.max_norm is None
    # Exact types: some subclasses hand their weight to other code (nn.MultiheadAttention).
    kind = type(module)
    return kind is nn.Linear or (kind.__module__, kind.__name__) in _LINEAR_CLASSES


def _only_scales(embedding: nn.Embedding) -> bool:
    """Whether a subclass gives its rows times embed_scale (Gemma, BART) and holds nothing else.

    T5Gemma2's class holds a row of its own for one id. Running forward on a table of three rows
    shows what the class computes: the weight may be on the meta device.
    """
    state = embedding._parameters.keys() | embedding._buffers.keys() | embedding._modules.keys()
    if not hasattr(embedding, "embed_scale") or not state <= {"weight", "embed_scale"}:
        return False
    try:
        scale = embedding_scale(embedding)
    except (RuntimeError, ValueError):  # no data, or no single number
        return False
    if scale is None:
        return False
    if isinstance(scale, Tensor):
        scale = scale.float()
    rows = torch.arange(3.0 * embedding.embedding_dim, dtype=torch.float32, device="cpu")
    rows = rows.view(3, -1) / 7 - 1
    probe = copy.copy(embedding)
    probe.__dict__ |= {
        "_parameters": {"weight": rows},
        "_buffers": {"embed_scale": scale} if "embed_scale" in embedding._buffers else {},
        "num_embeddings": 3,
        "padding_idx": None,
    }
    ids = torch.tensor([[2, 0, 1]], device="cpu")
    try:
        return torch.equal(type(probe).forward(probe, ids), rows[ids] * scale)  # no hooks
    except Exception:
        return False  # the forward takes other arguments, or other ids


def replaceable(model: nn.Module, name: str) -> bool:
    """Whether the model works on with the packable layer of that name replaced.

    Not if its parent's forward reads `layer.weight`, to compute with it or to convert activations
    to its dtype (T5's `wo`, Mamba's `lm_head`), nor if other code of the model reads it, nor if the
    model keeps the layer in f32.
    """
    owner, _, child = name.rpartition(".")
    read = _weights_read_by(type(model.get_submodule(owner)))  # type: ignore[arg-type]
    if child in read or kept_in_f32(model, f"{name}.weight"):
        return False
    return name not in weights_read(model, packable)


def kept_in_f32(model: nn.Module, name: str, dtype: torch.dtype = torch.float16) -> bool:
    """Whether the transformers model asks to keep the tensor of that name in f32.

    name: whole, as in state_dict; what a model lists are parts of names, one or more between dots.
    dtype: of the rest of the model; some are kept beside f16 alone and computed with as bf16.
    """
    keep = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        keep.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    return any(f".{part}." in f".{name}." for part in keep)


def pack_module(module: nn.Module, weight: Tensor, format: str) -> nn.Module:
    """The packed layer with this weight that stands in for `module` (see `packable`).

    ValueError: the weight has not the rows of the module, or not the row bytes of the format.
    """
    new: nn.Module
    n, k = weight_shape(module)
    if weight.shape[0] != n:
        raise ValueError(f"weight must have {n} rows, got {list(weight.shape)}")
    if isinstance(module, nn.Embedding):
        dtype = module.dtype if isinstance(module, QuantEmbedding) else module.weight.dtype
        new = QuantEmbedding.from_packed(
            weight, k, format, module.padding_idx, dtype, embedding_scale(module)
        )
    else:
        bias = module.bias
        assert bias is None or isinstance(bias, Tensor)
        new = QuantLinear.from_packed(weight, k, format, bias)
    return new.train(module.training)


def weight_shape(module: nn.Module | Stack) -> tuple[int, int]:
    """(N, K) of a packable layer; of a stack, with the rows of all experts."""
    if isinstance(module, Stack):
        e, rows, k = module.shape
        return e * rows, k
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    weight = module.weight
    assert isinstance(weight, Tensor)
    n, k = weight.shape
    return (k, n) if is_conv1d(module) else (n, k)


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, a linear layer that stores W transposed."""
    return type(module).__name__ == "Conv1D"


def dense_weight(module: nn.Module | Stack) -> Tensor:
    """W [N, K] of a packable layer, or of a stack.

    A packed one is decoded to the smallest dtype that has its values: half of f32 for mxfp4.
    """
    if isinstance(module, Stack):
        return module.dense()
    if isinstance(module, QuantLinear | QuantEmbedding):
        return module.dequantize(formats.get(module.format).exact)
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().t() if is_conv1d(module) else weight.detach()


@cache
def _weights_read_by(parent: type[nn.Module]) -> frozenset[str]:
    """The children whose `.weight` (other than its shape or device) the class's forward reads."""
    forward = inspect.unwrap(parent.forward)
    if not isinstance(forward, FunctionType):
        return frozenset()
    return frozenset(
        str(owner.argval)
        for owner, use in reads(forward.__code__)
        if owner.opname == "LOAD_ATTR"
        and use.argval not in ("device", "shape")
        and (parent.__name__, owner.argval) not in _READ_ELSEWHERE
    )


def summary(names: list[str]) -> str:
    """The names in one line; those that differ in a layer number only as "layers.*.up (30)"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return ", ".join(g[0] if len(g) == 1 else f"{p} ({len(g)})" for p, g in groups.items())


def largest_magnitude(weight: Tensor) -> float:
    """max |w|, NaN if the weight has one. Reads the weight once and makes no copy."""
    if weight.numel() == 0:
        return 0.0
    low, high = torch.aminmax(weight.detach())
    return float(torch.maximum(-low, high))
