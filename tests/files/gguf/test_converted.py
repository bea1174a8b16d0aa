"""Files of llama.cpp's converter against transformers, recorded: every value is the model's."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from converted_cases import HEAD, HEADS, UNSAID
from converted_models import CASES, VOCABULARY, logits, outcomes, random_model, read_record
from gguf_files import load_quietly, write_gguf
from places import ROOT

from torch_metalmm import load_gguf, save_gguf

# 62 layers, and sums of many norms, amplify the rounding of the original itself.
AMPLIFIES = ("gemma3-27b", "gemma4-shared")
# Tied heads of T5, whose scale no key says: {case: whether the model scales}.
SCALES = {"t5": True, "t5-gated": True, "t5-unscaled": False, "mt5": False}


def write_record(path: Path, case: str, more: tuple[str, ...] = (), **other: Any) -> Path:
    """The case's file, and in it vectors of ones of these names, and other values of its keys."""
    architecture, values, tensors = read_record(case)
    tensors |= {name: np.ones(HEADS * HEAD, np.float32) for name in more}
    prefix = f"{architecture}."
    stated = {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
    stated |= other
    words = {key: v for key, v in values.items() if not key.startswith(prefix)} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*(chr(33 + i) for i in range(VOCABULARY - 1)), "!#"],
        "tokenizer.ggml.merges": ["! #"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    return write_gguf(
        path,
        architecture,
        {name: (value, "f32") for name, value in tensors.items()},
        stated,
        words,
        tokenizer=False,
    )


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("case", CASES)
def test_converted_file_equals_transformers(tmp_path: Path, case: str) -> None:
    path = write_record(tmp_path / "model.gguf", case)
    loaded, _, warned = load_quietly(path)
    assert ["scale_decoder_outputs" in text for text in warned] == [True] * (case in SCALES)
    if case in SCALES:
        loaded.config.scale_decoder_outputs = SCALES[case]
    config = loaded.config.to_dict()
    for name, value in UNSAID.get(case, {}).items():
        found = reduce(lambda found, part: found.get(part), name.split("."), config)
        as_f32 = np.float32 if isinstance(value, float) else lambda given: given
        assert as_f32(found) == as_f32(value), name
    original = random_model(case)
    expected = logits(original)
    loaded = loaded.base_model if CASES[case][0].endswith("Model") else loaded
    error = (logits(loaded) - expected).abs().max().item()
    print(f"{case}: {error:.1e} of {expected.abs().max():.1f}")
    most = 1e-5
    if case in AMPLIFIES:
        most = 2 * (logits(original.double()) - expected).abs().max().item()
    assert torch.isfinite(expected).all() and error <= most < 2e-3


@pytest.mark.parametrize(
    ("case", "bias"), [("olmo", "attn_k.bias"), ("falcon-h1-plain", "attn_v.bias")]
)
def test_biases_that_the_converter_spoils_are_refused(tmp_path: Path, case: str, bias: str) -> None:
    """A model that has them is not written, either."""
    path = write_record(tmp_path / "model.gguf", case, (f"blk.1.{bias}",))
    with pytest.raises(ValueError, match=f"model.gguf: blk.1.{bias}: .* writes another bias"):
        load_gguf(path)
    if case == "olmo":
        config = random_model(case).config
        config.attention_bias = True
        with pytest.raises(ValueError, match=r"model: blk.0.attn_q.bias: .*; allowed: models with"):
            save_gguf(transformers.OlmoForCausalLM(config), None, tmp_path / "saved.gguf")


def test_a_granite_without_a_rotation_is_none(tmp_path: Path) -> None:
    path = write_record(tmp_path / "g.gguf", "granite", **{"rope.scaling.finetuned": False})
    with pytest.raises(ValueError, match=r"rope.scaling.finetuned is False; it must be True"):
        load_gguf(path)


def test_the_page_says_what_becomes_of_each_class() -> None:
    assert outcomes() in (ROOT / "docs/guide/gguf.md").read_text()
