"""Writing a transformers model as a GGUF file that llama.cpp reads, packed weights bit for bit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import formats
from ...extras import HF, require
from ...formats import DTYPES
from ...models.attach import is_transformers_model, quantized_by_another
from ...models.experts import homes
from ...models.mtp import MtpHead, check_own
from ...models.replace import dense_weight, is_conv1d, weight_shape
from ...models.shard.apply import refuse_sharded
from ...models.skeleton import empty_like, parameters_to_save
from ...nn import QuantEmbedding, QuantLinear
from ...nn.packed import quantize_weight
from ..staging import replaced
from .architectures import llama3_divisors, metadata, model_config, refuse_spoiled
from .derive import ROPE_DIVISORS
from .experts import check_format, stored_experts
from .file import GgufFile, write_out
from .joined import ANEW
from .layout import TensorMap, negated_exp
from .map import arch_of, tensor_map
from .nextn import NORM, stored_head
from .routing import one_group
from .rows import Architecture
from .vocabulary import vocabulary

_NO_TOKENS = "tokenizer.ggml.model"
# Attributes that config classes know, and that change no logits, are written elsewhere, or of which
# transformers makes others: max_window_layers becomes layer_types, which are compared.
_UNSAID = (
    *("use_cache", "initializer_range", "pretraining_tp", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_bidirectional_attention"),
    *("max_window_layers", "resid_pdrop", "embd_pdrop", "mamba_chunk_size"),
    # One number: the layers that predict tokens beyond the next, which no model here has.
    *("num_nextn_predict_layers", "num_mtp_layers"),
)


def save_gguf(
    model: Any,
    tokenizer: Any,
    path: str | os.PathLike[str],
    replace: bool = False,
    head: MtpHead | None = None,
) -> None:
    """Write a transformers model as one GGUF file, with its tokenizer.

    head: the model's own for later tokens, of load_mtp, which becomes the layer behind the model's
    (nextn). llama.cpp refuses files with one that are of architectures without has_nextn.

    tokenizer: a fast one, BPE; None for a file of weights alone, which load_gguf and llama.cpp's
    programs for text refuse; its library reads them.
    Packed layers and experts keep their bytes, their rows in the order that llama.cpp has for q and
    k, for heads of V, and for q, k, v and z of Qwen3-Next, which are two tensors; dense matrices
    keep their dtype, everything else is f32. The columns of Qwen3.5's linear_attn.out_proj are in
    llama.cpp's order, too: where it parts the blocks of a format, the layer is packed again in
    q8_0, with a warning. load_gguf reads an equal model. The file is complete before it appears
    under its name.
    FileExistsError: there is such a file, and not `replace`. OSError: it cannot be written.
    ValueError, before anything is written: no transformers model, without an output head, or of a
    type that is not among those written; the head is of another model; a layer in a format that
    GGUF does not have, or that gathers its input; a tensor or a tokenizer that has no place there.
    ValueError, and no file: a value of the config that readers of the file would not find.
    """
    require("save_gguf", "gguf", *HF)
    refuse_sharded(model, "save_gguf")
    if not is_transformers_model(model) or quantized_by_another(model):
        raise ValueError(f"model must be a transformers model, got {type(model).__name__}")
    if head is not None:
        check_own(head, model)
    target = check_target(path, replace, "replace=True")
    architecture, row, values = metadata(model.config)
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"model: {type(model).__name__} has no output head, which readers of a GGUF file would "
            "take to be tied to the embedding"
        )
    values |= {_NO_TOKENS: "no_vocab"} if tokenizer is None else vocabulary(tokenizer, model)
    tensors, _ = _tensors(model, architecture, row)
    if head is not None:
        count = values[f"{architecture}.block_count"]
        block, mapping = _tensors(head.block, architecture, row)
        tensors |= stored_head(head, block, partial(_others, mapping, NORM), count)
        for key, value in metadata(head.block.config)[2].items():
            if isinstance(value, list) and len(value) == 1:  # a number for each layer
                values[key] = values[key] + value
        values |= {
            f"{architecture}.block_count": count + 1,
            f"{architecture}.nextn_predict_layers": 1,
        }
    refuse_spoiled("model", row, tensors)
    with replaced(target) as made:
        _write(made, architecture, values, tensors)
        _check_config(made, row.as_stated(model.config))


def has_nextn(config: Any) -> bool:
    """Whether llama.cpp reads heads for later tokens in files of such a model, as gguf lists them.

    ValueError: as of metadata.
    """
    from gguf import MODEL_TENSOR, MODEL_TENSORS

    return MODEL_TENSOR.NEXTN_EH_PROJ in MODEL_TENSORS[arch_of(metadata(config)[0])]


def check_target(path: str | os.PathLike[str], replace: bool, option: str) -> Path:
    """The path, if a file can be written there. `option` is what allows to replace one.

    FileNotFoundError, IsADirectoryError or FileExistsError.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; give the name of a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
    if target.exists() and not replace:
        raise FileExistsError(f"{target} exists; {option} replaces it")
    return target


def _tensors(
    model: Any, architecture: str, row: Architecture
) -> tuple[dict[str, tuple[Tensor, str]], TensorMap]:
    """({name in the file: (the tensor or its packed bytes, its format)}, what a load does)."""
    outline = empty_like(model, torch.float32)
    mapping = tensor_map(architecture, outline, row, model.config.to_dict())
    names = mapping.names()
    tensors: dict[str, tuple[Tensor, str]] = {}
    experts = homes(model, apart=dict(model.named_modules()))
    for owner, home in experts.items():
        tensors |= stored_experts(owner, home)
    for target, module, value in parameters_to_save(model, experts):
        if target.endswith(".input_order"):
            continue  # an order of columns, by which the layer's weight is written
        if target not in names:
            raise ValueError(f"{target} has no place in a GGUF file of a {architecture} model")
        whole, format = _stored(mapping, names[target], target, module, value)
        rows = mapping.sources(target) or {names[target]: len(whole)}
        parts = torch.split(whole, [*rows.values()])
        tensors |= {name: (part, format) for name, part in zip(rows, parts, strict=True)}
    divisors = llama3_divisors(model.config, architecture)
    if divisors is not None:
        tensors[ROPE_DIVISORS] = divisors.float(), "f32"
    return tensors, mapping


def _stored(
    mapping: TensorMap, name: str, target: str, module: Any, value: Tensor
) -> tuple[Tensor, str]:
    """The file's tensor for a parameter of the module, all of its sources' rows, and the format."""
    matrix = isinstance(module, nn.Linear | nn.Embedding) and target.endswith(".weight")
    shape = tuple(weight_shape(module) if matrix else value.shape)
    if shape[0] == 1 and mapping.shape({name: shape[1:]}) == shape:
        row = dense_weight(module) if matrix else value
        return row[0].float().cpu(), "f32"  # a matrix of one row is a vector there
    if value.dim() == 3 and mapping.shape({name: (shape[0], shape[2])}) == shape:
        # A convolution of each channel
        return _matrix(mapping, name, target, value[:, 0].float()), "f32"
    if matrix and isinstance(module, QuantLinear | QuantEmbedding):
        return _packed(mapping, name, target, module)
    if value.dim() == 2 and not name.endswith("norm.weight"):
        if name.endswith("ffn_gate_inp.weight"):  # llama.cpp reads routers in f32 only
            value = value.float()
        dense = value.t() if is_conv1d(module) else value
        return _matrix(mapping, name, target, dense), _name_of(dense.dtype, target)
    return _others(mapping, name, target, value.float().cpu()), "f32"


def _packed(
    mapping: TensorMap, name: str, target: str, module: QuantLinear | QuantEmbedding
) -> tuple[Tensor, str]:
    """The layer's bytes, rows and columns in the order of the file; packed anew, with a warning,
    where that order of columns parts the blocks of the layer's format.
    """
    check_format(target, module.format)
    order = getattr(module, "input_order", None)
    given = np.arange(weight_shape(module)[1]) if order is None else order.cpu().numpy()
    rows, columns = _placement(mapping, name, target, (len(module.weight), len(given)))
    weight = module.weight.detach().cpu().contiguous()
    weight = weight if rows is None else _placed(weight, rows)
    own = given.argsort()[np.arange(len(given)) if columns is None else columns]
    size = formats.get(module.format).block_values
    blocks = own.reshape(-1, size)
    if np.array_equal(blocks, blocks[:, :1] // size * size + np.arange(size)):
        parts = weight.view(len(weight), len(blocks), -1)[:, torch.from_numpy(blocks[:, 0] // size)]
        return parts.reshape(weight.shape), module.format
    if columns is None:
        raise ValueError(f"{target}: its layer gathers its input, which no GGUF file says")
    warnings.warn(
        f"{target}: a GGUF file has its columns in another order, which parts the blocks of "
        f"{module.format}: written in {ANEW}",
        stacklevel=4,
    )
    dense = module.dequantize().cpu()[:, torch.from_numpy(columns)]
    dense = dense if rows is None else _placed(dense.contiguous(), rows)
    return quantize_weight(dense, ANEW), ANEW


def _matrix(mapping: TensorMap, name: str, target: str, matrix: Tensor) -> Tensor:
    """Rows and columns in the order of the file."""
    rows, columns = _placement(mapping, name, target, (len(matrix), matrix.shape[1]))
    matrix = matrix.cpu() if columns is None else matrix.cpu()[:, torch.from_numpy(columns)]
    return matrix.contiguous() if rows is None else _placed(matrix.contiguous(), rows)


def _placement(
    mapping: TensorMap, name: str, target: str, shape: tuple[int, int]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(the file's row of each row, the model's column of each of the file's), None: the same.

    ValueError: the file has more than another order of them.
    """
    rows = mapping.sources(target) or {name: shape[0]}
    layout = mapping.layout({part: (count, shape[1]) for part, count in rows.items()})
    if layout is None or layout.transposed:
        raise ValueError(f"{target} is not a matrix of a GGUF file, row by row")
    return layout.rows, None if layout.columns is None else layout.columns.argsort()


def _others(mapping: TensorMap, name: str, target: str, value: Tensor) -> Tensor:
    """The file's vector that becomes `value`, found by what becomes of 0, 1, 2, and so on."""
    if value.dim() == 2:  # one norm for each head
        return value
    if (restored := mapping.restored(name, value)) is not None:
        return restored
    numbers = np.arange(len(value), dtype=np.float32)
    made = mapping.convert(name, numbers)
    found = next(iter(made.values())).numpy() if len(made) == 1 else None
    if found is not None and np.array_equal(found, numbers - 1):
        return value + 1
    if found is not None and np.array_equal(np.sort(found), numbers):
        return _placed(value, found.astype(np.int64))
    if found is not None:
        (logs,) = mapping.convert(name, -np.exp(numbers / len(numbers))).values()
        order = logs.argsort().argsort().numpy()
        if np.allclose(logs.numpy(), order / len(order), rtol=0, atol=1 / 4 / len(order)):
            return torch.from_numpy(negated_exp(_placed(value, order).numpy(), name))
    raise ValueError(f"{target} is not stored in GGUF files in a way that can be undone")


def _placed(rows: Tensor, order: np.ndarray) -> Tensor:
    """out[order[i]] = rows[i]: the inverse of what a load does."""
    moved = rows.view(len(rows), -1).view(torch.uint8).numpy()[order.argsort()]
    return torch.from_numpy(moved).view(rows.dtype).view(rows.shape)


def _name_of(dtype: torch.dtype, target: str) -> str:
    found = [name for name, known in DTYPES.items() if known == dtype]
    if not found:
        raise ValueError(f"{target} is {dtype}, which is neither packed nor a float of GGUF")
    return found[0]


def _write(
    path: Path, architecture: str, values: dict[str, Any], tensors: dict[str, tuple[Tensor, str]]
) -> None:
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, architecture)
    if any(format not in DTYPES for _, format in tensors.values()):
        writer.add_quantization_version(GGML_QUANT_VERSION)
    # Numbers have their keys' types already
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in values.items():
        add[type(value)](key, value)
    for name, (tensor, format) in tensors.items():
        kind = GGMLQuantizationType[format.upper()]
        packed = tensor.dtype == torch.uint8  # parts of a stack are copied when they are written
        data = (tensor if packed else tensor.contiguous().view(torch.uint8)).numpy()
        writer.add_tensor(name, data, raw_dtype=kind)
    write_out(writer)


def _check_config(path: Path, config: Any) -> None:
    """ValueError: who reads the file finds another value than the config has."""
    from transformers import PretrainedConfig

    asked = one_group(config.to_dict())
    found = one_group(model_config(GgufFile(path))[0].to_dict())
    # Checkpoints have more, which no model reads; but models ask for head_dim without their config.
    read = {"head_dim", *type(config)().to_dict()} - PretrainedConfig().to_dict().keys()
    for key, value in sorted(asked.items()):
        if key not in read or key in _UNSAID or key.startswith("_") or "dropout" in key:
            continue
        if key == "head_dim" and value is None:
            value = config.hidden_size // config.num_attention_heads
        if not _same(value, found.get(key)):
            raise ValueError(
                f"model: its config has {key} = {value!r}, and who reads a GGUF file of a "
                f"{config.model_type} model finds {found.get(key)!r}"
            )


def _same(one: Any, other: Any) -> bool:
    """Whether values are equal as f32, which is what a file has; None and absent are the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        missing = {"partial_rotary_factor": 1.0}
        # A rotation's older name of rope_type, and a key that the config itself has, are left out.
        keys = (one.keys() | other.keys()) - {"type", "max_position_embeddings"}
        return all(_same(one.get(k, missing.get(k)), other.get(k, missing.get(k))) for k in keys)
    if isinstance(one, float | int) and isinstance(other, float | int):
        return bool(np.float32(one) == np.float32(other))
    return bool(one == other)
