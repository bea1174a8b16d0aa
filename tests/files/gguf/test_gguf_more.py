"""Architectures that transformers does not read: random models of transformers, converted here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from gguf_cases import CASES
from gguf_files import load_quietly, mapped, tensors_of, write_gguf
from gguf_models import LAYERS, convert, random_hf
from test_gguf import check_equals_reference
from test_gguf_save import check_same_file, check_same_model

from torch_metalmm import QuantEmbedding, QuantExperts, QuantLinear, load_gguf, save_gguf

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.usefixtures("quiet_transformers"),
]

DECODED = "decoded to torch.float32, because the model does not use them as plain matrices"

TIED = ("command-r", "command-r+", "cohere2", "gemma", "granite", "smollm3")


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_equals_its_original(tmp_path: Path, case: str) -> None:
    """And is saved as the file that it was read from."""
    original = random_hf(case, tied=case in TIED)
    path = convert(original, case, tmp_path / "model.gguf")
    model, tokenizer, warned = load_quietly(path)
    turned = LAYERS if CASES[case].stacks else 0  # keys of a latent, which are decoded
    assert [w.split(": ")[0] for w in warned] == [DECODED] * bool(turned)
    assert type(model) is type(original)
    seen = [m for name, m in original.named_modules() if ".router" not in name]  # dense
    layers = [m for m in seen if isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
    # The gate of a shared expert is one row of a dense vector in the file.
    layers = [m for m in layers if getattr(m, "out_features", 0) != 1]
    packed = [m for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)]
    assert len(packed) == len(layers) - turned
    check_experts(model, original, path)
    ids = torch.randint(0, 256, (2, 19), generator=torch.Generator().manual_seed(1))
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    with torch.inference_mode():
        made = model.generate(ids, **greedy)
        assert torch.equal(made, original.generate(ids, **greedy))
    check_equals_reference(model, original, ids)
    if not CASES[case].stacks:  # which are saved as one matrix
        save_gguf(model, tokenizer, tmp_path / "saved.gguf")
        check_same_file(tmp_path / "saved.gguf", path)
        check_same_model(tmp_path / "saved.gguf", model, tokenizer)


def check_experts(model: Any, original: Any, path: Path) -> None:
    """Each stack of experts is a view of the file."""
    stacked = [n for n, p in original.named_parameters() if p.dim() == 3]
    experts = {n: m for n, m in model.named_modules() if isinstance(m, QuantExperts)}
    assert experts.keys() == {n.rpartition(".")[0] for n in stacked}
    for module in experts.values():
        assert tuple(module.formats) == ("gate_proj", "up_proj", "down_proj")
        assert all(mapped(path, module.get_parameter(stack)) for stack in module.formats)


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("logit_scale", {}, "granite.logit_scale is missing"),
        ("embedding_scale", {}, "granite.embedding_scale is missing"),
        ("block_count", {}, "granite.block_count is missing"),
        ("attention.head_count", {}, "granite.attention.head_count is missing"),
        ("attention.head_count_kv", {"attention.head_count_kv": [2, 2]}, "has 2 elements"),
        ("", {"expert_count": 4}, "granite.expert_count is known for other architectures only"),
        ("", {"attention.sliding_window": 4}, "granite.attention.sliding_window is known for"),
        ("", {"rope.dimension_count": "x"}, "no config of its metadata"),
        ("attention.head_count", {"attention.head_count": 0}, "head_count = 0; allowed: integers"),
    ],
)
def test_metadata_that_makes_no_such_model(
    tmp_path: Path, removed: str, added: dict[str, Any], message: str
) -> None:
    path = convert(random_hf("granite", True), "granite", tmp_path / "good.gguf", ("f32",))
    values = metadata_of(path, "granite")
    if removed:
        del values[removed]
    bad = write_gguf(tmp_path / "bad.gguf", "granite", dict(tensors_of(path)), values | added)
    with pytest.raises(ValueError, match=message) as caught:
        load_gguf(bad)
    assert str(bad) in str(caught.value)


def metadata_of(path: Path, architecture: str) -> dict[str, Any]:
    fields = GGUFReader(path).fields.values()
    prefix = f"{architecture}."
    return {f.name.removeprefix(prefix): f.contents() for f in fields if f.name.startswith(prefix)}
