"""Texts as vectors: what a model's last layer has for their tokens, as one of length 1."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from ...models.cache_argument import with_cache
from ..sequence import keeps_entries
from .engine import Stopped, stoppable
from .errors import too_long, wrong
from .tokens import Tokens

_FORWARD = 1024  # tokens that texts of one forward have together
_MOST = 8192  # tokens of a text: OpenAI's limit
_REQUEST = 300_000  # tokens of a request: OpenAI's limit


class Embedder:
    """Embeddings of texts by one model and tokenizer."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        pooling: str,
        context: int | None,
        tokens: Tokens | None = None,
    ) -> None:
        """context: the most tokens of a text. pooling: of sentences.POOLINGS. tokens: Prompts'."""
        self._model, self._tokens = model, tokens or Tokens(model, tokenizer)
        self._base = getattr(model, "base_model", model)  # without a head for tokens
        self._pooling, self._most = pooling, min(context or _MOST, _MOST)
        takes = inspect.signature(self._base.forward).parameters
        self._options = {"use_cache": False} if "use_cache" in takes else {}
        self._reads_on = _reads_on(self._base)

    def size_of(self, wanted: int | None) -> int | None:
        """How many numbers of a vector are told, None: all. ApiError 400: it has not so many."""
        size = int(self._base.config.get_text_config().hidden_size)
        if wanted is not None and wanted > size:
            raise wrong("dimensions", f"{wanted}; the model's vectors have {size}")
        return wanted

    def tokens_of(self, inputs: list[str] | list[list[int]]) -> list[list[int]]:
        """ApiError 400: a text is too long, or has tokens that the model does not know."""
        found, count = [], 0
        for given in inputs:
            ids = self._tokens.of(given, "input", self._most) if isinstance(given, str) else given
            if not ids:
                raise wrong("input", "no tokens")
            if len(ids) > self._most:
                raise too_long(
                    "input", f"{len(ids)} tokens; at most {self._most} of a text are read"
                )
            found.append(self._tokens.checked(ids, "input"))
            count += len(ids)
            if count > _REQUEST:
                raise too_long("input", f"more than {_REQUEST} tokens")
        return found

    def vectors(
        self, texts: list[list[int]], is_over: Callable[[], bool], size: int | None = None
    ) -> Generator[None, None, list[Tensor]]:
        """[size] f32 of length 1 for each; nothing where it is over before the end.

        size: numbers of a vector, the first of the model's; None: all.

        Texts of about one length share a forward. A forward for each part, so that answers go on
        between them and a client may leave; it may so in a forward, too.
        """
        found: dict[int, Tensor] = {}
        for part in _shared([len(text) for text in texts]):
            pooled = yield from self._pooled([texts[i] for i in part], is_over)
            if pooled is None:
                return []
            vectors = torch.nn.functional.normalize(pooled[:, :size], dim=-1)
            found |= zip(part, vectors.cpu(), strict=True)
        return [found[i] for i in range(len(texts))]

    def _pooled(
        self, texts: list[list[int]], is_over: Callable[[], bool]
    ) -> Generator[None, None, Tensor | None]:
        most = max(map(len, texts))
        # Zeros come last: a causal model's tokens do not see them, another's are told by the mask.
        ids = torch.tensor([text + [0] * (most - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (most - len(text)) for text in texts])
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        options, size = self._options, most
        if most > _FORWARD and self._reads_on:
            from transformers import DynamicCache

            cache = DynamicCache(config=self._base.config)
            options, size = {"use_cache": True, **with_cache(self._base, cache)}, _FORWARD
        states = []
        for end in range(size, most + size, size):
            try:
                with stoppable(self._base, is_over):
                    out = self._base(
                        input_ids=ids[:, end - size : end], attention_mask=mask[:, :end], **options
                    )
            except Stopped:
                return None
            states.append(out.last_hidden_state.float())
            yield
        return self._of_states(torch.cat(states, dim=1), mask)

    def _of_states(self, states: Tensor, mask: Tensor) -> Tensor:
        """[T, size] of [T, tokens, size]; mask: [T, tokens], 1 of a text and 0 after it."""
        if self._pooling == "mean":
            weights = mask[..., None]
            pooled = (states * weights).sum(1) / weights.sum(1)
        else:
            count = len(mask)
            places = mask.sum(1) - 1 if self._pooling == "last" else torch.zeros(count)
            pooled = states[torch.arange(count), places.long()]
        return pooled


def _reads_on(base: Any) -> bool:
    """Whether a text may be read in parts: no token sees those after it, and a cache has the rest.

    Models say so at their attention; one that says nothing gets its text in one part.
    """
    said = [bool(module.is_causal) for module in base.modules() if hasattr(module, "is_causal")]
    return bool(said) and all(said) and keeps_entries(base)


def _shared(lengths: list[int]) -> Iterator[list[int]]:
    """The texts of each forward, from the shortest on; each costs as much as the longest there."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and lengths[i] * (len(part) + 1) > _FORWARD:
            yield part
            part = []
        part.append(i)
    yield part
