"""The gain of an importance matrix: weighted error and perplexity with the matrix and without.

The matrix is measured on README and the pages of docs, the perplexity on Moby-Dick (quality.py),
both with SmolLM2's own weights. Beside them what llama.cpp's quantizers make of the same weights
and the same matrix, by ggml_quantize_chunk, computed by our layers.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import QuantLinear, formats, load_gguf, read_importance
from torch_metalmm.files.imatrix import write_imatrix
from torch_metalmm.models.ggml import type_names
from torch_metalmm.tools.generate import demo_model
from torch_metalmm.tools.imatrix import measure

from ..peers import ggml
from ..runner import Record, Run, named
from ..tables import status
from . import cache_cost, quality

CHUNK, CHUNKS = 512, 16


def run(run: Run) -> Iterator[Record]:
    """Records of the formats that read an importance; the first has the file's own weights."""
    names, quick = named(run.args.formats), run.args.quick
    status("SmolLM2: importance")
    model, tokenizer = load_gguf(demo_model())
    importance = measured(model, tokenizer, *((64, 1) if quick else (CHUNK, CHUNKS)))
    ids = tokenizer(quality.TEXT.read_text(), return_tensors="pt").input_ids
    ids = ids[:, : 128 if quick else None]
    wanted = quality.log_probabilities(model, ids)
    theirs = ggml.library_folder() is not None
    if not theirs:
        yield {"kind": "skipped", "what": "llama.cpp", "why": "llama-cpp-python is not installed"}
    for name in (None, *(n for n in names if formats.get(n).weighs)):
        ways = {(name or "the file's q4_1"): None}
        if name is not None:
            ways[f"{name}, imatrix"] = importance
        made: dict[str, Any] = {}
        for variant, given in ways.items():
            status(f"SmolLM2: {variant}")
            made[variant] = quality.pack(model, name, given)
        if theirs and name in type_names().values():
            status(f"SmolLM2: {name}, llama.cpp's")
            made[f"{name}, imatrix, by llama.cpp"] = by_llama_cpp(model, name, importance)
        last = next(reversed(made.values()))
        for variant, other in made.items():
            yield record(variant, model, other, importance, ids, wanted) | {
                "same_bytes": same_bytes(other, last) if len(made) == 3 else None
            }


def measured(model: Any, tokenizer: Any, chunk: int, chunks: int) -> dict[str, Tensor]:
    """The importance of every layer, through a file."""
    ids = tokenizer(cache_cost.text()).input_ids[: chunk * chunks]
    matrix = measure(model, tokenizer, tokenizer.decode(ids), chunk, "docs", as_packed=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imatrix.gguf"
        write_imatrix(path, matrix)
        return read_importance(path, model, as_packed=True)


def by_llama_cpp(model: Any, name: str, importance: dict[str, Tensor]) -> Any:
    """`packed`, and then the bytes of every layer that has an importance are ggml's."""
    result = quality.pack(model, name)
    for layer, columns in importance.items():
        target = result.get_submodule(layer)
        dense = model.get_submodule(layer).dequantize()
        target.weight.copy_(chunk_of(dense, target.format, columns, target.weight.shape[1]))
    return result


def chunk_of(w: Tensor, name: str, importance: Tensor, row_bytes: int) -> Tensor:
    """ggml_quantize_chunk: uint8 [N, row_bytes] of w f32 [N, K]."""
    type_id = {n: t for t, n in type_names().items()}[name]
    out = torch.empty(len(w), row_bytes, dtype=torch.uint8)
    source, columns = w.float().contiguous(), importance.float().contiguous()
    to, by = (out.data_ptr(), columns.data_ptr())
    ggml.call("quantize_chunk", type_id, source.data_ptr(), to, 0, *w.shape, by)
    return out


def same_bytes(a: Any, b: Any) -> float:
    """The share of equal bytes of the linear layers."""
    equal = total = 0
    for name, layer in a.named_modules():
        if isinstance(layer, QuantLinear):
            other = b.get_submodule(name).weight
            equal += int((layer.weight == other).sum())
            total += other.numel()
    return equal / total


def weighted_error(model: Any, other: Any, importance: dict[str, Tensor]) -> float:
    """sqrt(Σ importance (ŵ - w)² / Σ importance w²) over the layers that have one, in f64."""
    error = size = 0.0
    for layer, columns in importance.items():
        w = model.get_submodule(layer).dequantize().double()
        e = other.get_submodule(layer).dequantize().double() - w
        error += float((e.square() * columns.double()).sum())
        size += float((w.square() * columns.double()).sum())
    return math.sqrt(error / size)


def record(
    variant: str, model: Any, other: Any, importance: dict[str, Tensor], ids: Tensor, wanted: Tensor
) -> Record:
    given = wanted if other is model else quality.log_probabilities(other, ids)
    return {
        "kind": "quality",
        "model": "SmolLM2-135M-Instruct, from its Q4_1 file, with an importance matrix",
        "variant": variant,
        "weighted_error": weighted_error(model, other, importance),
        **quality.Scores().add(given, wanted, ids[0, 1:]).record(),
        **quality.sizes(other, is_base=other is model),
    }
