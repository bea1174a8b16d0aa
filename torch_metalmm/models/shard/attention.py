"""Attention, divided at heads: whose these are is read from the module and its layers.

A rank computes with fewer heads than the model has, and the module is to find out from the shapes
of its layers' outputs, and from num_key_value_groups. What does not show that it does is left
alone: an attention of which a wrong part is divided computes something else, or dies in the first
forward.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from ..replace import weight_shape
from .parts import COLUMNWISE, ROWWISE, Part, block_of, feeds, leaf, other_tensors
from .split import heads, scaled

_QUERIES = {"q_proj", "query", "q", "q_lin", "query_proj", "wq"}
_KEYS = {"k_proj", "key", "k", "k_lin", "key_proj", "wk"}
_VALUES = {"v_proj", "value", "v", "v_lin", "value_proj", "wv"}
_BY_HEAD = "query_key_value"  # q, k, v of a head, then q, k, v of the next
_OTHERS = {_BY_HEAD, "qkv_proj", "qkv", "c_attn", "Wqkv", "W_pack", "o_proj", "out_proj"}
_SIZE = ("head_dim", "head_size")
_COUNTS = frozenset(
    {"num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads"}
    | {"num_key_value_heads", "num_kv_heads", "all_head_size", "split_size", "embed_dim"}
    | {"inner_dim", "hidden_size"}
)
_OF_THE_SAME = f"{{}}, of the same heads, is not of the style {COLUMNWISE}"
KEYS_ELSEWHERE = "it reads the keys of another layer"


def is_attention(owner: nn.Module, layers: dict[str, Any]) -> bool:
    """Whether layers of one parent are those of an attention, by their names or its attributes."""
    if {leaf(name) for name in layers} & (_QUERIES | _KEYS | _OTHERS):
        return True
    return any(hasattr(owner, name) for name in (*_SIZE, "num_key_value_groups", "num_heads"))


def by_heads(
    owner: Any, layers: dict[str, Any], last: str, ranks: int
) -> tuple[dict[str, Part], str | None]:
    """The parts of an attention's layers, `last` the one after it; or why it has none."""
    try:
        queries, keys, size = _counted(owner, layers, last)
        _check_others(owner, layers, queries, keys, size)
    except _Whole as why:
        return {}, str(why)
    block = block_of(layers[last])
    found = heads(queries, keys, ranks, size, block)
    if found is None:
        return {}, (
            f"{queries} heads of queries and {keys} of keys, of {size} values, where "
            f"{leaf(last)} has blocks of {block}"
        )
    parts = {last: Part(ROWWISE, scaled(found.queries, size), found)}
    for name, layer in layers.items():
        if name == last:
            continue
        n = weight_shape(layer)[0]
        of_keys = leaf(name) in _KEYS | _VALUES
        count, ranges = (keys, found.keys) if of_keys else (queries, found.queries)
        if n % count:
            return {}, f"{leaf(name)} has {n} outputs for {count} heads"
        parts[name] = Part(COLUMNWISE, scaled(ranges, n // count))
    return parts, None


class _Whole(Exception):
    """Why an attention is not divided."""


def _counted(owner: Any, layers: dict[str, Any], last: str) -> tuple[int, int, int]:
    """(heads of queries, heads of keys, values of a head)."""
    kind: Any = type(owner)
    size = next((s for s in (getattr(owner, n, None) for n in _SIZE) if isinstance(s, int)), None)
    if size is None:
        raise _Whole(f"{kind.__name__} has no {' or '.join(_SIZE)}, which says where heads end")
    if read := sorted(_names_in(kind) & _COUNTS):
        raise _Whole(f"{kind.__name__} computes with its {read[0]}, which is that of all ranks")
    by_leaf = {leaf(name): layer for name, layer in layers.items()}
    of_keys = next((layer for name, layer in by_leaf.items() if name in _KEYS), None)
    k = weight_shape(layers[last])[1]
    n = k if of_keys is None else weight_shape(of_keys)[0]
    if k % size or n % size:
        raise _Whole(f"{leaf(last)} has {k} inputs and {n} keys, for heads of {size} values")
    for name, _ in feeds(owner, layers):
        if name in _KEYS | _VALUES:
            raise _Whole(_OF_THE_SAME.format(name))
    if of_keys is None and by_leaf.keys() - {leaf(last)} != {_BY_HEAD}:
        raise _Whole(KEYS_ELSEWHERE)
    if of_keys is None and weight_shape(by_leaf[_BY_HEAD])[0] != 3 * k:
        raise _Whole(f"{_BY_HEAD} has not three times the {k} values of {k // size} heads")
    return k // size, n // size, size


def _check_others(owner: Any, layers: dict[str, Any], queries: int, keys: int, size: int) -> None:
    """_Whole: something else of the attention is for all heads."""
    groups = getattr(owner, "num_key_value_groups", queries // keys)
    if groups != queries // keys:
        raise _Whole(
            f"{queries} heads of queries and {keys} of keys, where num_key_value_groups is {groups}"
        )
    for name, other in feeds(owner, layers):
        if weight_shape(other)[0] in (queries, keys, queries * size, keys * size):
            raise _Whole(_OF_THE_SAME.format(name))
    for name, tensor in other_tensors(owner, layers):
        if tensor.numel() > 1 and tuple(tensor.shape) != (size,):
            raise _Whole(f"{name} is {list(tensor.shape)}, not a row of a head's {size} values")


@cache
def _names_in(kind: type) -> frozenset[str]:
    """The names of attributes and variables in the methods of a module's class."""
    found: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, method in vars(base).items():
            function = inspect.unwrap(method) if callable(method) else None
            if name != "__init__" and isinstance(function, FunctionType):
                found.update(function.__code__.co_names)
    return frozenset(found)
