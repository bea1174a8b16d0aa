"""from_pretrained(gguf_file=..., quantization_config=MetalMMConfig(...)): refused by name.

transformers lets only its own quantizer read a GGUF file: it compares quant_method with "gguf" and
then asks the quantizer for the file's tensors. Its words say nothing of load_gguf, and no hook of a
quantizer is given the file's name before that, so the function that compares is wrapped.
"""

from __future__ import annotations

import functools
from typing import Any

import transformers.modeling_utils

from .config import MetalMMConfig

_theirs: Any = transformers.modeling_utils  # which imports the function from elsewhere
_get = _theirs.get_hf_quantizer


@functools.wraps(_get)
def _get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **options: Any) -> Any:
    gguf_file = options.get("gguf_file")
    if gguf_file is not None and isinstance(quantization_config, MetalMMConfig):
        raise ValueError(
            f"quantization_config: from_pretrained cannot keep {gguf_file} packed as MetalMMConfig "
            "asks; torch_metalmm.load_gguf(path) keeps the bytes of the file, and quantize_ packs "
            "its model in other formats"
        )
    return _get(config, quantization_config, *args, **options)


_theirs.get_hf_quantizer = _get_hf_quantizer
