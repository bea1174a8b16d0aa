"""Good and bad calls of the ops on a cache, beside those of op_calls.py and error_cases.py."""

from __future__ import annotations

import torch
from error_cases import Fitting, Good, bad, good
from inputs import activations, random_weight

ops = torch.ops.metalmm

BATCH, HEADS, KV_HEADS, QUERIES, SLOTS, DIM = 2, 4, 2, 3, 7, 32


def cache_calls(dtype: torch.dtype) -> dict[str, Good]:
    """{label: (op, args, kwargs)}, as op_calls.py has them."""
    rows = random_weight("q4_0", BATCH * KV_HEADS * SLOTS, DIM).view(BATCH, KV_HEADS, SLOTS, -1)
    dense = activations(BATCH, KV_HEADS, SLOTS, DIM, seed="dense")
    q = activations(BATCH, HEADS, QUERIES, DIM, dtype=dtype, seed="q")
    k = activations(BATCH, KV_HEADS, QUERIES, DIM, dtype=dtype, seed="k")
    slots, length = torch.tensor([4, 0, 5]), torch.tensor(6)
    qkv = activations(BATCH, QUERIES, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype, seed="qkv")
    turn = (qkv, qkv[:1, :, :16], qkv[:1, :, 16:32], HEADS, KV_HEADS)
    traits = {
        "mask": torch.ones(1, 1, QUERIES, SLOTS, dtype=torch.bool).tril(2),
        "scale": 0.5,
        "softcap": 4.0,
        "window": 3,
        "sinks": activations(HEADS, seed="sinks"),
        "causal": False,
    }
    pair, packed = (dense, dense.flip(2), "f32", "f32"), (rows, rows.flip(2), "q4_0", "q4_0")
    # Rows that end within a vector of values, and more slots than a vector has.
    odd, narrow = (t[..., :20].repeat(1, 1, 6, 1) for t in (q, dense))
    norms = {"q_norm": qkv[0, 0, :32], "k_norm": qkv[0, 1, :32], "eps": 1e-5, "offset": 1.0}
    return {
        "cache_append": good(ops.cache_append, rows, rows.clone(), k, k, slots, "q4_0", "q4_0"),
        "cache_append, dense": good(
            ops.cache_append, dense, rows.clone(), k, k, slots, "f32", "q4_0"
        ),
        "rope_append": good(ops.rope_append, *turn, rows, rows.clone(), slots, "q4_0", "q4_0"),
        "rope_append, all": good(
            *(ops.rope_append, qkv[..., :192], *turn[1:], rows, dense, slots, "q4_0", "f32"),
            **{"v": qkv[..., 192:], "interleaved": True, **norms},
        ),
        "attention": good(ops.attention, q, *pair, length),
        "attention, all": good(ops.attention, q, *pair, length, **traits),
        "attention without a length": good(ops.attention, q, *pair, None),
        "attention of packed rows by sdpa": good(
            ops.attention, q, *packed, length, mask=traits["mask"], window=3, strategy="sdpa"
        ),
        "attention of packed rows": good(ops.attention, q, *packed, length, **traits),
        "attention of many queries": good(
            ops.attention, odd, narrow, narrow.flip(2), "f32", "f32", None, causal=False
        ),
        "attention of no query": good(ops.attention, q[:, :, :0], *packed, length),
    }


# 2 heads of 32 values and 3 queries over 3 rows of a key head.
attend = Fitting(
    ops.attention,
    lambda t: dict(
        q=t.x.view(1, 3, 2, 32).transpose(1, 2), format_k="q4_0", format_v="q4_0",
        keys=t.w[None, None, :, :18], values=t.w[None, None, :, 18:],
        length=torch.tensor(3).to(t.x.device),
    ),
)  # fmt: skip
# One head of q, of k and of v, 16 values each, into 5 slots of f32.
append = Fitting(
    ops.rope_append,
    lambda t: dict(
        qkv=t.x[None, :, :48], cos=t.x[None, :, :8], sin=t.x[None, :, 8:16], heads=1, kv_heads=1,
        keys=t.w.float()[None, None, :, :16], values=t.w.float()[None, None, :, :16],
        slots=torch.tensor([4, 0, 2]).to(t.x.device), format_k="f32", format_v="f32",
    ),
)  # fmt: skip
# k and v of 2 heads and 3 positions, 32 values each, into 5 slots of q4_0.
store = Fitting(
    ops.cache_append,
    lambda t: dict(
        keys=t.w[None, None, :, :18].repeat(1, 2, 1, 1), k=t.x.view(1, 3, 2, 32).transpose(1, 2),
        values=t.w[None, None, :, 18:].repeat(1, 2, 1, 1), v=t.x.view(1, 3, 2, 32).transpose(1, 2),
        slots=torch.tensor([4, 0, 2]).to(t.x.device), format_k="q4_0", format_v="q4_0",
    ),
)  # fmt: skip


CACHE_CASES = {
    **store.refuses(
        bad("keys", lambda t: t.w, r"\[5, 36\]", r"\[B"),
        bad("values", lambda t: t.w[None, None, :4, :18].repeat(1, 2, 1, 1), "4, 18", "5"),
        bad("k", lambda t: t.x.view(1, 3, 4, 16).transpose(1, 2), r"32\]", r"16\]", says="v"),
        bad("v", lambda t: t.x.view(1, 1, 6, 32), "1, 6, 32", "2, 3, 32"),
        bad("slots", lambda t: torch.arange(2).to(t.x.device), "2", "k has 3"),
        bad("slots", lambda t: t.ids.int(), "int|Int", "int64"),
        bad("format_k", "q8_0", "18", "q8_0 has 34 bytes", says="keys"),
        bad("format_v", "q9", "'q9'", "q4_0", says="format"),
    ),
    **append.refuses(
        bad("qkv", lambda t: t.x, r"\[3, 64\]", r"\[B, S"),
        bad("heads", 3, "48", "5 heads", says="qkv"),
        bad("qkv", lambda t: t.x.repeat(1, 2)[None, :, :80], r"\[1, 2\]", r"\[1, 1\]", kv_heads=2),
        bad("cos", lambda t: t.x[:, :8], r"\[3, 8\]", r"\[B or 1"),
        bad(
            "keys",
            lambda t: torch.ones(2, 1, 5, 16).to(t.x.device),
            r"\[1, 1\]",
            r"\[2, 1\]",
            says="qkv",
            values=lambda t: torch.ones(2, 1, 5, 16).to(t.x.device),
        ),
        bad("keys", lambda t: t.w[None, None], r"\[1, 1, 5, 36\]", "64"),
        bad("values", lambda t: t.w.float()[None, None, 1:, :16], r"\[1, 1, 4, 16\]", "keys are"),
        bad("format_v", "q9", "'q9'", "q4_0", says="format"),
        bad("format_k", "q8_0", "K = 16", "32 values", says="keys"),
        bad("slots", lambda t: torch.arange(2).to(t.x.device), "2", "3 rows"),
        bad("slots", lambda t: torch.arange(3).int().to(t.x.device), "Int|32", "int64"),
        bad("q_norm", lambda t: t.bias, r"\[5\]", r"\[16\]"),
        bad("v", lambda t: t.x[None], "3, 64", r"\[1, 3, 16\]", qkv=lambda t: t.x[None, :, :32]),
    ),
    **attend.refuses(
        bad("q", lambda t: t.x, r"\[3, 64\]", r"\[B, heads, S, D\]"),
        bad("q", lambda t: t.x.view(1, 2, 3, 32).double(), "float64|Double", "float32"),
        bad("q", lambda t: t.x.view(2, 1, 3, 32), r"\[2, 1, 3, 32\]", "1 sequences"),
        bad(
            "keys",
            lambda t: t.w[:3, :18].view(1, 3, 1, 18),
            "2 heads",
            "multiple of the 3",
            says="q",
            values=lambda t: t.w[:3, 18:].reshape(1, 3, 1, 18),
        ),
        bad("keys", lambda t: t.w[None, None], r"\[1, 1, 5, 36\]", "18 bytes"),
        bad("values", lambda t: t.w[None, None, 1:, 18:], r"\[1, 1, 4, 18\]", "keys are"),
        bad("format_v", "q9", "'q9'", "q4_0", says="format"),
        bad("format_k", "q4_k", "K = 32", "256 values", says="keys"),
        bad("length", lambda t: torch.tensor([3]).to(t.x.device), r"\[1\]", r"int64 \[\]"),
        bad("length", lambda t: torch.tensor(3.0).to(t.x.device), "Float|32", "int64"),
        bad("mask", lambda t: t.x.view(1, 1, 2, 96), r"\[1, 1, 2, 96\]", "3, T"),
        bad("mask", lambda t: t.x.view(1, 4, 3, 16), r"\[1, 4, 3, 16\]", "1 or 2, 3, T"),
        bad("mask", lambda t: t.x.view(4, 1, 3, 16), r"\[4, 1, 3, 16\]", "1 or 1, 1 or 2"),
        bad("mask", lambda t: t.x.view(1, 2, 3, 32).int(), "int|Int", "float32"),
        bad("sinks", lambda t: t.x[0, :3], r"\[3\]", r"\[2\]"),
        bad("window", -1, "-1", "at least 1"),
        bad("softcap", -2.0, "-2", "above 0"),
        bad("scale", float("nan"), "nan", "finite"),
        bad("scale", -1e300, r"-1e\+300", "finite as f32"),
        bad("softcap", 1e300, r"1e\+300", "finite as f32"),
        bad("softcap", 1e-60, "1e-60", "normal number of f32 above 0"),
        bad("softcap", 1e-40, "1e-40", "normal"),
    ),
}
