"""The model of a command that answers: fetched, loaded, with its adapter, cache and draft."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...extras import require
from ...files.hub import fetch
from ...files.mtp import load_mtp
from ...models.activations import activations_
from ...models.attach import check_cache, set_cache
from ...models.fuse.apply import fuse_
from .. import generate
from ..arguments import dtype_of
from ..kernels import compile_kernels
from .flags import options_of
from .session import Session
from .template import Template


@dataclass
class Loaded:
    name: str
    path: Path  # the model's file or folder
    model: Any
    tokenizer: Any
    draft: Any  # "lookup", an MtpHead, (model, tokenizer), or None


def load(args: argparse.Namespace, generating: bool = True) -> Loaded:
    """The model that the flags name. The errors of loaders and fetch; ValueError: it makes no text.

    generating=False: the model need not.
    """
    if args.adapter is not None:
        require("--adapter", "peft")
    name = args.model or str(generate.demo_model())
    path, model, tokenizer = _loaded(name, args, generating)
    draft, small = _draft(args, path, model)
    if args.adapter is not None:
        model = _with_adapter(model, args.adapter)
    if args.cache is None and args.fuse is not False and args.adapter is None:
        args.cache = _own_format(model)
    if args.cache is not None:
        set_cache([model], args.cache)
    if args.activations is not None:
        activations_(model, args.activations)
    if args.fuse is not False:
        if args.adapter is None:  # layers with adapters compute alone, and fuse_ warns of each
            fuse_(model)
        if small is not None:
            if (format := _own_format(small)) is not None:
                set_cache([small], format)
            fuse_(small)
    for answering in (model, small):
        if answering is not None:
            compile_kernels(answering)
    return Loaded(Path(name).name, path, model, tokenizer, draft)


def _draft(args: argparse.Namespace, path: Path, model: Any) -> tuple[Any, Any]:
    """(what proposes tokens, the model of it that is to be fused)."""
    if args.draft in (None, "lookup"):
        return args.draft, None
    if args.draft == "mtp":
        head = load_mtp(model, path)
        return head, head
    draft = _loaded(args.draft, args, True)[1:]
    return draft, draft[0]


def session_of(
    args: argparse.Namespace,
    loaded: Loaded,
    template: Template | None,
    tools: list[dict[str, Any]] | None,
    max_new_tokens: int | None,
) -> Session:
    """A session of the flags; without a template where the model has none."""
    import torch

    if args.seed is not None:
        torch.manual_seed(args.seed)
    if template is not None and not template.use(loaded.tokenizer, tools):
        template = None
    options = options_of(args, max_new_tokens)
    return Session(loaded.model, loaded.tokenizer, options, template, args.cache, loaded.draft)


def _loaded(name: str, args: argparse.Namespace, generating: bool) -> tuple[Path, Any, Any]:
    path = fetch(name, lambda folder: generate.check_loadable(folder, name))
    if not path.exists() and path.name == name and path.suffix != ".gguf":
        raise FileNotFoundError(
            f"{name}: no such file or folder; on the hub models are named org/name, or "
            "org/name-GGUF:Q4_K_M"
        )
    model, tokenizer = generate.load_model(path, args.device, dtype_of(args.dtype))
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer")
    if generating and not getattr(model, "can_generate", lambda: False)():
        raise ValueError(f"{name} holds no model that generates text")
    return path, model, tokenizer


def _own_format(model: Any) -> str | None:
    """The format of a PackedCache in the model's dtype, for replayed steps; None: it takes none."""
    from ...hf.caches.layers import DTYPE_NAMES

    name = DTYPE_NAMES.get(model.dtype)
    try:
        if name is not None:
            check_cache([model], name)
    except ValueError:
        return None
    return name


def _with_adapter(model: Any, name: str) -> Any:
    """The model with the layers of a PEFT adapter in it. ValueError: not such a folder."""
    from peft import PeftConfig, PeftModel

    from ...files.blame import blaming

    path = fetch(name)
    if not (path / "adapter_config.json").is_file():
        raise FileNotFoundError(f"--adapter {path} has no adapter_config.json")
    if not (path / "adapter_model.safetensors").is_file():
        raise FileNotFoundError(f"--adapter {path} has no adapter_model.safetensors")
    with blaming(path, "its files make no adapter of this model"):
        if PeftConfig.from_pretrained(path).is_prompt_learning:
            raise ValueError("it is a prompt that was learned; only adapters of layers are taken")
        return PeftModel.from_pretrained(model, path).eval().get_base_model()
