"""Fewer, larger ops: SwiGLU MLPs, and linear layers that have their input in common.

Nothing goes by the names of models or layers. Which layers have one input is read from the code of
their parent's forward; which modules are SwiGLU MLPs is found by running them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from .fuse_times import MLP, faster_forms
from .fused import FORMS, LinearPart, MergedLinear, Roles, SwiGLU, plain, unhooked
from .linear import QuantEmbedding, QuantLinear
from .replace import summary

_MERGED = "merged_"  # the child's name begins so, then those of its layers


def fuse_(model: nn.Module, mlp_form: str | None = None) -> nn.Module:
    """Compute SwiGLU MLPs, and packed layers of one input and format, in fewer ops, in place.

    MLPs that are down(silu(gate(x)) * up(x)), whatever they are called, become SwiGLU modules; gate
    and up may be halves of one layer (Phi3). mlp_form says how one row is computed: "swiglu" or
    "swiglu_linear" (see SwiGLU); None times both, once for each size of layer and device. Other
    packed layers called with one input (q, k and v; gate and up of a GELU MLP) become parts of one
    MergedLinear, as far as their formats are equal: their bytes move into one tensor.

    state_dict keeps its names and bytes, so the model is saved as before; results differ by
    rounding. Layers with adapters, hooks, shared or trained tensors stay as they are. Meant for
    inference: to merge adapters, quantize again or replace layers, call unfuse_ first.
    Returns `model`. ValueError: mlp_form is no form, or a packed weight is on the meta device.
    """
    if mlp_form is not None and mlp_form not in FORMS:
        raise ValueError(f"mlp_form: {mlp_form!r}; allowed: None, {', '.join(map(repr, FORMS))}")
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and module.weight.is_meta:
            raise ValueError(f"{name}.weight is on the meta device and has no data")
    once = _unshared(model)
    adapted, mlps = [], {}
    for name, parent in list(model.named_modules()):
        if isinstance(parent, SwiGLU):
            continue
        if any(isinstance(getattr(c, "base_layer", None), QuantLinear) for c in parent.children()):
            adapted.append(name)
        roles = _swiglu_roles(parent) if name else None
        if roles is not None:
            mlps[name] = MLP(parent, roles)
        else:
            _merge(parent, once)
    chosen = faster_forms(list(mlps.values()), _activation_dtype(model)) if not mlp_form else {}
    for name, mlp in mlps.items():
        form, note = chosen.get(mlp.sizes(), (mlp_form or FORMS[0], ""))
        model.set_submodule(name, SwiGLU(mlp.module, mlp.roles, form, note))
    if adapted:
        warnings.warn(f"layers with adapters are not fused: {summary(adapted)}", stacklevel=2)
    return model


def unfuse_(model: nn.Module) -> nn.Module:
    """Put the modules back that fuse_ replaced, in place; their bytes are shared, not copied."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SwiGLU):
            module.original.training = module.training
            model.set_submodule(name, module.original)
    for name, module in list(model.named_modules()):
        if isinstance(module, LinearPart):
            layer = module.merged.restore(module.index)
            model.set_submodule(name, layer.train(module.training))
    for parent in model.modules():
        for name, child in list(parent.named_children()):
            if isinstance(child, MergedLinear):
                delattr(parent, name)
    return model


def _activation_dtype(model: nn.Module) -> torch.dtype:
    for module in model.modules():
        if isinstance(module, QuantEmbedding):
            return module.dtype
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.float32)


def _unshared(model: nn.Module) -> set[int]:
    """The ids of packed layers that are in the model once, with tensors of their own."""
    owners: dict[int, int] = {}
    paths: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        paths[id(module)] = paths.get(id(module), 0) + 1
    for module in model.modules():
        for p in module._parameters.values():
            owners[id(p)] = owners.get(id(p), 0) + 1
    return {
        id(m)
        for m in model.modules()
        if plain(m)
        and paths[id(m)] == 1
        and all(owners[id(p)] == 1 and not p.requires_grad for p in m.parameters())
    }


# ---- layers of one input


def _merge(parent: nn.Module, once: set[int]) -> None:
    for names in _same_input(type(parent).forward):
        alike: dict[object, list[str]] = {}
        for name in names:
            layer = parent._modules.get(name)
            if isinstance(layer, QuantLinear) and id(layer) in once:
                bias = None if layer.bias is None else layer.bias.dtype
                key = (layer.format, layer.in_features, layer.weight.device, bias)
                alike.setdefault(key, []).append(name)
        for group in alike.values():
            if len(group) < 2:
                continue
            merged = MergedLinear([getattr(parent, name) for name in group])
            for index, name in enumerate(group):
                setattr(parent, name, LinearPart(merged, index))
            parent.add_module(_MERGED + "_".join(group), merged)


@cache
def _same_input(forward: Callable[..., Any]) -> list[list[str]]:
    """Names of children that the function calls once each, with one variable."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return []
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return []
    calls = _Calls(function.args.args[0].arg)
    calls.visit(function)
    return [names for names in calls.groups() if len(names) > 1]


_Path = tuple[tuple[int, str], ...]  # the blocks that a node is in, and which part of each


class _Calls(ast.NodeVisitor):
    """Collects the calls self.child(variable) of a function, and what may change the variable."""

    def __init__(self, self_name: str) -> None:
        self.self_name = self_name
        self.uses: dict[str, int] = {}
        self.calls: list[tuple[str, str, ast.stmt, _Path]] = []
        self.changes: dict[str, list[int]] = {}  # variable: lines of statements that change it
        self.path: _Path = ()
        self.statement: ast.stmt | None = None

    def generic_visit(self, node: ast.AST) -> None:
        statement, path = self.statement, self.path
        if isinstance(node, ast.stmt):
            self.statement = node
        for field, value in ast.iter_fields(node):
            if hasattr(node, "body"):
                self.path = (*path, (id(node), field))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)
        self.statement, self.path = statement, path

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == self.self_name:
            self.uses[node.attr] = self.uses.get(node.attr, 0) + 1
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._changed(node.id)

    def visit_Call(self, node: ast.Call) -> None:
        function, arguments = node.func, node.args
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            owner = function.value.id
            if owner != self.self_name and function.attr.endswith("_"):
                self._changed(owner)  # x.add_(y)
            elif owner == self.self_name and len(arguments) == 1 and not node.keywords:
                argument = arguments[0]
                if isinstance(argument, ast.Name) and self.statement is not None:
                    call = (function.attr, argument.id, self.statement, self.path)
                    self.calls.append(call)
        self.generic_visit(node)

    def _changed(self, variable: str) -> None:
        if self.statement is not None:
            self.changes.setdefault(variable, []).append(self.statement.lineno)

    def groups(self) -> list[list[str]]:
        """Children called in one block with a variable that does not change in between."""
        found: dict[object, list[tuple[str, ast.stmt]]] = {}
        for child, variable, statement, path in self.calls:
            if self.uses[child] == 1:
                found.setdefault((variable, path), []).append((child, statement))
        groups: list[list[str]] = []
        for (variable, _), calls in found.items():  # type: ignore[misc]
            changes, last = self.changes.get(variable, []), None
            for child, statement in sorted(calls, key=lambda call: call[1].lineno):
                # What the statement of a call changes, it changes after the call.
                if last is None or any(last <= n < statement.lineno for n in changes):
                    groups.append([])
                groups[-1].append(child)
                last = statement.lineno
        return groups


# ---- SwiGLU


def _swiglu_roles(module: nn.Module) -> Roles | None:
    """The roles of its layers if the module computes SwiGLU, None otherwise."""
    layers = {n: c for n, c in module._modules.items() if isinstance(c, QuantLinear)}
    others = (c for n, c in module._modules.items() if c is not None and n not in layers)
    if len(layers) not in (2, 3) or not all(plain(layer) for layer in layers.values()):
        return None
    if module._parameters or module._buffers or any(_is_more(c) for c in others):
        return None
    if not unhooked(module):
        return None
    candidates = _candidates(layers)
    if not candidates:
        return None
    training = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        return next((r for r in candidates if _computes_swiglu(module, r)), None)
    finally:
        for m, was_training in training:
            m.training = was_training


def _is_more(module: nn.Module) -> bool:
    """Whether it may be more than an activation function."""
    state = bool(module._parameters or module._buffers or module._modules)
    return state or (isinstance(module, nn.Dropout) and module.p > 0)


def _candidates(layers: dict[str, QuantLinear]) -> list[Roles]:
    """The roles that fit the shapes; gate and up have no bias."""
    found: list[Roles] = []
    for names in permutations(layers):
        gate, down = layers[names[0]], layers[names[-1]]
        if gate.bias is not None:
            continue
        if len(names) == 2:
            if gate.out_features == 2 * down.in_features:
                found += [Roles(names[0], None, names[1], first) for first in (True, False)]
            continue
        up = layers[names[1]]
        sizes = (gate.in_features, gate.out_features)
        if up.bias is None and sizes == (up.in_features, up.out_features) == (
            up.in_features,
            down.in_features,
        ):
            found.append(Roles(*names))
    return found


def _computes_swiglu(module: Any, roles: Roles) -> bool:
    """Whether the module gives, bit for bit, what its layers give as SwiGLU.

    Both are the same ops in the same order if it is one. Large inputs too, because some clamp.
    """
    gate, down = module._modules[roles.gate], module._modules[roles.down]
    x = torch.randn(2, gate.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(gate.weight.device)
    with torch.inference_mode():
        for scale in (1.0, 1000.0):
            if roles.up is None:
                a, b = gate(x * scale).chunk(2, dim=-1)
                a, b = (a, b) if roles.gate_first else (b, a)
            else:
                a, b = gate(x * scale), module._modules[roles.up](x * scale)
            want = down(nn.functional.silu(a) * b)
            try:
                got = module(x * scale)
            except Exception:
                return False  # it takes other arguments
            if not isinstance(got, Tensor) or not torch.equal(got, want):
                return False
    return True
