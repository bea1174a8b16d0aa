"""transformers models without weights, to be filled with packed ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..nn import QuantLinear
from ..nn.sharded import Sharded
from .replace import kept_in_f32, pack_module, packable, replaceable


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside keep their parameters on the meta device and their buffers real.

    Buffers hold what no checkpoint has, such as rotary frequencies. Other threads are unaffected.
    """
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None  # a parameter that is on meta may be a tied one: keep the object
        empty = nn.Parameter(parameter.to("meta"), requires_grad=False)
        empty._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers draws no values
        return empty

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def named_class(config: Any) -> Any:
    """The model class that config.architectures[0] names; None if it names none of this config.

    The name may come from any file, so it chooses among transformers' models and nothing else.
    """
    import transformers

    names = config.architectures
    name = names[0] if isinstance(names, list) and names else None
    named = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(named, type) or not issubclass(named, transformers.PreTrainedModel):
        return None
    return named if isinstance(config, named.config_class or ()) else None


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The transformers model of that config, parameters on meta, in eval mode.

    The class is named_class, else the causal LM, the sequence-to-sequence LM or the bare model of
    the config. ValueError: none exists.
    """
    with parameters_on_meta():
        return _built(config, dtype)


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """The model of empty_model with its buffers on meta too: nothing of it takes memory."""
    with torch.device("meta"), parameters_on_meta():
        return _built(config, dtype)


def real_buffers(model: Any, config: Any, dtype: torch.dtype) -> None:
    """Make the buffers of a meta_model on the CPU, with the values that its modules give them.

    transformers models compute in _init_weights what no checkpoint has, since from_pretrained
    builds on meta. A class that leaves one out is built once more with real buffers.
    """
    owners: dict[str, Any] = {"": model}
    unset: list[Tensor] = []
    for name, module in model.named_modules():
        parent = owners[name.rpartition(".")[0]]
        owners[name] = module if hasattr(module, "_init_weights") else parent
        made = [key for key, b in module._buffers.items() if b is not None and b.is_meta]
        for key in made:
            floating = module._buffers[key].is_floating_point()
            value = float("nan") if floating else torch.iinfo(module._buffers[key].dtype).max
            module._buffers[key] = torch.full_like(module._buffers[key], value, device="cpu")
        if made:
            owners[name]._init_weights(module)
            unset += [b for b in (module._buffers[key] for key in made) if _unset(b)]
    if unset:
        real = dict(empty_model(config, dtype).named_buffers())
        for name, buffer in model.named_buffers():
            buffer.copy_(real[name])


def _unset(buffer: Tensor) -> bool:
    """Whether the buffer has what real_buffers fills it with."""
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return bool((buffer == torch.iinfo(buffer.dtype).max).any())


def _built(config: Any, dtype: torch.dtype) -> Any:
    import transformers

    named = named_class(config)
    if named is not None:
        return named._from_config(config, dtype=dtype).eval()
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        factory = getattr(transformers, auto)
        if type(config) in factory._model_mapping:
            return factory.from_config(config, dtype=dtype).eval()
    raise ValueError(f"transformers has no model for the config {type(config)}")


def empty_like(model: Any, dtype: torch.dtype) -> Any:
    """A model of the class and config of the transformers model, dense, parameters on meta."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with parameters_on_meta():
        return type(model)._from_config(config, dtype=dtype)


def parameters_to_save(
    model: Any, experts: Container[str]
) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """(name, its module, value) of each tensor but those of these experts, and but the weight of a
    tied head, which who reads GGUF files and MLX's ties again."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for name, value in model.state_dict(keep_vars=True).items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        is_tied = module is head and leaf == "weight" and value is embedding.weight
        if owner not in experts and not is_tied:
            yield name, module, value.detach()


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """For every parameter name, all names of that same parameter, itself included."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: names for names in groups.values() for name in names}


def untie(model: Any, given: set[str]) -> None:
    """Let transformers forget the ties between weights that a file gives one by one."""
    ties = getattr(model, "all_tied_weights_keys", {})
    for target, source in list(ties.items()):
        if target in given and source in given:
            del ties[target]


def can_pack(model: nn.Module, names: list[str]) -> bool:
    """Whether the parameter of these names may be packed: each is a packable layer's weight."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf != "weight" or not packable(module) or not replaceable(model, owner):
            return False
    return True


def put_packed(model: nn.Module, names: list[str], weight: Tensor, format: str) -> None:
    """Replace the layers that hold the parameter `names` by packed ones sharing `weight`.

    A sharded layer, which is a packed one, gets the weight, this rank's part.
    ValueError: the weight does not fit one of the layers.
    """
    shared = nn.Parameter(weight, requires_grad=False)
    for name in names:
        owner = name.rpartition(".")[0]
        layer = model.get_submodule(owner)
        if isinstance(layer, Sharded):
            layer.weight = shared
            continue
        try:
            packed = pack_module(layer, shared, format)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        model.set_submodule(owner, packed)


def set_input_order(model: nn.Module, names: list[str], order: Tensor) -> None:
    """Make packed linear layers gather their input (see QuantLinear.input_order)."""
    for name in names:
        layer = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(layer, QuantLinear)
        layer.input_order = order


def put_dense(model: nn.Module, names: list[str], value: Tensor, device: Any) -> None:
    """Give the parameters or buffers `names` one shared tensor: value in their dtype, on device.

    Tensors the model keeps in f32 get f32.
    """
    first: Tensor | None = None
    for name in names:
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if first is None:
            dtype = getattr(owner, leaf).dtype
            if dtype.is_floating_point and kept_in_f32(model, name, dtype):
                dtype = torch.float32
            first = value.to(device=device, dtype=dtype)
            if leaf in owner._parameters:
                first = nn.Parameter(first, requires_grad=False)
        setattr(owner, leaf, first)
