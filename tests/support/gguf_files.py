"""Small random GGUF files of every architecture that transformers maps, and what is in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from inputs import random_weight

from torch_metalmm import load_gguf
from torch_metalmm.files.gguf.file import GgufFile
from torch_metalmm.formats import get

H, FFN, HEADS, LAYERS, CONTEXT = 256, 512, 4, 2, 128

MIXED = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "mxfp4", "f16", "bf16", "f32"),
)

# Types of ggml that are rare in files.
RARE = (
    *("tq1_0", "tq2_0", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"),
    "nvfp4",
)

_DECODER = {
    "context_length": CONTEXT,
    "block_count": LAYERS,
    "feed_forward_length": FFN,
    "embedding_length": H,
    "rope.freq_base": 10000.0,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
_MOE = {"expert_count": 4, "expert_used_count": 2}
_LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
_SHARED = {"expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 256}
_QWEN3NEXT = _DECODER | {
    "block_count": 4,
    "attention.key_length": 64,
    "full_attention_interval": 4,
    "rope.dimension_count": 16,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 64,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 256,
}
_QWEN35 = _QWEN3NEXT | {"rope.dimension_sections": [4, 2, 2, 0]}

# general.architecture -> the metadata of a tiny model, without the prefix
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _DECODER | {"rope.dimension_count": 64},
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "phi3": _DECODER,
    "gemma2": _DECODER | {"attention.key_length": 64, "attention.sliding_window": 64},
    "gemma3": _DECODER | {"attention.key_length": 64, "attention.sliding_window": 64},
    "gemma4": _DECODER
    | {"attention.key_length": 64, "attention.sliding_window": 64, "rope.freq_base": 1e6}
    | {"attention.key_length_swa": 256, "embedding_length_per_layer_input": 256},
    "mamba": _DECODER
    | {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 32}
    | {"ssm.inner_size": 512, "vocab_size": 320},
    "t5": _DECODER
    | _LAYER_NORM
    | {"attention.key_length": 64, "attention.relative_buckets_count": 32}
    | {"decoder_start_token_id": 0},
    "lfm2": _DECODER | {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35 | _MOE | _SHARED,
    "qwen3next": _QWEN3NEXT | _MOE | _SHARED,
}


_MADE: dict[tuple[Any, ...], bytes] = {}  # files of random_model by its arguments
NEW_STYLE = ("qwen35", "qwen35moe")  # transformers reads three types less in these


def byte_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """(tokens, token types, merges): 256 bytes, some pairs, and control tokens; 320 tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    pairs = [("t", "h"), ("h", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "n"), ("a", "t")]
    tokens = [*letters, *(a + b for a, b in pairs), "<|end|>", "<|start|>"]
    types = [1] * (len(tokens) - 2) + [3, 3]
    while len(tokens) < 320:
        tokens.append(f"<|extra{len(tokens)}|>")
        types.append(3)
    return tokens, types, [f"{a} {b}" for a, b in pairs]


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, tuple[np.ndarray, str]],
    values: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    tokenizer: bool = True,
    **options: Any,
) -> Path:
    """A GGUF file: tensors {name: (array or packed bytes, format)}, values without the prefix.

    options: of the writer.
    """
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in (values or {}).items():
        _add_value(writer, f"{architecture}.{key}", value)
    for key, value in (extra or {}).items():
        _add_value(writer, key, value)
    if tokenizer:
        _add_tokenizer(writer, architecture)
    for name, (data, format) in tensors.items():
        kind = gguf.GGMLQuantizationType[format.upper()]
        writer.add_tensor(name, data, raw_dtype=kind)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write what the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, architecture: str) -> None:
    tokens, types, merges = byte_vocabulary()
    if architecture.startswith("t5"):
        spaced = ["<pad>", "</s>", "<unk>", *("▁" + t for t in tokens[:256]), *tokens[:61]]
        writer.add_tokenizer_model("t5")
        writer.add_token_list(spaced)
        writer.add_token_scores([-float(i) for i in range(len(spaced))])
        writer.add_token_types([3, 3, 2] + [1] * (len(spaced) - 3))
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(0)
        return
    if architecture.startswith("gemma"):
        words = ["<pad>", "<eos>", "<bos>", "<unk>", "▁"] + [chr(c) for c in range(33, 127)]
        words += ["▁t", "he", "▁the", *(f"<unused{i}>" for i in range(320 - len(words) - 3))]
        writer.add_tokenizer_model("gemma4" if architecture == "gemma4" else "llama")
        writer.add_token_list(words)
        writer.add_token_scores([-float(i) for i in range(len(words))])
        writer.add_token_types([3, 3, 3, 2] + [1] * (len(words) - 4))
        if architecture == "gemma4":
            writer.add_token_merges(["▁ t", "h e", "▁t he"])
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(0)
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_bos_token_id(tokens.index("<|start|>"))
    writer.add_pad_token_id(tokens.index("<|end|>"))


def random_model(
    path: Path,
    architecture: str,
    tied: bool = True,
    seed: int = 0,
    kinds: Sequence[str] = MIXED,
    context: int = CONTEXT,
) -> Path:
    """A GGUF file of that architecture: random weights, the formats of `kinds` in turn."""
    values = ARCHITECTURES[architecture] | {"context_length": context}
    key = (architecture, tied, seed, *kinds, str(values))
    if key in _MADE:
        path.write_bytes(_MADE[key])
    else:
        _MADE[key] = _random_file(path, architecture, tied, seed, kinds, values).read_bytes()
    torch.manual_seed(seed)
    return path


def _random_file(
    path: Path,
    architecture: str,
    tied: bool,
    seed: int,
    kinds: Sequence[str],
    values: dict[str, Any],
) -> Path:
    embedding = {"token_embd.weight": (np.zeros((320, H), np.float32), "f32")}
    head = {} if tied else {"output.weight": (np.zeros((320, H), np.float32), "f32")}
    extra: dict[str, Any] = {}
    if architecture == "gemma4":
        extra["rope_freqs.weight"] = np.float32([1] * 8 + [1e30] * 24), "f32"
        # A file without it has a table of 262144 tokens.
        extra["per_layer_token_embd.weight"] = np.zeros((320, 512), np.float32), "f32"
    write_gguf(path, architecture, embedding | head | extra, values)
    torch.manual_seed(seed)
    skip = ("q5_0", "q5_1", "mxfp4") if architecture in NEW_STYLE else ()
    formats = cycle(f for f in kinds if f not in skip)
    tensors = dict(extra)
    for name, shape in _tensor_shapes(path, architecture):
        tensors[name] = _random_tensor(name, shape, formats)
    return write_gguf(path, architecture, tensors, values)


def split(
    path: Path, architecture: str, tensors_each: int, empty_first: bool = False
) -> list[Path]:
    """The file's model as the gguf package splits it, beside the file; the parts in order."""
    target = path.with_name(f"{path.stem}-split.gguf")
    options = {"split_max_tensors": tensors_each, "small_first_shard": empty_first}
    values, tensors = ARCHITECTURES[architecture], dict(tensors_of(path))
    write_gguf(target, architecture, tensors, values, **options)
    return sorted(path.parent.glob(f"{path.stem}-split-*.gguf"))


def tensors_of(path: Path) -> list[tuple[str, tuple[np.ndarray, str]]]:
    """The tensors of a file in the form write_gguf takes."""
    file = GgufFile(path)
    numpy_types = {"f32": np.float32, "f16": np.float16}
    found: list[tuple[str, tuple[np.ndarray, str]]] = []
    for name, entry in file.tensors.items():
        data = file.packed(name).numpy().copy()
        kind = numpy_types.get(entry.format)
        found.append((name, (data if kind is None else data.view(kind), entry.format)))
    return found


def decoded(path: Path, architecture: str) -> Path:
    """The file with what the gguf package decodes, in f32: test_converted.py has such files."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: (gguf.dequantize(t.data, t.tensor_type), "f32") for t in reader.tensors}
    return write_gguf(
        path.with_name("f32.gguf"), architecture, tensors, ARCHITECTURES[architecture]
    )


def fields_of(path: Path, prefix: str = "") -> dict[str, Any]:
    """The metadata, values by their keys; with a prefix, those that have it, without it."""
    fields = gguf.GGUFReader(path).fields.values()
    named = {field.name: field for field in fields if not field.name.startswith("GGUF.")}
    return {
        key.removeprefix(prefix): field.contents()
        for key, field in named.items()
        if key.startswith(prefix)
    }


def load_quietly(path: Path, **options: Any) -> tuple[Any, Any, list[str]]:
    """load_gguf's model and tokenizer, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, tokenizer = load_gguf(path, **options)
    return model, tokenizer, [str(w.message) for w in caught]


def mapped(path: Path, tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are those of the file, mapped into this process."""
    name = str(path.resolve())
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < end:
                return True
    return False


def _random_tensor(
    name: str, shape: tuple[int, ...], formats: Iterator[str]
) -> tuple[np.ndarray, str]:
    value = torch.randn(shape) * 0.05
    if "norm" in name and name.endswith("weight"):
        value += 1
    if name.endswith("ssm_a"):
        value = -value.abs() - 0.5
    # llama.cpp keeps 1-D tensors, convolutions and routers in f32.
    if len(shape) == 1 or "conv1d" in name or "shortconv.conv" in name or "ssm_a" in name:
        return value.numpy(), "f32"
    if "ffn_gate_inp" in name:
        return value.numpy(), "f32"
    format = "q4_k" if "_exps" in name else next(formats)
    while shape[-1] % 256 and format not in ("q8_0", "q4_0", "f32", "f16"):
        format = next(formats)
    if shape[-1] % 32:
        format = "f32"
    rows = value.reshape(-1, shape[-1])
    if get(format).packs:
        packed = torch.ops.metalmm.quantize(rows, format)
    else:
        packed = random_weight(format, *rows.shape, seed=name)
    data = packed.reshape(*shape[:-1], -1).numpy()
    if format == "f32":
        return value.numpy(), "f32"
    return (data.view(np.float16), "f16") if format == "f16" else (data, format)


def map_and_model(file: GgufFile) -> tuple[Any, Any]:
    """Where the tensors of the file go, and the model, without weights."""
    from torch_metalmm.files.gguf.architectures import model_config
    from torch_metalmm.files.gguf.map import tensor_map
    from torch_metalmm.models.skeleton import empty_model

    config, row, values = model_config(file)
    model = empty_model(config, torch.float32)
    return tensor_map(file.architecture, model, row, values), model


def _tensor_shapes(path: Path, architecture: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(GGUF name, shape in the file) of every tensor a model with this header needs."""
    file = GgufFile(path)
    mapping, model = map_and_model(file)
    untied = "output.weight" in file.tensors
    names = _names(mapping, model, architecture)
    state = model.state_dict()
    for name, target in names:
        shape, rows = tuple(state[target].shape), mapping.sources(target)
        if rows and name in rows:
            yield name, (rows[name], *shape[1:])
        elif "ffn_gate_up_exps" in name:  # which the converter writes apart
            for part in ("gate", "up"):
                yield name.replace("gate_up", part), (shape[0], shape[1] // 2, shape[2])
        elif not rows and (untied or name != "output.weight"):
            yield name, _file_shape(name, shape)


def _names(mapping: Any, model: Any, architecture: str) -> list[tuple[str, str]]:
    """(GGUF name, model name) pairs: every GGUF name that the map sends into the model."""
    if hasattr(mapping, "_names"):
        pairs = []
        for name, target in mapping._names.items():
            stacked = not name.endswith((".weight", ".bias")) and "_exps" in name
            pairs.append((name + ".weight" if stacked else name, target))
        return pairs
    kinds = {t for t in _gguf_names(architecture)}
    state = model.state_dict()
    found = [(n, mapping.target(n)) for n in sorted(kinds)]
    return [(n, t) for n, t in found if t in state]


def _gguf_names(architecture: str) -> Iterator[str]:
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    for kind in gguf.MODEL_TENSORS[arch]:
        name = gguf.TENSOR_NAMES[kind]
        blocks = range(ARCHITECTURES[architecture]["block_count"]) if "{bid}" in name else [0]
        for block in blocks:
            full = name.format(bid=block)
            yield from (f"{full}.weight", f"{full}.bias", full)


def _file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 3 and shape[1] == 1:
        return (shape[0], shape[2])
    if "ffn_gate_exps" in name or "ffn_up_exps" in name:
        return (shape[0], shape[1] // 2, shape[2])
    if "ffn_gate_inp_shexp" in name:
        return shape[-1:]
    return shape
