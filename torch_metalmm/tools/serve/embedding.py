"""Texts as vectors: what a model's last layer has for their tokens, as one of length 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import ApiError
from .prompts import checked, tokens_of, vocabulary_of

POOLINGS = ("mean", "cls", "last")
_BATCH = 32  # texts a forward


def pooling_of(folder: Path, generates: bool) -> str:
    """As the folder's sentence-transformers module says; else last where it generates, or mean.

    ValueError: the module asks for another kind.
    """
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return "last" if generates else "mean"
    config = json.loads(file.read_text(encoding="utf-8"))
    modes = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
    asked = [k for k in config if k.startswith("pooling_mode_") and config[k] is True]
    for key in asked:
        kind = modes.get(key.removeprefix("pooling_mode_"))
        if kind is not None and len(asked) == 1:
            return kind
    raise ValueError(f"{file}: {', '.join(asked) or 'no kind'}; must be one of {', '.join(modes)}")


class Embedder:
    """Of one model and tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, pooling: str, context: int | None) -> None:
        """context: the most tokens of a text. pooling: of POOLINGS."""
        self._model, self._tokenizer = model, tokenizer
        self._base = getattr(model, "base_model", model)  # without a head for tokens
        self._pooling, self._context = pooling, context

    def tokens_of(self, inputs: list[str] | list[list[int]]) -> list[list[int]]:
        """ApiError 400: a text is too long, or has tokens that the model does not know."""
        size, found = vocabulary_of(self._model), []
        for given in inputs:
            ids = given if isinstance(given, list) else tokens_of(self._tokenizer, given, "input")
            if not ids:
                raise ApiError(400, "input: no tokens", "input")
            if self._context is not None and len(ids) > self._context:
                message = f"input: {len(ids)} tokens; the model reads {self._context}"
                raise ApiError(400, message, "input", "context_length_exceeded")
            found.append(checked(ids, size, "input"))
        return found

    def vectors(self, texts: list[list[int]]) -> list[Tensor]:
        """[size] f32 of length 1 for each. Texts of about one length share a forward."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        found: dict[int, Tensor] = {}
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            found |= zip(part, self._pooled([texts[i] for i in part]), strict=True)
        return [found[i] for i in range(len(texts))]

    def _pooled(self, texts: list[list[int]]) -> Tensor:
        most = max(map(len, texts))
        # Zeros come last: a causal model's tokens do not see them, another's are told by the mask.
        ids = torch.tensor([text + [0] * (most - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (most - len(text)) for text in texts])
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        states = self._base(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        if self._pooling == "mean":
            weights = mask[..., None]
            pooled = (states * weights).sum(1) / weights.sum(1)
        else:
            places = mask.sum(1) - 1 if self._pooling == "last" else torch.zeros(len(texts))
            pooled = states[torch.arange(len(texts)), places.long()]
        return torch.nn.functional.normalize(pooled, dim=-1).cpu()
