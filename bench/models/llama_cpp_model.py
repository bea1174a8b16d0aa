"""llama.cpp on the packed weights of a transformers Llama: the same bytes, as a GGUF file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


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


def _interleave_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k as llama.cpp rotates them: (2i, 2i + 1) for transformers' (i, i + d/2)."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _tensors(model: Any) -> Iterator[tuple[str, nn.Module]]:
    yield "token_embd", model.model.embed_tokens
    yield "output_norm", model.model.norm
    yield "output", model.lm_head
    for i, layer in enumerate(model.model.layers):
        for ours, theirs in _LAYER.items():
            yield f"blk.{i}.{theirs}", layer.get_submodule(ours)


def write_gguf(model: Any, path: Path) -> None:
    """The model's weights without a vocabulary."""
    import gguf

    c = model.config
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)
    w.add_tokenizer_model("no_vocab")
    heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}
    for name, module in _tensors(model):
        data = module.weight.detach().cpu()
        if name.endswith(tuple(heads)):
            data = _interleave_halves(data, heads[name[-6:]])
        packed = getattr(module, "format", None)
        kind = gguf.GGMLQuantizationType[packed.upper()] if packed else None
        w.add_tensor(f"{name}.weight", data.contiguous().numpy(), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


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
            settings.type_k = settings.type_v = CACHES[cache]
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
    format of keys and values, of CACHES, with its flash attention; None: what it takes by itself.
    """
    path = folder / f"{format}.gguf"
    if not path.exists():
        write_gguf(packed, path)
    name = f"llama.cpp {format}" + (f", cache {cache}" if cache else "")
    return LlamaCpp(name, path, threads, room, packed.config.vocab_size, batch or room, cache)
