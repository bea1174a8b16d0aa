"""PyTorch linear layers whose weights stay packed in GGML or MLX formats.

Importing this package registers torch.ops.metalmm: at once where torch is imported, else as soon as
torch is. Everything else is imported at its first use, so that the command line answers
`metalmm --help` in the time of Python's own start; torch takes 1 to 2 s.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .late import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from . import ops as ops
    from .files.gguf.load import load_gguf
    from .files.gguf.save import save_gguf
    from .files.imatrix import read_importance
    from .files.mlx.load import load_mlx
    from .files.mlx.save import save_mlx
    from .files.mtp import load_mtp
    from .files.quantized import load_quantized
    from .hf.cache import PackedCache
    from .hf.config import MetalMMConfig
    from .hf.packed import load_packed, save_packed
    from .models.activations import activations_
    from .models.adopt import adopt_
    from .models.fuse.apply import fuse_, unfuse_
    from .models.lora.report import merge_errors
    from .models.quantize import quantize_
    from .models.shard.apply import shard_
    from .nn import QuantEmbedding, QuantExperts, QuantLinear

__version__ = "0.1.0"

__all__ = [
    "MetalMMConfig",
    "PackedCache",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "activations_",
    "adopt_",
    "fuse_",
    "load_gguf",
    "load_mlx",
    "load_mtp",
    "load_packed",
    "load_quantized",
    "merge_errors",
    "quantize_",
    "read_importance",
    "save_gguf",
    "save_mlx",
    "save_packed",
    "shard_",
    "unfuse_",
]

_MODULE_OF = {
    "MetalMMConfig": "hf.config",
    "PackedCache": "hf.cache",
    "QuantEmbedding": "nn",
    "QuantExperts": "nn",
    "QuantLinear": "nn",
    "activations_": "models.activations",
    "adopt_": "models.adopt",
    "fuse_": "models.fuse.apply",
    "load_gguf": "files.gguf.load",
    "load_mlx": "files.mlx.load",
    "load_mtp": "files.mtp",
    "load_packed": "hf.packed",
    "load_quantized": "files.quantized",
    "merge_errors": "models.lora.report",
    "quantize_": "models.quantize",
    "read_importance": "files.imatrix",
    "save_gguf": "files.gguf.save",
    "save_mlx": "files.mlx.save",
    "save_packed": "hf.packed",
    "shard_": "models.shard.apply",
    "unfuse_": "models.fuse.apply",
}
# Reachable as attributes without an import of their own.
_MODULES = ("_C", "formats", "ops")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = found  # the next access, also by torch.compile, finds the name as any other
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_ops() -> None:
    import_module(".ops", __name__)


def _plug_into_transformers() -> None:
    try:
        from .hf import quantizer  # noqa: F401  # it registers the quant_method "metalmm"
    except ImportError as error:
        import warnings

        warnings.warn(f"this transformers cannot load packed models: {error}", stacklevel=2)


def _plug_into_gguf() -> None:
    try:
        from .hf import gguf  # noqa: F401  # from_pretrained(gguf_file=...) names load_gguf
    except (ImportError, AttributeError) as error:
        import warnings

        warnings.warn(f"this transformers reads GGUF files otherwise: {error}", stacklevel=2)


def _plug_into_saving() -> None:
    from .hf import save  # noqa: F401  # save_pretrained of packed models becomes its own


def _plug_into_attention() -> None:
    try:
        # They register the attention function "metalmm", and how fuse_ chooses generate()'s cache.
        from .hf import attention, generation  # noqa: F401
    except (ImportError, AttributeError) as error:
        import warnings

        warnings.warn(f"this transformers has other attention: {error}", stacklevel=2)


def _plug_into_experts() -> None:
    try:
        from .hf import experts  # noqa: F401  # it registers the experts implementation "metalmm"
    except (ImportError, AttributeError) as error:
        import warnings

        warnings.warn(f"this transformers has other experts: {error}", stacklevel=2)


def _plug_into_diffusers(part: str, what: str) -> Callable[[], None]:
    """What imports a part of hf/diffusers, by which diffusers can do what `what` says."""

    def plug() -> None:
        try:
            import_module(f".hf.diffusers.{part}", __name__)
        except (ImportError, AttributeError) as error:
            import warnings

            warnings.warn(f"this diffusers cannot {what}: {error}", stacklevel=2)

    return plug


def _plug_into_models() -> None:
    from .hf import methods  # noqa: F401  # counts and resizing know of packed layers


def _plug_into_sentences() -> None:
    try:
        from .hf import sentences  # noqa: F401  # its models load with packed embeddings
    except (ImportError, AttributeError) as error:
        import warnings

        warnings.warn(f"this sentence-transformers has other modules: {error}", stacklevel=2)


def _plug_into_trl() -> None:
    with suppress(ImportError, AttributeError):  # older ones, whose loss takes the model's logits
        from .hf import trl  # noqa: F401  # its loss decodes slices of a packed output head


def _plug_into_peft() -> None:
    try:
        from .models.lora import layers, others  # noqa: F401  # they register layers and checks
    except (ImportError, AttributeError) as error:
        import warnings

        warnings.warn(f"this PEFT cannot merge LoRA into packed layers: {error}", stacklevel=2)


when_imported("torch", _register_ops)
# Imported here, transformers' quantizers would add 1.2 s and 75 MB to torch's 2.2 s and 220 MB.
when_imported("transformers.quantizers.auto", _plug_into_transformers)
when_imported("transformers.modeling_utils", _plug_into_saving)
when_imported("transformers.modeling_utils", _plug_into_gguf)
when_imported("transformers.modeling_utils", _plug_into_attention)
when_imported("transformers.modeling_utils", _plug_into_experts)
for _module, _part, _what in (
    ("quantizers.auto", "quantizer", "load packed models"),
    ("models.modeling_utils", "save", "save packed models"),
    ("models.attention", "attention", "tell that packed projections are not fused"),
    ("loaders.lora_pipeline", "lora", "load LoRA into packed models"),
):
    when_imported(f"diffusers.{_module}", _plug_into_diffusers(_part, _what))
when_imported("transformers.modeling_utils", _plug_into_models)
when_imported("sentence_transformers", _plug_into_sentences)
when_imported("trl.trainer.utils", _plug_into_trl)
when_imported("peft.tuners.lora", _plug_into_peft)
