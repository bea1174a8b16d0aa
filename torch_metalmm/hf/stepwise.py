"""generate()'s steps one at a time, for a caller that chooses the tokens, between other work.

A prompt may have images or whatever else the model's generate() takes: transformers prepares the
inputs of each step, as in its own loop (GenerationMixin._sample).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ..models.cache_argument import cache_of_generate
from ..models.last_prompt import forget_prompt

Steps = Generator[Tensor, int, None]


def stepwise(model: Any, cache: Any, **inputs: Any) -> Steps:
    """A generator of logits f32 [1, vocabulary]: behind the prompt, then behind each token sent.

    inputs: arguments of generate() that say what the prompt is: input_ids int64 [1, S],
    attention_mask, pixel_values and their like. cache: an empty one. The prompt is read in one
    forward when the first logits are asked for. What the model raises, a step raises.
    """
    given = {cache_of_generate(): cache, "use_cache": True, "cache_implementation": None}
    given["max_new_tokens"] = 1  # which nothing reads: the caller knows the end
    steps: Steps = model.generate(**inputs, **given, custom_generate=_steps)
    return steps


def _steps(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **given: Any,
) -> Steps:
    try:
        out = model._prefill(input_ids, generation_config, given, is_first_iteration=True)
        while True:
            token = yield out.logits[:, -1].float()
            given = model._update_model_kwargs_for_generation(out, given)
            input_ids = torch.cat([input_ids, input_ids.new_tensor([[token]])], 1)
            step = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **given)
            out = model(**step, return_dict=True)
    finally:
        forget_prompt(model)
