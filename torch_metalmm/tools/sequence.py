"""Which tokens a model has read, and the cache that holds them: one owner of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models.cache_argument import cache_argument, with_cache
from ..models.fuse.layers import fused_layer

# Tokens of a prompt between two looks at whether to stop: one look takes 0.3 s for a model of 0.2 B
# parameters on two cores.
CHUNK = 512


class Sequence:
    """The tokens of one text and their cache, under `generate`, `chat` and `serve`.

    The next text is compared with the tokens, and the cache cropped to what both begin with; where
    its layers cannot be cropped, sliding windows and recurrent ones, it is read anew. After an
    error or interrupt within a forward, when some layers have a token and others not, there is
    nothing to go on from, and the sequence is empty.
    """

    def __init__(self, model: Any, format: str | None = None) -> None:
        """format: of a PackedCache, whose attention the model has; None: transformers' cache."""
        self.model, self._format = model, format
        self.keeps = keeps_cache(model)
        self.cache: Any = None
        self.tokens: list[int] = []  # tokens whose keys and values the cache has
        self._long_from = long_from(model)
        self._is_long = False  # which of a longrope's factors turned the cache's keys
        self._logits = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}

    def reuse(self, ids: list[int]) -> int:
        """Be the longest beginning of the text that is held, without its last token; its length."""
        from ..hf.drafts import agreeing

        if not self.keeps:
            return 0
        is_long = self._long_from is not None and len(ids) >= self._long_from
        if self.cache is None or is_long != self._is_long:
            self.cache, self.tokens, self._is_long = self.new_cache(), [], is_long
        same = agreeing(self.tokens, ids[:-1])  # the last is always read
        surplus = len(self.tokens) - same
        if surplus:
            try:
                self.cache.crop(-surplus)
            except (RuntimeError, ValueError, NotImplementedError, AttributeError):
                self.cache, same = self.new_cache(), 0
        self.tokens = self.tokens[:same]
        return same

    def read_on(self, ids: list[int]) -> bool:
        """Read the next part of the text after reuse(); False: what is left is for one forward."""
        done = len(self.tokens)
        # A part that ends where the short factors hold would get these, and the rest the long.
        least = max(0, self._long_from - done) if self._is_long and self._long_from else 0
        if not self.keeps or len(ids) - done <= (least or CHUNK):
            return False
        self.read(ids[done : done + min(max(CHUNK, least), len(ids) - done - 1)])
        return True

    def read(self, ids: list[int]) -> Tensor:
        """Append these tokens; the logits [1, S, vocabulary], of models that can the last alone."""
        if self.cache is None:
            self.cache = self.new_cache()
        part = torch.tensor([ids], device=self.model.device)
        try:
            logits: Tensor = self.model(
                input_ids=part,
                use_cache=True,
                **with_cache(self.model, self.cache),
                **self._logits,
            ).logits
        except BaseException:
            self.forget()
            raise
        self.tokens = self.tokens + ids
        return logits

    def advanced(self, ids: list[int]) -> None:
        """generate() has appended to the cache, of a text that begins with these tokens."""
        if self.cache is not None:
            self.tokens = ids[: int(self.cache.get_seq_length())]

    def forget(self) -> None:
        self.cache, self.tokens = None, []

    def new_cache(self) -> Any:
        """An empty one, as the sequence's are."""
        from transformers import DynamicCache

        from ..hf.cache import PackedCache

        config = self.model.config
        if self._format is None:
            return DynamicCache(config=config)
        return PackedCache(config, self._format)


def keeps_entries(model: Any, states: bool = False) -> bool:
    """Whether every layer's cache has keys and values of each token, or of the last ones.

    Or it has none, because the layer reads those of another. states: recurrent ones may be there,
    too, in layers that fuse_ has changed: their ops have the same bits in any parts of a text.
    """
    import inspect

    from transformers import DynamicCache
    from transformers.cache_utils import (
        DummyLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionLayer,
    )

    takes = inspect.signature(model.forward).parameters
    if not keeps_cache(model) or not {"attention_mask", "position_ids"} <= set(takes):
        return False
    with_entries = DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer
    layers = DynamicCache(config=model.config).layers
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    if recurrent:
        fused = [each for module in model.modules() if (each := fused_layer(module)) is not None]
        mixers = sum(each.recipe.mixer is not None for each in fused)  # mixers that our ops compute
        if not states or len(recurrent) != mixers:
            return False
    kinds = (*with_entries, DummyLayer, LinearAttentionLayer)
    return (
        any(type(x) in with_entries for x in layers)
        and all(type(x) in kinds for x in layers)
        and long_from(model) is None
    )


def keeps_cache(model: Any) -> bool:
    """Whether the model goes on from a cache that it is given."""
    takes = cache_argument(type(model).forward)
    return takes is not None and not model.config.is_encoder_decoder


def context_of(model: Any, given: int | None = None) -> int | None:
    """The tokens that a prompt and its answer may have together: those that the model was made for,
    and at most so many as are given; None: no limit is known."""
    own = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min((n for n in (own, given) if isinstance(n, int) and n > 0), default=None)


def room_behind(name: str, count: int, context: int | None, most: int | None) -> int:
    """Tokens that may follow so many of `name`, at most `most`, where it is given.

    ValueError: none."""
    if context is not None and count >= context:
        raise ValueError(
            f"{name}: {count} tokens; the context has {context}, the answer's included"
        )
    limits = most, None if context is None else context - count
    return min((limit for limit in limits if limit is not None), default=1 << 30)


def long_from(model: Any) -> int | None:
    """The number of tokens from which a longrope turns all keys by its long factors; None: no such.

    A forward chooses by its last position, and transformers reads a prompt in one. The dynamic
    type, which chooses too, does so beyond max_position_embeddings alone, where no prompt may be.
    """
    given = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [given, *(kind for kind in given.values() if isinstance(kind, dict))]  # layer types'
    lengths = [
        kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min(lengths) + 1 if lengths else None
