"""attn_implementation="metalmm": attention of any model of transformers by the op `attention`.

The function reads a PackedCache where that lies, and the dense keys and values of every other
cache; many queries go to torch's SDPA where that is the faster. A gradient, dropout and what the op
does not know go to transformers' attention function of SDPA.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from .caches import ATTENTION
from .caches.layers import DTYPE_NAMES, Offset, Room
from .caches.slots import PackedEntries

# Arguments of attention_forward that say more than the op's scale and soft cap.
_TRAITS = ("s_aux", "position_bias", "cache")
_NUMBERS = frozenset(("dropout", "scaling", "softcap", "is_causal"))


def op_options(
    constants: dict[str, Any], passed: Collection[str], own: Collection[str] = ()
) -> dict[str, Any] | None:
    """The scale and soft cap with which attention_forward(..., **constants) calls the op.

    passed: the names of arguments that change; own: of those that are parameters, of which the op
    takes s_aux, as its sinks. None: these may say more than that.
    """
    if not set(own) <= {"s_aux"}:
        return None
    if not _NUMBERS.isdisjoint(passed) or not set(_TRAITS).isdisjoint(passed):
        return None
    if any(constants.get(name) is not None for name in _TRAITS):
        return None
    if constants.get("dropout", 0.0) != 0 or constants.get("is_causal") is False:
        return None
    return {"scale": constants.get("scaling"), "softcap": constants.get("softcap") or 0.0}


def _is_known(query: Tensor, key: Any, value: Any) -> bool:
    """Whether the op takes tensors like these."""
    return (
        query.dtype in DTYPE_NAMES
        and all(isinstance(t, PackedEntries) or t.dtype in DTYPE_NAMES for t in (key, value))
        and key.shape == value.shape
        and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
        and query.shape[1] % key.shape[1] == 0
    )


def _records_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in tensors
    )


def _entries(t: Any) -> tuple[Tensor, str]:
    return (t.entries, t.format) if isinstance(t, PackedEntries) else (t, DTYPE_NAMES[t.dtype])


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, heads, S, D] as an attention function of transformers returns it."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if isinstance(key, Room):
        y = torch.ops.metalmm.attention(
            *(query, key.keys, key.values, *key.formats, key.length),
            scale=scaling,
            softcap=softcap or 0.0,
            window=key.window,
            sinks=sinks,
            pages=key.pages,
        )
        return y, None
    has_traits = softcap is not None or sinks is not None
    known = (
        _is_known(query, key, value)
        and dropout == 0
        and kwargs.get("position_bias") is None
        and kwargs.get("cache") is None
    )
    if not known or (not has_traits and _records_grad(query, key, value)):
        if has_traits:
            raise ValueError(
                f"metalmm attention: dropout {dropout}, a position_bias, a paged cache, or entries "
                "of other dtypes or shapes beside a soft cap or sinks; none of it is computed there"
            )
        key, value = (t.decoded() if isinstance(t, PackedEntries) else t for t in (key, value))
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    queries, slots = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = bool(is_causal) and queries > 1 and attention_mask is None
    length = key.length if isinstance(key, PackedEntries) else None
    if is_causal and slots > queries and not isinstance(key, PackedEntries):
        # Without a mask, several queries are the first of the cache: what is behind is empty.
        key, value = (t[:, :, :queries] for t in (key, value))
    if attention_mask is not None and attention_mask.shape[2] != queries:
        attention_mask = attention_mask.expand(-1, -1, queries, -1)
    (keys, format_k), (values, format_v) = _entries(key), _entries(value)
    y = torch.ops.metalmm.attention(
        query,
        keys,
        values,
        format_k,
        format_v,
        length,
        mask=attention_mask,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=sinks,
        causal=is_causal,
    )
    return y, None


def mask_of(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask that transformers makes for sdpa; None, too, for a token that sees its whole window.

    For such a token transformers makes, at every step, a mask that hides nothing. With a
    PagedCache, and in a step that is recorded, the op knows what a query sees.
    """
    may_skip = not args and kwargs.get("allow_is_causal_skip")
    if may_skip and (isinstance(kwargs.get("q_offset"), Offset) or _sees_all(kwargs)):
        return None
    return sdpa_mask(*args, **kwargs)


def _sees_all(given: dict[str, Any]) -> bool:
    """Whether one query of sequences without padding sees every entry of a window that is full.

    Where transformers allows a mask to be left out, what a query sees ends with its own entry and
    has no gaps, so the first says it: the mask of a chunk hides that one, the mask of a window not.
    """
    q, kv = given.get("q_offset"), given.get("kv_offset")
    if given["q_length"] != 1 or given.get("attention_mask") is not None:
        return False
    if given.get("local_size") == 0:  # Qwen2-MoE's config says so of layers that have no window
        return True
    if given["kv_length"] != given.get("local_size") or type(q) is not int or type(kv) is not int:
        return False
    if torch.compiler.is_compiling():
        return False
    zero = torch.tensor(0)
    return bool(given["mask_function"](zero, zero, torch.tensor(q), torch.tensor(kv)))


attention_forward.op_options = op_options  # type: ignore[attr-defined]  # for fused layers
AttentionInterface.register(ATTENTION, attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, mask_of)
