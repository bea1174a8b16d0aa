"""experts_implementation="metalmm" of transformers: packed experts compute by torch.ops.metalmm."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "metalmm"


def _of_dense(module: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """ValueError: experts with the implementation "metalmm" are dense. Packed ones need no name."""
    kind = type(module).__name__
    raise ValueError(
        f'experts_implementation="{NAME}" is for packed experts, and those of {kind} are dense: '
        "pack them with quantize_(model, format) or from_pretrained(..., quantization_config="
        "MetalMMConfig(format)), or choose another implementation for dense ones "
        '(model.set_experts_implementation("grouped_mm"))'
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, _of_dense)
