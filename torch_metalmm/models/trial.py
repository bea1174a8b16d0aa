"""A forward of few inputs on the meta device: which layers' weights other code of the model reads.

Code that reads `layer.weight` itself would take packed bytes for numbers: DeBERTa's and WavLM's
attention, SAM's tokens, RWKV's rescaling. The code of each class says whether a read is possible
(Llama has none, and costs no forward); only a forward says of which layers.
"""

from __future__ import annotations

import copy
import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, get_ident
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Modules that read weights of torch's own layers alone, or to fill new ones.
_NO_MODELS = ("torch.", "transformers.modeling_utils", "transformers.pytorch_utils")
_INITIALISES = ("__init__", "_init_weights", "reset_parameters")
# Reads that a packed layer answers with the numbers of the dense one.
_HARMLESS = {Tensor.shape.__get__, Tensor.device.__get__, Tensor.size, Tensor.is_meta.__get__}  # type: ignore[attr-defined]

_TRITON = Lock()  # one thread at a time changes Triton's launcher
_read: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def weights_read(model: nn.Module, packable: Callable[[nn.Module], bool]) -> frozenset[str]:
    """The names of the packable layers of a transformers model whose weight it reads itself.

    Found once for a model. Empty where nothing reads, and for models of no known inputs. A forward
    that fails on the meta device has found what it read until then.
    """
    if model not in _read:
        suspect = hasattr(model, "main_input_name") and any(
            _may_read(kind)  # type: ignore[arg-type]
            for kind in {type(module) for module in model.modules()}
        )
        _read[model] = _try(model, packable) if suspect else frozenset()
    return _read[model]


@cache
def _may_read(kind: type[nn.Module]) -> bool:
    """Whether a method of the class reads the weight of another module."""
    for base in kind.__mro__:
        if base is nn.Module or f"{base.__module__}.".startswith(_NO_MODELS):
            continue
        for name, method in vars(base).items():
            function = inspect.unwrap(method) if callable(method) else None
            if name in _INITIALISES or not isinstance(function, FunctionType):
                continue
            if any(owner.argval != "self" for owner, _ in reads(function.__code__)):
                return True
    return False


def _try(model: nn.Module, packable: Callable[[nn.Module], bool]) -> frozenset[str]:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(meta, False) if isinstance(tensor, nn.Parameter) else meta
    seen: set[nn.Module] = set()
    try:
        twin = copy.deepcopy(model, memo).eval()
    except Exception:  # other code may keep anything in a model
        return frozenset()
    layers = [module for module in twin.modules() if packable(module)]
    kinds = {kind: _watched(kind, seen) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    for inputs in _inputs(twin):
        try:
            with torch.no_grad(), torch.device("meta"), _Zeros(), _without_triton():  # type: ignore[no-untyped-call]
                twin(**inputs)
        except Exception:  # the model takes other inputs, or its steps depend on values
            continue
    names = twin.named_modules(remove_duplicate=False)
    return frozenset(name for name, module in names if module in seen)


class _Weight(Tensor):
    """A weight that enters its layer in a set when anything computes with it."""

    layer: nn.Module
    seen: set[nn.Module]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        for weight in (t for t in given if isinstance(t, cls) and func not in _HARMLESS):
            weight.seen.add(weight.layer)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _watched(kind: Any, seen: set[nn.Module]) -> type[nn.Module]:
    """The class of layers whose weight is a _Weight to all but their own forward."""

    class Watched(kind):  # type: ignore[misc]
        _computes = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.__dict__["_computes"] = True
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.__dict__["_computes"] = False

        @property
        def weight(self) -> Any:
            weight = self._parameters["weight"]
            if self._computes or weight is None:
                return weight
            watched = weight.detach().as_subclass(_Weight)
            watched.layer, watched.seen = self, seen
            return watched

    return Watched


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers that Python asks of tensors without data are 0, as the inputs are."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_triton() -> Iterator[None]:
    """Triton's kernels raise. For a tensor without data they read address 0, after which no call of
    CUDA works in the process: kernels of flash-linear-attention, which Qwen3.5 takes where it is
    installed, also for a model that lies on the CPU."""
    launcher = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    here = get_ident()
    if launcher is None:
        yield
        return

    def run(*given: Any, **named: Any) -> Any:
        if get_ident() == here:
            raise RuntimeError("a kernel of Triton has nothing to read here")
        return own(*given, **named)

    with _TRITON:
        own, launcher.run = launcher.run, run
        try:
            yield
        finally:
            launcher.run = own


def _inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Arguments to try: all that are known here, then what the model calls its main input."""
    takes = inspect.signature(model.forward).parameters
    known = {name: make(model.config) for name, make in _MAKERS.items() if name in takes}
    yield known
    main = {model.main_input_name, "decoder_input_ids"}
    yield {name: tensor for name, tensor in known.items() if name in main}


def _ids(config: Any) -> Tensor:
    return torch.zeros(1, 5, dtype=torch.int64, device="meta")


def _pixels(config: Any) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size, channels = (getattr(vision, name, None) for name in ("image_size", "num_channels"))
    height, width = size if isinstance(size, list | tuple) else (size or 224, size or 224)
    return torch.zeros(1, channels or 3, height, width, device="meta")


def _spectrum(config: Any) -> Tensor:
    bins = getattr(config, "num_mel_bins", 80)
    return torch.zeros(1, bins, 2 * getattr(config, "max_source_positions", 1500), device="meta")


_MAKERS: dict[str, Callable[[Any], Tensor]] = {
    "input_ids": _ids,
    "decoder_input_ids": _ids,
    "pixel_values": _pixels,
    "input_values": lambda config: torch.zeros(1, 4000, device="meta"),  # a quarter of a second
    "input_features": _spectrum,
    "input_points": lambda config: torch.zeros(1, 1, 1, 2, device="meta"),
    "input_labels": lambda config: torch.zeros(1, 1, 1, dtype=torch.int64, device="meta"),
    "input_boxes": lambda config: torch.zeros(1, 1, 4, device="meta"),
}


def reads(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """(owner, use) of each read of `owner.weight`: what was loaded before, and what comes next."""
    if "weight" not in code.co_names:
        return
    steps = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    for owner, weight, use in zip(steps, steps[1:], [*steps[2:], steps[-1]], strict=False):
        if weight.opname == "LOAD_ATTR" and weight.argval == "weight":
            yield owner, use
