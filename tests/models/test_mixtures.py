"""The formats of llama.cpp's mixtures, against what llama-quantize gave the same layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from mixtures import CASES, RECORDS, lines, matrices, skeleton

from bench.models.families import new_model, sizes
from torch_metalmm import MetalMMConfig
from torch_metalmm.models.mixtures import MIXTURES, resolve
from torch_metalmm.models.quantize import plan


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.filterwarnings("ignore:K is not a multiple")
@pytest.mark.parametrize("case", CASES)
def test_mixtures_are_those_of_llama_quantize(case: str) -> None:
    model, recorded = skeleton(case), json.loads(RECORDS.read_text())
    names = {layer: name for layer, (name, _) in matrices(model).items()}
    assert {row.split()[1] for row in recorded} == MIXTURES.keys()
    for mixture in MIXTURES:
        given = {names[job.name]: job.format for job in plan(model, mixture.upper())}
        missing = {name: "f32" for name in names.values() if name not in given}
        if model.config.tie_word_embeddings:
            missing.pop("output.weight", None)
        assert lines(given | missing) == recorded[f"{case} {mixture}"], mixture


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.filterwarnings("ignore:K is not a multiple")
def test_a_mixture_of_one_pattern_and_of_a_config(tmp_path: Path) -> None:
    new_model("llama", sizes(256, 256, 32, num_hidden_layers=1)).save_pretrained(tmp_path)
    asked = MetalMMConfig("Q5_K_M", {"*.q_proj": "q8_0", "*.up_proj": None})
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=asked)
    found = {n.rpartition(".")[2]: getattr(m, "format", None) for n, m in model.named_modules()}
    expected = {"embed_tokens": "q5_k", "q_proj": "q8_0", "k_proj": "q5_k", "v_proj": "q6_k"}
    expected |= {"up_proj": None, "down_proj": "q6_k", "lm_head": "q6_k"}
    assert expected.items() <= found.items()
    assert resolve("Q4_K_M") == "q4_k_m"
    with pytest.raises(ValueError, match="unknown 'q4_k_n'"):
        resolve("q4_k_n")
