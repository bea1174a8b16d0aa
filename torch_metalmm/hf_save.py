"""save_pretrained of packed models: complete or none, and with the quantization_config.

Layers are packed one by one, inside wrappers or by assignment, too, and nothing tells the model of
it. So PreTrainedModel.save_pretrained itself asks, which every such save ends in.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from .checkpoint import replaceable_weights
from .hf import attach, is_transformers_model
from .hf_config import stored_config
from .owned import obsolete_weights, prepare_folder
from .staging import is_staging, staged

_save = PreTrainedModel.save_pretrained
_signature = inspect.signature(_save)


def check_save(model: Any, folder: str | os.PathLike[str]) -> tuple[Path, set[str]]:
    """(folder, weights in it that a save of the packed model may replace).

    ValueError: no transformers model, or one that another method quantized, too. OSError as
    prepare_folder.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a transformers model, got {type(model).__name__}")
    if not is_transformers_model(model):
        other = type(model.hf_quantizer).__name__
        raise ValueError(
            f"the model has packed layers and is quantized by {other}, too; config.json has room "
            "for one method"
        )
    target = prepare_folder(folder, replaceable_weights)
    return target, replaceable_weights(target) or set()


@functools.wraps(_save)
def _save_pretrained(
    self: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any
) -> None:
    given = _signature.bind(self, save_directory, *args, **options).arguments
    only_adapters = getattr(self, "_hf_peft_config_loaded", False)
    if only_adapters or stored_config(self) is None:
        _save(self, save_directory, *args, **options)
        return
    alone = given.get("is_main_process", True) and not given.get("distributed_checkpoint")
    if is_staging(save_directory) or not alone:
        attach(self)
        _save(self, save_directory, *args, **options)
        return
    target, weights = check_save(self, save_directory)
    attach(self)
    if given.get("push_to_hub"):  # it names the repository after the folder
        options.setdefault("repo_id", target.resolve().name)
    with staged(target, lambda names: obsolete_weights(weights, given.get("variant"))) as staging:
        _save(self, staging, *args, **options)


PreTrainedModel.save_pretrained = _save_pretrained  # type: ignore[method-assign]
