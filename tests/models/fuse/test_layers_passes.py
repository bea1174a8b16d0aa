"""How many passes a GPU is given for a token of a fused layer with a PackedCache: recorded here."""

from __future__ import annotations

import pytest
import torch
from layer_models import are_fused, ids, small

from torch_metalmm import _C, PackedCache, fuse_

PRE = ["gemv", "rope", "attention_split", "attention_join", "gemv", "swiglu_up", "gemv"]
SANDWICH = [*PRE[:5], "rms_norm", *PRE[5:], "rms_norm"]


def passes(kind: str, layers: int, format: str) -> list[str]:
    """The kernels of a token, without format and dtype."""
    options = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    model = small(kind, head_dim=32, dtype=torch.float16, **options)
    assert all(are_fused(fuse_(model, "swiglu")))
    model.set_attn_implementation("metalmm")
    cache = PackedCache(model.config, format)
    with torch.no_grad():
        model(ids(1, 3), past_key_values=cache)
        _C.install_recorder("m4-max", 40)
        try:
            model(ids(1, 1), past_key_values=cache)
        finally:
            calls = _C.remove_recorder()
    return [call[1] for call in calls if call[0] == "set_pipeline"]


@pytest.mark.parametrize("format", ["f16", "q8_0"])
@pytest.mark.parametrize(
    ("kind", "expected"), [("llama", PRE), ("qwen3", PRE), ("gemma3_text", SANDWICH)]
)
def test_passes_of_a_layer(kind: str, expected: list[str], format: str) -> None:
    """Seven with two of attention; Gemma 3 has two norms more."""
    two, three = (passes(kind, layers, format) for layers in (2, 3))
    layer = three[2 : 2 + len(three) - len(two)]  # behind the embedding, cos and sin
    assert len(layer) == len(expected)
    for name, kernel in zip(layer, expected, strict=True):
        assert name.startswith(kernel)
