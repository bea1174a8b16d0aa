"""Ways to run a transformers model token by token: eager, compiled, and as a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from torch_metalmm import PackedCache
from torch_metalmm.models.cache_argument import cache_in, with_cache

Step = Callable[[Tensor], Tensor]
LENGTH = 64


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
        self, name: str, model: nn.Module, exact: bool = True, experts: str | None = None
    ) -> None:
        """experts: how a mixture multiplies by its dense experts, for a token."""
        self.name, self.model, self.exact, self.experts = name, model, exact, experts
        if experts == "batched_mm":  # which has a copy of the weights for each token
            self.prefills = False
        self.weight_bytes = sum(p.nbytes for p in model.parameters())
        self.device = next(model.parameters()).device
        self.cache: Any = None

    def reset(self) -> None:
        self.cache = None

    def feed(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self.device)
        self.choose(ids)
        given = with_cache(self.model, self.cache)
        out = self.model(ids, use_cache=True, logits_to_keep=1, **given)
        self.cache = cache_in(out)
        logits: Tensor = out.logits[0, -1].float()
        return logits

    def choose(self, ids: Tensor) -> None:
        """Let the model, which may be that of other systems too, multiply as this one does."""
        if self.experts is not None:
            many = self.experts == "batched_mm" and ids.shape[1] > 1
            config = cast(Any, self.model).config
            config._experts_implementation = "grouped_mm" if many else self.experts


class Packed(Transformers):
    """A model that attends by our op, and a PackedCache in its dtype, whose rows stay in place."""

    def __init__(self, name: str, model: nn.Module, exact: bool = True) -> None:
        super().__init__(name, model, exact)
        module: Any = model
        module.set_attn_implementation("metalmm")
        self.reset()

    def reset(self) -> None:
        self.cache = PackedCache(self.model.config)


class Static(Transformers):
    """A model and a cache of constant size; a single token is fed by `step`, made at the first."""

    prefills = False

    def __init__(
        self,
        name: str,
        model: nn.Module,
        exact: bool = True,
        length: int = LENGTH,
        make: Callable[[int], Any] | None = None,
    ) -> None:
        """length: tokens that the cache holds; attention walks over all of them. make(length) is
        the cache; None: a StaticCache."""
        super().__init__(name, model, exact)
        self.length = length
        self._make = make or self._static
        self._step: Step | None = None

    def _static(self, length: int) -> Any:
        from transformers import StaticCache

        return StaticCache(config=self.model.config, max_cache_len=length)

    def reset(self) -> None:
        if self.cache is None:
            self.cache = self._make(self.length)
        else:
            self.cache.reset()

    def run(self, ids: Tensor) -> Tensor:
        """The model's own logits [1, 1, vocabulary]."""
        model: Any = self.model
        self.choose(ids)
        given = with_cache(model, self.cache)
        out = model(ids, use_cache=True, logits_to_keep=1, **given)
        logits: Tensor = out.logits
        return logits

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
    """What a cache of constant size counts, all of which moves with a token: the length of each
    layer of StaticCache; the last slot and the length that the layers of ours share."""
    names = ("cumulative_length", "last_and_length")
    held = [getattr(layer, next(n for n in names if hasattr(layer, n))) for layer in cache.layers]
    return list({id(t): t for t in held}.values())


class Compiled(Static):
    """The step by torch.compile; on cuda in its graphs (reduce-overhead)."""

    is_eager = False

    def make_step(self) -> Step:
        from torch._inductor import config

        config.cpp.enable_kernel_profile = True  # names for the profiler

        def step(ids: Tensor) -> Tensor:
            return self.run(ids)

        # Code of its own: dynamo keeps what it compiles by the code, and tries one after the other.
        own = FunctionType(step.__code__.replace(), globals(), "step", None, step.__closure__)
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        compiled = torch.compile(own, fullgraph=True, mode=mode)

        def call(ids: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(ids)

        return call


class Graph(Static):
    """The kernels of the eager step, captured once by the CUDA driver and replayed."""

    is_eager = False

    def make_step(self) -> Step:
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        before = [length.clone() for length in counts(self.cache)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles what is compiled at the first call
                self.run(ids)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls may break the capture: NCCL's watchdog asks for events.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self.run(ids)
        # What was fed to warm up is masked out again, and overwritten by the next tokens.
        for length, was in zip(counts(self.cache), before, strict=True):
            length.copy_(was)

        def replay(given: Tensor) -> Tensor:
            ids.copy_(given)
            graph.replay()
            return logits

        return replay
