"""Whether a model still computes what it computed, without a call of it.

The settings that decide which code of Python runs are compared: what modules have beside the values
of their tensors (numbers, parameters, children, hooks), the code of their classes and the functions
that it names, configs, and the functions that transformers knows by a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from .. import _C
from ..nn.settings import named_functions
from ..nn.watch import hooks_are_known

_LIBRARIES = frozenset(("torch", "transformers", "torch_metalmm"))
_OTHER_HOOKS = ("_state_dict", "_load_state_dict")  # a module's, which no forward calls
_HOOKS = [
    d for n, d in vars(torch_module).items() if n.startswith("_global_") and isinstance(d, dict)
]


class Unchanged:
    """A model as it is when the object is made. why: code in it that nobody has read, or "".

    The object keeps alive all that it compares, weights too.
    """

    def __init__(self, model: nn.Module) -> None:
        modules, by_name = dict(model.named_modules()), _by_name()
        configs = [*_configs(getattr(model, "config", None))]
        classes = dict.fromkeys(
            each
            for thing in (*modules.values(), *by_name)
            for each in type(thing).__mro__
            if each is not object
        )
        found: list[Any] = [*_HOOKS]
        for interface in by_name:  # an interface's functions, and all interfaces'
            found += [interface._local_mapping, interface._global_mapping]
        for module in modules.values():
            own = module.__dict__
            found.append(own)
            found += _containers(v for n, v in own.items() if not n.startswith(_OTHER_HOOKS))
        for config in configs:
            found += [vars(config), *_containers(vars(config).values())]
        dicts = [each for each in found if isinstance(each, dict)]
        lists = [each for each in found if isinstance(each, list)]
        items = []
        for one in {type(m): m for m in modules.values()}.values():
            of_file, seen = named_functions(type(one).forward)
            items += [(of_file, name, function) for name, function in seen.items()]
        self._guard = _C.Guard([*dicts, *classes], lists, items, [*modules.values()])
        self.why = "a hook of all modules" if any(_HOOKS) else ""
        for config in configs:
            self.why = self.why or _foreign_attention(by_name[0], config)
        for name, module in modules.items():
            self.why = self.why or _foreign(name or "the model", module)

    def same(self) -> bool:
        """Whether the model is what it was."""
        return bool(self._guard.same())


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """The dicts and lists among the values, and those that they hold."""
    for value in values:
        if isinstance(value, dict | list):
            yield value
            yield from _containers(value.values() if isinstance(value, dict) else value)


def _by_name() -> tuple[Any, ...]:
    """The tables in which transformers finds functions by a name."""
    # Imported here: with modeling_utils, late.py puts what imports this file into transformers.
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def _foreign_attention(functions: Any, config: Any) -> str:
    name = getattr(config, "_attn_implementation", None)
    function = functions.get(name)
    if function is None or _root(getattr(function, "__module__", "")) in _LIBRARIES:
        return ""
    return f"the attention function {name} is of {function.__module__}, which may do anything"


def _foreign(name: str, module: nn.Module) -> str:
    """A sentence on code of the module that nobody has read, or ""."""
    if _library(module) not in _LIBRARIES:
        return f"{name} is a {type(module).__name__}, which may do anything"
    if module.training and _library(module) != "torch_metalmm":
        return f"{name} is in training mode"
    own = module.__dict__.get("forward")
    if own is not None and _library(getattr(own, "__self__", own)) != "torch_metalmm":
        return f"{name}.forward is not that of its class"
    return "" if hooks_are_known(module, set()) else f"{name} has a hook"


def _library(thing: Any) -> str:
    return _root(type(thing).__module__)


def _root(module: str) -> str:
    return module.partition(".")[0]


def _configs(config: Any) -> Iterator[Any]:
    if config is not None:
        yield config
        for key in getattr(config, "sub_configs", ()):
            yield from _configs(getattr(config, key, None))
