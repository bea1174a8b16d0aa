"""Packed models on disk: a folder with safetensors, config.json and the tokenizer's files.

The format is that of the transformers quantization method "metalmm" (see quantizer.py). Two things
are added to save_pretrained and from_pretrained: a save is complete or leaves the old files
(files/staging.py), and a load refuses a folder that lacks a tensor instead of drawing the tensor at
random.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ..extras import HF, require, uncollected
from ..files.blame import blaming
from ..files.folder import check_packed, is_packed, read_tokenizer
from ..files.owned import obsolete_tokenizer, obsolete_weights
from ..files.staging import staged
from ..files.untrusted import load_config
from ..models.finite import check_finite
from ..models.shard.gather import on_whole
from ..models.skeleton import named_class
from ..nn.sharded import is_sharded

__all__ = ["is_packed", "load_packed", "save_packed"]


def save_packed(model: Any, tokenizer: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write a transformers model with packed layers, and its tokenizer unless that is None.

    All files change at once (see files/staging.py): a save that fails or is killed leaves the model
    that was there. Weights and tokenizer files of an earlier save are removed, other files stay.
    options go to the model's save_pretrained (max_shard_size). Every rank of a sharded model calls
    this, and rank 0 writes the bytes of the model as it was before shard_.
    ValueError: the model has no packed layer or is not transformers'. OSError: the folder cannot be
    written, or holds weights that are not a packed model's (checked before anything is written).
    """
    require("save_packed", *HF)
    if is_sharded(model):
        on_whole(model, lambda: save_packed(model, tokenizer, folder, **options))
        return
    save_beside(model, tokenizer, folder, {}, **options)


def save_beside(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    files: Mapping[str, Path],
    stale: Collection[str] = (),
    **options: Any,
) -> None:
    """save_packed for a model that is not sharded; files, {name in the folder: file}, are copied
    beside it. stale: files of the model that was there, which go with it."""
    from .config import stored_config
    from .save import check_save

    if stored_config(model) is None:
        raise ValueError("model has no packed layer; call quantize_ first")
    target, weights = check_save(model, folder)

    def obsolete(names: set[str]) -> set[str]:
        old = obsolete_weights(weights, options.get("variant"))
        old |= {name for name in stale if name not in files and (target / name).is_file()}
        return old if tokenizer is None else old | obsolete_tokenizer(target)

    with staged(target, obsolete) as staging:
        model.save_pretrained(staging, **options)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        for name, file in files.items():
            (staging / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, staging / name)


@uncollected()
def load_packed(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mesh: Any = None,
    plan: Mapping[str, str] | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a packed folder; no tokenizer in it gives None.

    dtype is that of activations and unpacked weights, by default the one the model was saved with.
    The model is frozen and in eval mode. On the CPU its weights are views of the mapped files,
    which must not be truncated while the model is used: a read beyond their end kills the process
    (SIGBUS). Our saves write new files.
    With a mesh, this rank loads and reads its part of the model, as shard_(model, mesh, plan).
    No code is fetched or run, and no file outside the folder is read.
    OSError: the folder or a file is missing. ValueError: not such a folder, its tensors do not fit
    its config, or it names code or files elsewhere.
    """
    require("load_packed", *HF)
    path = Path(folder)
    check_packed(path)
    torch.empty(0, device=device)  # torch's own error where there is none
    config = load_config(path)
    kind = named_class(config)
    if kind is None:
        raise ValueError(f"{path}: transformers has no class {config.architectures} of its config")
    from .parallel import loading_on

    with blaming(path, "its files make no such model"), loading_on(mesh, plan):
        model, info = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype or "auto",
            device_map=None if str(device) == "cpu" else {"": device},
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    for problem, keys in (
        ("has no tensor for", info["missing_keys"]),
        ("has tensors the model does not:", info["unexpected_keys"]),
    ):
        if keys:
            raise ValueError(f"{path} {problem} {', '.join(sorted(keys)[:6])}")
    check_finite(path, model)
    return model.requires_grad_(False), read_tokenizer(path)
