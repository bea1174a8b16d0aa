"""`metalmm imatrix`: a model's importance matrix, in a file that llama-quantize reads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..files.imatrix import Imatrix


def add_imatrix(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Run a text through a model and write, for each weight that GGUF files name, the sums of "
        "squares of what its columns multiply: what llama-quantize takes as --imatrix."
    )
    parser.add_argument("--model", required=True, help="as of `metalmm generate`")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="a .gguf file, or a .dat file"
    )
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="tokens at a time")


def run(args: argparse.Namespace, dtype: torch.dtype | None) -> None:
    """Do what the arguments say. ValueError, OSError: as the loaders, or the text is too short."""
    from ..files.hub import fetch
    from ..files.imatrix import write_imatrix
    from ..files.quantized import is_quantized
    from .generate import check_loadable, load_model, reads_gguf

    if args.chunk < 2:
        raise ValueError(f"--chunk must be at least 2, got {args.chunk}")
    text = args.text.read_text(encoding="utf-8")
    path = fetch(args.model, lambda folder: check_loadable(folder, args.model))
    model, tokenizer = load_model(path, args.device, dtype)
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer")
    as_packed = reads_gguf(path)
    if not as_packed and not is_quantized(path) and (ordered := sorted(_orders(model))):
        raise ValueError(
            f"{args.model}: {ordered[0]} has an input_order, and the folder does not say whether a "
            "GGUF file has its columns so; give the file or folder that it was packed from"
        )
    dataset = str(args.text)
    write_imatrix(
        args.output, measure(model, tokenizer, text, args.chunk, dataset, as_packed=as_packed)
    )


def measure(
    model: Any, tokenizer: Any, text: str, chunk: int, dataset: str, *, as_packed: bool
) -> Imatrix:
    """The importance matrix of the text, in whole chunks of so many tokens.

    As llama.cpp's: each chunk begins with the token that begins a text, and the output head is left
    out, whose quantization is chosen apart. as_packed: the columns of a layer with an input_order
    are those of its packed weight, as in the GGUF file that it came from; else those of its input,
    as in the file that the model would be converted to. ValueError: the text is shorter than a
    chunk.
    """
    import numpy as np
    import torch
    from tqdm import tqdm

    from ..files.gguf.map import gguf_names
    from ..files.imatrix import Entry, Imatrix
    from ..models.importance import importance

    chunks = _chunks(tokenizer, text, chunk)
    with importance(model) as sums, torch.inference_mode():
        for ids in tqdm(chunks, desc="chunks", disable=None):
            model(ids[None].to(model.device), use_cache=False)
    orders = _orders(model) if as_packed else {}
    entries = {
        name: Entry(
            sums[layer].squares[orders.get(layer, slice(None))].float().numpy()[None],
            np.array([sums[layer].rows], dtype=np.float32),
        )
        for name, layer in gguf_names(model, sums).items()
        if sums[layer].rows and name != "output.weight"
    }
    return Imatrix(entries, (dataset,), len(chunks), chunk)


def _orders(model: Any) -> dict[str, Tensor]:
    """{layer: the order of its packed columns, int64 [K] on the CPU} of layers that have one."""
    found = {n: getattr(m, "input_order", None) for n, m in model.named_modules()}
    return {name: order.cpu() for name, order in found.items() if order is not None}


def _chunks(tokenizer: Any, text: str, chunk: int) -> list[Tensor]:
    """int64 [chunk] each."""
    import torch

    ids: list[int] = tokenizer(text, verbose=False).input_ids
    begin = ids[0] if ids and ids[0] == tokenizer.bos_token_id else None
    whole = torch.tensor(ids)[: len(ids) // chunk * chunk].reshape(-1, chunk)
    if not len(whole):
        raise ValueError(f"the text has {len(ids)} tokens, fewer than a chunk of {chunk}")
    if begin is not None:
        whole[:, 0] = begin
    return list(whole)
