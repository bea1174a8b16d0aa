"""Good and bad calls of the ops on a cache, beside those of op_calls.py and error_cases.py."""

from __future__ import annotations

import torch
from error_cases import Case, Good, bad, good
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
attend = bad(
    ops.attention,
    lambda t: dict(
        q=t.x.view(1, 3, 2, 32).transpose(1, 2), format_k="q4_0", format_v="q4_0",
        keys=t.w[None, None, :, :18], values=t.w[None, None, :, 18:],
        length=torch.tensor(3).to(t.x.device),
    ),
)  # fmt: skip
# One head of q, of k and of v, 16 values each, into 5 slots of f32.
append = bad(
    ops.rope_append,
    lambda t: dict(
        qkv=t.x[None, :, :48], cos=t.x[None, :, :8], sin=t.x[None, :, 8:16], heads=1, kv_heads=1,
        keys=t.w.float()[None, None, :, :16], values=t.w.float()[None, None, :, :16],
        slots=torch.tensor([4, 0, 2]).to(t.x.device), format_k="f32", format_v="f32",
    ),
)  # fmt: skip
# k and v of 2 heads and 3 positions, 32 values each, into 5 slots of q4_0.
store = bad(
    ops.cache_append,
    lambda t: dict(
        keys=t.w[None, None, :, :18].repeat(1, 2, 1, 1), k=t.x.view(1, 3, 2, 32).transpose(1, 2),
        values=t.w[None, None, :, 18:].repeat(1, 2, 1, 1), v=t.x.view(1, 3, 2, 32).transpose(1, 2),
        slots=torch.tensor([4, 0, 2]).to(t.x.device), format_k="q4_0", format_v="q4_0",
    ),
)  # fmt: skip


CACHE_CASES = {
    "store keys": Case(store(keys=lambda t: t.w), "keys", r"\[5, 36\]", r"\[B"),
    "store values": Case(
        store(values=lambda t: t.w[None, None, :4, :18].repeat(1, 2, 1, 1)), "values", "4, 18", "5"
    ),
    "store k": Case(
        store(k=lambda t: t.x.view(1, 3, 4, 16).transpose(1, 2)), "v", r"32\]", r"16\]"
    ),
    "store v": Case(store(v=lambda t: t.x.view(1, 1, 6, 32)), "v", "1, 6, 32", "2, 3, 32"),
    "store slots": Case(
        store(slots=lambda t: torch.arange(2).to(t.x.device)), "slots", "2", "k has 3"
    ),
    "store slots dtype": Case(store(slots=lambda t: t.ids.int()), "slots", "int|Int", "int64"),
    "store row": Case(store(format_k="q8_0"), "keys", "18", "q8_0 has 34 bytes"),
    "store format": Case(store(format_v="q9"), "format", "'q9'", "q4_0"),
    "append qkv": Case(append(qkv=lambda t: t.x), "qkv", r"\[3, 64\]", r"\[B, S"),
    "append heads": Case(append(heads=3), "qkv", "48", "5 heads"),
    "append kv_heads": Case(
        append(kv_heads=2, qkv=lambda t: t.x.repeat(1, 2)[None, :, :80]),
        "qkv",
        r"\[1, 2\]",
        r"\[1, 1\]",
    ),
    "append cos": Case(append(cos=lambda t: t.x[:, :8]), "cos", r"\[3, 8\]", r"\[B or 1"),
    "append batch": Case(
        append(
            keys=lambda t: torch.ones(2, 1, 5, 16).to(t.x.device),
            values=lambda t: torch.ones(2, 1, 5, 16).to(t.x.device),
        ),
        "qkv",
        r"\[1, 1\]",
        r"\[2, 1\]",
    ),
    "append keys": Case(append(keys=lambda t: t.w[None, None]), "keys", r"\[1, 1, 5, 36\]", "64"),
    "append values": Case(
        append(values=lambda t: t.w.float()[None, None, 1:, :16]),
        "values",
        r"\[1, 1, 4, 16\]",
        "keys are",
    ),
    "append format": Case(append(format_v="q9"), "format", "'q9'", "q4_0"),
    "append block": Case(append(format_k="q8_0"), "keys", "K = 16", "32 values"),
    "append slots": Case(
        append(slots=lambda t: torch.arange(2).to(t.x.device)), "slots", "2", "3 rows"
    ),
    "append slots dtype": Case(
        append(slots=lambda t: torch.arange(3).int().to(t.x.device)), "slots", "Int|32", "int64"
    ),
    "append q_norm": Case(append(q_norm=lambda t: t.bias), "q_norm", r"\[5\]", r"\[16\]"),
    "append v": Case(
        append(v=lambda t: t.x[None], qkv=lambda t: t.x[None, :, :32]),
        "v",
        "3, 64",
        r"\[1, 3, 16\]",
    ),
    "attention q": Case(attend(q=lambda t: t.x), "q", r"\[3, 64\]", r"\[B, heads, S, D\]"),
    "attention q dtype": Case(
        attend(q=lambda t: t.x.view(1, 2, 3, 32).double()), "q", "float64|Double", "float32"
    ),
    "attention batch": Case(
        attend(q=lambda t: t.x.view(2, 1, 3, 32)), "q", r"\[2, 1, 3, 32\]", "1 sequences"
    ),
    "attention heads": Case(
        attend(
            keys=lambda t: t.w[:3, :18].view(1, 3, 1, 18),
            values=lambda t: t.w[:3, 18:].reshape(1, 3, 1, 18),
        ),
        "q",
        "2 heads",
        "multiple of the 3",
    ),
    "attention keys": Case(
        attend(keys=lambda t: t.w[None, None]), "keys", r"\[1, 1, 5, 36\]", "18 bytes"
    ),
    "attention values": Case(
        attend(values=lambda t: t.w[None, None, 1:, 18:]), "values", r"\[1, 1, 4, 18\]", "keys are"
    ),
    "attention format": Case(attend(format_v="q9"), "format", "'q9'", "q4_0"),
    "attention block": Case(attend(format_k="q4_k"), "keys", "K = 32", "256 values"),
    "attention length": Case(
        attend(length=lambda t: torch.tensor([3]).to(t.x.device)), "length", r"\[1\]", r"int64 \[\]"
    ),
    "attention length dtype": Case(
        attend(length=lambda t: torch.tensor(3.0).to(t.x.device)), "length", "Float|32", "int64"
    ),
    "attention mask": Case(
        attend(mask=lambda t: t.x.view(1, 1, 2, 96)), "mask", r"\[1, 1, 2, 96\]", "3, T"
    ),
    "attention mask of other heads": Case(
        attend(mask=lambda t: t.x.view(1, 4, 3, 16)), "mask", r"\[1, 4, 3, 16\]", "1 or 2, 3, T"
    ),
    "attention mask of other sequences": Case(
        attend(mask=lambda t: t.x.view(4, 1, 3, 16)), "mask", r"\[4, 1, 3, 16\]", "1 or 1, 1 or 2"
    ),
    "attention mask dtype": Case(
        attend(mask=lambda t: t.x.view(1, 2, 3, 32).int()), "mask", "int|Int", "float32"
    ),
    "attention sinks": Case(attend(sinks=lambda t: t.x[0, :3]), "sinks", r"\[3\]", r"\[2\]"),
    "attention window": Case(attend(window=-1), "window", "-1", "at least 1"),
    "attention softcap": Case(attend(softcap=-2.0), "softcap", "-2", "above 0"),
    "attention scale": Case(attend(scale=float("nan")), "scale", "nan", "finite"),
    "attention scale beyond f32": Case(attend(scale=-1e300), "scale", r"-1e\+300", "finite as f32"),
    "attention softcap beyond f32": Case(
        attend(softcap=1e300), "softcap", r"1e\+300", "finite as f32"
    ),
    "attention softcap below f32": Case(
        attend(softcap=1e-60), "softcap", "1e-60", "normal number of f32 above 0"
    ),
    "attention softcap subnormal": Case(attend(softcap=1e-40), "softcap", "1e-40", "normal"),
}
