"""Systems in the middle of a sequence, whose cache holds random rows or a random prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from torch_metalmm import formats
from torch_metalmm.hf.caches import pair_of

from ..peers import llama_cpp_model
from .systems import Graph, Transformers, counts

CHUNK = 512  # tokens of a prompt that llama.cpp takes at a time
MULTIPLE = 16  # slots of a cache of constant size
PIECE = 1024  # positions whose rows are one draw of random numbers, wherever a context ends


def random_rows(config: Any, layer: int, start: int, stop: int, like: Tensor) -> list[Tensor]:
    """Keys and values [1, kv_heads, stop - start, D] of a layer, in the dtype of `like`."""
    first, device = start // PIECE, like.device
    pieces = []
    for i in range(first, -(-stop // PIECE)):
        make = torch.Generator(device).manual_seed(1 + layer * 65537 + i)
        shape = (2, 1, config.num_key_value_heads, PIECE, config.head_dim)
        pieces.append(torch.randn(shape, generator=make, device=device))
    rows = torch.cat(pieces, 3)[:, :, :, start - first * PIECE : stop - first * PIECE]
    return [*rows.to(like.dtype)]


def rounded(rows: Tensor, format: str) -> Tensor:
    """Rows [..., D] as a format has them, by the native quantizer."""
    if (dtype := formats.DTYPES.get(format)) is not None:
        return rows.to(dtype).to(rows.dtype)
    ops, size = torch.ops.metalmm, rows.shape[-1]
    packed = ops.quantize(rows.cpu().float().reshape(-1, size), format)
    return cast(Tensor, ops.dequantize(packed, format, size).view(rows.shape).to(rows))


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """Keys and values as the formats of a cache have them, in the dtype of the model."""

    def __init__(self, format: str) -> None:
        super().__init__()
        self.format = format

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        given = map(rounded, (k, v), pair_of(self.format))
        return super().update(*given, layer_idx, *args, **kwargs)


class Growing(Transformers):
    """A model and a cache that grows, whose first rows are random ones."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        exact: bool,
        make: Callable[[], Any],
        attention: str,
        format: str | None = None,
    ) -> None:
        """format: that the cache rounds to; None: the model's dtype."""
        super().__init__(name, model, exact)
        self.make, self.attention, self.format = make, attention, format
        self.held = 0

    def extend(self, context: int) -> None:
        if self.cache is None:
            self.cache = self.make()
        self.begin()
        fill(self.cache, self.model, self.held, context)
        self.held = context

    def begin(self) -> None:
        model: Any = self.model  # one of several systems, which call attention by other functions
        if model.config._attn_implementation != self.attention:
            model.set_attn_implementation(self.attention)

    def rewind(self, tokens: int) -> None:
        self.cache.crop(-tokens)


class Constant(Growing):
    """The step as a CUDA graph, with a cache of the context's size, made anew for each context."""

    is_eager = False

    def __init__(
        self,
        name: str,
        model: nn.Module,
        make: Callable[[int], Any],
        attention: str,
        beyond: int,
        format: str | None = None,
    ) -> None:
        super().__init__(name, model, False, lambda: None, attention, format)
        self.make_sized, self.beyond = make, beyond
        self.step: Graph | None = None

    def extend(self, context: int) -> None:
        slots = -(-(context + self.beyond) // MULTIPLE) * MULTIPLE
        self.begin()
        self.step = Graph(self.name, self.model, False, slots, self.make_sized)
        self.step.reset()
        fill(self.step.cache, self.model, 0, context)
        self.cache = self.step.cache

    def feed(self, tokens: Sequence[int]) -> Tensor:
        assert self.step is not None
        return self.step.feed(tokens)

    def rewind(self, tokens: int) -> None:
        for length in counts(self.cache):
            length.sub_(tokens)


def fill(cache: Any, model: Any, start: int, stop: int) -> None:
    """Rows of the positions from start to stop, in every layer."""
    like = model.model.norm.weight
    for layer in range(model.config.num_hidden_layers):
        cache.update(*random_rows(model.config, layer, start, stop, like), layer)


class Evaluated:
    """llama.cpp, whose cache holds a random prompt."""

    exact = False

    def __init__(self, system: llama_cpp_model.LlamaCpp) -> None:
        self.system, self.name, self.held = system, system.name, 0

    def extend(self, context: int) -> None:
        if not self.held:
            self.system.reset()
        pick = random.Random(self.held)
        while self.held < context:
            count = min(CHUNK, context - self.held)
            self.system.feed([pick.randrange(self.system.vocabulary) for _ in range(count)])
            self.held += count

    def begin(self) -> None:
        """Nothing."""

    def feed(self, tokens: Sequence[int]) -> Tensor:
        return self.system.feed(tokens)

    def rewind(self, tokens: int) -> None:
        self.system.forget(self.held)
