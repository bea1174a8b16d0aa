"""Plans of attention: which kernel, its grid, its parts and their join."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from plan_cases import CHIPS, DTYPES, stored

from torch_metalmm import _C

MIN_PART, MOST_PARTS, ROWS, TILE = 64, 64, 4, 32


def plan(heads: int = 32, kv_heads: int = 8, queries: int = 1, **changes: Any) -> dict[str, Any]:
    sizes = {"heads": heads, "kv_heads": kv_heads, "queries": queries}
    asked: dict[str, Any] = {"n": 8192, "k": 128, "format": "q8_0", "chip": "m1"}
    sizes |= changes.pop("attention", {})
    return dict(_C.plan("attention", **asked | changes, attention=sizes))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", stored())
def test_a_token_is_parts_and_their_join(chip: str, name: str) -> None:
    for dtype in DTYPES:
        split, join = plan(chip=chip, format=name, dtype=dtype)["passes"]
        assert split["kernel"] == f"attention_split_{name}_{dtype}"
        assert join["kernel"] == f"attention_join_{dtype}"
        assert split["grid"] == [MOST_PARTS, 8, 1] and join["grid"] == [32, 1, 1]
        assert split["constants"]["batch"] == 4 and split["constants"]["k"] == 128


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "kernel"),
    [
        (32, 8, 1, "attention_split"),
        (32, 8, 4, "attention_split"),
        (32, 8, 5, "attention_tile"),
        (64, 8, 2, "attention_split"),
        (8, 8, 16, "attention_split"),
        (8, 8, 17, "attention_tile"),
    ],
)
def test_rows_of_a_key_head_choose_the_kernel(
    heads: int, kv_heads: int, queries: int, kernel: str
) -> None:
    made = plan(heads, kv_heads, queries)
    assert made["passes"][0]["kernel"].startswith(kernel)
    assert made["reason"].startswith(kernel)


def test_the_grid_covers_all_rows_and_all_slots() -> None:
    """Parts of at least 64 slots, at most 64 of them; rows in even groups."""
    for slots in (1, 64, 65, 700, 4096, 4097, 131072):
        for group, queries in ((1, 1), (3, 1), (5, 1), (7, 2), (4, 16), (2, 100)):
            made = plan(2 * group, 2, queries, n=slots, attention={"batch": 3})
            first = made["passes"][0]
            rows, parts = group * queries, first["args"]["parts"]
            own = first["constants"]["batch"] or TILE
            assert own <= (TILE if "tile" in first["kernel"] else ROWS)
            assert first["grid"] == [ceil(rows / own) * parts, 2, 3]
            wanted = min(MOST_PARTS, ceil(slots / MIN_PART)) if queries <= 16 else 1
            assert parts == wanted and len(made["passes"]) == (2 if parts > 1 else 1)
            assert made["workspace_bytes"] == (
                rows * 2 * 3 * parts * (128 + 2) * 4 if parts > 1 else 0
            )


def test_traits_are_bits() -> None:
    """What a kernel need not ask is not compiled into it: one query sees all that is there."""
    bits = _C.ATTENTION_BITS
    for given, queries, wanted in (
        ({}, 1, ()),
        ({}, 2, ("causal",)),
        ({"causal": False}, 2, ()),
        ({"window": 5}, 1, ("window",)),
        ({"softcap": 30.0, "sinks": True}, 1, ("softcap", "sinks")),
        ({"float_mask": True, "sinks": True, "float_sinks": True}, 1, None),
    ):
        made = plan(queries=queries, n=64, attention=given)
        names = ("float_mask", "sinks", "float_sinks") if wanted is None else wanted
        assert made["passes"][0]["constants"]["epilogue"] == sum(bits[name] for name in names)


@pytest.mark.parametrize("filled", [False, True])
def test_a_kernel_is_told_of_a_filled_cache_and_of_aligned_queries(filled: bool) -> None:
    for alignment in (8, 16):
        one = plan(x_alignment=alignment, attention={"filled": filled})["passes"][0]
        assert one["args"]["count"] == filled
        aligned = one["constants"]["bounds"] & _C.BOUNDS_BITS["aligned_x"]
        assert bool(aligned) == (alignment == 16)


def test_threadgroup_memory_fits_every_head() -> None:
    assert plan(gpu={"max_threadgroup_memory": 8320})["passes"]
    for k in range(16, 257, 16):
        for queries in (1, 40):
            for dtype in DTYPES:
                made = plan(queries=queries, k=k, dtype=dtype, format="f16")
                assert all(one["threadgroup_bytes"] <= 32768 for one in made["passes"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 72, "format": "f16"}, "heads of 72 values of f16; allowed: multiples of 16"),
        ({"k": 272, "format": "f16"}, "heads of 272 values"),
        ({"k": 256, "format": "q4_k"}, "heads of 256 values of q4_k; .* that a shader stores"),
        ({"heads": 7}, "heads 7, kv_heads 8"),
        ({"heads": 0}, "heads 0, kv_heads 8"),
        ({"kv_heads": 0}, "kv_heads 0"),
        ({"queries": -1}, "queries -1"),
        ({"attention": {"batch": -1}}, "batch -1"),
        ({"n": 8191, "attention": {"pages": 4}}, "pages: of whole pages of .* slots"),
        ({"attention": {"pages": 4, "filled": True}}, "pages: .* with lengths and without a mask"),
        ({"attention": {"pages": 4, "bool_mask": True}}, "pages: .* without a mask"),
        ({"attention": {"pages": 4, "float_mask": True}}, "pages: .* without a mask"),
        ({"attention": {"window": -1}}, "window: -1; at least 1, 0 for none"),
        ({"attention": {"bool_mask": True, "float_mask": True}}, "mask: of bools or of f32"),
        ({"attention": {"rows": 2}}, "attention: unknown 'rows'; allowed: batch, heads"),
        ({"n": 2**31}, "2147483648 slots"),
        (
            {"strategy": "gemm"},
            "strategy: gemm computes linear, not attention; that takes attention_split, .*, sdpa$",
        ),
        (
            {"strategy": "sdpa", "attention": {"softcap": 2.0}},
            "strategy: sdpa computes attention without soft cap; allowed: attention_split",
        ),
        ({"strategy": "sdpa", "attention": {"sinks": True}}, "without sinks"),
        ({"strategy": "sdpa", "attention": {"float_mask": True}}, "without mask that is added"),
        ({"gpu": {"max_threadgroup_memory": 8319}}, "gpu: attention_split needs 8320 bytes"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def sdpa(dtype: str = "f16", **changes: Any) -> dict[str, Any] | None:
    """What torch's attention is given on an NVIDIA GPU; None where a kernel computes."""
    found: dict[str, Any] | None = plan(**{"chip": _C.CUDA, "dtype": dtype} | changes)["sdpa"]
    return found


def test_many_queries_are_torchs_on_an_nvidia_gpu() -> None:
    """Of halves, where the host knows the length or the cache has few slots; of no Mac."""
    known = {"filled": True}
    for name in stored():
        for dtype in DTYPES:
            taken = [n for n in (1, 16, 17, 512) if sdpa(dtype, queries=n, attention=known)]
            assert taken == ([] if dtype == "f32" else [17, 512]), name
    assert sdpa(queries=100, n=400) and not sdpa(queries=100, n=401)
    assert sdpa(queries=512, n=2**16, attention=known)
    assert not sdpa(queries=512, n=2**17, attention=known)  # panels of 4 x 341 rows of q
    dense: dict[str, Any] = {"queries": 512, "n": 2**17, "format": "f16"}
    assert sdpa(**dense, attention=known)
    by_head = {"bool_mask": True, "mask_head_stride": 1}  # of 32 x 10
    assert not sdpa(**dense, attention=known | by_head)
    assert not any(plan(queries=512, attention=known, chip=chip)["sdpa"] for chip in CHIPS)
    for trait in ({"softcap": 2.0}, {"sinks": True}, {"float_mask": True}):
        assert not sdpa(queries=512, attention=known | trait)


def test_a_mask_is_made_where_something_is_hidden() -> None:
    """What is a prompt into an empty cache, or hides nothing, has none."""
    for n, traits, wanted in (
        (512, {}, "is_causal"),
        (512, {"window": 512}, "is_causal"),
        (512, {"causal": False}, ""),
        (8192, {"causal": False}, ""),
        (8192, {}, "is_masked"),
        (100, {}, "is_masked"),
        (512, {"window": 511}, "is_masked"),
        (512, {"causal": False, "bool_mask": True}, "is_masked"),
        (512, {"filled": False}, "is_masked"),
    ):
        found = sdpa(queries=512, n=n, attention={"filled": True} | traits)
        assert found and [k for k in ("is_causal", "is_masked") if found[k]] == wanted.split()


@pytest.mark.parametrize(
    ("changes", "panels"),
    [
        ({"format": "f16"}, (3, 8, 512)),
        ({"format": "f16", "n": 131072}, (3, 8, 341)),  # a mask of 3 bytes a slot
        ({"format": "f16", "n": 131072, "mask": (0, 1)}, (3, 8, 10)),
        ({"format": "f16", "n": 131072, "mask": (1, 1)}, (3, 8, 3)),
        ({"n": 512}, (3, 8, 512)),
        ({"n": 8192}, (2, 8, 512)),  # decoded keys and values of 4 MB a head
        ({"n": 16384}, (1, 8, 512)),
        ({"n": 16385}, (1, 7, 512)),
        ({"n": 10**6}, (1, 1, 44)),
        ({"format": "f32", "n": 8192}, (2, 8, 512)),
    ],
)
def test_panels_of_torchs_attention(changes: dict[str, Any], panels: tuple[int, int, int]) -> None:
    """A mask, with what torch makes of it, of at most 128 MB; rows that are decoded, of 64 MB."""
    by_sequence, by_head = changes.pop("mask", (0, 0))
    sizes = {"filled": True, "batch": 3, "mask_head_stride": by_head}
    sizes |= {"mask_sequence_stride": by_sequence, "bool_mask": by_head > 0}
    found = sdpa(queries=512, attention=sizes, strategy="sdpa", **changes)
    assert found and tuple(found[k] for k in ("sequences", "heads", "queries")) == panels


def test_the_reason_says_what_torch_is_given() -> None:
    made = plan(queries=512, chip=_C.CUDA, attention={"filled": True})
    assert made["reason"] == (
        "sdpa: 512 queries are at least 17, and torch's attention reaches the tensor cores at full "
        "rate; a mask for 512 queries at a time, rows of 1 sequences and 8 heads decoded at a time"
    )
    assert made["passes"] == [] and made["workspace_bytes"] == 0


def test_nothing_asked_is_no_pass() -> None:
    assert plan(queries=0)["passes"] == [] and plan(attention={"batch": 0})["passes"] == []
