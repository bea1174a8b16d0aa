"""The weights in a folder that a save may replace: files that a save of its kind wrote there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .headers import read_headers
from .staging import cannot_write, check_writable, settle

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

# Files that transformers reads in preference to, or beside, the files of a new tokenizer.
_TOKENIZER = ("tokenizer.json", "added_tokens.json", "special_tokens_map.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
_OTHERS = ("pytorch_model*", "tf_model*", "flax_model*", "consolidated*.safetensors")


def prepare_folder(
    folder: str | os.PathLike[str], weights: Callable[[Path], set[str] | None]
) -> Path:
    """The folder, made if needed, known to be writable and free of other savers' models.

    weights(path) are the names of the weights that the save may replace; None if the folder's
    config.json is not of its kind.
    OSError that says why not; FileExistsError names the file that is not to be replaced.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None
    check_writable(path)
    settle(path)
    if (path / CONFIG).is_dir():
        raise IsADirectoryError(f"cannot write to the folder {path}: {path / CONFIG} is a folder")
    ours = weights(path) if (path / CONFIG).exists() else set()
    if ours is None:
        raise FileExistsError(f"{path} holds another model; choose an empty folder")
    found = {f.name for pattern in ("model*.safetensors*", *_OTHERS) for f in path.glob(pattern)}
    if foreign := sorted(found - ours):
        raise FileExistsError(
            f"{path / foreign[0]} is no part of a model that this save may replace; move it away "
            "or choose an empty folder"
        )
    return path


def packed_weights(path: Path, packed: Iterable[str]) -> set[str]:
    """The weights of a packed model: files with the packed layers' bytes, shards of their index.

    packed: the layers that config.json names. A file that another program put in the place of one
    of ours has floats there, or other tensors than the index says.
    """
    names = {f"{layer}.weight" for layer in packed}
    tensors = {file.name: _tensors(file) for file in path.glob("model*.safetensors")}
    ours = {file for file, held in tensors.items() if _holds_packed(held, names)}
    for index in path.glob("model.safetensors.index*.json"):
        shards = _shards(index)
        if not any(shard in ours for shard in shards):
            continue
        ours.add(index.name)
        ours |= {shard for shard, keys in shards.items() if keys == tensors.get(shard, {}).keys()}
    return ours


def mlx_weights(path: Path) -> set[str]:
    """The weights of an MLX checkpoint: mlx-lm reads every model*.safetensors of a folder."""
    from safetensors import SafetensorError, safe_open

    ours = set()
    for file in path.glob("model*.safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                if (opened.metadata() or {}).get("format") == "mlx":
                    ours.add(file.name)
        except (SafetensorError, OSError):
            continue
    return ours | {INDEX} if ours and (path / INDEX).is_file() else ours


def obsolete_weights(ours: set[str], variant: str | None = None) -> set[str]:
    """The weights that a new save of that variant would leave behind as a second model."""
    part = "" if variant is None else re.escape(f".{variant}")
    shard = rf"model{part}(-\d{{5}}-of-\d{{5}})?\.safetensors"
    pattern = re.compile(rf"{shard}|model\.safetensors\.index{part}\.json")
    return {name for name in ours if pattern.fullmatch(name)}


def obsolete_tokenizer(path: Path) -> set[str]:
    """Files of an earlier tokenizer that a new one would read, too."""
    found = (file for pattern in (*_TOKENIZER, *_TEMPLATES) for file in path.glob(pattern))
    return {str(file.relative_to(path)) for file in found if file.is_file()}


def _holds_packed(held: dict[str, str], names: set[str]) -> bool:
    found = held.keys() & names
    return bool(found) and all(held[name] == "U8" for name in found)


def _tensors(file: Path) -> dict[str, str]:
    """{tensor: dtype} of a safetensors file; empty if it cannot be read."""
    try:
        return {name: tensor.dtype for name, tensor in read_headers([str(file)]).items()}
    except (ValueError, OSError):
        return {}


def _shards(index: Path) -> dict[str, set[str]]:
    """{shard: its tensors} of an index; empty if it is none."""
    try:
        table: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {}
        for tensor, shard in table.items():
            shards.setdefault(str(shard), set()).add(tensor)
    except (ValueError, OSError, LookupError, TypeError, AttributeError):
        return {}
    return shards
