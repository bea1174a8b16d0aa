"""PEFT's methods other than LoRA on packed layers: which may be used, and that none is merged.

A method that only calls its layer trains on a packed one as on any other. One that computes with
`weight` takes packed bytes for numbers: most then fail with an error of torch about shapes, but
RoAd and MiSS merge bytes into other bytes without one. So methods are let in by name (the tests
train each of them), and no merging of theirs is: PEFT itself refuses to merge AdaLoRA and IA3
into its own quantized layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from .linear import QuantEmbedding, QuantLinear

TRAINS = (
    *("ADALORA", "C3A", "FOURIERFT", "GRALORA", "IA3", "LILY", "MISS", "OFT"),
    *("PVERA", "RANDLORA", "ROAD", "VBLORA", "VERA", "WAVEFT"),
)


def _check_target(tuner: Any, config: Any, model: Any, target: str) -> None:
    """ValueError: the method is not known to work on packed layers, and this may be one."""
    from peft.tuners.mixed import MixedModel

    method = _name(config)
    if method in ("LORA", *TRAINS) and not isinstance(tuner, MixedModel):
        return
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == target and is_packed(module):
            refused = "PeftMixedModel" if isinstance(tuner, MixedModel) else method
            raise ValueError(
                f"{refused} cannot be used on {name}, {describe(module)}: its weight is packed; "
                f"methods that train on packed layers: LORA, {', '.join(TRAINS)}"
            )


def _check_merge(tuner: Any) -> None:
    """ValueError: an adapter around a packed layer would merge into its bytes as if into floats."""
    from .lora import PackedLoraEmbedding, PackedLoraLinear

    for name, module in tuner.model.named_modules():
        if not isinstance(module, BaseTunerLayer) or isinstance(
            module, PackedLoraLinear | PackedLoraEmbedding
        ):
            continue
        if is_packed(base := module.get_base_layer()):
            methods = ", ".join(sorted({_name(c) for c in tuner.peft_config.values()}))
            raise ValueError(
                f"{methods} cannot be merged: the weight of {name}, {describe(base)}, is packed; "
                "only LoRA by get_peft_model merges into packed layers. Keep the adapter apart, or "
                "merge it into the dense model and quantize that"
            )


def _check_copy(wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """ValueError: PEFT would train a copy of a packed layer, or rows of it."""
    if is_packed(module):
        raise ValueError(
            f"modules_to_save and trainable_token_indices need a dense layer, but "
            f"{describe(module)} is packed: leave it dense (MetalMMConfig's skip, or None as its "
            "format in quantize_)"
        )


def is_packed(module: Any) -> bool:
    return isinstance(module, QuantLinear | QuantEmbedding)


def describe(module: Any) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


def _name(config: Any) -> str:
    kind = config.peft_type
    return str(getattr(kind, "value", kind))


def _first(check: Callable[..., None], kind: type, method: str) -> None:
    """Let every object of that kind call `check` before its own `method`."""
    own = getattr(kind, method)

    @wraps(own)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    setattr(kind, method, checked)


# What PEFT asks itself before it adds and before it merges adapters, and what it makes of
# modules_to_save. Its table of methods, where LoRA is entered, would be no place for this: it is
# filled while PEFT is being imported.
_first(_check_target, BaseTuner, "_check_target_module_compatiblity")
_first(_check_merge, BaseTuner, "_check_merge_allowed")
_first(_check_copy, AuxiliaryTrainingWrapper, "__init__")
