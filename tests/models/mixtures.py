"""What llama-quantize makes of small models: {"case mixture": {types in runs: GGUF names}}.

    python tests/models/mixtures.py LIBLLAMA

records it, with libllama of llama-cpp-python 0.3.36 (llama.cpp 0c1e570). Its files have zeros.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers

from torch_metalmm.files.gguf.map import gguf_names
from torch_metalmm.models.quantize import plan
from torch_metalmm.models.replace import weight_shape

RECORDS = Path(__file__).with_suffix(".json")
_IDS = {"q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15}  # of llama_ftype
_IDS |= {"q5_k_s": 16, "q5_k_m": 17}
_SMALL = {"vocab_size": 32, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 18}
_SMALL |= {"tie_word_embeddings": False}
_KEYS = {
    "context_length": 64,
    "embedding_length": 256,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}
_CHOICE = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
# Case: (class, its config, the architecture, keys of the file).
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("Llama", _SMALL, "llama", {}),
    "tied": ("Qwen2", _SMALL | {"tie_word_embeddings": True}, "qwen2", {}),
    "narrow": ("Llama", _SMALL | {"hidden_size": 288, "num_hidden_layers": 9}, "llama", {}),
    "odd": ("Llama", _SMALL | {"hidden_size": 264, "num_hidden_layers": 2}, "llama", {}),
    "70b": ("Llama", _SMALL | {"num_hidden_layers": 80}, "llama", {}),
    "eight": ("Mixtral", _SMALL | {"num_local_experts": 8}, "llama", {"expert_count": 8}),
    "six": ("Qwen3Moe", _SMALL | _CHOICE | {"num_experts": 6}, "qwen3moe", {"expert_count": 6}),
    "falcon": (
        "Falcon",
        {"vocab_size": 32, "hidden_size": 256, "num_attention_heads": 4, "num_kv_heads": 2}
        | {"num_hidden_layers": 18, "new_decoder_architecture": True},
        "falcon",
        {},
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": 32, "n_embd": 256, "n_layer": 18, "n_head": 4, "n_positions": 16},
        "gpt2",
        {},
    ),
}


def skeleton(case: str) -> Any:
    name, values, _, _ = CASES[case]
    config = getattr(transformers, f"{name}Config")(**values)
    end = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    with torch.device("meta"):
        return getattr(transformers, name + end)(config)


def matrices(model: Any) -> dict[str, tuple[str, list[int]]]:
    """{layer: (GGUF name, shape)}; gate and up of experts, one stack here, count as up."""
    sites = {name: site for job in plan(model, "q8_0") for name, site in job.sites}
    named = {layer: name for name, layer in gguf_names(model, sites).items()}
    for name in sites.keys() - named.keys():
        named[name] = f"blk.{name.split('.')[2]}.ffn_up_exps.weight"
    return {
        name: (named[name], list(getattr(site, "shape", weight_shape(site))))
        for name, site in sites.items()
    }


def lines(types: dict[str, str]) -> dict[str, str]:
    """{types by layer, as "2 q6_k, 7 q4_k": the kinds of tensors that have these}."""
    order = sorted(types, key=lambda name: int((re.findall(r"\d+", name) or [0])[0]))
    kinds: dict[str, list[str]] = {}
    for name in order:
        kinds.setdefault(name.split(".")[-2], []).append(types[name])
    found: dict[str, str] = {}
    for kind, each in sorted(kinds.items()):
        runs = ", ".join(f"{len(list(run))} {name}" for name, run in groupby(each))
        found[runs] = f"{found[runs]} {kind}" if runs in found else kind
    return found


def _quantized(library: Any, folder: Path, case: str, mixture: str) -> dict[str, str]:
    import gguf
    import numpy as np

    source, target = folder / f"{case}.gguf", folder / "out.gguf"
    model = skeleton(case)
    if not source.exists():
        *_, architecture, values = CASES[case]
        layers = model.config.num_hidden_layers
        writer = gguf.GGUFWriter(source, architecture)
        for key, value in (_KEYS | {"block_count": layers} | values).items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{key}", value)
        if values:
            writer.add_uint32(f"{architecture}.expert_used_count", 2)
        tied = {name for name, _ in matrices(model).values()} - {
            "output.weight" if model.config.tie_word_embeddings else ""
        }
        for name, shape in matrices(model).values():
            if name in tied:
                writer.add_tensor(name, np.zeros(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    class Params(ctypes.Structure):
        """llama_model_quantize_params, whose default sets the rest."""

        _fields_ = (
            ("threads", ctypes.c_int32),
            ("kind", ctypes.c_int),
            ("rest", ctypes.c_char * 88),
        )

    default = library.llama_model_quantize_default_params
    default.restype = Params
    params = default()
    params.threads, params.kind = 1, _IDS[mixture]
    paths = str(source).encode(), str(target).encode()
    if library.llama_model_quantize(*paths, ctypes.byref(params)):
        raise RuntimeError(f"{case}: llama_model_quantize failed")
    return {t.name: t.tensor_type.name.lower() for t in gguf.GGUFReader(target).tensors}


def _main(library: str) -> None:
    loaded = ctypes.CDLL(library)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            f'"{case} {name}": {json.dumps(lines(_quantized(loaded, Path(folder), case, name)))}'
            for case in CASES
            for name in _IDS
        ]
    RECORDS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    _main(sys.argv[1])
