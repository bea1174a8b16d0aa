"""torch's own attention on a dense cache: each backend of SDPA that runs, compiled flex attention.

Forms: "grouped", keys as they lie and enable_gqa; "folded", for one query, the heads of a group as
queries of their head of keys, which backends without grouped heads read once, too; "mask", several
queries behind filled slots by a boolean mask; "lower right", by torch's causal bias for this.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ..devices import captured

Call = Callable[[Tensor, Tensor], Tensor]  # a function of keys and values [B, kv_heads, T, D]
FIRST = ("grouped", "causal", "mask")  # the ways that transformers calls it
MATH_BYTES = 4 << 30  # most bytes of the copies that math makes for each head of q, in f32
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Chosen:
    """The backend that SDPA may take, changed only where another call takes another."""

    name, context = "", None

    def take(self, name: str) -> None:
        """The backend of that name alone; "": as torch chooses."""
        if name == self.name:
            return
        if self.context is not None:
            self.context.__exit__(None, None, None)
        self.name, self.context = name, sdpa_kernel(BACKENDS[name]) if name else None
        if self.context is not None:
            self.context.__enter__()


chosen = Chosen()


def _mask(queries: int, slots: int, device: torch.device) -> Tensor:
    """Which slots each of the last `queries` positions sees."""
    own = torch.arange(slots - queries, slots, device=device)[:, None]
    return torch.arange(slots, device=device)[None] <= own


def forms(q: Tensor, slots: int, kv_heads: int) -> Iterator[tuple[str, Call]]:
    """(name, call) of q [B, heads, S, D] against as many slots, the last S of them the queries'."""
    queries, group = q.shape[2], q.shape[1] // kv_heads
    sdpa, grouped = F.scaled_dot_product_attention, {"enable_gqa": group > 1}
    if queries == 1:
        yield "grouped", lambda k, v: sdpa(q, k, v, **grouped)
        if group > 1:
            folded = q.view(q.shape[0], kv_heads, group, q.shape[3])
            yield "folded", lambda k, v: sdpa(folded, k, v).view(q.shape)
    elif slots == queries:
        yield "causal", lambda k, v: sdpa(q, k, v, is_causal=True, **grouped)
    else:
        mask = _mask(queries, slots, q.device)
        yield "mask", lambda k, v: sdpa(q, k, v, attn_mask=mask, **grouped)
        if q.device.type == "cuda":
            bias = causal_lower_right(queries, slots)
            yield "lower right", lambda k, v: sdpa(q, k, v, attn_mask=bias, **grouped)


def backends(q: Tensor, slots: int, form: str) -> Iterator[str]:
    """Names of BACKENDS to try, and "", what torch chooses; a CPU has two, MPS none to choose."""
    device = q.device.type
    if device == "mps" or (device == "cuda" and form in FIRST):
        yield ""
    if device == "mps":
        return
    copied = 2 * 4 * q.shape[0] * q.shape[1] * slots * q.shape[3]
    if copied <= MATH_BYTES:
        yield "math"
    yield from ("flash", "efficient", "cudnn") if device == "cuda" else ("flash",)


def flex(q: Tensor, slots: int, kv_heads: int) -> Call:
    """Compiled flex attention, causal."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    queries = q.shape[2]
    filled, mask = slots - queries, None
    if queries > 1:
        mask = create_block_mask(
            lambda b, h, i, j: j <= i + filled, None, None, queries, slots, device=q.device.type
        )
    torch._dynamo.reset()  # or shapes become symbolic, and the sixth is not compiled
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    grouped = q.shape[1] != kv_heads
    return lambda k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def failure(call: Call, k: Tensor, v: Tensor) -> str | None:
    """Why the call cannot take these keys, or be captured, as it is timed on cuda; None: it can."""
    try:
        once = lambda: call(k, v)  # noqa: E731
        once()
        if k.is_cuda:
            captured(once, once)
    except Exception as e:  # a backend or a compiler may raise anything
        return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    return None


def running(
    q: Tensor, cache: Sequence[tuple[Tensor, Tensor]], kv_heads: int, compile: bool
) -> Iterator[tuple[str, Call, str | None]]:
    """(name, call, why it does not run) of everything to try on the keys and values of a cache."""
    slots = cache[0][0].shape[2]
    tried: list[tuple[str, Call]] = []
    for form, call in forms(q, slots, kv_heads):
        for name in backends(q, slots, form):

            def with_backend(k: Tensor, v: Tensor, name: str = name, call: Call = call) -> Tensor:
                chosen.take(name)
                return call(k, v)

            tried.append((f"SDPA {name or 'as chosen'}, {form}", with_backend))
    if compile:
        tried.append(("flex attention, compiled", flex(q, slots, kv_heads)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each reason why a backend does not run
        for name, call in tried:
            yield name, call, failure(call, *cache[0])
    chosen.take("")
