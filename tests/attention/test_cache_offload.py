"""A PackedCache whose layers wait in other memory until their turn.

transformers moves them by CUDA streams, which are not here: a stream is a stand-in, and a layer
that waits has no tensors.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from layer_models import ids, padded, small

from torch_metalmm import PackedCache, fuse_
from torch_metalmm.hf.caches.layers import PackedLayer

pytestmark = pytest.mark.usefixtures("quiet_transformers")


class _Waiting:
    """Rows that are elsewhere: whoever uses them fails."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often rows went away, and came back."""
    counts = {"offload": 0, "prefetch": 0}

    def offload(layer: PackedLayer) -> None:
        if layer.is_initialized:
            layer.keys, layer.values = _Waiting(layer.keys), _Waiting(layer.values)
            counts["offload"] += 1

    def prefetch(layer: PackedLayer) -> None:
        if layer.is_initialized and isinstance(layer.keys, _Waiting):
            layer.keys, layer.values = layer.keys.rows, layer.values.rows
            counts["prefetch"] += 1

    monkeypatch.setattr(torch, "Stream", lambda *_, **__: MagicMock())
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: MagicMock())
    monkeypatch.setattr(PackedLayer, "offload", offload)
    monkeypatch.setattr(PackedLayer, "prefetch", prefetch)
    return counts


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("format", [None, "q8_0"])
def test_tokens_are_those_of_a_cache_that_stays(
    moves: dict[str, int], kind: str, format: str | None, is_fused: bool
) -> None:
    """Layers of a window are small, and stay. A fused layer calls update(), which moves rows."""
    model: Any = small(kind, head_dim=32)
    if is_fused:
        fuse_(model, "swiglu")
    model.set_attn_implementation("metalmm")
    for given in (padded(2, 7), {"input_ids": ids(1, 20)}):
        made = [
            model.generate(
                **given,
                past_key_values=PackedCache(model.config, format, offloading=offloading),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
            )
            for offloading in (False, True)
        ]
        assert torch.equal(*made)
    moving = 2 if kind == "llama" else 1
    assert moves["offload"] == 2 * 8 * moving and moves["prefetch"] >= 2 * 7 * moving


def test_a_layer_that_stays_on_its_device() -> None:
    """offload and prefetch without a GPU: the same tensors."""
    cache = PackedCache(small("llama", head_dim=32).config, "q8_0")
    layer = cache.layers[0]
    layer.offload()  # has no rows yet
    cache.update(torch.ones(1, 2, 3, 32), torch.ones(1, 2, 3, 32), 0)
    memory = layer.keys.data_ptr()
    layer.offload()
    layer.prefetch()
    assert layer.keys.data_ptr() == memory
