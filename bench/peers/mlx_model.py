"""mlx-lm on the packed weights of a transformers model: the same bytes, as an MLX checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_metalmm import save_mlx

NAME = "MLX"


def missing(format: str, device: str) -> str | None:
    """Why mlx-lm cannot run a model of the format beside the device's; None if it can."""
    absent = [m for m in ("mlx", "mlx_lm") if find_spec(m) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if not format.startswith("affine") and format != "mxfp4":
        return "MLX has no such format"
    return "MLX runs on a Mac's GPU or a CPU" if device == "cuda" else None


class Mlx:
    """A model of mlx-lm and its cache, on MLX's own device: the GPU of a Mac, elsewhere the CPU."""

    exact = False
    prefills = sys.platform == "darwin"  # 7 tokens/s of 168 M parameters on two Zen 5 cores

    def __init__(self, name: str, folder: Path) -> None:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        if sys.platform != "darwin":
            mx.set_default_device(mx.cpu)
        self.name, self.mx = name, mx
        model: Any
        model, _ = load_model(folder)
        self.model = model
        self.weight_bytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        self.reset()

    def reset(self) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.cache = make_prompt_cache(self.model)

    def feed(self, tokens: Sequence[int]) -> Tensor:
        logits = self.model(self.mx.array([list(tokens)]), cache=self.cache)[0, -1]
        return torch.from_numpy(np.array(logits.astype(self.mx.float32)))


def load(packed: Any, format: str, folder: Path, threads: int, room: int) -> Mlx:
    """mlx-lm with the weights of `packed`, through a checkpoint in `folder`."""
    path = folder / f"mlx-{format}"
    save_mlx(packed, None, path)
    return Mlx(f"MLX {format}", path)
