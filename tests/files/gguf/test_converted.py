"""Files of llama.cpp's converter against transformers, recorded: every value is the model's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from converted_cases import UNSAID
from converted_models import CASES, class_of, logits, outcomes, random_model, write_record
from gguf_files import fields_of, load_quietly, mapped
from places import ROOT
from test_gguf_save import check_same_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from bench.models.families import family
from torch_metalmm import QuantEmbedding, QuantExperts, QuantLinear, save_gguf
from torch_metalmm.files.gguf.load import model_of, open_gguf
from torch_metalmm.files.gguf.rows import all_rows

# 62 layers, and sums of many norms, amplify the rounding of the original itself.
AMPLIFIES = ("gemma3-27b", "gemma4-shared")
# Tied heads of T5, whose scale no key says: {case: whether the model scales}.
SCALES = {"t5": True, "t5-gated": True, "t5-unscaled": False, "mt5": False}

# Layers whose weight transformers reads itself, which stay dense.
DENSE: dict[str, tuple[str, ...]] = {
    "mamba": ("embeddings", "dt_proj", "lm_head"),
    "mamba2": ("lm_head",),
    "falcon-mamba": ("embeddings", "dt_proj", "lm_head", "x_proj", "out_proj"),
}

# Keys that readers do not need: a rotation that is not scaled, no window, a number that llama.cpp
# has itself.
UNNEEDED = (
    *("command-r.rope.scaling.type", "cohere2.rope.scaling.type", "gemma3.rope.freq_base_swa"),
    *("phi3.rope.scaling.original_context_length", "phi3.attention.sliding_window"),
)
# What the converter takes of sizes that are the model's in published checkpoints, and not here.
OTHERWISE = {
    "granitehybrid.context_length": 96,  # the model's, not 2^20
    "cohere2.rope.dimension_count": 12,  # a head, not the width by the heads
    "qwen35.full_attention_interval": 2,  # what layer_types says
    "qwen35moe.full_attention_interval": 2,
    "qwen3next.full_attention_interval": 2,
    "ernie4_5-moe.expert_shared_feed_forward_length": 2 * 24,  # not the width by the key heads
}
# Whose converter writes files of another architecture.
ATTENTION_ALONE = ("granitehybrid-attention", "granitehybrid-attention-moe")
# Not written: a rotation by two lists; one that five frequencies do not tell from another.
UNWRITTEN = ("phi3-long", "llama3", *ATTENTION_ALONE)
# Whose numbers the converter puts into the weights: what is loaded is written.
MULTIPLIED = ("falcon-h1",)
# Cases whose models are written, one for each layout; keys of a latent are saved in another.
TYPES = {row.model_type for _, row in all_rows() if row.writes and not row.latent} | {"mistral"}
WRITTEN = [
    case
    for case, (name, values) in CASES.items()
    if not name.endswith("Model") and "text_config" not in values and case not in UNWRITTEN
    if class_of(case).config_class.model_type in TYPES
]


Load = Callable[[str], tuple[Path, Any, Any, list[str]]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """load(case): the recorded file and what load_gguf makes of it, once."""
    folder = tmp_path_factory.mktemp("converted")

    @cache
    def made(case: str) -> tuple[Path, Any, Any, list[str]]:
        path = write_record(folder / f"{case}.gguf", case)
        return path, *load_quietly(path)

    return made


@pytest.mark.parametrize("case", CASES)
def test_converted_file_equals_transformers(load: Load, case: str) -> None:
    path, loaded, _, warned = load(case)
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
    check_packed(case, loaded, path)


def check_packed(case: str, loaded: Any, path: Path) -> None:
    """Its matrices are packed, as f32 here; stacks of experts are views of the file."""
    with torch.device("meta"):
        plain = type(loaded)(loaded.config)
    modules = dict(plain.named_modules())
    # kv_b_proj is two stacks in the file.
    dense = ("kv_b_proj", ".router", ".wo", *DENSE.get(case.removesuffix("-biased"), ()))
    layers = {n for n, m in modules.items() if isinstance(m, nn.Linear | nn.Embedding | Conv1D)}
    packed = {n for n, m in loaded.named_modules() if isinstance(m, QuantLinear | QuantEmbedding)}
    assert packed == {n for n in layers if not n.endswith(dense)}
    experts = {n: m for n, m in loaded.named_modules() if isinstance(m, QuantExperts)}
    stacks = {n.rpartition(".")[0] for n, p in plain.named_parameters() if p.dim() == 3}
    assert experts.keys() == {n for n in stacks if not isinstance(modules[n], nn.Conv1d)}
    for module in experts.values():
        assert all(mapped(path, module.get_parameter(stack)) for stack in module.formats)


@pytest.mark.parametrize("case", WRITTEN)
def test_a_saved_file_is_the_converters(load: Load, tmp_path: Path, case: str) -> None:
    """Of the model, and of what is loaded from the file; but keys of a latent in another layout."""
    path, loaded, tokenizer, _ = load(case)
    for number, model in enumerate((random_model(case), loaded)):
        saved = tmp_path / f"{number}.gguf"
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        if case in MULTIPLIED and model is not loaded:
            with pytest.raises(ValueError, match="its config has .*_multiplier = "):
                save_gguf(model, tokenizer, saved)
            continue
        save_gguf(model, tokenizer, saved)
        check_same_file(saved, path, (*UNNEEDED, *OTHERWISE))
        if number == 0:
            made = fields_of(saved)
            assert all(made[key] == value for key, value in OTHERWISE.items() if key in made)


def test_halves_of_a_packed_matrix_are_apart(tmp_path: Path) -> None:
    """Rows of gate and up, which the model has in one; experts and their router."""
    for options in ({}, {"num_local_experts": 4, "num_experts_per_tok": 2}):
        model = family("granitemoehybrid", position_embedding_type="nope", **options)
        save_gguf(model, None, tmp_path / "saved.gguf", replace=True)
        loaded, _ = model_of(open_gguf(tmp_path / "saved.gguf"), "cpu", torch.float32)
        # Experts are in another layout, which test_a_saved_file_is_the_converters compares.
        state, of_loaded = (
            {n: t for n, t in m.state_dict().items() if ".experts." not in n}
            for m in (model, loaded)
        )
        assert state.keys() == of_loaded.keys()
        for name, value in of_loaded.items():
            wanted = state[name].float()
            # Files have exp of A_log: two roundings.
            most = 2.0**-23 * (1 + wanted.abs()) * name.endswith("A_log")
            assert bool(((value.float() - wanted).abs() <= most).all()), name


@pytest.mark.parametrize("case", ATTENTION_ALONE)
def test_hybrids_without_a_state_are_not_written(tmp_path: Path, case: str) -> None:
    with pytest.raises(ValueError, match="layer_types .*; allowed in files of granitehybrid: some"):
        save_gguf(random_model(case), None, tmp_path / "saved.gguf")


def test_a_model_of_biases_that_the_converter_spoils_is_not_written(tmp_path: Path) -> None:
    config = random_model("olmo").config
    config.attention_bias = True
    with pytest.raises(ValueError, match=r"model: blk.0.attn_q.bias: .*; allowed: models with"):
        save_gguf(transformers.OlmoForCausalLM(config), None, tmp_path / "saved.gguf")


def test_the_page_says_what_becomes_of_each_class() -> None:
    assert outcomes() in (ROOT / "docs/guide/gguf.md").read_text()
