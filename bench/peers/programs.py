"""llama.cpp and mlx-lm on the packed weights of a transformers model: the same bytes, as a file."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_metalmm import save_gguf, save_mlx
from torch_metalmm.hf.caches import pair_of

from ..models.systems import CACHE_LIMIT, ROUNDED_LIMIT
from . import ggml

CHUNK = 512  # tokens that llama.cpp takes at a time, as by itself


def absent(*modules: str) -> str | None:
    names = [m for m in modules if find_spec(m) is None]
    return f"{', '.join(names)} not installed" if names else None


class Program:
    """A model in another program. missing(format, device): why it cannot run; None if it can."""

    title: str
    exact, limit = False, ROUNDED_LIMIT

    @staticmethod
    def has_cache(format: str) -> bool:
        """Whether keys and values can have that format."""
        return False


class LlamaCpp(Program):
    """A context of llama.cpp's C interface, through a GGUF file in `folder`.

    room: tokens that fit. cache: the formats of keys and values, with its flash attention; None:
    what it takes by itself.
    """

    title = "llama.cpp"

    @staticmethod
    def missing(format: str, device: str) -> str | None:
        if why := absent("llama_cpp", "gguf"):
            return why
        import gguf

        if format.upper() not in gguf.GGMLQuantizationType.__members__:
            return "llama.cpp has no such format"
        return "llama.cpp is built for the CPU here" if device == "cuda" else None

    @staticmethod
    def has_cache(format: str) -> bool:
        return ggml.TYPES.keys() >= set(pair_of(format))

    def __init__(
        self,
        packed: Any,
        format: str,
        folder: Path,
        threads: int,
        room: int,
        cache: str | None = None,
    ) -> None:
        import llama_cpp as api

        path = folder / f"{format}.gguf"
        if not path.exists():
            save_gguf(packed, None, path)
        self.name = f"llama.cpp {format}" + (f", cache {cache}" if cache else "")
        self.api, self.vocabulary = api, packed.config.vocab_size
        self.limit = CACHE_LIMIT if cache else ROUNDED_LIMIT
        api.llama_log_set(ggml.QUIET, ctypes.c_void_p(None))
        api.llama_backend_init()
        self.weight_bytes = path.stat().st_size
        options = api.llama_model_default_params()
        model = api.llama_model_load_from_file(str(path).encode(), options)
        if not model:
            raise OSError(f"llama.cpp cannot load {path}")
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = room, CHUNK, CHUNK
        if cache is not None:
            settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            settings.type_k, settings.type_v = (ggml.TYPES[kind] for kind in pair_of(cache))
        settings.n_threads = settings.n_threads_batch = threads
        self.context = api.llama_init_from_model(model, settings)
        if not self.context:
            raise OSError(f"llama.cpp cannot make a context for {path}")

    def reset(self) -> None:
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, 0, -1)

    def feed(self, tokens: Sequence[int]) -> Tensor:
        for i in range(0, len(tokens), CHUNK):
            part = tokens[i : i + CHUNK]
            ids = (ctypes.c_int32 * len(part))(*part)
            if self.api.llama_decode(self.context, self.api.llama_batch_get_one(ids, len(part))):
                raise RuntimeError("llama.cpp: llama_decode failed")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        memory = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocabulary)).contents
        return torch.frombuffer(memory, dtype=torch.float32).clone()


class MlxLm(Program):
    """A model of mlx-lm and its cache, through a checkpoint in `folder`, on MLX's own device: the
    GPU of a Mac, elsewhere the CPU."""

    title = "MLX"
    prefills = sys.platform == "darwin"  # 7 tokens/s of 168 M parameters on two Zen 5 cores

    @staticmethod
    def missing(format: str, device: str) -> str | None:
        if why := absent("mlx", "mlx_lm"):
            return why
        if not format.startswith("affine") and format != "mxfp4":
            return "MLX has no such format"
        return "MLX runs on a Mac's GPU or a CPU" if device == "cuda" else None

    def __init__(
        self, packed: Any, format: str, folder: Path, threads: int, room: int, cache: None = None
    ) -> None:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        path = folder / f"mlx-{format}"
        save_mlx(packed, None, path)
        if sys.platform != "darwin":
            mx.set_default_device(mx.cpu)
        self.name, self.mx, (self.model, _) = f"MLX {format}", mx, load_model(path)
        self.weight_bytes = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        self.reset()

    def reset(self) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.cache = make_prompt_cache(self.model)

    def feed(self, tokens: Sequence[int]) -> Tensor:
        logits = self.model(self.mx.array([list(tokens)]), cache=self.cache)[0, -1]
        return torch.from_numpy(np.array(logits.astype(self.mx.float32)))


PROGRAMS = (LlamaCpp, MlxLm)
