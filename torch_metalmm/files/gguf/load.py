"""Loading a GGUF file as a transformers model whose weights stay packed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...extras import HF, require, uncollected
from ...formats import DTYPES, get
from ...models.attach import attach
from ...models.finite import check_finite
from ...models.replace import is_conv1d, summary
from ...models.shard.apply import part_of, part_of_columns, part_of_rows, shard_
from ...models.skeleton import (
    can_pack,
    meta_model,
    put_dense,
    put_packed,
    real_buffers,
    set_input_order,
    tied_names,
    untie,
)
from ...nn.place import place
from ..blame import blaming
from ..limits import MAX_LAYERS
from .architectures import model_config
from .derive import ROPE_DIVISORS
from .experts import Experts, experts_of, put_experts
from .file import GgufFile
from .joined import ANEW, common_format, joined_rows
from .layout import Layout, TensorMap
from .map import layer_of, tensor_map
from .rows import Architecture
from .split import open_gguf
from .tokenizer import tokenizer

# Trained in bfloat16, with residuals beyond float16's 65504.
_BEYOND_F16 = ("gemma", "t5")
_MOST_BUFFERS = 1 << 20  # bytes, of models that are smaller than what they have of these


@uncollected()
def load_gguf(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mesh: Any = None,
    plan: Mapping[str, str] | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file, for every architecture in supported_architectures().

    A split file is given by any of its parts, or by the folder that has them and no other model.

    Each 2-D weight of a Linear, Conv1D (GPT-2) or Embedding becomes a QuantLinear or
    QuantEmbedding, and stacks of experts QuantExperts: on the CPU views of the memory-mapped file,
    copied only where the architecture reorders rows (Llama's q and k); on another device copies.
    Files larger than memory load, and writing to a weight never reaches the file. The file must not
    be truncated while the model is used: a read beyond its end kills the process (SIGBUS). A tied
    output head shares the embedding's bytes. Everything else (norms, biases, convolutions) is
    decoded to `dtype`, the dtype of the activations too; by default that of default_dtype.
    A quantized weight that cannot stay packed is decoded with a warning; another warning names the
    tensors of the file that the model has no place for. The model is frozen and in eval mode.
    With a mesh, this rank loads and reads its part of the model, as shard_(model, mesh, plan).

    FileNotFoundError, IsADirectoryError, ImportError (transformers or gguf missing), or ValueError,
    before any weight is read: not a GGUF file, truncated, parts that are not one model's, a tensor
    type without a format here, tensors that overlap or are not aligned, an architecture that cannot
    be mapped, a missing tensor or one of another shape than the model's, metadata too large for a
    model. ValueError, too, where the file is truncated while it is read, and where a packed weight
    decodes to NaN or Inf, unless the packed weights take more than half of the memory.
    """
    if dtype not in (None, *DTYPES.values()):
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    require("load_gguf", "gguf", *HF)

    model, tokens, _ = _loaded(open_gguf(path), device, dtype, mesh, plan)
    return model, tokens


def model_of(
    file: GgufFile, device: torch.device | str, dtype: torch.dtype
) -> tuple[Any, TensorMap]:
    """The model of the file's tensors, as load_gguf's, and where they went."""
    model, _, mapping = _loaded(file, device, dtype, wants_tokens=False)
    return model, mapping


def _loaded(
    file: GgufFile,
    device: torch.device | str,
    dtype: torch.dtype | None,
    mesh: Any = None,
    plan: Mapping[str, str] | None = None,
    wants_tokens: bool = True,
) -> tuple[Any, Any, TensorMap]:
    _check_sizes(file)
    dtype = dtype or default_dtype(file, device)
    with blaming(file.path, "transformers makes no config of its metadata"):
        config, row, values = model_config(file)
    with blaming(file.path, "no model fits its metadata"):
        model = meta_model(config, dtype)
        mapping = tensor_map(file.architecture, model, row, values)
    experts = experts_of(file, model)
    _check_shapes(file, model, mapping, experts)
    _check_buffers(file, model)
    todo = _plan(file, model, mapping, experts, row)
    # load_mtp reads what predicts later tokens.
    todo.unused = [name for name in todo.unused if not _is_later(name, config)]
    with blaming(file.path, "transformers makes no tokenizer of its metadata"):
        tokens = tokenizer(file, config) if wants_tokens else None
    with blaming(file.path, "no model fits its metadata"):
        real_buffers(model, config, dtype)
    rope = values.get("rope_parameters", {})
    scaling = rope.get("full_attention", rope).get("rope_type")
    if scaling in ("llama3", "proportional") and ROPE_DIVISORS in todo.unused:
        todo.unused.remove(ROPE_DIVISORS)  # the config has the divisors
    if scaling == "longrope":
        todo.unused = [name for name in todo.unused if not name.startswith("rope_factors_")]
    _warn(file, todo, dtype, config)
    if mesh is not None:
        _put_empty(model, file, todo)
        shard_(model, mesh, plan)
    _fill(model, file, mapping, todo, device)
    check_finite(file.path, model)
    _set_end_tokens(model, file)
    attach(model)
    return model.requires_grad_(False), tokens, mapping


def default_dtype(file: GgufFile, device: torch.device | str) -> torch.dtype:
    """The dtype of activations where none is asked for: float32, but on mps one of 16 bits.

    There float32 takes float tiles, matrix kernels from 9 rows on where float16 has them from 33,
    and never the matrix units of M5. bfloat16 where a matrix of the file is, and for architectures
    whose activations float16 does not hold; else float16.
    """
    if torch.device(device).type != "mps":
        return torch.float32
    bf16 = any(t.format == "bf16" and len(t.shape) > 1 for t in file.tensors.values())
    return torch.bfloat16 if bf16 or file.architecture.startswith(_BEYOND_F16) else torch.float16


@dataclass
class _Packed:
    """A tensor of the file that stays packed, and where it goes."""

    sources: list[str]  # several have the rows one after the other
    names: list[str]
    format: str
    layout: Layout


@dataclass
class _Plan:
    names: dict[str, list[str]]  # every name in the model of each tensor the file gives
    packed: list[_Packed] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)  # parameters that the metadata has
    experts: list[Experts] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # buffers that stay as the class makes them


def _check_sizes(file: GgufFile) -> None:
    """ValueError for sizes that the tensors contradict."""
    blocks = file.metadata.get(f"{file.architecture}.block_count", 0)
    most = min(len(file.tensors), MAX_LAYERS)
    if not isinstance(blocks, int) or blocks > most:
        raise ValueError(
            f"{file.path}: block_count = {blocks!r}, but it has {len(file.tensors)} tensors, "
            f"and no model has more than {MAX_LAYERS} blocks"
        )
    width = file.metadata.get(f"{file.architecture}.embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and width is not None and embedding.shape[-1] != width:
        raise ValueError(
            f"{file.path}: embedding_length = {width}, but token_embd.weight is "
            f"{list(embedding.shape)}"
        )


def _check_shapes(file: GgufFile, model: Any, mapping: TensorMap, experts: list[Experts]) -> None:
    """ValueError for tensors that do not make the model's, by their names and shapes alone."""
    state: dict[str, Tensor] = model.state_dict()
    stacks = {name for item in experts for name in item.tensors}
    makers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, entry in file.tensors.items():
        target = mapping.target(name)
        if target is not None and target in state and name not in stacks:
            makers.setdefault(target, {})[name] = entry.shape
    for target, shapes in makers.items():
        _check_one_layout(file, target, shapes, mapping)
        made, wanted = mapping.shape(shapes), tuple(state[target].shape)
        if made != wanted:
            given = " and ".join(f"tensor {n!r} is {list(shape)}" for n, shape in shapes.items())
            made_of = "nothing" if made is None else list(made)
            makes = "" if made in shapes.values() else f", which makes {made_of}"
            raise ValueError(
                f"{file.path}: {given}{makes}, but the model's {target} is {list(wanted)}"
            )


def _check_one_layout(
    file: GgufFile, target: str, shapes: dict[str, tuple[int, ...]], mapping: TensorMap
) -> None:
    """ValueError for a tensor that makes one of the model's, beside others that would make it too.

    So may be the keys and values of a latent, for which files have two layouts.
    """
    for name, shape in shapes.items() if len(shapes) > 1 else ():
        if mapping.shape({name: shape}) is not None:
            others = ", ".join(repr(other) for other in shapes if other != name)
            raise ValueError(
                f"{file.path}: tensor {name!r} alone makes the model's {target}, for which the "
                f"file has {others} too"
            )


def _check_buffers(file: GgufFile, model: nn.Module) -> None:
    """ValueError for metadata that asks for more memory than a model of this size has use for."""
    most = _MOST_BUFFERS + sum(entry.nbytes for entry in file.tensors.values())
    for name, buffer in model.named_buffers():
        if buffer.nbytes > most:
            raise ValueError(
                f"{file.path}: no model fits its metadata: the buffer {name} alone is "
                f"{list(buffer.shape)}, {buffer.nbytes} bytes, more than all tensors of the file"
            )


def _plan(
    file: GgufFile, model: Any, mapping: TensorMap, experts: list[Experts], row: Architecture
) -> _Plan:
    """The place of every tensor of the file and the source of every parameter of the model."""
    state = model.state_dict()
    stacks = {name for item in experts for name in item.tensors}
    targets = {name: mapping.target(name) for name in file.tensors if name not in stacks}
    given = {target for target in targets.values() if target is not None and target in state}
    plan = _Plan(_names_to_fill(model, given), experts=experts)
    for name, target in targets.items():
        if target is None or target not in state:
            plan.unused.append(name)
            continue
        joined = mapping.sources(target)
        item = _packed_of(
            file, model, mapping, [*joined] if name in joined else [name], plan.names[target]
        )
        if item is None:
            plan.dense.append(name)
        elif name == item.sources[0]:
            plan.packed.append(item)
    for end, key in row.parameters.items():
        for name in (n for n in state if n.endswith(end)):
            plan.numbers[name] = _number(file, key, layer_of(name))
    filled = {name for names in plan.names.values() for name in names} | plan.numbers.keys()
    filled.update(name for item in experts for name in item.parameters)
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name in filled:
            continue
        if not name.endswith(".bias"):
            raise ValueError(f"{file.path} has no tensor for the model's {name}")
        plan.zeros.append(name)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)} - filled
    plan.kept = [n for n, t in state.items() if n in buffers and t.is_floating_point()]
    return plan


def _is_later(name: str, config: Any) -> bool:
    """Whether the tensor is of a layer behind the model's."""
    layer = layer_of(name)
    return layer is not None and layer >= getattr(config, "num_hidden_layers", MAX_LAYERS)


def _number(file: GgufFile, key: str, layer: int | None) -> float:
    """The layer's number, of a key that states one for all or for each."""
    given = file.value(key)
    if isinstance(given, list):
        given = given[layer] if layer is not None and layer < len(given) else None
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ValueError(f"{file.path}: {key} has no number of layer {layer}")
    return float(given)


def _names_to_fill(model: Any, given: set[str]) -> dict[str, list[str]]:
    """{tensor the file gives: the names it fills}: its own and those tied to it.

    Tied names that the file gives one by one are not tied in this model; transformers does the
    same, and files of Bloom and Falcon can have an output head of their own.
    """
    untie(model, given)
    ties = tied_names(model)
    result = {}
    for target in given:
        group = ties.get(target, [target])
        first = next(name for name in group if name in given)
        free = [name for name in group if name not in given] if target == first else []
        result[target] = [target, *free]
    return result


def _packed_of(
    file: GgufFile, model: nn.Module, mapping: TensorMap, sources: list[str], names: list[str]
) -> _Packed | None:
    """How the rows of these tensors stay packed in the model; None if they cannot."""
    shapes = {source: file.tensors[source].shape for source in sources}
    format = common_format({file.tensors[source].format for source in sources})
    if format is None or any(len(s) != 2 for s in shapes.values()) or not can_pack(model, names):
        return None
    modules = [model.get_submodule(n.rpartition(".")[0]) for n in names]
    layout = mapping.layout(shapes)
    if layout is None or layout.transposed != is_conv1d(modules[0]):
        return None
    if layout.columns is not None and not all(isinstance(m, nn.Linear) for m in modules):
        return None
    # Conv1D keeps W transposed and GGUF does not: transformers turns it, a packed layer need not.
    return _Packed(sources, names, format, layout)


def _warn(file: GgufFile, plan: _Plan, dtype: torch.dtype, config: Any) -> None:
    # T5 1.0 scales what a tied head takes; transformers also ties heads of models that do not.
    decodes = "dec.output_norm.weight" in file.tensors and "output.weight" not in file.tensors
    if decodes and config.model_type == "t5":
        warnings.warn(
            f"{file.path} has no output.weight, and no key says whether the input of its tied head "
            "is scaled by d_model**-0.5, as T5 1.0 does: taken as scaled; else set "
            "model.config.scale_decoder_outputs = False",
            stacklevel=3,
        )
    joins = [item.sources for item in plan.packed if item.format == ANEW]
    again = [s for s in joins if {file.tensors[name].format for name in s} != {ANEW}]
    if again:
        warnings.warn(
            f"packed again in {ANEW}, because the model has these formats in one matrix: "
            f"{summary([name for sources in again for name in sources])}",
            stacklevel=3,
        )
    decoded = [name for name in plan.dense if file.tensors[name].format not in DTYPES]
    if decoded:
        warnings.warn(
            f"decoded to {dtype}, because the model does not use them as plain matrices: "
            f"{summary(decoded)}",
            stacklevel=3,
        )
    if plan.kept:
        warnings.warn(
            f"the file has no tensor for {summary(plan.kept)}; as initialised", stacklevel=3
        )
    if plan.unused:
        warnings.warn(f"not used by the model: {summary(plan.unused)}", stacklevel=3)


def _put_empty(model: Any, file: GgufFile, plan: _Plan) -> None:
    """Packed layers without data, from whose formats and sizes shard_ sees what to divide."""
    for item in plan.packed:
        shapes = [file.tensors[source].shape for source in item.sources]
        size = sum(n for n, _ in shapes), get(item.format).row_bytes(shapes[0][1])
        rows = torch.empty(size, dtype=torch.uint8, device="meta")
        put_packed(model, item.names, rows, item.format)
        if item.layout.columns is not None:
            order = torch.empty(len(item.layout.columns), dtype=torch.int64, device="meta")
            set_input_order(model, item.names, order)


def _fill(
    model: Any, file: GgufFile, mapping: TensorMap, plan: _Plan, device: torch.device | str
) -> None:
    for item in plan.packed:
        weight, name = joined_rows(file, item.sources, item.format), item.names[0]
        if item.layout.rows is not None:
            rows = part_of_rows(model, name, torch.from_numpy(item.layout.rows))
            # numpy, because torch's index_select is 100 times slower on rows of bytes
            weight = part_of_columns(model, name, torch.from_numpy(weight.numpy()[rows.numpy()]))
        else:
            weight = part_of(model, name, weight)
        put_packed(model, item.names, place(weight, device), item.format)
        if item.layout.columns is not None:
            order = torch.from_numpy(item.layout.columns.argsort())
            order = part_of(model, f"{name.removesuffix('weight')}input_order", order)
            set_input_order(model, item.names, order.to(device))
    for experts in plan.experts:
        put_experts(model, file, experts, device)
    for name in plan.dense:
        for target, value in mapping.convert(name, file.dense(name).numpy()).items():
            names = plan.names[target]
            put_dense(model, names, part_of(model, names[0], value).contiguous(), device)
    for name, number in plan.numbers.items():
        *_, leaf = name.rpartition(".")
        value = torch.full(model.state_dict()[name].shape, number)
        module = model.get_submodule(name.removesuffix(f".{leaf}"))
        if leaf in module._buffers:
            module._buffers[leaf] = value.to(module._buffers[leaf].dtype)
        else:
            put_dense(model, [name], value, device)
    for name in plan.zeros:
        put_dense(model, [name], torch.zeros(model.get_parameter(name).shape), device)
    model.to(device)  # buffers, which were made on the CPU


def _set_end_tokens(model: Any, file: GgufFile) -> None:
    """Generation stops at the end of text and at the end of a turn, as the file names them."""
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    known = generation.eos_token_id
    ends = known if isinstance(known, list) else [] if known is None else [known]
    for kind in ("eos", "eot", "eom"):
        token = file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if isinstance(token, int) and token not in ends:
            ends = [*ends, token]
    if ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
