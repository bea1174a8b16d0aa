"""The inputs and results of a transformers model's decoder layers, in short runs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.layer import positions
from ..cache_argument import with_cache
from ..last_prompt import forget_prompt, recall_prompt
from .runs import evaluating, numbers

_NAMED = ("module", "query", "key", "value", "attention_mask")  # the first arguments of attention
_LENGTH = 5  # tokens of a prompt


@dataclass
class Call:
    """A call of a module, and its result, the first of several."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [t for t in (*self.args, *self.kwargs.values()) if isinstance(t, Tensor)]

    def takes(self, x: Tensor) -> bool:
        return any(t is x for t in self.inputs)


@dataclass
class Attention:
    """A call of an attention function, and the interface that it came from."""

    interface: Any
    implementation: str
    default: Callable[..., Any]
    args: tuple[Any, ...]  # the module, q, k, v and the mask
    options: dict[str, Any]
    out: Any


@dataclass
class Update:
    """A call of the cache's update."""

    args: tuple[Any, ...]  # k, v and the number of the layer
    options: dict[str, Any]
    result: Any


@dataclass
class Seen:
    """A call of a layer, and what was called in it.

    kwargs: the arguments but x, by their names, a mapping among them as the layer found it; before:
    the cache as the layer found it. stored: what the layer put into mappings, {(name, key): value}.
    """

    x: Any
    kwargs: dict[str, Any]
    before: Any
    out: Any = None
    calls: list[Call] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    stored: dict[tuple[str, Any], Any] = field(default_factory=dict)

    def of(self, module: nn.Module) -> Seen:
        """The call of a module of the layer, that attends."""
        call = next(c for c in self.calls if c.module is module)
        inside = set(module.modules())
        x, kwargs = _bound(module, call.args, call.kwargs)
        calls = [c for c in self.calls if c.module in inside and c is not call]
        return replace(self, x=x, kwargs=kwargs, out=call.out, calls=calls)


def observed(model: Any) -> dict[nn.Module, list[Seen]]:
    """{layer: its call in each run}; empty where the model takes no tokens and cache.

    The runs, with random tokens: a prompt, one token after it, a prompt at the last positions that
    the model has, three prompts padded on the left, one token after them.
    """
    observer = _Observer()
    try:
        with quietly(model), observer.spying():
            _run(model, observer)
    except Exception:
        return {}
    return observer.seen


@contextmanager
def quietly(model: Any) -> Iterator[None]:
    """Inside, the model runs in eval mode and leaves no gradient, random number or prompt."""
    cuda = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(list(cuda)))
        stack.enter_context(evaluating(model))
        stack.callback(recall_prompt, forget_prompt(model))
        yield


def _run(model: Any, observer: _Observer) -> None:
    config, table = model.config, model.get_input_embeddings()
    text, device = config.get_text_config(), table.weight.device
    prompt = torch.arange(_LENGTH, device=device)

    def run(batch: int, lengths: tuple[int, ...], **options: Any) -> None:
        cache = observer.new_cache(config)
        for length in lengths:
            ids = numbers(text.vocab_size, batch, length, seed=batch + length).to(device)
            model(input_ids=ids, use_cache=True, **with_cache(model, cache), **options)
            if "attention_mask" in options:
                mask = options["attention_mask"]
                options["attention_mask"] = torch.cat((mask, mask.new_ones(batch, 1)), -1)

    run(1, (_LENGTH,))
    observer.find_layers(model)
    if not observer.seen:
        return
    with observer.watching():
        run(1, (_LENGTH, 1))
        if observer.rotating():  # others may have a table of positions, which ends before the last
            run(1, (_LENGTH,), position_ids=prompt[None] + text.max_position_embeddings - _LENGTH)
        run(
            3,
            (_LENGTH, 1),
            attention_mask=(prompt >= torch.arange(3, device=device)[:, None]).long(),
        )


class _Observer:
    """Stands between a model and the attention functions, and between it and its cache."""

    def __init__(self) -> None:
        self.seen: dict[nn.Module, list[Seen]] = {}
        self.attending: list[nn.Module] = []
        self.now: Seen | None = None  # the layer's call that runs
        self.cache: Any = None
        self.thread = get_ident()

    def new_cache(self, config: Any) -> Any:
        from transformers import DynamicCache

        cache: Any = DynamicCache(config=config)
        update = cache.update

        def see(*args: Any, **options: Any) -> Any:
            result = update(*args, **options)
            if self.now is not None:
                self.now.updates.append(Update(args, options, result))
            return result

        cache.update = see
        self.cache = cache
        return cache

    @contextmanager
    def spying(self) -> Iterator[None]:
        """Attention functions that are looked up meanwhile report their calls."""
        from transformers import modeling_utils

        kind: Any = modeling_utils.AttentionInterface
        get = kind.get_interface

        def spy(interface: Any, implementation: str, default: Any) -> Any:
            function = get(interface, implementation, default)
            if get_ident() != self.thread:
                return function

            def call(*args: Any, **options: Any) -> Any:
                out = function(*args, **options)
                self.attending.append(args[0])
                if self.now is not None:
                    given = args + tuple(
                        options.pop(n) for n in _NAMED[len(args) :] if n in options
                    )
                    self.now.attentions.append(
                        Attention(interface, implementation, default, given, options, out)
                    )
                return out

            return call

        kind.get_interface = spy
        try:
            yield
        finally:
            kind.get_interface = get

    def find_layers(self, model: nn.Module) -> None:
        """A layer is of the list of modules that has one which attends, or mixes in another way."""
        names = {module: name for name, module in model.named_modules()}
        mixing = [module for module in names if convolution_of(module) is not None]
        for module in dict.fromkeys(self.attending + mixing):
            name = names.get(module, "")
            while name:
                name = name.rpartition(".")[0]
                parent = model.get_submodule(name)
                if isinstance(parent, nn.ModuleList):
                    own = (layer for layer in parent if "forward" not in layer.__dict__)
                    self.seen.update((layer, []) for layer in own if layer not in self.seen)
                    break

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The calls of the layers found are recorded."""
        layers = list(self.seen)
        for layer in layers:
            layer.__dict__["forward"] = self._recording(layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]

    def rotating(self) -> bool:
        """Whether the layers get (cos, sin), of which there is one for each position."""
        attending = [c for calls in self.seen.values() for c in calls if c.attentions]
        return bool(attending) and all(
            any(is_angles(value) for value in call.kwargs.values()) for call in attending
        )

    def _recording(self, layer: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            x, named = _bound(layer, args, kwargs)
            seen = Seen(x, {n: _copied(v) for n, v in named.items()}, copy_of(self.cache))
            self.now = seen
            hooks = [
                module.register_forward_hook(see, with_kwargs=True)
                for module in layer.modules()
                if module is not layer
            ]
            try:
                seen.out = type(layer).forward(layer, *args, **kwargs)
            finally:
                self.now = None
                for hook in hooks:
                    hook.remove()
            seen.stored = stored(seen.kwargs, named)
            self.seen[layer].append(seen)
            return seen.out

        def see(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if self.now is not None:
                first = out[0] if isinstance(out, tuple) and out else out
                self.now.calls.append(Call(module, args, kwargs, first))

        return forward


def _bound(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(the first argument, the others by their names); None and nothing where one has no name."""
    names = positions(module)
    if len(args) > len(names) or not names:
        return None, {}
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return named.pop(names[0], None), named


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, Mapping) else value


def stored(before: dict[str, Any], after: dict[str, Any]) -> dict[tuple[str, Any], Any]:
    """{(name, key): value} of what came into mappings among arguments, or is another there."""
    return {
        (name, key): value
        for name, values in after.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
        if before[name].get(key) is not value
    }


def is_angles(value: Any) -> bool:
    """Whether the value may be (cos, sin)."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(isinstance(t, Tensor) and t.dim() == 3 for t in value) and (
        value[0].shape == value[1].shape
    )


def copy_of(cache: Any) -> Any:
    """The cache as it is, which other calls leave alone."""
    copied = copy.copy(cache)
    copied.__dict__.pop("update", None)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in copied.layers:  # keys are replaced, states written in place
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, {k: _cloned(v) for k, v in value.items()})
    return copied


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def convolution_of(module: nn.Module) -> nn.Module | None:
    """The child that is a convolution of each channel, None if there is none."""
    weights = ((child, child._parameters.get("weight")) for child in module.children())
    return next((c for c, w in weights if w is not None and w.dim() == 3 and w.shape[1] == 1), None)


def is_transformers_model(module: nn.Module) -> bool:
    found = sys.modules.get("transformers.modeling_utils")
    return found is not None and isinstance(module, found.PreTrainedModel)
