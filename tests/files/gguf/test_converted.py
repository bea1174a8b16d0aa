"""Files of llama.cpp's converter against transformers, recorded: every value is the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from converted_models import CASES, VOCABULARY, logits, outcomes, random_model, read_record
from gguf_files import load_quietly, write_gguf
from places import ROOT

# 62 layers, and sums of many norms, amplify the rounding of the original itself.
AMPLIFIES = ("gemma3-27b", "gemma4-shared")
# Tied heads of T5, whose scale no key says: {case: whether the model scales}.
UNSAID = {"t5": True, "t5-gated": True, "t5-unscaled": False, "mt5": False}


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("case", CASES)
def test_converted_file_equals_transformers(tmp_path: Path, case: str) -> None:
    architecture, values, tensors = read_record(case)
    prefix = f"{architecture}."
    stated = {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
    words = {key: v for key, v in values.items() if not key.startswith(prefix)} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*(chr(33 + i) for i in range(VOCABULARY - 1)), "!#"],
        "tokenizer.ggml.merges": ["! #"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    path = write_gguf(
        tmp_path / "model.gguf",
        architecture,
        {name: (value, "f32") for name, value in tensors.items()},
        stated,
        words,
        tokenizer=False,
    )
    loaded, _, warned = load_quietly(path)
    assert ["scale_decoder_outputs" in text for text in warned] == [True] * (case in UNSAID)
    if case in UNSAID:
        loaded.config.scale_decoder_outputs = UNSAID[case]
    original = random_model(case)
    expected = logits(original)
    loaded = loaded.base_model if CASES[case][0].endswith("Model") else loaded
    error = (logits(loaded) - expected).abs().max().item()
    print(f"{case}: {error:.1e} of {expected.abs().max():.1f}")
    most = 1e-5
    if case in AMPLIFIES:
        most = 2 * (logits(original.double()) - expected).abs().max().item()
    assert torch.isfinite(expected).all() and error <= most < 2e-3


def test_the_page_says_what_becomes_of_each_class() -> None:
    assert outcomes() in (ROOT / "docs/guide/gguf.md").read_text()
