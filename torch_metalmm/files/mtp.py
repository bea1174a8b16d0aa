"""Loading a model's own head for the token after the next, which transformers drops."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..extras import HF, require
from ..models.mtp import OWN, MtpHead
from ..models.quantize import quantize_
from ..nn import QuantLinear
from .blame import blaming
from .gguf.nextn import mtp_of_gguf
from .gguf.split import is_gguf, open_gguf
from .headers import read_headers
from .source import Source
from .untrusted import check_index

# Names of a checkpoint's tensors, and those of a model of one layer or of MtpHead. Qwen3-Next,
# Qwen3.5 and EXAONE-MoE have the first, DeepSeek-V3 and GLM the second, behind their layers.
_NAMES = {
    r"(?:model\.)?mtp\.layers\.0\.(.+)": r"model.layers.0.\1",
    r"(?:model\.)?mtp\.norm\.(.+)": r"model.norm.\1",
    r"(?:model\.)?mtp\.fc\.(.+)": r"eh_proj.\1",
    r"(?:model\.)?mtp\.pre_fc_norm_embedding\.(.+)": r"enorm.\1",
    r"(?:model\.)?mtp\.pre_fc_norm_hidden\.(.+)": r"hnorm.\1",
    r"model\.layers\.LAYERS\.(?:embed_tokens|shared_head\.head)\..+": "",  # the model's
    r"model\.layers\.LAYERS\.shared_head\.norm\.(.+)": r"model.norm.\1",
    r"model\.layers\.LAYERS\.(enorm|hnorm|eh_proj)\.(.+)": r"\1.\2",
    r"model\.layers\.LAYERS\.(.+)": r"model.layers.0.\1",
}


# Of a packed folder: transformers reads it no more than the tensors in it.
HEAD_FILE = "mtp.safetensors"


def load_mtp(model: Any, path: str | os.PathLike[str], format: str | None = None) -> MtpHead:
    """The head of the checkpoint that the model was loaded from, for drafts of later tokens.

    path: a GGUF file with a nextn layer, whose bytes stay packed; or a folder of transformers with
    tensors `mtp.*` or, as DeepSeek-V3 and GLM, of a layer behind the last, which are packed as
    `format` (by default the commonest of the model's packed layers, or not where it has none). Of
    several heads the first is read. The embedding and the output head are the model's own. Give
    generate() a `Mtp(model, head)` of hf.mtp as its draft; fuse_(head, cache=...) makes its ops
    fewer.

    FileNotFoundError; ValueError: the checkpoint has no such head, or one that does not fit.
    """
    require("load_mtp", *HF)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if is_gguf(path):
        return mtp_of_gguf(model, path)
    with tempfile.TemporaryDirectory() as folder:
        own = _stage(path, model, Path(folder))
        block = _block_of(path, model, Path(folder))
    head = MtpHead(model, block)
    head.eh_proj.to_empty(device=model.device)
    with blaming(path, "its tensors are no head of the model"):
        for name, value in own.items():
            head.get_parameter(name).data.copy_(value)
    format = format or _commonest(model)
    if format is not None:
        quantize_(block.get_decoder().layers, format, progress=False)
        quantize_(head, {"eh_proj": format}, progress=False)
    return head.requires_grad_(False).eval()


def copy_head(source: Path, config: Any, file: Path) -> bool:
    """Write the tensors of a folder's heads to a file, as they are; False: it has none.

    config: of the source's model. ValueError: a file is no whole safetensors file.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    for name, keys in _of_heads(source, config).items():
        with safe_open(name, framework="pt") as opened:
            held |= {key: opened.get_tensor(key) for key in keys}
    if held:
        save_file(held, file)
    return bool(held)


def has_head(source: Path, config: Any) -> bool:
    """Whether a GGUF file, or a folder, has a head. config: of its model."""
    if is_gguf(source):
        return bool(open_gguf(source).stated("nextn_predict_layers", 0))
    return any(_of_heads(source, config).values())


def _of_heads(source: Path, config: Any) -> dict[str, list[str]]:
    """{file: its tensors of heads, and of layers behind the model's last}, without what is the
    model's own; files that repeat a model, in another dtype say, repeat its heads."""
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)

    def is_of_head(key: str) -> bool:
        if re.match(r"(?:model\.)?mtp\.", key):
            return True
        layer = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.(.*)", key)
        is_behind = layer is not None and type(layers) is int and int(layer[1]) >= layers
        return is_behind and not re.match(r"embed_tokens|shared_head\.head", layer[2])  # type: ignore[index]

    return {
        name: [key for key in read_headers([name]) if is_of_head(key)] for name in _files(source)
    }


def _files(path: Path) -> list[str]:
    check_index(path)
    return sorted(str(f) for f in path.glob("*.safetensors") if f.is_file())


def _stage(path: Path, model: Any, folder: Path) -> dict[str, Tensor]:
    """Write a checkpoint of the head's layer; the head's other tensors."""
    from safetensors.torch import save_file

    text = model.config.get_text_config(decoder=True)
    names = {of.replace("LAYERS", str(text.num_hidden_layers)): n for of, n in _NAMES.items()}

    def renamed(key: str) -> str:
        key = key.replace("model.language_model.", "model.")
        found = next((m.expand(n) for of, n in names.items() if (m := re.fullmatch(of, key))), "")
        return found or f"unused.{key}"

    with Source(_files(path), model.config, renamed) as source:
        tensors = {n: source.read(n) for n in source.keys if not n.startswith("unused.")}
    if not any(name.startswith("model.layers.0.") for name in tensors):
        raise ValueError(
            f"{path} has no head for later tokens: no mtp.layers.0.*, no "
            f"model.layers.{text.num_hidden_layers}.*"
        )
    own = {n: tensors.pop(n) for n in list(tensors) if not n.startswith("model.")}
    if missing := sorted({f"{name}.weight" for name in OWN} - own.keys()):
        raise ValueError(f"{path}: its head for later tokens has no {', '.join(missing)}")
    tensors["model.embed_tokens.weight"] = torch.zeros(1, text.hidden_size)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return own


def _block_of(path: Path, model: Any, folder: Path) -> Any:
    """The model of one layer in the folder. Its embedding has one row."""
    from transformers import AutoModelForCausalLM

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
    vocabulary, config.vocab_size = config.vocab_size, 1
    config.pad_token_id, config.tie_word_embeddings = None, True
    config.save_pretrained(folder)
    with blaming(path, "its tensors are no layer of the model"):
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
