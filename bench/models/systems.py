"""Ways to run a transformers model token by token: eager, and as a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_metalmm import PackedCache
from torch_metalmm.models.cache_argument import cache_in, with_cache

from ..devices import captured

Step = Callable[[Tensor], Tensor]
LENGTH = 64
# Errors of logits against float64 where activations are rounded, and where rows of a cache are. A
# wrong layer is off by about 1.
ROUNDED_LIMIT, CACHE_LIMIT = 0.1, 0.5


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
    limit = ROUNDED_LIMIT

    def __init__(
        self,
        name: str,
        model: nn.Module,
        exact: bool = True,
        *,
        make: Callable[[], Any] | None = None,
        attention: str | None = None,
        experts: str | None = None,
    ) -> None:
        """make() is an empty cache; None: the model's own. attention: transformers' name of the
        function by which this system attends. experts: how a mixture multiplies by its dense
        experts, for a token."""
        self.name, self.model, self.exact, self.experts = name, model, exact, experts
        if experts == "batched_mm":  # which has a copy of the weights for each token
            self.prefills = False
        self.make, self.attention = make, attention
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


class Packed(Transformers):
    """A model that attends by our op, and a PackedCache, whose rows stay in place.

    Its steps are replayed where fuse_(model, cache=...) has seen to that.
    """

    def __init__(
        self, name: str, model: nn.Module, exact: bool = True, format: str | None = None
    ) -> None:
        """format: the cache's; None: the model's dtype."""
        make = lambda: PackedCache(model.config, format)  # noqa: E731
        super().__init__(name, model, exact, make=make, attention="metalmm")
        if format is not None:
            self.limit = CACHE_LIMIT

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
        **others: Any,
    ) -> None:
        """length: tokens that the cache holds; attention walks over all of them."""
        super().__init__(name, model, exact, **others)
        self.length = length
        self._step: Step | None = None

    def reset(self) -> None:
        self.begin()
        if self.cache is None:
            from transformers import StaticCache

            self.cache = StaticCache(config=self.model.config, max_cache_len=self.length)
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


def counts(cache: Any) -> list[Tensor]:
    """The lengths of the layers of a StaticCache; recurrent layers count nothing."""
    name = "cumulative_length"
    layers = (x for x in cache.layers if hasattr(x, name) or not hasattr(x, "recurrent_states"))
    return [getattr(layer, name) for layer in layers]


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
