"""save_pretrained of packed models: complete or none, and with the quantization_config.

Layers are packed one by one, also inside wrappers or by assignment, and nothing tells the model. So
PreTrainedModel.save_pretrained itself, in which every such save ends, looks for packed layers.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from ..files.folder import replaceable_weights
from ..files.owned import obsolete_weights, prepare_folder
from ..files.staging import is_staging, staged
from ..models.experts import homes
from ..models.shard.gather import on_whole
from ..models.skeleton import can_pack, empty_like, tied_names
from ..nn import QuantExperts
from ..nn.sharded import is_sharded
from .checks import check_one_method, shape_in_words
from .config import stored_config
from .quantizer import attach, tie

_save = PreTrainedModel.save_pretrained
_signature = inspect.signature(_save)


def check_save(model: Any, folder: str | os.PathLike[str]) -> tuple[Path, set[str]]:
    """(folder, weights in it that a save of the packed model may replace).

    ValueError: no transformers model, one that another method quantized, too, or one whose packed
    layers are not those of its config. OSError as prepare_folder.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a transformers model, got {type(model).__name__}")
    check_one_method(model)
    _check_layers(model)
    target = prepare_folder(folder, replaceable_weights)
    return target, replaceable_weights(target) or set()


def _check_layers(model: Any) -> None:
    """ValueError: from_pretrained, which builds the model of the config, could not load a layer."""
    config = stored_config(model)
    assert config is not None
    made = empty_like(model, model.dtype)
    tie(made, config.modules)
    modules, names = dict(made.named_modules(remove_duplicate=False)), tied_names(made)
    shared, experts = tied_names(model), homes(made)
    layers = dict(model.named_modules(remove_duplicate=False))
    for name in (n for n, m in layers.items() if isinstance(m, QuantExperts)):
        theirs = experts.get(name)
        if theirs is None or _of_experts(theirs.made) != _of_experts(layers[name]):
            raise ValueError(
                f"{name} could not be loaded again: a {type(model).__name__} of this config has no "
                f"experts {_of_experts(layers[name])} there; change model.config or the layer"
            )
    for name, format in config.modules.items():
        if format is None or name not in layers:  # dense, or a stack of experts
            continue
        weight = f"{name}.weight"
        ours, theirs = layers[name], modules.get(name)
        if theirs is None or not can_pack(made, [weight]):
            problem = "no layer that can be packed"
        elif shape_in_words(ours) != shape_in_words(theirs):
            problem = f"{shape_in_words(theirs)}, the packed layer has {shape_in_words(ours)}"
        elif apart := set(shared.get(weight, ())) - set(names[weight]):
            problem = f"a weight of its own for it, which is that of {min(apart)} here"
        else:
            continue
        raise ValueError(
            f"{name} could not be loaded again: a {type(model).__name__} of this config has "
            f"{problem}; change model.config or the layer"
        )


def _of_experts(layer: Any) -> str:
    """Sizes, gate and biases of experts, in words; gate and up may be one stack or two."""
    biases = sorted(name for name in layer._parameters if name.endswith("_bias"))
    sizes = f"{layer.num_experts} x {layer.hidden_dim} x {layer.intermediate_dim}"
    gate = dataclasses.replace(layer.gate, interleaved=False)
    return f"{sizes}, {gate}, {'gated' if layer.is_gated else 'not gated'}, biases {biases}"


@functools.wraps(_save)
def _save_pretrained(
    self: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any
) -> None:
    given = _signature.bind(self, save_directory, *args, **options).arguments
    if is_sharded(self):
        on_whole(self, lambda: _save_pretrained(self, save_directory, *args, **options))
        return
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
    if given.get("push_to_hub"):  # the repository has the folder's name
        options.setdefault("repo_id", target.resolve().name)
    with staged(target, lambda names: obsolete_weights(weights, given.get("variant"))) as staging:
        _save(self, staging, *args, **options)


PreTrainedModel.save_pretrained = _save_pretrained  # type: ignore[method-assign]
