"""Caches in pages: the ops compute to the bit what they compute of rows that follow each other."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from cache_cases import as_stored, pack, unwritten
from inputs import activations
from torch import Tensor

ops = torch.ops.metalmm
SLOTS, HEADS, KV_HEADS, DIM = 64, 4, 2, 64
LENGTHS = (1, 64, 130, 190)
# Of each text, of a cache of 9 pages: neighbours, and others.
TABLE = ((3, 0, 0), (7, 0, 0), (4, 5, 1), (8, 2, 6))
WRITTEN = {"f32": torch.float32, "f16/q8_0": torch.float16, "q4_0/q4_0": torch.bfloat16}


def rows(name: str, count: int, seed: int) -> Tensor:
    return as_stored(name, pack(name, activations(1, KV_HEADS, count, DIM, seed=seed)))


def pool(name: str) -> Tensor:
    """Rows of 9 pages, of which those that nobody wrote are no numbers."""
    return unwritten(name, 1, KV_HEADS, 9 * SLOTS, DIM)


def alone(t: Tensor) -> Tensor:
    """With the capacity of 3 pages: on a GPU as many parts, of which some are empty, are joined."""
    return torch.cat((t, t.new_zeros(1, KV_HEADS, 192 - t.shape[2], t.shape[3])), 2)


def places(text: int, first: int, last: int) -> Tensor:
    """Where the slots of a text lie."""
    return torch.tensor([TABLE[text][t // SLOTS] * SLOTS + t % SLOTS for t in range(first, last)])


@pytest.mark.quick
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("names", WRITTEN)
def test_attention_through_pages(names: str, window: int, queries: int, backend: Backend) -> None:
    key, value = names.split("/")[0], names.split("/")[-1]
    keys, values, put = pool(key), pool(value), backend.put
    strategy = "attention_split" if queries <= 16 else "attention_tile"
    texts = [i for i, n in enumerate(LENGTHS) if n >= queries]
    q = activations(len(texts), HEADS, queries, DIM, seed=1).to(WRITTEN[names])
    want = []
    for row, i in enumerate(texts):
        n, at = LENGTHS[i], places(i, 0, LENGTHS[i])
        k, v = rows(key, n, i), rows(value, n, 10 + i)
        keys[:, :, at], values[:, :, at] = k, v
        own = ops.attention(
            *(put(t) for t in (q[row : row + 1], alone(k), alone(v))),
            *(key, value, put(torch.tensor(n))),
            window=window,
            strategy=strategy,
        )
        want.append(own)
    got = ops.attention(
        *(put(t) for t in (q, keys, values)),
        *(key, value, put(torch.tensor(LENGTHS)[texts])),
        window=window,
        pages=put(torch.tensor(TABLE)[texts]),
        strategy=strategy,
    )
    assert torch.equal(got, torch.cat(want))
    assert got.isfinite().all()


def test_formats_without_a_kernel(backend: Backend) -> None:
    """Where the engine has none, rows of each text are copied together."""
    keys, values = pool("q5_0"), pool("q4_1")
    k, v = rows("q5_0", 130, 1), rows("q4_1", 130, 2)
    at, put = places(2, 0, 130), backend.put
    keys[:, :, at], values[:, :, at] = k, v
    q = activations(1, HEADS, 2, DIM, seed=3)
    given = (put(q), put(keys), put(values), "q5_0", "q4_1", put(torch.tensor([130])))
    got = ops.attention(*given, pages=put(torch.tensor(TABLE[2:3])))
    own = (put(q), put(alone(k)), put(alone(v)), "q5_0", "q4_1", put(torch.tensor(130)))
    assert torch.equal(got, ops.attention(*own))
    none = (given[0][:0], *given[1:5], given[5][:0])
    assert ops.attention(*none, pages=put(torch.tensor(TABLE)[:0])).shape == (0, 2, HEADS, DIM)


@pytest.mark.parametrize("names", [*WRITTEN, "q5_0/q4_1"])
def test_rows_are_written_to_slots_of_their_own(names: str, backend: Backend) -> None:
    """By both ops, as a cache of each text alone is written."""
    key, value = names.split("/")[0], names.split("/")[-1]
    put, batch, count = backend.put, 3, 5
    slots = torch.stack([places(i, 60, 65) for i in (2, 3)] + [torch.arange(5)])
    qkv = activations(batch, count, (HEADS + 2 * KV_HEADS) * DIM, seed=2)
    angles = activations(batch, count, DIM, seed=3)
    given = (put(qkv), put(angles.cos()), put(angles.sin()), HEADS, KV_HEADS)
    _, k, v = ops.rope(*given)
    first, second, alone = ([put(pool(n)) for n in (key, value)] for _ in range(3))
    q = ops.rope_append(*given, *first, put(slots), key, value)
    ops.cache_append(*second, k, v, put(slots), key, value)
    for i in range(batch):
        one = put(slots[i])
        ops.cache_append(*alone, k[i : i + 1], v[i : i + 1], one, key, value)
    assert torch.equal(q, ops.rope(*given)[0])
    for got in (first, second):
        for a, b in zip(got, alone, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("way", ("attention_split", "attention_tile"))
def test_numbers_that_are_no_page(way: str, backend: Backend) -> None:
    """The host of a GPU does not look: some page of the cache is read, and none beside it."""
    cache = activations(1, KV_HEADS, 9 * SLOTS, DIM, seed=1)
    given = [activations(3, HEADS, 1, DIM, seed=2), cache, cache]
    q, keys, values = (backend.put(t) for t in given)
    pages = backend.put(torch.tensor([[-1], [9], [1 << 40]]))
    length = backend.put(torch.full((3,), SLOTS))
    call = lambda: ops.attention(  # noqa: E731
        q, keys, values, "f32", "f32", length, pages=pages, strategy=way
    )
    if q.device.type == "cpu":  # the emulator's, too
        with pytest.raises(IndexError, match="pages: -1 is out of range"):
            call()
    else:
        assert call().isfinite().all()


REFUSED = {
    "pages: .*Int.*must be int64": {"pages": torch.tensor([[0]], dtype=torch.int32)},
    r"pages: .*\[2, 1\].*must be int64 \[B, N\]": {"pages": torch.tensor([[0], [1]])},
    "pages: 9 is out of range; the cache has 9 pages": {"pages": torch.tensor([[9]])},
    "length: 65; the pages have 64 slots": {"length": torch.tensor([65])},
    r"length: .*must be int64 \[B\] with pages": {"length": torch.tensor(3)},
    "length: None; with pages int64": {"length": None},
    "mask: given with pages": {"mask": torch.zeros(1, 1, 1, 64)},
    r"keys: shape \[2, .*the cache of all sequences": {
        name: torch.zeros(2, KV_HEADS, 64, DIM) for name in ("keys", "values")
    },
    "keys: 60 slots; with pages a multiple of 64": {
        name: torch.zeros(1, KV_HEADS, 60, DIM) for name in ("keys", "values")
    },
    "keys: 4294967296 slots; with pages at most 4294967295": {
        name: torch.zeros(1, 1, 1, DIM).expand(1, KV_HEADS, 1 << 32, DIM)
        for name in ("keys", "values")
    },
    "pages: attention through pages has no gradient": {
        "q": torch.zeros(1, HEADS, 1, DIM, requires_grad=True)
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    given = {
        "q": torch.zeros(1, HEADS, 1, DIM),
        "keys": torch.zeros(1, KV_HEADS, 9 * SLOTS, DIM),
        "values": torch.zeros(1, KV_HEADS, 9 * SLOTS, DIM),
        "length": torch.tensor([3]),
        "pages": torch.tensor([[0]]),
    } | REFUSED[message]
    error = IndexError if "out of range" in message else ValueError
    with pytest.raises(error, match=message):
        ops.attention(format_k="f32", format_v="f32", **given)
