"""Loading a model's own head for the token after the next, which transformers drops."""

from __future__ import annotations

import copy
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..extras import HF, require
from ..models.finite import check_finite
from ..models.mtp import MtpHead
from ..models.quantize import quantize_
from ..models.replace import packable
from ..models.skeleton import empty_model
from ..models.spec import Spec, chooser_of
from ..nn import QuantLinear
from .blame import blaming
from .folder import is_packed, read_config
from .gguf.nextn import mtp_of_gguf
from .gguf.split import is_gguf
from .heads import source_of_head
from .mlx.layout import Quantization
from .mlx.load import pop_quantization, put
from .source import Source

_LAYER = "block.model.layers.0."  # the layer of an MtpHead


def load_mtp(model: Any, path: str | os.PathLike[str], format: Spec | None = None) -> MtpHead:
    """The head of the checkpoint that the model was loaded from, for drafts of later tokens.

    path: a GGUF file with a nextn layer; or a folder of transformers or MLX, or a packed one, with
    tensors `mtp.*` or, as DeepSeek-V3 and GLM, of a layer behind the last (heads.py has the
    places). format: a spec as quantize_ takes it, for the layer behind the model's last and its
    eh_proj (`model.layers.46.eh_proj`, say); a pattern may match none. By default a head that GGUF
    or MLX packed keeps its bytes, and another is packed in the commonest format of the model's
    packed layers, or not where it has none. The first of several heads is read. The embedding and
    the output head are the model's own. Give generate() a `Mtp(model, head)` of hf.mtp as its
    draft; fuse_(head, cache=...) makes its ops fewer.

    FileNotFoundError; ValueError: the checkpoint has no such head, or one that does not fit;
    format, as of quantize_. TypeError: format is no spec.
    """
    require("load_mtp", *HF)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if format:
        chooser_of(format)  # refuses what is no spec before anything is read
    if is_gguf(path):
        head, packed = mtp_of_gguf(model, path), True
    else:
        head, packed = _of_folder(model, path)
    spec = format or (None if packed else _commonest(model))
    if spec is not None:
        _pack(head, spec, model.config.get_text_config(decoder=True).num_hidden_layers)
    return head.requires_grad_(False).eval()


def _of_folder(model: Any, path: Path) -> tuple[MtpHead, bool]:
    """(the head, whether MLX has packed it)."""
    with source_of_head(path, model) as source:
        of_layer = {n: key for n, key in source.keys.items() if n.startswith("model.")}
        own = {n: key for n, key in source.keys.items() if n not in of_layer}
        packed = any(n.endswith(".scales") or ".switch_mlp." in n for n in source.keys)
        quantization = _quantization(path) if packed else None
        source.keys = of_layer
        if packed:
            head = MtpHead(model, empty_model(_one_layer(model), model.dtype))
            block = head.block
            shared = {n for n in block.state_dict() if not n.startswith("model.layers.")}
            put(block, source, quantization, model.device, done=shared - {"model.norm.weight"})
        else:
            block = _block_of(path, model, source)
            head = MtpHead(model, block)
        source.keys = own
        done = {name for name in head.state_dict() if name.startswith("block.")}
        put(head, source, quantization, model.device, done=done)
    check_finite(path, head)
    return head, packed


def _quantization(path: Path) -> Quantization | None:
    """The config's entries on a head that MLX packed: none in a packed folder, into which the head
    came as it was. The shapes of its tensors tell MLX's modes apart."""
    return Quantization({}) if is_packed(path) else pop_quantization(path, read_config(path))


def _pack(head: MtpHead, spec: Spec, number: int) -> None:
    """Pack the head's own layers, which the spec knows as the model's layer of that number."""
    chooser = chooser_of(spec)

    def format_of(name: str, module: nn.Module) -> str | None:
        if not name.startswith((_LAYER, "eh_proj")):
            return None  # the model's
        own = f"model.layers.{number}.{name.removeprefix(_LAYER)}"
        names = [own]
        if not packable(module) and not callable(spec):
            names.append(own.rpartition(".")[0])  # experts have the name of a stack
        return chooser([(each, module) for each in names])

    quantize_(head, format_of, progress=False)


def _one_layer(model: Any) -> Any:
    """The config of a model of one layer, as the head's is."""
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kinds = getattr(config, "mlp_layer_types", None) or []
    one = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": kinds[-1:],
        "first_k_dense_replace": 0,
    }
    for name, value in one.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def _block_of(path: Path, model: Any, source: Source) -> Any:
    """The model of the layer that the source has, as transformers loads it: the checkpoint's
    experts may be apart. Its embedding has one row."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = _one_layer(model)
    tensors = {name: source.read(name).contiguous() for name in source.keys}
    tensors["model.embed_tokens.weight"] = torch.zeros(1, config.hidden_size)
    vocabulary, config.vocab_size = config.vocab_size, 1
    config.pad_token_id, config.tie_word_embeddings = None, True
    with tempfile.TemporaryDirectory() as folder, blaming(path, "its tensors are no layer of it"):
        config.save_pretrained(folder)
        save_file(tensors, Path(folder) / "model.safetensors")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,
            output_loading_info=True,
        )
        block, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"no tensor for {', '.join(missing[:6])}")
    block.config.vocab_size, block.config.tie_word_embeddings = vocabulary, False
    return block.to(model.device)


def _commonest(model: nn.Module) -> str | None:
    """The format of most of the packed layers."""
    formats = Counter(m.format for m in model.modules() if isinstance(m, QuantLinear))
    return formats.most_common(1)[0][0] if formats else None
