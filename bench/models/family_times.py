"""The time of a token in families whose layers are more than attention and a gated MLP.

Random models of 8 layers of hidden size 2048, or with --models those of WHOLE, packed: unfused on
transformers' own cache, after fuse_ on a PackedCache, and with its steps replayed, by turns in one
process; and a prompt of each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from torch_metalmm import fuse_
from torch_metalmm.hf.replay import replayed

from ..peers.programs import LlamaCpp
from ..problem import parse_names
from ..runner import Record, Run, named
from ..tables import status
from ..timing import Timing, by_turns, wall_clock
from .families import family, versions
from .llamas import packed_random, sharing
from .systems import Graph, Packed, Transformers
from .tokens import Race

CONTEXT = 128
_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
_SMALL = {"num_hidden_layers": 2}  # with --quick, of the page's sizes
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 768}
_EVERY_FOURTH = [*["linear_attention"] * 3, "full_attention"] * 2
_LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "olmo2": {},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "global_head_dim": 256,
    },
    "qwen3_moe": {"num_experts": 32} | _EXPERTS,
    "glm4_moe": {"n_routed_experts": 32} | _EXPERTS,
    "qwen3_5_text": {"layer_types": _EVERY_FOURTH} | _LINEAR,
    "lfm2": {
        "layer_types": [*["conv"] * 2, "full_attention", "conv"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
    "bamba": {
        "attn_layer_indices": [3, 7],
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
    "falcon_h1": {
        "mamba_d_ssm": 4096,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
}

# Models as they are published, by their config.json, without images and heads for later tokens.
_QWEN3_5: dict[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 16,
    "vocab_size": 248320,
    "tie_word_embeddings": False,
} | _LINEAR
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-35b-a3b": (
        "qwen3_5_moe_text",
        _QWEN3_5
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3.5-4b": (
        "qwen3_5_text",
        _QWEN3_5
        | {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
    ),
}
_SMALL_WHOLE = {"num_hidden_layers": 4, "num_experts": 8, "vocab_size": 512}


def model_of(kind: str, format: str, run: Run) -> Any:
    """On the run's device, in f16 of a GPU. Tables of angles stay f32, as a load leaves them."""
    if kind in WHOLE:
        from transformers import AutoConfig

        name, sizes = WHOLE[kind]
        small = {k: v for k, v in _SMALL_WHOLE.items() if run.args.quick and k in sizes}
        config = AutoConfig.for_model(name, **sizes | small)
        dtype = torch.float32 if run.device.type == "cpu" else torch.float16
        return packed_random(config, format, run.device.type, dtype)
    options = _SMALL if run.args.quick else _SIZES | KINDS[kind]
    model = family(kind, format, **options)
    if run.device.type == "cpu":
        return model
    angles = {name: b for name, b in model.named_buffers() if "inv_freq" in name}
    model = model.to(run.device.type, torch.float16)
    for name, buffer in model.named_buffers():
        if name in angles:
            buffer.data = angles[name].to(buffer.device)
    return model


class Eager(Packed):
    """The model's own forward, where another would replay it."""

    def called(self, ids: torch.Tensor) -> Any:
        steps = replayed(self.model)
        if steps is not None:
            steps.detach()
        try:
            return super().called(ids)
        finally:
            if steps is not None:
                steps.attach()


def run(run: Run) -> Iterator[Record]:
    """One record per family and system."""
    (format, *_) = named(run.args.formats)
    cache = "f32" if run.device.type == "cpu" else "f16"
    known = (*KINDS, *WHOLE)
    wanted = parse_names(run.args.models) or tuple(KINDS)
    if unknown := [kind for kind in wanted if kind not in known]:
        raise ValueError(f"--models: {unknown[0]!r}; of --families: {', '.join(known)}")
    for kind in wanted:
        status(kind)
        title = "whole models" if kind in WHOLE else "8 layers of hidden size 2048"
        with torch.inference_mode(False), torch.no_grad():
            model = model_of(kind, format, run)
            fused = fuse_(sharing(model), cache=cache)
        systems = {
            "unfused": Transformers("unfused", model),
            "fuse_": Eager("fuse_", fused),
            "replayed": Packed("replayed", fused),
        } | _peer(kind, model, format, run)
        if run.device.type == "cuda":  # the unfused step, as one graph
            systems["graph"] = Graph("graph", model, length=CONTEXT + run.args.new_tokens + 2)
        ways = {name: partial(_turn, system, run.args) for name, system in systems.items()}
        found = by_turns(ways, run.args.repetitions)
        medians = {
            n: Timing.of([s for steps, _ in each for s in steps]) for n, each in found.items()
        }
        prompts = {
            name: 1e3 * median(taken)
            for name, each in found.items()
            if (taken := [prompt for _, prompt in each if prompt is not None])
        }
        for name, timing in medians.items():
            yield {
                "kind": "families",
                "model": f"{title}, {format}; {versions()}",
                "family": kind,
                "system": name,
                **timing.fields("ms", lambda s: 1e3 * s),
                "of_unfused": timing.median / medians["unfused"].median,
                "prompt": run.args.prompt,
                "prompt_ms": prompts.get(name),
                "prompt_of_unfused": prompts[name] / prompts["unfused"]
                if name in prompts
                else None,
                "replays": replayed(fused).replays if name == "replayed" else 0,  # type: ignore[union-attr]
            }


def _peer(kind: str, model: Any, format: str, run: Run) -> dict[str, Any]:
    """{name: llama.cpp on the model's bytes}, where that is installed and save_gguf writes them."""
    room = max(run.args.prompt, CONTEXT + run.args.new_tokens + 2)
    if run.args.no_peers or LlamaCpp.missing(format, run.device.type):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            peer = LlamaCpp(model, format, Path(folder), run.args.threads, room)
        except ValueError as e:  # as of this family no GGUF files are written
            status(f"{kind}: {e}")
            return {}
    return {peer.name: peer}


def _turn(system: Any, args: Any) -> tuple[list[float], float | None]:
    """Seconds of new tokens after a context, and of a prompt where the system has a form for
    those, each until its choice is read.

    Not of the first two tokens, which a replayed system records.
    """

    def choice(count: int) -> int:
        system.reset()
        return int(system.feed([i % 97 + 3 for i in range(count)]).argmax())

    race = Race(system, {})
    race.decode(choice(CONTEXT), args.new_tokens + 2)
    prefills = getattr(system, "prefills", True)
    return race.steps[2:], wall_clock(partial(choice, args.prompt)) if prefills else None
