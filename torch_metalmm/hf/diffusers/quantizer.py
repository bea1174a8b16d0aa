"""The quantization method "metalmm" of diffusers: from_pretrained and from_single_file pack.

Importing this module registers it; `import torch_metalmm` sees to that when diffusers loads. A
stored model is as hf/quantizer.py says it, with diffusers' names of the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from ...files.folder import QUANT_METHOD
from ...files.headers import read_headers
from ...models.attach import DIFFUSERS, plug_in
from ...models.experts import Stack
from ...models.quantize import Job, check_weight, plan, warn_fallbacks
from ...models.replace import packable, replaceable
from ...models.skeleton import parameters_on_meta
from ...models.stored import put_empty, stored_jobs, take_activations, unpack_
from ...nn.packed import quantize_weight
from ..checks import (
    check_floats,
    check_stored,
    finish_loaded,
    refuse_disk,
    require_safetensors,
    shape_in_words,
)
from ..config import MetalMMConfig, site_names, stored_config

_SOURCES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def attach(model: Any) -> None:
    """Let a diffusers model know of its packed layers, as if from_pretrained had packed them.

    Nothing is done for a model without packed layers. is_quantized stays False: with it diffusers
    refuses `.to(dtype)`, which packed layers can do.
    """
    config = stored_config(model)
    if config is None:
        return
    model.hf_quantizer = DiffusersMetalMMQuantizer(config, pre_quantized=True)
    model.is_quantized = False
    model.quantization_method = config.quant_method
    model.register_to_config(quantization_config=config)


def forget(model: Any) -> None:
    """Take out of the config of a diffusers model that it has packed layers."""
    if isinstance(model.config.get("quantization_config"), MetalMMConfig):
        model._internal_dict = FrozenDict(_without_quantization(model.config))


def empty_like(model: Any) -> Any:
    """A model of the class and config of the diffusers model, dense, parameters on meta."""
    with parameters_on_meta():
        return type(model).from_config(_without_quantization(model.config))


def _without_quantization(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


class DiffusersMetalMMQuantizer(DiffusersQuantizer):  # type: ignore[misc]  # untyped here
    """Packs each weight as it comes, or checks the packed ones of a stored model.

    diffusers compares shapes before it asks for a packed weight, so a dense layer on the meta
    device is replaced when its weight comes. Weights are packed from the numbers of the file,
    whatever torch_dtype is.
    """

    use_keep_in_fp32_modules = True
    is_serializable = is_compileable = True
    is_trainable = True  # adapters are, as in hf/quantizer.py
    quantization_config: MetalMMConfig
    pre_quantized: bool

    def __init__(self, quantization_config: MetalMMConfig, **kwargs: Any) -> None:
        # from_single_file says nothing of pre_quantized; what it reads is other programs'.
        super().__init__(quantization_config, **{"pre_quantized": False, **kwargs})
        self._files: Sequence[str] = ()
        self._jobs: dict[str, Job] = {}  # by the names of the weights to pack
        self._packed: set[str] = set()

    @property
    def supports_parallel_loading(self) -> bool:
        return self.pre_quantized  # else threads would each hold a dense weight

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """ValueError: what diffusers' loaders have no way to do while they pack."""
        refuse_disk(self.pre_quantized, device_map)
        if self.quantization_config.importance is not None:
            raise ValueError(
                "quantization_config: importance is read by transformers' from_pretrained; for a "
                "model of diffusers give it to quantize_"
            )

    def maybe_update_loaded_keys(self, loaded_keys: list[str], files: Any) -> list[str]:
        self._files = [str(file) for file in files]
        return loaded_keys

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """ValueError: a GGUF file, or a weight to pack is of a dtype that is not packed."""
        if any(hasattr(value, "quant_type") for value in state_dict.values()):
            raise ValueError(
                "quantization_config: MetalMMConfig packs dense weights; for a GGUF file give "
                "GGUFQuantizationConfig, and torch_metalmm.adopt_(model) keeps its bytes"
            )
        self._check_sources(state_dict)
        return state_dict

    def _check_sources(self, state_dict: dict[str, Any]) -> None:
        """diffusers would say of packed bytes that they are a weight of another shape.

        Numbers of 8 bits are refused, too: files have them with scales under names of their own.
        """
        for name in self._jobs:
            if name in state_dict and (dtype := state_dict[name].dtype) not in _SOURCES:
                raise ValueError(
                    f"{name} is {dtype} in the checkpoint; packed are "
                    f"{', '.join(map(str, _SOURCES))}. A packed model is loaded by "
                    "from_pretrained, from its folder and with its config.json"
                )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        if not self.pre_quantized:
            jobs = plan(model, config.spec(), config.skip_filter(model))
            # A stack of experts waits for several tensors; none of diffusers' models has one.
            jobs = [job for job in jobs if not isinstance(job.sites[0][1], Stack)]
            warn_fallbacks(jobs)
            self._jobs = {name: job for job in jobs for name in job.parameters}
            self._check_sources(kwargs.get("state_dict", {}))  # a single file's, renamed
            return
        require_safetensors("packed weights are", self._files)
        found = read_headers(self._files)
        if unknown := sorted(config.modules.keys() - set(site_names(model))):
            raise ValueError(f"quantization_config: the model has no layer {unknown[0]}")
        jobs = stored_jobs(model, config.modules)
        put_empty(model, jobs, config.input_order)
        take_activations(model, config.activations)
        check_floats(model, found)
        check_stored(model, jobs, found)

    def check_if_quantized_param(
        self, model: Any, param_value: Any, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        return param_name in self._jobs

    def create_quantized_param(
        self,
        model: Any,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        state_dict: dict[str, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        job = self._jobs[param_name]
        if param_name in self._packed:  # by another of its names
            return
        weight = param_value if state_dict is None else state_dict[param_name]
        check_weight(param_name, weight)
        job.put(model, quantize_weight(weight, job.format, name=param_name).to(target_device))
        self._packed.update(job.parameters)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if left := [name for name in self._jobs if name not in self._packed]:
            raise ValueError(f"the checkpoint has no tensor for {left[0]}, which is to be packed")
        if not self.pre_quantized:
            take_activations(model, self.quantization_config.activations)
        finish_loaded(model)
        attach(model)
        config = model.config.get("quantization_config")  # as it was, if every layer stayed dense
        self._jobs, self._packed, self._files = {}, set(), ()
        self.quantization_config, self.pre_quantized = config, True
        model.is_quantized = False

    def _dequantize(self, model: Any) -> Any:
        """Give the model its dense layers back, with what the packed ones decode to."""
        dtype = model.dtype if model.dtype.is_floating_point else torch.float32
        unpack_(model, empty_like(model), dtype)
        forget(model)
        return model


def check_layers(model: nn.Module, names: Sequence[str]) -> None:
    """ValueError: from_pretrained, which builds the model of the config, could not load a layer."""
    made = empty_like(model)
    layers = dict(made.named_modules(remove_duplicate=False))
    for name in names:
        ours, theirs = model.get_submodule(name), layers.get(name)
        if theirs is None or not packable(theirs) or not replaceable(made, name):
            problem = "no layer that can be packed"
        elif shape_in_words(ours) != shape_in_words(theirs):
            problem = f"{shape_in_words(theirs)}, the packed layer has {shape_in_words(ours)}"
        else:
            continue
        advice = "change the layer or the config"
        if name.endswith(".base_layer"):
            advice = "unload the adapters, which save_lora_adapter saves, and save the model then"
        raise ValueError(
            f"{name} could not be loaded again: a {type(model).__name__} of this config has "
            f"{problem}; {advice}"
        )
    expected = made.state_dict()
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        want = expected.get(name)
        if owner in names or want is None:
            continue
        if want.shape != tensor.shape or want.is_floating_point() != tensor.is_floating_point():
            kind = type(model.get_submodule(owner)).__name__
            raise ValueError(
                f"{owner} could not be saved: it is a {kind} whose {leaf} is {tensor.dtype} "
                f"{list(tensor.shape)}, the model's is {want.dtype} {list(want.shape)}"
            )


AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = DiffusersMetalMMQuantizer
AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = MetalMMConfig
plug_in(DIFFUSERS, DiffusersMetalMMQuantizer, attach)
