"""The quantization method "metalmm" of transformers: from_pretrained packs, save_pretrained keeps.

Importing this module registers it; `import torch_metalmm` sees to that when transformers loads.
A stored model has its own parameter names in safetensors, packed weights as uint8 [N, row_bytes],
and a MetalMMConfig in config.json that names every packed layer and its format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from ..files.folder import QUANT_METHOD
from ..files.headers import Found
from ..files.imatrix import read_importance
from ..files.untrusted import check_inside
from ..models.attach import TRANSFORMERS, plug_in
from ..models.experts import Stack
from ..models.quantize import Job, check_weight, plan, warn_fallbacks, warn_stacked, weigh
from ..models.replace import is_conv1d
from ..models.shard.apply import refuse_sharded
from ..models.skeleton import empty_like
from ..models.stored import put_empty, stored_jobs, take_activations, unpack_
from ..nn import QuantEmbedding, QuantExperts, QuantLinear
from ..nn.packed import quantize_weight
from ..nn.sharded import Sharded
from .checks import (
    check_floats,
    check_shape,
    check_sources,
    check_stored,
    find_tensors,
    finish_loaded,
    refuse_disk,
    require_safetensors,
)
from .config import MetalMMConfig, site_names, stored_config
from .parallel import check_present, cut_converters, forget_styles, is_of_dense, shard_skeleton


def attach(model: Any) -> None:
    """Let a transformers model know of its packed layers, as if from_pretrained had packed them.

    Nothing is done for a model without packed layers.
    """
    config = stored_config(model)
    if config is None:
        return
    model.hf_quantizer = MetalMMQuantizer(config, pre_quantized=True)
    model.is_quantized = True
    model.quantization_method = QUANT_METHOD
    model.hf_quantizer.postprocess_model(model)


class MetalMMQuantizer(HfQuantizer):
    """Replaces the layers before the weights come, and packs or checks each weight as it comes.

    Memory at any time: what is packed so far and one dense weight.
    """

    quantization_config: MetalMMConfig
    is_trainable = True  # adapters are: packed weights are frozen, but gradients pass through them
    is_compileable = True

    def __init__(self, quantization_config: MetalMMConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._jobs: list[Job] = []  # the dense layers that were replaced; empty once loaded
        self._files: list[str] | None = None

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        refuse_disk(self.pre_quantized, device_map)

    # Before the weights

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self._files = checkpoint_files
        if self.pre_quantized:
            require_safetensors("packed weights are", checkpoint_files or [])
            check_inside(model.config._name_or_path, checkpoint_files or [])
            self._jobs = self._stored_jobs(model)
        else:
            tie(model, {})
            skip = self.quantization_config.skip_filter(model)
            spec = self.quantization_config.spec()
            self._jobs = plan(model, spec, skip)
            if (path := self.quantization_config.importance) is not None:
                weigh(model, self._jobs, read_importance(path, model))
            warn_fallbacks(self._jobs)
            warn_stacked(model, spec, self._jobs, skip)
        put_empty(model, self._jobs, _in_model(model, self.quantization_config.input_order))
        asked = self.quantization_config.activations
        take_activations(model, _in_model(model, asked) if isinstance(asked, dict) else asked)
        shard_skeleton(model, self._jobs, checkpoint_files)

    def _stored_jobs(self, model: Any) -> list[Job]:
        names = self.quantization_config.modules
        table = _in_model(model, names)
        tie(model, table)
        jobs = stored_jobs(model, table)
        if not jobs:
            named = ", ".join(list(names)[:3])
            raise ValueError(f"quantization_config: the model has none of the layers {named}, ...")
        return jobs

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """The conversions to load with; here the files are known and what they hold is checked."""
        if self.pre_quantized:  # transformers' conversions would take packed bytes for numbers
            weight_conversions = [c for c in weight_conversions if isinstance(c, WeightRenaming)]
        if self._files is None or not all(f.endswith(".safetensors") for f in self._files):
            return weight_conversions
        found = find_tensors(self._files, model, weight_conversions)
        check_floats(model, found)
        check_present(model, found)
        if self.pre_quantized:
            check_stored(model, self._jobs, found)
        else:
            self._leave_new_layers_dense(model, found)
            check_sources(self._jobs, found)
        return [*weight_conversions, *cut_converters(model, self._jobs, found)]

    def _leave_new_layers_dense(self, model: nn.Module, found: dict[str, Found]) -> None:
        """Put back the dense layers that the checkpoint lacks: transformers will draw them."""
        new = [j for j in self._jobs if not any(name in found for name in j.parameters)]
        homes = {id(j.sites[0][1].home) for j in new if isinstance(j.sites[0][1], Stack)}
        for job in [*self._jobs]:
            first = job.sites[0][1]
            if job not in new and not (isinstance(first, Stack) and id(first.home) in homes):
                continue
            self._jobs.remove(job)
            for name, module in job.sites:
                if isinstance(module, Stack):
                    name, module = name.rpartition(".")[0], module.home.module
                model.set_submodule(name, module)

    # While they come

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        if self.pre_quantized:
            return False
        owner, _, leaf = param_name.rpartition(".")
        layer = model.get_submodule(owner)
        if isinstance(layer, QuantExperts):
            return leaf in layer.formats
        return isinstance(layer, QuantLinear | QuantEmbedding) and leaf == "weight"

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self._jobs)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> Any:
        if is_of_dense(converter):
            return None
        if dtype == torch.uint8 and super().get_new_dtype(converter, param, dtype) is not None:
            name = converter.target_patterns[0]
            raise ValueError(f"{name} must be packed bytes, uint8, and is a float tensor")
        return super().get_new_dtype(converter, param, dtype)

    # After them

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._jobs, self._files, self.pre_quantized = [], None, True
        forget_styles(model)
        finish_loaded(model)
        model._weight_conversions = []  # the file gets the model's own names
        self._record(model)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        """Called before the config is saved, so that the config names the layers packed by then."""
        self._record(model)
        return None, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Give the model its dense layers back, with what the packed ones decode to."""
        refuse_sharded(model, "dequantize")
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
        originals = empty_like(model, dtype)
        for name in unpack_(model, originals, dtype):
            _share_config(model, name, model.get_submodule(name))
        return model

    def _record(self, model: Any) -> None:
        config = stored_config(model)
        if config is None:
            self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        else:
            self.quantization_config = model.config.quantization_config = config


def _share_config(model: Any, name: str, experts: Any) -> None:
    """Let dense experts read the model's own config, which names their implementation."""
    while name:
        name = name.rpartition(".")[0]
        config = getattr(model.get_submodule(name), "config", None)
        if type(config) is type(getattr(experts, "config", None)):
            experts.config = config
            return


class _Pack(ConversionOps):
    """A dense weight from a checkpoint, or its part -> the bytes of the layer that waits for it."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = {name: job for job in jobs for name in job.parameters}

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        result = {}
        for name, given in input_dict.items():
            weight = given[0] if isinstance(given, list) else given
            job = self._jobs.get(name)
            result[name] = weight if job is None else _pack(name, weight, job, kwargs["model"])
        return result


def _pack(name: str, weight: Tensor, job: Job, model: nn.Module) -> Tensor:
    dense = job.sites[0][1]
    if not isinstance(model.get_submodule(name.rpartition(".")[0]), Sharded):  # cut already
        check_shape(name, tuple(weight.shape), dense)
        weight = weight.t() if is_conv1d(dense) else weight
    check_weight(name, weight)
    if isinstance(dense, Stack):
        return quantize_weight(dense.rows(weight), job.format, name=name).view(*dense.shape[:2], -1)
    return quantize_weight(weight, job.format, job.importance, name)


def _in_model(model: Any, names: Any) -> dict[str, Any]:
    """{name in this model: value} of the names it has, the base model's prefix added or removed.

    A list of names gives {name: None}.
    """
    given = dict(names) if isinstance(names, dict) else dict.fromkeys(names)
    prefix = f"{model.base_model_prefix}."
    result = {}
    for name in site_names(model):
        for stored in (name, prefix + name, name.removeprefix(prefix)):
            if stored in given:
                result[name] = given[stored]
                break
    return result


def tie(model: Any, table: dict[str, Any]) -> None:
    """Share tied parameters: transformers ties only after loading, and a pack replaces both layers.

    Layers stay apart where the table has two formats for them, or leaves one dense: a GGUF file may
    have both tensors in spite of its config, and one of two layers may have been packed.
    """
    for target, source in model.all_tied_weights_keys.items():
        owners = [name.rpartition(".")[0] for name in (target, source)]
        if len({table[owner] for owner in owners if owner in table}) > 1:
            continue
        owner, _, leaf = target.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter_or_buffer(source))


register_quantization_config(QUANT_METHOD)(MetalMMConfig)
register_quantizer(QUANT_METHOD)(MetalMMQuantizer)
plug_in(TRANSFORMERS, MetalMMQuantizer, attach)
