"""Which packed layers the code of a forward calls with one input that nothing writes in between.

A list of what can write to a tensor cannot be complete (x[:, 0] = 5, relu_(x), out=x, x.data, a
view, an array of numpy, a hook), so the reader has a list of what may stand between two calls, and
everything else ends the group. The reader assumes only that reading attributes or items of an
object, and arithmetic on tensors, write to no tensor; and that a child given nothing but new
tensors does not write the input, which the run in merge.py and the versions at run time check.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

# Methods of Tensor that write to no tensor, and those of them whose result is a new tensor or a
# view of the one that they are called on.
_TENSOR_METHODS = frozenset(
    ("abs", "add", "bfloat16", "clamp", "contiguous", "div", "expand", "flatten", "float", "half")
    + ("mul", "permute", "pow", "relu", "reshape", "sigmoid", "squeeze", "sub", "tanh", "to")
    + ("transpose", "type_as", "unflatten", "unsqueeze", "view")
)
_METHODS = _TENSOR_METHODS | frozenset(("chunk", "dim", "numel", "size", "split", "unbind"))
# Functions of torch that write at most to their arguments.
_ACTIVATIONS = frozenset(
    ("elu", "gelu", "hardswish", "layer_norm", "leaky_relu", "mish", "relu", "rms_norm", "selu")
    + ("sigmoid", "silu", "softplus", "tanh")
)
_CONSTANTS = (int, float, str, tuple, type(None), torch.dtype)


@dataclass(frozen=True)
class Group:
    """Layers called one after the other with one variable; children called between the calls."""

    layers: tuple[str, ...]
    between: tuple[str, ...]


def groups_of_one_input(
    parent: type[nn.Module], layers: frozenset[str], children: frozenset[str]
) -> list[Group]:
    """The groups in parent.forward, each layer in the order of the calls.

    layers: the children that are packed layers, which write to no tensor; children: all of them.
    Empty if the code cannot be read.
    """
    try:
        forward: Callable[..., Any] = inspect.unwrap(parent.forward)
        function = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return []
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return []
    if parent.__getattribute__ is not object.__getattribute__ or (
        parent.__getattr__ is not nn.Module.__getattr__
    ):
        return []  # reading an attribute runs code
    reader = _Reader(parent, forward, function, layers, children)
    reader.block(function.body)
    return reader.groups


class _Reader:
    """Goes through a function in the order in which it runs.

    Three kinds of values: new tensors, to whose memory nothing else refers; constants; and all
    others, any of which may be the input under another name.
    """

    def __init__(
        self,
        parent: type[nn.Module],
        forward: Callable[..., Any],
        function: ast.FunctionDef,
        layers: frozenset[str],
        children: frozenset[str],
    ) -> None:
        self.parent, self.layers, self.children = parent, layers, children
        self.globals: dict[str, Any] = getattr(forward, "__globals__", {})
        self.self_name = function.args.args[0].arg
        self.groups: list[Group] = []
        # {variable: (child, whether it is a layer called with the variable)}
        self.open: dict[str, list[tuple[str, bool]]] = {}
        self.new: set[str] = set()  # variables that hold new tensors
        self.leaked = False  # whether code that is not read may have called the layers
        nodes = list(ast.walk(function))
        attributes = [n for n in nodes if isinstance(n, ast.Attribute)]
        of_self = [n for n in attributes if self._is_self(n.value)]
        self.uses = Counter(n.attr for n in of_self)
        owners = {id(n.value) for n in attributes}
        names = [n for n in nodes if isinstance(n, ast.Name)]
        self.leaks = {id(n) for n in of_self if not self._is_state(n.attr)}
        self.leaks |= {id(n) for n in names if self._is_self(n) and id(n) not in owners}
        self.leaks |= {id(n) for n in names if n.id in ("super", "__class__")}
        self.locals = {n.arg for n in nodes if isinstance(n, ast.arg)}
        self.locals |= {n.id for n in names if not isinstance(n.ctx, ast.Load)}
        functions = [n.func for n in nodes if isinstance(n, ast.Call)]
        called = {id(n) for n in functions}
        self.leaks |= {id(n) for n in of_self if id(n) in called and n.attr not in children}
        calls = [n for n in nodes if isinstance(n, ast.Call) and self._layer_of(n)]
        # Variables that layers are called with hold tensors.
        self.inputs = {a.id for n in calls for a in n.args if isinstance(a, ast.Name)}

    # ---- statements

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Assign(targets=targets, value=value):
                    self._assign(targets, value)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign([target], value)
                case ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
                    self.value(value)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._end(statement)
                case _:
                    self._compound(statement)
        self._end()

    def _compound(self, statement: ast.AST) -> None:
        """A statement that may do anything; the blocks in it are read each on its own."""
        self._end()
        for _, field in ast.iter_fields(statement):
            for part in field if isinstance(field, list) else [field]:
                if isinstance(part, ast.ExceptHandler | ast.match_case):
                    self._compound(part)
                elif isinstance(part, ast.AST) and not isinstance(part, ast.stmt):
                    self._end(part)
            if isinstance(field, list) and field and isinstance(field[0], ast.stmt):
                self.block(field)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        new = self.value(value)
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for name in names:
                if isinstance(name, ast.Name):
                    self._end_of(name.id)
                    self.new.discard(name.id)
                else:
                    self._end(name)  # x[0] = 5, self.y = 5
            if new and isinstance(target, ast.Name):
                self.new.add(target.id)

    # ---- expressions

    def value(self, node: ast.expr) -> bool:
        """Read an expression. Whether its value is a new tensor."""
        match node:
            case ast.Name(id=name):
                self.leaked |= id(node) in self.leaks
                return name in self.new
            case ast.Attribute(value=owner, attr=name):
                if self._is_self(owner):
                    if id(node) in self.leaks:
                        self._end(node)  # a property runs code
                    return False
                return self.value(owner) and name in ("T", "mT")
            case ast.Subscript(value=owner, slice=index):
                new = self.value(owner)
                self.value(index)
                return new
            case ast.BinOp(left=left, right=right):
                one, other = self.value(left), self.value(right)
                return one or other
            case ast.UnaryOp(operand=operand):
                return self.value(operand)
            case ast.Call():
                return self._call(node)
            case ast.Constant():
                return False
            case ast.Tuple() | ast.List() | ast.Slice() | ast.Starred():
                for part in ast.iter_child_nodes(node):
                    if isinstance(part, ast.expr):
                        self.value(part)
                return False
        self._end(node)
        return False

    def _call(self, node: ast.Call) -> bool:
        function, keywords = node.func, {keyword.arg for keyword in node.keywords}
        owner = function.value if isinstance(function, ast.Attribute) else None
        name = function.attr if isinstance(function, ast.Attribute) else ""
        of_self = owner is not None and self._is_self(owner)
        on_new = owner is not None and not of_self and self.value(owner)
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        new = [self.value(v) for v in values]
        inert = (n or isinstance(v, ast.Constant) for v, n in zip(values, new, strict=True))
        only_new = any(new) and all(inert)
        if self._layer_of(node) and not keywords:
            self._called(name, node.args)
            return True
        if of_self and name in self.children and only_new:
            self._called(name, [])
            return True
        if self._is_activation(function) and only_new:
            return True
        on_tensor = on_new or (isinstance(owner, ast.Name) and owner.id in self.inputs)
        if on_tensor and name in _METHODS and keywords.isdisjoint({"out", None}):
            return on_new and name in _TENSOR_METHODS
        self._end(node)
        return False

    def _called(self, child: str, arguments: list[ast.expr]) -> None:
        variable = (
            arguments[0].id if len(arguments) == 1 and isinstance(arguments[0], ast.Name) else None
        )
        grouped = child in self.layers and self.uses[child] == 1 and not self.leaked
        if variable is not None and grouped:
            self.open.setdefault(variable, [])
        for of, calls in self.open.items():
            calls.append((child, grouped and of == variable))

    # ---- what ends groups

    def _end(self, cause: ast.AST | None = None) -> None:
        """End all groups, because the code at hand may write to any tensor."""
        for variable in list(self.open):
            self._end_of(variable)
        self.new.clear()
        if cause is not None:
            self.leaked |= any(id(node) in self.leaks for node in ast.walk(cause))

    def _end_of(self, variable: str) -> None:
        calls = self.open.pop(variable, [])
        while calls and not calls[-1][1]:
            calls.pop()  # called after the last layer
        layers = tuple(child for child, of_group in calls if of_group)
        between = tuple(dict.fromkeys(child for child, of_group in calls if not of_group))
        if len(layers) > 1:
            self.groups.append(Group(layers, between))

    # ---- what a node is

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.self_name

    def _layer_of(self, node: ast.Call) -> str | None:
        function = node.func
        if isinstance(function, ast.Attribute) and self._is_self(function.value):
            return function.attr if function.attr in self.layers else None
        return None

    def _is_state(self, name: str) -> bool:
        """Whether self.name is a value that is kept, not code of the class."""
        return isinstance(inspect.getattr_static(self.parent, name, None), _CONSTANTS)

    def _is_activation(self, function: ast.expr) -> bool:
        found = self._resolve(function)
        name = getattr(found, "__name__", "")
        return name in _ACTIVATIONS and found in (
            getattr(nn.functional, name, None),
            getattr(torch, name, None),
        )

    def _resolve(self, node: ast.expr) -> Any:
        """What the name of a module's attribute stands for, None for other expressions."""
        if isinstance(node, ast.Name):
            return None if node.id in self.locals else self.globals.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return None
