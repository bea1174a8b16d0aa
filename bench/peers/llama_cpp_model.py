"""llama.cpp on the packed weights of a transformers model: the same bytes, as a GGUF file."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import save_gguf
from torch_metalmm.hf.caches import pair_of

NAME = "llama.cpp"
# Of a cache: formats by the numbers that ggml has for them.
CACHES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}


def missing(format: str, device: str) -> str | None:
    """Why llama.cpp cannot run a model of the format beside the device's; None if it can."""
    absent = [m for m in ("llama_cpp", "gguf") if find_spec(m) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    import gguf

    if format.upper() not in gguf.GGMLQuantizationType.__members__:
        return "llama.cpp has no such format"
    return "llama.cpp is built for the CPU here" if device == "cuda" else None


class LlamaCpp:
    """A context of llama.cpp's C interface."""

    exact = False

    def __init__(
        self,
        name: str,
        path: Path,
        threads: int,
        room: int,
        vocabulary: int,
        batch: int,
        cache: str | None,
    ) -> None:
        import llama_cpp as api

        self.api, self.name, self.vocabulary = api, name, vocabulary
        api.llama_log_set(_QUIET, ctypes.c_void_p(None))
        api.llama_backend_init()
        self.weight_bytes = path.stat().st_size
        options = api.llama_model_default_params()
        model = api.llama_model_load_from_file(str(path).encode(), options)
        if not model:
            raise OSError(f"llama.cpp cannot load {path}")
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = room, batch, batch
        if cache is not None:
            settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            settings.type_k, settings.type_v = (CACHES[kind] for kind in pair_of(cache))
        settings.n_threads = settings.n_threads_batch = threads
        self.context = api.llama_init_from_model(model, settings)
        if not self.context:
            raise OSError(f"llama.cpp cannot make a context for {path}")

    def reset(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def forget(self, first: int) -> None:
        """The tokens from the position `first` on."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, first, -1)

    def feed(self, tokens: Sequence[int]) -> Tensor:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        if self.api.llama_decode(self.context, self.api.llama_batch_get_one(ids, len(tokens))):
            raise RuntimeError("llama.cpp: llama_decode failed")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        memory = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocabulary)).contents
        return torch.frombuffer(memory, dtype=torch.float32).clone()


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _QUIET(level: int, text: bytes, data: int) -> None:
    """A log callback that drops everything."""


def load(
    packed: Any,
    format: str,
    folder: Path,
    threads: int,
    room: int,
    batch: int | None = None,
    cache: str | None = None,
) -> LlamaCpp:
    """llama.cpp with the weights of `packed`, through a file in `folder`.

    room: tokens that fit; batch: tokens that it takes at a time, all of them if None. cache: the
    formats of keys and values, of CACHES, with its flash attention; None: what it takes by itself.
    """
    path = folder / f"{format}.gguf"
    if not path.exists():
        save_gguf(packed, None, path)
    name = f"llama.cpp {format}" + (f", cache {cache}" if cache else "")
    return LlamaCpp(name, path, threads, room, packed.config.vocab_size, batch or room, cache)
