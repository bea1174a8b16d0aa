"""Which tensors of safetensors files are a head for the token after the next, and their places.

transformers and mlx-lm drop them. Who quantizes for MLX and keeps them has `language_model.mtp.*`
among the weights (oMLX), `mtp.*` in model-mtp.safetensors or mtp/weights.safetensors (vllm-mlx's
add_mtp_weights.py), in mtp.safetensors (MTPLX) or optiq/mtp.safetensors, the layer behind the last
(GLM), or a folder of the head alone, its names without mtp (mlx-vlm's qwen3_5_mtp).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..models.mtp import OWN
from .gguf.split import is_gguf, open_gguf
from .headers import read_headers
from .mlx.shifted import SHIFTED, has_sums, text_name, unshifted
from .source import Source
from .untrusted import check_index

# Names of a head's tensors behind its prefix, and those of a model of one layer or of MtpHead.
_MTP = {  # Qwen3-Next, Qwen3.5, EXAONE-MoE
    r"layers\.0\.(.+)": r"model.layers.0.\1",
    r"norm\.(.+)": r"model.norm.\1",
    r"fc\.(.+)": r"eh_proj.\1",
    r"pre_fc_norm_embedding\.(.+)": r"enorm.\1",
    r"pre_fc_norm_hidden\.(.+)": r"hnorm.\1",
}
_LAYER = {  # DeepSeek-V3 and GLM, behind their layers
    r"(?:embed_tokens|shared_head\.head)\..+": "",  # the model's
    r"shared_head\.norm\.(.+)": r"model.norm.\1",
    r"(enorm|hnorm|eh_proj)\.(.+)": r"\1.\2",
    r"(.+)": r"model.layers.0.\1",
}


def source_of_head(path: Path, model: Any) -> Source:
    """The tensors of the folder's head, by the names of a model of one layer and of MtpHead: those
    of `mtp`, else those of the layer behind the last, else those without a prefix.

    ValueError: there is none, or it lacks one of OWN.
    """
    text, files = model.config.get_text_config(decoder=True), _files(path)
    behind = rf"model\.layers\.{text.num_hidden_layers}\."
    places = {r"(?:model\.)?mtp\.": _MTP, behind: _LAYER, "": _MTP}
    given = [text_name(key) or "" for key in read_headers(files)]
    prefix = next((p for p in places if any(re.match(p, name) for name in given)), "")
    names = {re.compile(prefix + of): name for of, name in places[prefix].items()}

    def renamed(key: str) -> str | None:
        name = text_name(key) or ""
        return next((m.expand(n) for of, n in names.items() if (m := of.fullmatch(name))), None)

    source = Source(path, files, model.config, renamed)
    source.keys.pop("", None)
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
    """Those of a checkpoint's names that are of heads: a model has no place for them."""
    names = {key: text_name(key) or "" for key in keys}
    mark = "eh_proj.weight"
    layers = [n.removesuffix(mark) for n in names.values() if n.endswith(f".{mark}")]
    return {key for key, n in names.items() if n.startswith(("mtp.", "model.mtp.", *layers))}


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
