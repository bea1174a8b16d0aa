"""The tensors of safetensors files that predict the token after the next, and their places.

transformers and mlx-lm drop them. Who quantizes for MLX and keeps them has `language_model.mtp.*`
among the weights (oMLX), `mtp.*` in model-mtp.safetensors or mtp/weights.safetensors (vllm-mlx's
add_mtp_weights.py), in mtp.safetensors (MTPLX) or optiq/mtp.safetensors, the layer behind the last
(GLM), or a folder of the head alone, its names without mtp (mlx-vlm's qwen3_5_mtp).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..models.mtp import OWN
from .gguf.split import is_gguf, open_gguf
from .headers import read_headers
from .mlx.shifted import SHIFTED, has_sums, text_name, unshifted
from .source import Source
from .untrusted import check_index

HEAD_FILE = "mtp.safetensors"  # beside weights: no program takes it for a part of the model

# Beginnings of names of a head's tensors behind its prefix, and those of a model of one layer or of
# MtpHead; None: it is the model's. The first that fits counts, read either way.
_MTP: dict[str, str | None] = {  # Qwen3-Next, Qwen3.5, EXAONE-MoE
    "layers.0.": "model.layers.0.",
    "norm.": "model.norm.",
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
}
_LAYER: dict[str, str | None] = {  # DeepSeek-V3 and GLM, behind their layers
    "embed_tokens.": None,
    "shared_head.head.": None,
    "shared_head.norm.": "model.norm.",
    **{f"{name}.": f"{name}." for name in OWN},
    "": "model.layers.0.",
}


def source_of_head(path: Path, model: Any) -> Source:
    """The tensors of the folder's head, by the names of a model of one layer and of MtpHead: those
    of `mtp`, else those of the layer behind the last, else those without a prefix.

    ValueError: there is none, or it lacks one of OWN.
    """
    text, files = model.config.get_text_config(decoder=True), _files(path)
    headers = read_headers(files)
    behind = f"model.layers.{text.num_hidden_layers}."
    places = {"mtp.": _MTP, "model.mtp.": _MTP, behind: _LAYER, "": _MTP}
    given = [text_name(key) or "" for key in headers]
    prefix = next(p for p in places if any(name.startswith(p) for name in (*given, "")))

    def renamed(key: str) -> str | None:
        name = text_name(key) or ""
        own = name.startswith(prefix)
        return _renamed(name.removeprefix(prefix), places[prefix]) if own else None

    source = Source(path, files, model.config, renamed)
    if not any(name.startswith("model.layers.0.") for name in source.keys):
        raise ValueError(
            f"{path} has no head for later tokens: no mtp.layers.0.*, no "
            f"model.layers.{text.num_hidden_layers}.*"
        )
    if missing := sorted({f"{name}.weight" for name in OWN} - source.keys.keys()):
        raise ValueError(f"{path}: its head for later tokens has no {', '.join(missing)}")
    if text.model_type in SHIFTED and has_sums(source):
        source.convert = unshifted
    return source


def published_name(model: Any, name: str) -> str | None:
    """The name of a head's tensor in checkpoints of such models, by that of a model of one layer or
    of MtpHead: behind `mtp` where transformers leaves out what is called so, else in the layer
    behind the last. None: the tensor is the model's."""
    left_out = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    if any(re.search(pattern, "mtp.") for pattern in left_out):
        prefix, table = "mtp.", _MTP
    else:
        prefix, table = f"model.layers.{model.config.num_hidden_layers}.", _LAYER
    found = _renamed(name, {ours: theirs for theirs, ours in table.items() if ours is not None})
    return None if found is None else prefix + found


def copy_head(source: Path, file: Path) -> None:
    """Write the tensors of a folder's heads to a file, as they are.

    ValueError: a file is no whole safetensors file.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    for name, keys in _of_heads(source).items():
        with safe_open(name, framework="pt") as opened:
            held |= {key: opened.get_tensor(key) for key in keys}
    save_file(held, file)


def has_head(source: Path) -> bool:
    """Whether a GGUF file, or a folder, has a head."""
    if is_gguf(source):
        return bool(open_gguf(source).stated("nextn_predict_layers", 0))
    return any(_of_heads(source).values())


def of_heads(keys: Iterable[str]) -> set[str]:
    """The names in a checkpoint that are of heads: a model has no place for them."""
    names = {key: text_name(key) or "" for key in keys}
    mark = "eh_proj.weight"
    layers = [n.removesuffix(mark) for n in names.values() if n.endswith(f".{mark}")]
    return {key for key, n in names.items() if n.startswith(("mtp.", "model.mtp.", *layers))}


def _renamed(name: str, beginnings: Mapping[str, str | None]) -> str | None:
    """The name with its beginning replaced; None: no beginning fits, or None is in its place."""
    for old, new in beginnings.items():
        if name.startswith(old):
            return None if new is None else new + name.removeprefix(old)
    return None


def _of_heads(source: Path) -> dict[str, list[str]]:
    """{file: its tensors of heads}, without what is the model's own; files that repeat a model, in
    another dtype say, repeat its heads."""
    files = {name: [*read_headers([name])] for name in _files(source)}
    heads = of_heads(key for keys in files.values() for key in keys)
    own = re.compile(r"\.(embed_tokens|shared_head\.head)\.")
    return {n: [k for k in keys if k in heads and not own.search(k)] for n, keys in files.items()}


def _files(path: Path) -> list[str]:
    check_index(path)
    places = ("*.safetensors", "mtp/*.safetensors", "optiq/mtp.safetensors")
    return sorted(str(f) for place in places for f in path.glob(place) if f.is_file())
