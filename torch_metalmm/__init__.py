"""PyTorch linear layers whose weights stay packed in GGML or MLX formats.

Importing this package registers torch.ops.metalmm. The parts that need transformers are imported
when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import ops as ops
from .adopt import adopt_
from .fuse import fuse_, unfuse_
from .late import when_imported
from .linear import QuantEmbedding, QuantLinear
from .lora_report import merge_errors
from .quantize import quantize_

if TYPE_CHECKING:
    from .checkpoint import load_packed, save_packed
    from .gguf import load_gguf
    from .hf_config import MetalMMConfig
    from .mlx import load_mlx
    from .mlx_save import save_mlx

__version__ = "0.1.0"

__all__ = [
    "MetalMMConfig",
    "QuantEmbedding",
    "QuantLinear",
    "adopt_",
    "fuse_",
    "load_gguf",
    "load_mlx",
    "load_packed",
    "merge_errors",
    "quantize_",
    "save_mlx",
    "save_packed",
    "unfuse_",
]

_LAZY = {
    "MetalMMConfig": "hf_config",
    "load_gguf": "gguf",
    "load_mlx": "mlx",
    "load_packed": "checkpoint",
    "save_mlx": "mlx_save",
    "save_packed": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def _plug_into_transformers() -> None:
    try:
        from . import hf  # noqa: F401  # it registers the quant_method "metalmm"
    except ImportError as error:
        import warnings

        warnings.warn(f"this transformers cannot load packed models: {error}", stacklevel=2)


def _plug_into_peft() -> None:
    try:
        from . import lora, lora_others  # noqa: F401  # they register layers and checks
    except (ImportError, AttributeError) as error:
        import warnings

        warnings.warn(f"this PEFT cannot merge LoRA into packed layers: {error}", stacklevel=2)


# Imported here, transformers' quantizers would add 1.2 s and 75 MB to torch's 2.2 s and 220 MB.
when_imported("transformers.quantizers.auto", _plug_into_transformers)
when_imported("peft.tuners.lora", _plug_into_peft)
