"""Folders of sentence-transformers: a model at the top, and modules that make vectors of it.

What the modules are is read here, by `metalmm serve` and `metalmm quantize`, and nothing is run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..files.blame import blaming

POOLINGS = ("mean", "cls", "last")
_MODULES = "modules.json"
# Settings of the model: the length of texts, the prompts, the similarity.
_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")


def pooling_of(path: Path, generates: bool) -> str:
    """As the folder's sentence-transformers modules say; else last where it generates, or mean.

    ValueError: they ask for what is not there. FileNotFoundError: a module's config is missing.
    """
    modules, place = path / _MODULES, "1_Pooling"
    if modules.is_file():
        listed = _modules_of(modules)
        kinds = [kind for kind, _ in listed]
        # Others compute something more of the vector, or from the tokens.
        if sorted(kinds) not in (
            ["Normalize", "Pooling", "Transformer"],
            ["Pooling", "Transformer"],
        ):
            allowed = "Transformer, Pooling and Normalize"
            raise ValueError(f"{modules}: {', '.join(kinds)}; only {allowed} are supported")
        place = dict(listed)["Pooling"]
        if not (path / place / "config.json").is_file():
            raise FileNotFoundError(f"{path / place / 'config.json'}, which {modules} names")
    file = path / place / "config.json"
    if not file.is_file():
        return "last" if generates else "mean"
    with blaming(file, "it says no pooling"):
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    modes = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
    asked = [k for k in config if k.startswith("pooling_mode_") and config[k] is True]
    if "pooling_mode" in config:  # from version 6 on: a name, or several
        modes = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
        given = config["pooling_mode"]
        asked = [str(mode) for mode in (given if isinstance(given, list) else [given])]
    if len(asked) == 1 and (kind := modes.get(asked[0].removeprefix("pooling_mode_"))):
        return kind
    raise ValueError(f"{file}: {', '.join(asked) or 'no kind'}; must be one of {', '.join(modes)}")


def files_beside(folder: Path) -> dict[str, Path]:
    """{name in the folder: file} of what SentenceTransformer reads beside the model.

    Nothing of a folder without modules. ValueError: modules.json is none, or names other folders.
    """
    if not (folder / _MODULES).is_file():
        return {}
    places = [place for _, place in _modules_of(folder / _MODULES) if place]
    files = [folder / name for name in (_MODULES, *_SETTINGS)]
    files += [file for place in places for file in (folder / place).glob("*")]
    return {str(file.relative_to(folder)): file for file in files if file.is_file()}


def _modules_of(modules: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each module; "" is the folder of the file itself, the model's alone."""
    with blaming(modules, "it is no list of modules"):
        listed = json.loads(modules.read_text(encoding="utf-8"))
        found = [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in listed]
    for kind, place in found:
        if not re.fullmatch(r"\w+", place) and (place or kind != "Transformer"):
            raise ValueError(f"{modules}: path {place!r} is not that of a folder in this one")
    return found
