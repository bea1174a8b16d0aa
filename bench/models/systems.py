"""Ways to run a transformers model token by token: eager, and as a captured graph; from a prompt,
or from the middle of a sequence whose cache holds random rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_metalmm import PackedCache, formats
from torch_metalmm.hf.caches import pair_of, rows_of
from torch_metalmm.models.cache_argument import cache_in, with_cache

from ..devices import captured

Step = Callable[[Tensor], Tensor]
LENGTH = 64
MULTIPLE = 16  # slots of a cache of constant size
PIECE = 1024  # positions whose rows are one draw of random numbers, wherever a context ends


class System(Protocol):
    """A model that continues a sequence."""

    name: str
    exact: bool  # activations are not rounded below f32
    weight_bytes: int

    def reset(self) -> None:
        """Forgets the sequence."""
        ...

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Appends tokens; the logits f32 [vocabulary] after the last, which the device may still
        be computing."""
        ...


class Transformers:
    """A transformers model, dense or with packed weights, and a cache that grows."""

    is_eager = True  # each step calls the ops from Python
    prefills = True  # in a form of its own

    def __init__(
        self,
        name: str,
        model: nn.Module,
        exact: bool = True,
        *,
        make: Callable[[], Any] | None = None,
        attention: str | None = None,
        format: str | None = None,
        experts: str | None = None,
    ) -> None:
        """make() is an empty cache; None: the model's own. attention: transformers' name of the
        function by which this system attends. format: that the cache rounds to; None: the model's
        dtype. experts: how a mixture multiplies by its dense experts, for a token."""
        self.name, self.model, self.exact, self.experts = name, model, exact, experts
        if experts == "batched_mm":  # which has a copy of the weights for each token
            self.prefills = False
        self.make, self.attention, self.format, self.held = make, attention, format, 0
        self.weight_bytes = sum(p.nbytes for p in model.parameters())
        self.device = next(model.parameters()).device
        self.cache: Any = None

    def reset(self) -> None:
        self.begin()
        self.cache = self.make() if self.make else None

    def begin(self) -> None:
        """Lets the model, which may be that of other systems too, attend as this one does."""
        model: Any = self.model
        if self.attention not in (None, model.config._attn_implementation):
            model.set_attn_implementation(self.attention)

    def called(self, ids: Tensor) -> Any:
        """The model's output for the last of these tokens."""
        if self.experts is not None:
            many = self.experts == "batched_mm" and ids.shape[1] > 1
            self.model.config._experts_implementation = "grouped_mm" if many else self.experts
        given = with_cache(self.model, self.cache)
        return self.model(ids, use_cache=True, logits_to_keep=1, **given)

    def feed(self, tokens: Sequence[int]) -> Tensor:
        out = self.called(torch.tensor([tokens], device=self.device))
        self.cache = cache_in(out)
        return out.logits[0, -1].float()

    # ---- in the middle of a sequence

    def extend(self, context: int) -> None:
        """Lets the cache hold `context` random rows."""
        self.begin()
        if self.cache is None:
            self.cache = self.make()
        fill(self.cache, self.model, self.held, context)
        self.held = context

    def rewind(self, tokens: int) -> None:
        self.cache.crop(-tokens)


class Packed(Transformers):
    """A model that attends by our op, and a PackedCache in its dtype, whose rows stay in place.

    Its steps are replayed where fuse_(model, cache=...) has seen to that.
    """

    def __init__(self, name: str, model: nn.Module, exact: bool = True) -> None:
        make = lambda: PackedCache(model.config)  # noqa: E731
        super().__init__(name, model, exact, make=make, attention="metalmm")

    def called(self, ids: Tensor) -> Any:
        if self.cache is None:
            self.reset()
        first, count = self.cache.get_seq_length(), ids.shape[1]
        positions = torch.arange(first, first + count, device=ids.device)[None]
        given = {"position_ids": positions, "logits_to_keep": 1, "use_cache": True}
        return self.model(input_ids=ids, **given, **with_cache(self.model, self.cache))


class Static(Transformers):
    """A model and a cache of constant size; a single token is fed by `step`, made at the first."""

    prefills = False

    def __init__(
        self,
        name: str,
        model: nn.Module,
        exact: bool = True,
        length: int = LENGTH,
        make_sized: Callable[[int], Any] | None = None,
        **others: Any,
    ) -> None:
        """length: tokens that the cache holds, or that it holds beyond those of extend(); attention
        walks over all of them. make_sized(length) is the cache; None: a StaticCache."""
        super().__init__(name, model, exact, **others)
        self.length, self._make_sized = length, make_sized or self._static
        self._step: Step | None = None

    def _static(self, length: int) -> Any:
        from transformers import StaticCache

        return StaticCache(config=self.model.config, max_cache_len=length)

    def reset(self) -> None:
        self.begin()
        if self.cache is None:
            self.cache = self._make_sized(self.length)
        else:
            self.cache.reset()

    def run(self, ids: Tensor) -> Tensor:
        """The model's own logits [1, 1, vocabulary]."""
        return self.called(ids).logits

    def make_step(self) -> Step:
        """run() of one token in the form of this system. The cache holds a sequence already."""
        return self.run

    def feed(self, tokens: Sequence[int]) -> Tensor:
        if self.cache is None:
            self.reset()
        ids = torch.tensor([tokens], device=self.device)
        if len(tokens) > 1:
            return self.run(ids)[0, -1].float()
        if self._step is None:
            self._step = self.make_step()
        return self._step(ids)[0, -1].float()

    def extend(self, context: int) -> None:
        """The cache is made anew, and what is captured of it."""
        self.begin()
        slots = -(-(context + self.length) // MULTIPLE) * MULTIPLE
        self.cache, self._step = self._make_sized(slots), None
        fill(self.cache, self.model, 0, context)

    def rewind(self, tokens: int) -> None:
        for length in counts(self.cache):
            length.sub_(tokens)


def counts(cache: Any) -> list[Tensor]:
    """The counters of a cache of constant size, all of which move with a token: the length of each
    layer of StaticCache; the last slot and the length that the layers of ours share. Recurrent
    layers count nothing."""
    names = ("cumulative_length", "last_and_length")
    held = []
    for layer in cache.layers:
        name = next((n for n in names if hasattr(layer, n)), None)
        if name is not None or not hasattr(layer, "recurrent_states"):
            held.append(getattr(layer, name or names[0]))
    return list({id(t): t for t in held}.values())


class Graph(Static):
    """The kernels of the eager step, captured once by the CUDA driver and replayed."""

    is_eager = False

    def make_step(self) -> Step:
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        before = [length.clone() for length in counts(self.cache)]
        # Twice before: what is compiled at the first call is compiled then.
        graph, logits = captured(lambda: self.run(ids), lambda: [self.run(ids) for _ in range(2)])
        # The tokens of the warm-up are masked out again, and overwritten by the next ones. States
        # of recurrent layers keep them, which changes no time.
        for length, was in zip(counts(self.cache), before, strict=True):
            length.copy_(was)

        def replay(given: Tensor) -> Tensor:
            ids.copy_(given)
            graph.replay()
            return logits

        return replay


# ---- rows of a cache


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


def fill(cache: Any, model: Any, start: int, stop: int) -> None:
    """Rows of the positions from start to stop, in every layer."""
    like = model.model.norm.weight
    for layer in range(model.config.num_hidden_layers):
        cache.update(*random_rows(model.config, layer, start, stop, like), layer)


def rounded(rows: Tensor, format: str) -> Tensor:
    """Rows [..., D] as a format has them, by the native quantizer."""
    if (dtype := formats.DTYPES.get(format)) is not None:
        return rows.to(dtype).to(rows.dtype)
    ops, size = torch.ops.metalmm, rows.shape[-1]
    packed = ops.quantize(rows.cpu().float().reshape(-1, size), format)
    return ops.dequantize(packed, format, size).view(rows.shape).to(rows)


def held(rows: Tensor, name: str) -> Tensor:
    """The values that a cache gives back for these: `name` is that of its rows, as in pair_of."""
    kind, is_rotated = rows_of(name)
    if not is_rotated:
        return rounded(rows, kind.name)
    turned = torch.ops.metalmm.hadamard(rows.float())
    back: Tensor = torch.ops.metalmm.hadamard(rounded(turned, kind.name))
    return back.to(rows.dtype)


def rounded_cache(format: str) -> Any:
    """Keys and values as the formats of a cache have them, in the dtype of the model."""
    from transformers import DynamicCache

    class RoundedCache(DynamicCache):
        def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            given = map(held, (k, v), pair_of(format))
            return super().update(*given, layer_idx, *args, **kwargs)

    return RoundedCache()
