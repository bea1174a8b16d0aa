"""Steps of generate() one at a time, of prompts with images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from seeing_models import SEEING, prompt_of, seeing

from torch_metalmm import PackedCache, fuse_, quantize_
from torch_metalmm.hf.stepwise import stepwise
from torch_metalmm.tools.sequence import keeps_entries

COUNT = 12


def generated(model: Any, given: dict[str, Any]) -> list[int]:
    with torch.no_grad():
        ids = model.generate(**given, max_new_tokens=COUNT, do_sample=False)
    return list(ids[0, given["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("kind", SEEING)
def test_tokens_are_those_of_generate_whatever_runs_between_steps(kind: str) -> None:
    model = quantize_(seeing(kind), "q8_0", progress=False)
    prompts = [prompt_of(kind, seed) for seed in range(2)]
    want = [generated(model, given) for given in prompts]
    fuse_(model, cache="f32")  # which an image that the model has seen must not keep from fusing
    assert keeps_entries(model, states=True)
    with torch.inference_mode():
        steps = [stepwise(model, PackedCache(model.config, "f32"), **given) for given in prompts]
        got: list[list[int]] = [[], []]
        for i in range(COUNT):
            for tokens, step in zip(got, steps, strict=True):
                logits = step.send(tokens[-1]) if i else next(step)
                tokens.append(int(logits.argmax()))
            model(input_ids=torch.tensor([[30, 31, 32, 33]]))
    assert got == want
