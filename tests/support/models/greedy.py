"""transformers' own answers, each token the likeliest, from no cache: what others must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def greedy(model: Any, ids: Sequence[int], new: int, **options: Any) -> list[int]:
    """The tokens that follow these, `new` at most. options: generate()'s."""
    given = torch.tensor([[*ids]])
    options |= {"attention_mask": torch.ones_like(given), "do_sample": False}
    with torch.inference_mode():
        out = model.generate(input_ids=given, max_new_tokens=new, **options)
    return [int(token) for token in out[0, len(ids) :]]


def greedy_text(model: Any, tokenizer: Any, ids: Sequence[int], new: int, **options: Any) -> str:
    """Their text, without bytes at its end that are no character."""
    tokens = greedy(model, ids, new, **options)
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("\ufffd")


def greedy_chat(model: Any, tokenizer: Any, messages: list[dict[str, Any]], new: int) -> str:
    """The answer to a chat, by the tokenizer's own template."""
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return greedy_text(model, tokenizer, given["input_ids"], new)
