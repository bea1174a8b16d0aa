"""save_pretrained of diffusers' models: packed layers are saved, complete or not at all.

And their num_parameters, the other method of ModelMixin that would take packed bytes for weights.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from pathlib import Path
from typing import Any

from diffusers.models.modeling_utils import ModelMixin

from ...files.folder import is_packed
from ...files.staging import is_staging, staged
from ..checks import check_one_method
from ..config import stored_config
from ..num_parameters import of_weights
from .quantizer import attach, check_layers, forget

_save = ModelMixin.save_pretrained
_signature = inspect.signature(_save)
_STEM = "diffusion_pytorch_model"


def _check(model: Any, given: dict[str, Any]) -> None:
    config = stored_config(model)
    assert config is not None
    check_one_method(model)
    if not given.get("safe_serialization", True) or given.get("use_flashpack"):
        raise ValueError("packed layers are saved as safetensors only: safe_serialization=True")
    check_layers(model, [name for name, format in config.modules.items() if format])


def _weights_of(folder: Path, variant: str | None) -> set[str]:
    """The names of that variant's weights in the folder: what a new save of it replaces."""
    part = "" if variant is None else re.escape(f".{variant}")
    shard = rf"{_STEM}{part}(-\d{{5}}-of-\d{{5}})?\.(safetensors|bin)"
    pattern = re.compile(rf"{shard}|{_STEM}\.(safetensors|bin)\.index{part}\.json")
    return {f.name for f in folder.iterdir() if pattern.fullmatch(f.name)}


def _check_dense(folder: Path) -> None:
    """FileExistsError: the folder has weights that no packed model wrote.

    Such weights would be lost; or, of another variant, could not be loaded any more, since
    config.json, which variants share, would say that they are packed.
    """
    found = {f.name for f in folder.glob(f"{_STEM}*")}
    if found and not is_packed(folder):
        raise FileExistsError(
            f"{folder / min(found)}: the folder has weights that are not packed; choose another "
            "folder"
        )


@functools.wraps(_save)
def _save_pretrained(
    self: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any
) -> None:
    given = _signature.bind(self, save_directory, *args, **options).arguments
    if stored_config(self) is None:
        forget(self)  # packed layers that the model had are dense again
        _save(self, save_directory, *args, **options)
        return
    _check(self, given)
    attach(self)
    if is_staging(save_directory) or not given.get("is_main_process", True):
        _save(self, save_directory, *args, **options)
        return
    target = Path(save_directory)
    target.mkdir(parents=True, exist_ok=True)
    if given.get("push_to_hub"):  # the repository has the folder's name
        options.setdefault("repo_id", target.resolve().name)
    variant = given.get("variant")
    _check_dense(target)
    with staged(target, lambda new: _weights_of(target, variant) - new) as staging:
        _save(self, str(staging), *args, **options)


ModelMixin.save_pretrained = _save_pretrained
ModelMixin.num_parameters = of_weights(ModelMixin.num_parameters)
