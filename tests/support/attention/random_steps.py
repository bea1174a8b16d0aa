"""Random sequences of steps on a cache, with faults and changes: each known by its number.

Beside a fused model with a PackedCache goes the model before fuse_ with a DynamicCache that keeps
rows as the format rounds them, to which no fault happens. A step that fails is tried again; between
steps the cache is cropped, reordered, repeated, emptied, and what the model computes with is
changed. The logits of each step that succeeds are compared.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch
from cache_cases import pack, unpack
from layer_models import are_fused, ids, layers, small
from torch import Tensor
from transformers import DynamicCache

from torch_metalmm import PackedCache, fuse_
from torch_metalmm.hf.caches.slots import FEW_QUERIES
from torch_metalmm.nn import heads as fused_code

KINDS = ("llama", "gemma3_text", "qwen3")
FORMATS = (None, "f16", "q8_0/q8_0")
# In f32 a layer rounds a few dozen times; rows that differ so may be rounded to other codes of
# q8_0 or values of f16. A row too much, or of another step, moves logits by a tenth and more.
NEAR = {None: 1e-4, "f16": 1e-2, "q8_0/q8_0": 3e-2}
_OPS = ("norm_linear", "rope_append", "attention", "linear", "swiglu")


class Fault(Exception):
    pass


class Rounded(DynamicCache):
    """Rows as a format keeps them."""

    def __init__(self, config: Any, format: str | None) -> None:
        super().__init__(config=config)
        self.format = format

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(self.kept(k), self.kept(v), *args, **kwargs)

    def kept(self, t: Tensor) -> Tensor:
        if self.format is None:
            return t
        if self.format == "f16":
            return t.half().to(t.dtype)
        return unpack("q8_0", pack("q8_0", t), t.shape[-1]).to(t.dtype)


@functools.cache
def _models(kind: str) -> tuple[Any, Any]:
    plain = small(kind, head_dim=32, num_hidden_layers=3, **_layer_types(kind))
    fused = fuse_(copy.deepcopy(plain), "swiglu")
    assert all(are_fused(fused))
    fused.set_attn_implementation("metalmm")
    return plain, fused


def _layer_types(kind: str) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return {"layer_types": kinds} if kind == "gemma3_text" else {}


# ---- faults


def fault(model: Any, r: random.Random) -> AbstractContextManager[Any]:
    """One of the ops fails in one of the layers, before it or after it has written."""
    name, layer, late = r.choice(_OPS), r.randrange(3), r.random() < 0.5
    ops, left = fused_code.DIRECT[None], [layer * (2 if name == "linear" else 1) + 1]
    op = getattr(ops, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        out = op(*args, **kwargs) if late or left[0] else None
        if left[0] == 0:
            raise r.choice((Fault, KeyboardInterrupt))
        return out

    return patch.object(ops, name, failing)


def outside(model: Any, r: random.Random) -> AbstractContextManager[Any]:
    """Code of others fails, between two layers."""

    def fail(*_: Any) -> None:
        raise Fault

    return layers(model)[r.randrange(3)].register_forward_pre_hook(fail)


# ---- changes of a model


def _scaled(function: Callable[..., Any], by: float) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return (out[0] * by, *out[1:]) if isinstance(out, tuple) else out * by

    return forward


def _attribute(module: Any, *names: str) -> str:
    return next(name for name in names if name in vars(module))


def _part(model: Any, name: str) -> Any:
    layer = layers(model)[1]
    part = layer if name == "layer" else getattr(layer, name, None) or layer.self_attn
    return getattr(part, "gated", None).module if hasattr(part, "gated") else part  # type: ignore[union-attr]


def changed(plain: Any, fused: Any, what: str) -> list[Any]:
    """Contexts in which both models compute something else."""
    if what in ("eps", "last_eps"):
        found = []
        for model in (plain, fused):
            norm = layers(model)[1].input_layernorm if what == "eps" else model.model.norm
            found.append(patch.object(norm, _attribute(norm, "variance_epsilon", "eps"), 0.5))
        return found
    if what == "scaling":
        return [patch.object(layers(m)[2].self_attn, "scaling", 0.5) for m in (plain, fused)]
    part = _part(plain, {"norm_class": "input_layernorm", "mlp_class": "mlp"}.get(what, what))
    kind = type(part)
    return [patch.object(kind, "forward", _scaled(kind.forward, 0.75))]


CHANGES = ("eps", "last_eps", "scaling", "norm_class", "mlp_class", "self_attn", "layer")

# ---- a sequence


def check_sequence(number: int) -> float:
    """The largest error, in parts of the bound. AssertionError, or whatever went wrong."""
    r = random.Random(number)
    kind, format = r.choice(KINDS), r.choice(FORMATS)
    slots = r.choice((None, 64))
    plain, fused = _models(kind)
    cache, twin = PackedCache(fused.config, format, slots=slots), Rounded(plain.config, format)
    for each in (cache, twin):
        each.activate_past_recording()  # type: ignore[no-untyped-call]
    batch, length, worst = r.choice((1, 2, 3)), 0, 0.0
    for step in range(r.randrange(4, 10)):
        count = r.choice((1, 1, 1, 2, 5, FEW_QUERIES + 1)) if length + FEW_QUERIES < 60 else 0
        if count:
            given = {"input_ids": ids(batch, count, seed=1000 * number + step)}
            faults = [fault, outside][: 1 + (length > 0)]
            while r.random() < 0.4:
                with r.choice(faults)(fused, r), torch.no_grad():
                    try:
                        fused(**given, past_key_values=cache)
                        raise AssertionError("the fault did not happen")
                    except (Fault, KeyboardInterrupt):
                        pass
                assert int(cache.get_seq_length()) == length
                if r.random() < 0.3:
                    cache.crop(0)
            what = r.choice(CHANGES) if r.random() < 0.3 else None
            contexts = [] if what is None else changed(plain, fused, what)
            worst = max(worst, _step(plain, fused, cache, twin, given, contexts) / NEAR[format])
            assert worst < 1, f"step {step}: {worst} of the bound, {kind} {format} {slots} {what}"
            length += count
            for each in (cache, twin):
                each.crop(0)  # as assisted decoding does, for which windows record
        batch, length = _between(r, cache, twin, batch, length, slots)
    return worst


def _step(
    plain: Any, fused: Any, cache: Any, twin: Any, given: dict[str, Tensor], contexts: list[Any]
) -> float:
    with ExitStack() as changes, torch.no_grad():
        for context in contexts:
            changes.enter_context(context)
        got = fused(**given, past_key_values=cache).logits
        want = plain(**given, past_key_values=twin).logits
    return float((got - want).norm() / want.norm())


def _between(
    r: random.Random, cache: Any, twin: Any, batch: int, length: int, slots: int | None
) -> tuple[int, int]:
    """What generate() may do between two steps."""
    act = r.choice(("", "", "crop", "reorder", "repeat", "select", "reset"))
    caches = (cache, twin)
    if act == "crop" and length:
        count = r.randrange(min(length, 3))
        if any(cache.is_sliding):  # of a window only what was written since the last crop
            count = 0
        for each in caches:
            each.crop(-count)
        length -= count
    elif act == "reorder" and length:
        order = torch.tensor([r.randrange(batch) for _ in range(batch)])
        for each in caches:
            each.reorder_cache(order)
    elif act == "repeat" and length and batch < 4 and slots is None:
        for each in caches:
            each.batch_repeat_interleave(2)
        batch *= 2
    elif act == "select" and length and slots is None:
        kept = torch.tensor(sorted(r.sample(range(batch), max(1, batch // 2))))
        for each in caches:
            each.batch_select_indices(kept)
        batch = len(kept)
    elif act == "reset":
        cache.reset()
        twin.layers = Rounded(cache.config, None).layers
        twin.activate_past_recording()
        length = 0
    return batch, length
