"""PEFT's methods other than LoRA on packed layers: which may be used, and that none is merged.

A method that only calls its layer trains on a packed layer as on any other. A method that computes
with `weight` takes packed bytes for numbers: most then fail with an error of torch about shapes,
but RoAd, MiSS and IA3 merge bytes into other bytes without an error. So methods are let in by name
(the tests train each of them), and their merging is refused, by the model and by the layer: PEFT
itself does not merge AdaLoRA and IA3 into its own quantized layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from ...nn.packed import Packed
from ...nn.sharded import Sharded
from . import layers as layers  # which puts LoRA into the table of methods
from .base import MergesPacked, describe

TRAINS = (
    *("ADALORA", "C3A", "FOURIERFT", "GRALORA", "IA3", "LILY", "MISS", "OFT"),
    *("PVERA", "RANDLORA", "ROAD", "VBLORA", "VERA", "WAVEFT"),
)


def _check_target(tuner: Any, config: Any, model: Any, target: str) -> None:
    """ValueError: a target is sharded, or the method is not known to work on packed layers, and
    the target may be one.

    PEFT passes the last part of the name only.
    """
    from peft.tuners.mixed import MixedModel

    for name, module in model.named_modules():
        if isinstance(module, Sharded) and tuner._check_target_module_exists(config, name):
            raise ValueError(
                f"{name} is sharded, and an adapter would be of a part of it; merge adapters "
                "before shard_"
            )
    method = _name(config)
    if method in ("LORA", *TRAINS) and not isinstance(tuner, MixedModel):
        return
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != target or not isinstance(module, Packed):
            continue
        if tuner._check_target_module_exists(config, name):
            refused = "PeftMixedModel" if isinstance(tuner, MixedModel) else method
            raise ValueError(
                f"{refused} cannot be used on {name}, {describe(module)}: its weight is packed; "
                f"methods that train on packed layers: LORA, {', '.join(TRAINS)}"
            )


def _check_merge(tuner: Any) -> None:
    """ValueError, before any layer is merged: one of them cannot be."""
    for module in tuner.model.modules():
        if _merges_bytes(module):
            _check_layer_merge(module)


def _check_layer_merge(layer: Any, *args: Any, **kwargs: Any) -> None:
    """ValueError: an adapter around a packed layer would merge into its bytes as if into floats."""
    if _merges_bytes(layer):
        raise ValueError(
            f"{type(layer).__module__.split('.')[-2]} adapters cannot be merged: the weight of "
            f"{describe(layer.get_base_layer())} is packed; only LoRA by get_peft_model merges "
            "into packed layers. Keep the adapter apart, or merge it into the dense model and "
            "quantize that"
        )


def _merges_bytes(module: Any) -> bool:
    return (
        isinstance(module, BaseTunerLayer)
        and not isinstance(module, MergesPacked)
        and isinstance(module.get_base_layer(), Packed)
    )


_GUARDED: set[type] = set()


def _guard_layers(tuner: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Let the classes of layers that PEFT has put around packed ones check before they merge."""
    for kind in {type(m) for m in model.modules() if _merges_bytes(m)} - _GUARDED:
        _wrap(kind, "merge", before=_check_layer_merge)
        _GUARDED.add(kind)


def _check_copy(wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """ValueError: PEFT would train a copy of a packed layer, or rows of it."""
    if isinstance(module, Packed):
        raise ValueError(
            f"modules_to_save and trainable_token_indices need a dense layer, but "
            f"{describe(module)} is packed: leave it dense (MetalMMConfig's skip, or None as its "
            "format in quantize_)"
        )


def _name(config: Any) -> str:
    kind = config.peft_type
    return str(getattr(kind, "value", kind))


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _wrap(
    kind: type,
    method: str,
    before: Callable[..., None] = _nothing,
    after: Callable[..., None] = _nothing,
) -> None:
    """Let every object of that kind call `before` and `after` around its own `method`."""
    own = getattr(kind, method)

    @wraps(own)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        result = own(self, *args, **kwargs)
        after(self, *args, **kwargs)
        return result

    setattr(kind, method, wrapped)


# Wrapped: PEFT's own checks before it adds and before it merges adapters, and its class for
# modules_to_save. PEFT's table of methods, where LoRA is entered, cannot hold our checks: the
# table is filled while PEFT is being imported.
_wrap(BaseTuner, "_check_target_module_compatiblity", before=_check_target)
_wrap(BaseTuner, "inject_adapter", after=_guard_layers)
_wrap(BaseTuner, "_check_merge_allowed", before=_check_merge)
_wrap(AuxiliaryTrainingWrapper, "__init__", before=_check_copy)
