"""Makes by_llama_cpp.gguf, which llama.cpp quantizes with an imatrix, and the logits of it.

    PYTHONPATH=<llama-cpp-python's folder> python tests/files/others/record_llama_cpp.py

By hand, on a CPU, with llama-cpp-python 0.3.36. A random model, each matrix in another type of what
needs an importance or takes one. The logits are those of the file that llama.cpp decodes to f32
itself: on quantized weights it rounds activations to 8 bits.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from gguf_files import write_gguf  # noqa: E402

OUT = Path(__file__).with_name("by_llama_cpp.gguf")
H, HEADS, KV_HEADS, VOCABULARY, TOKENS = 256, 4, 2, 320, 9
KV = H // HEADS * KV_HEADS
# Tensor: shape, and its type by ggml's number.
MATRICES = {
    "token_embd.weight": ((VOCABULARY, H), 19),  # iq1_s
    "blk.0.attn_q.weight": ((H, H), 16),  # iq2_xxs
    "blk.0.attn_k.weight": ((KV, H), 17),  # iq2_xs
    "blk.0.attn_v.weight": ((KV, H), 22),  # iq2_s
    "blk.0.attn_output.weight": ((H, H), 18),  # iq3_xxs
    "blk.0.ffn_gate.weight": ((H, H), 21),  # iq3_s
    "blk.0.ffn_up.weight": ((H, H), 29),  # iq1_m
    "blk.0.ffn_down.weight": ((H, H), 23),  # iq4_xs
}
NORMS = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")
VALUES = {
    "context_length": 128,
    "block_count": 1,
    "feed_forward_length": H,
    "embedding_length": H,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": H // HEADS,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def random_file(path: Path) -> None:
    torch.manual_seed(0)
    tensors = {name: (torch.randn(size) * 0.05).numpy() for name, (size, _) in MATRICES.items()}
    tensors |= {name: (1 + torch.randn(H) * 0.05).numpy() for name in NORMS}
    write_gguf(path, "llama", {name: (t, "f32") for name, t in tensors.items()}, VALUES)


def quantize(source: Path, target: Path) -> None:
    """Each matrix in its type, by sums of squares of columns that differ by a factor of 1,000."""
    options = api.llama_model_quantize_default_params()
    options.ftype, options.nthread = api.LLAMA_FTYPE_MOSTLY_IQ2_XXS, 1
    options.token_embedding_type = MATRICES["token_embd.weight"][1]
    torch.manual_seed(1)
    columns = {name: torch.rand(H).mul(6.9).exp().numpy() for name in MATRICES}
    sums = [(name.encode(), _floats(values), H) for name, values in columns.items()]
    options.imatrix = (api.llama_model_imatrix_data * (len(sums) + 1))(*sums)
    types = [(f"^{name}$".encode(), kind) for name, (_, kind) in MATRICES.items()]
    options.tt_overrides = (api.llama_model_tensor_override * (len(types) + 1))(*types)
    _quantize(source, target, options)


def _floats(values: np.ndarray) -> Any:
    return values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def decode(source: Path, target: Path) -> None:
    """The same model in f32, as llama.cpp decodes it."""
    options = api.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = api.LLAMA_FTYPE_ALL_F32, True
    options.token_embedding_type = options.output_tensor_type = 0
    _quantize(source, target, options)


def _quantize(source: Path, target: Path, options: Any) -> None:
    names = (str(path).encode() for path in (source, target))
    if api.llama_model_quantize(*names, ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp does not quantize {source}")


def logits(path: Path, ids: Tensor) -> Tensor:
    """[T, V] of all tokens, with a cache in f32."""
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.type_k, settings.type_v = 64, 0, 0
    settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = api.llama_init_from_model(model, settings)
    batch = api.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids.tolist()):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    if api.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    rows = [api.llama_get_logits_ith(context, i)[:VOCABULARY] for i in range(len(ids))]
    return torch.tensor(rows)


def main() -> None:
    api.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        dense, decoded = Path(folder, "dense.gguf"), Path(folder, "decoded.gguf")
        random_file(dense)
        quantize(dense, OUT)
        decode(OUT, decoded)
        ids = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(2))
        made = {"ids": ids, "logits": logits(decoded, ids)}
    save_file(made, OUT.with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
