"""Files of a model folder may not have code fetched, nor have files elsewhere read.

transformers' own loaders run no code of a folder unless trust_remote_code is set. Two ways remain:
a config may name a repository, whose attention kernels are fetched and run, and the index of the
shards may name any path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .blame import blaming
from .folder import read_config
from .limits import check_counts

# Computed by torch and transformers themselves; for others (flash_attention_2, sonicmoe, ...)
# transformers fetches kernels if the package `kernels` is there and their own is not.
_LOCAL = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
_CHOICES = ("_attn_implementation", "_experts_implementation")


def load_config(path: Path) -> Any:
    """The transformers config of the folder, without choices that would have code fetched.

    ValueError: the config names a repository for its kernels, the config or the index names weights
    that are not in the folder, the config asks for more layers than there are tensors, or
    transformers has no such model. OSError: no config.json.
    """
    from transformers import AutoConfig

    check_index(path)
    check_counts(path, read_config(path))
    with blaming(path, "transformers makes no config of its config.json"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    forget_kernels(path, config)
    _check_name(path / "config.json", getattr(config, "transformers_weights", None))
    return config


def config_of(path: Path, values: dict[str, Any]) -> Any:
    """The transformers config of these values of a config.json, without choices as in load_config.

    ValueError: transformers has no such model, or the values ask for more layers than there are
    tensors, or for kernels of a repository.
    """
    from transformers import CONFIG_MAPPING

    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"{path}: transformers has no model_type {kind!r}")
    check_counts(path, values)
    with blaming(path, "transformers makes no config of it"):
        config = CONFIG_MAPPING[kind].from_dict(
            {k: v for k, v in values.items() if k != "auto_map"}
        )
    forget_kernels(path, config)
    return config


def forget_kernels(path: Path, config: Any) -> None:
    """Take choices of attention and experts that are not local out of the config and its parts.

    Such a choice is the caller's (model.set_attn_implementation). ValueError: one is a repository.
    """
    from transformers import PreTrainedConfig

    for name in _CHOICES:
        choice = getattr(config, name, None)
        if choice is None or choice in _LOCAL:
            continue
        if not isinstance(choice, str) or not choice.replace("_", "").isalnum():
            raise ValueError(
                f"{path / 'config.json'}: {name.removeprefix('_')} is {choice!r}, whose code would "
                "be fetched; remove it"
            )
        setattr(config, name, None)
    for value in list(vars(config).values()):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, PreTrainedConfig):
                forget_kernels(path, part)


def check_index(path: Path) -> set[str]:
    """The files that the indices of shards name; not all need exist.

    ValueError: an index is none, or names files that are not in the folder.
    """
    named: set[str] = set()
    for index in sorted(path.glob("*.safetensors.index*.json")):
        if not index.is_file():  # a save was killed; see staging.py
            continue
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index} has no weight_map of tensors to files: {error!r}") from None
        for shard in shards:
            _check_name(index, shard)
            named.add(shard)
    return named


def check_inside(folder: str, files: list[str]) -> None:
    """ValueError: one of the files of a local model is not in its folder."""
    root = Path(folder).absolute()
    if not root.is_dir():
        return  # a name on the hub, whose files are in the cache
    for file in files:
        inner = Path(file).absolute()
        if ".." in inner.parts or root not in inner.parents:
            raise ValueError(f"{file} is not in the folder {folder}: its index names other files")


def _check_name(where: Path, name: Any) -> None:
    if name is None:
        return
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        raise ValueError(f"{where} names the weights {name!r}, which is no file of the folder")
