"""PyTorch linear layers whose weights stay packed in GGML or MLX formats.

Importing this package registers torch.ops.metalmm: at once where torch is imported, else as soon as
torch is. Everything else is imported at its first use, so that the command line answers
`metalmm --help` in the time of Python's own start; torch takes 1 to 2 s.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .late import when_imported

if TYPE_CHECKING:
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
__all__ = [  # written out for type checkers, which read no dict
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


# {a module of ours that plugs itself into another package: (whose import it follows, what is said
# where it cannot)}; None: the error ends that import; "": nothing is said. Imported here,
# transformers' quantizers would add 1.2 s and 75 MB to torch's 2.2 s and 220 MB.
_MODELING = "transformers.modeling_utils"
_PLUGS: dict[str, tuple[str, str | None]] = {
    "ops": ("torch", None),
    "hf.quantizer": ("transformers.quantizers.auto", "this transformers cannot load packed models"),
    "hf.save": (_MODELING, None),
    "hf.gguf": (_MODELING, "this transformers reads GGUF files otherwise"),
    "hf.generation": (_MODELING, "this transformers has other attention"),
    "hf.experts": (_MODELING, "this transformers has other experts"),
    "hf.methods": (_MODELING, None),
    "hf.diffusers.quantizer": (
        "diffusers.quantizers.auto",
        "this diffusers cannot load packed models",
    ),
    "hf.diffusers.save": (
        "diffusers.models.modeling_utils",
        "this diffusers cannot save packed models",
    ),
    "hf.diffusers.attention": (
        "diffusers.models.attention",
        "this diffusers cannot tell that packed projections are not fused",
    ),
    "hf.diffusers.lora": (
        "diffusers.loaders.lora_pipeline",
        "this diffusers cannot load LoRA into packed models",
    ),
    "hf.sentences": ("sentence_transformers", "this sentence-transformers has other modules"),
    "hf.trl": ("trl.trainer.utils", ""),  # the loss of older ones takes the model's logits
    "models.lora.others": ("peft.tuners.lora", "this PEFT cannot merge LoRA into packed layers"),
}


def _plug(part: str, problem: str | None) -> None:
    try:
        import_module(f".{part}", __name__)
    except (ImportError, AttributeError) as error:
        if problem is None:
            raise
        if problem:
            import warnings

            warnings.warn(f"{problem}: {error}", stacklevel=2)


for _part, (_module, _problem) in _PLUGS.items():
    when_imported(_module, partial(_plug, _part, _problem))
