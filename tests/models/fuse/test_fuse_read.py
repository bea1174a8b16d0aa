"""fuse_ merges layers only where nothing writes their input in between: by hand and at random."""

from __future__ import annotations

import itertools
import linecache
import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fuse_cases import packed
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import activations
from torch import Tensor, nn

from torch_metalmm import QuantLinear, fuse_
from torch_metalmm.models.fuse.read import groups_of_one_input
from torch_metalmm.nn.fused import MergedLinear

pytestmark = pytest.mark.covering

K, N = 32, 8
WEIGHTS = [packed("q8_0", N, K, seed=i).weight for i in range(4)]
TEMPLATE = "import torch\nimport torch.nn.functional as F\ndef forward(self, x, z=None):\n"


class Keeper(nn.Module):
    """Returns what it is given and may write it later."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == K:
            self.kept = x
        return x

    def spoil(self) -> None:
        self.kept.data.add_(1)


class Parent(nn.Module):
    """Four packed layers, other children, and what may write the input behind one's back."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, weight in zip("abcd", WEIGHTS, strict=True):
            self.add_module(name, QuantLinear.from_packed(weight, K, "q8_0"))
        # Exact: torch's GELU of a slice and of a contiguous tensor differ in the last bit.
        self.act = nn.LeakyReLU(0.5)
        self.inplace, self.keeper = nn.ReLU(inplace=True), Keeper()
        self.scale, self.heads = 0.5, 2

    @property
    def touched(self) -> int:
        self.kept.data.add_(1)
        return 2

    def spoil(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x

    def helper(self, x: Tensor) -> Tensor:
        q = self.a(x)
        x.data.add_(1)
        return q + self.b(x)


def spoiled(x: Tensor, *rest: Any) -> Any:
    x.data.add_(1)
    return rest[0] if rest else x


def parent_of(lines: list[str]) -> type[Parent]:
    """A Parent whose forward consists of these lines, with source that inspect can read."""
    text = TEMPLATE + "".join(f"    {part}\n" for line in lines for part in line.split("\n"))
    file = f"<forward {next(NUMBERS)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope: dict[str, Any] = {"np": np, "operator": operator, "spoiled": spoiled}
    exec(compile(text, file, "exec"), scope)
    return type("Random", (Parent,), {"forward": scope["forward"], "file": file})


NUMBERS = itertools.count()

# ---- by hand

LAYERS, CHILDREN = frozenset("abcd"), frozenset({*"abcd", "act", "inplace", "keeper"})
READ: dict[str, list[str]] = {
    # what is merged
    "return self.a(x), self.b(x), self.c(x)": ["abc"],
    "return self.c(self.a(x) * self.b(x))": ["ab"],
    "x = self.a(x) * self.b(x)\nreturn self.c(x)": ["ab"],
    "return self.a(x), self.b(x), self.c(x), self.a(x)": ["bc"],
    "return self.a(x.to(self.d.weight.dtype)), self.b(x), self.c(x)": ["bc"],
    "return self.act(self.a(x)) * self.b(x)": ["ab"],
    "return F.gelu(self.a(x), approximate='tanh') * self.b(x)": ["ab"],
    "return torch.nn.functional.silu(self.a(x)) * self.b(x)": ["ab"],
    "s = (*x.shape[:-1], -1, self.heads)\n"
    "q = self.a(x).view(s).transpose(1, 2)\n"
    "k = self.act(self.b(x).view(*s)) * self.scale\n"
    "return q, k, self.c(x).chunk(2, dim=-1)": ["abc"],
    "q = self.a(x)\nk, v = self.b(x), self.c(x)\nx = q + 1\nreturn x, self.d(x)": ["abc"],
    "y = x if z is None else z\nif y is not None:\n    k, v = self.b(y), self.c(y)\n"
    "return self.a(x), k, v": ["bc"],
    "with torch.no_grad():\n    q = self.a(x)\n    k = self.b(x)\nreturn q, k": ["ab"],
    "q, k = self.a(x), self.b(z)\nreturn q, k, self.c(x), self.d(z)": ["ac", "bd"],
    # what is not
    "q = self.a(x)\nnp.split(x, 1)\nreturn q, self.b(x)": [],  # split, of what is no tensor
    "y = self.a(x)\nx = x + 1\nreturn y, self.b(x)": [],
    "q = self.a(x)\nif z is None:\n    k = self.b(x)\nelse:\n    k = self.c(x)\nreturn q, k": [],
    "return self.a(x + 1), self.b(x, scale=2), self.c(x)": [],
    "return self.a(x), self.b(x) if z is None else self.c(x)": [],
    "return [self.a(x) for _ in z], self.b(x)": [],
    "self.helper(x)\nreturn self.a(x), self.b(x)": [],  # it may call the layers itself
    "y = self.call(x)\nreturn self.a(x), self.b(x)": [],
    "y = torch.add(self, 1)\nreturn self.a(x), self.b(x)": [],
    "F = self.keeper\ny = F.gelu(self.a(x))\nreturn y, self.b(x)": [],
    "q = self.a(x).mul_(2)\nreturn q, self.b(x)": [],
    "q = self.a(x)\nq = x\nq = F.relu(q, True)\nreturn q, self.b(x)": [],
}


@pytest.mark.parametrize("code", READ)
def test_what_forward_is_read_to_say(code: str) -> None:
    found = groups_of_one_input(parent_of([code]), LAYERS, CHILDREN)
    assert sorted("".join(group.layers) for group in found) == READ[code]


# What writes {t}, another name of the input, or may: each on a line of its own.
WRITES = [
    "{t}[:, 0] = 5",
    "torch.relu_({t})",
    "F.relu({t}, inplace=True)",
    "F.relu({t}, True)",
    "torch.add({t}, 1, out={t})",
    "{t}.data.add_(1)",
    "{t}.add_(1)",
    "{t}.view(-1)[0] = 3",
    "{t} += 1",
    "{t}.detach().numpy()[0] = 3",
    "np.from_dlpack({t}.detach())[...] = 3",
    "np.negative({t}.detach().numpy(), out={t}.detach().numpy())",
    "{t}.detach().view(-1).zero_()",
    "{t}.data = {t}.data * 2",
    "setattr({t}, 'data', {t}.data + 1)",
    "exec('v.data.mul_(2)', dict(v={t}))",
    "globals()['spoiled']({t})",
    "spoiled({t})",
    "(lambda v: v.data.add_(1))({t})",
    "w = [v.data.mul_(2) for v in [{t}]]",
    "(w := {t}).data.mul_(3)",
    "w = {t}.view(-1)\nw.data.add_(1)",
    "def f(v={t}.data.add_(1)):\n    pass",
    "with torch.no_grad():\n    {t}.mul_(2)",
    "try:\n    {t}.data.mul_(2)\nfinally:\n    pass",
    "for _ in range(2):\n    {t}.data.add_(1)",
    "if {t}.sum() > 0:\n    {t}.data.add_(1)",
    "assert {t}.data.add_(1) is not None",
    "self.inplace({t})",
    "self.inplace({t}.view(-1))",
    "self.kept = {t}\nself.touched",
    "self.kept = {t}\nself.a(x).view(self.touched, -1)",
    "self.keeper({t})\nself.keeper.spoil()",
    "self.spoil({t})",
    "self.helper({t})",
    "torch._foreach_add_([{t}.data], 1)",
    "nn = torch.nn.init.ones_({t}.data)",
    "{t}.data.__iadd__(1)",
    "operator.iadd({t}.data, 1)",
    "del {t}.grad\n{t}.data.neg_()",
    "w = {t}\nF.silu(w, inplace=True)",
    "w = self.a(x + 1)\nw.set_({t})\nF.silu(w, inplace=True)",
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", "xz")
def test_a_write_between_two_calls_is_seen(write: str, name: str) -> None:
    line = write.format(t=name)
    code = ["z = x.view(1, -1, x.shape[-1])", "q = self.c(x)", line, "return q, self.d(x)"]
    assert groups_of_one_input(parent_of(code), LAYERS, CHILDREN) == []
    agree(code)


def test_a_forward_without_source_merges_nothing() -> None:
    scope: dict[str, Any] = {}
    exec("def forward(self, x): return self.a(x), self.b(x)", scope)
    for forward in (scope["forward"], nn.Module.forward, torch.relu):
        parent = type("NoSource", (Parent,), {"forward": forward})
        assert groups_of_one_input(parent, LAYERS, CHILDREN) == []


# ---- at random

PLAIN = [
    "q{i} = self.{m}({t})",
    "q{i} = self.{m}({t}).view(-1, 2, 4).transpose(0, 1)",
    "q{i} = self.act(self.{m}({t}))",
    "q{i} = self.keeper(self.{m}({t})) * self.scale",
    "q{i} = F.leaky_relu(self.{m}({t}), 0.25)",
    "q{i}, p{i} = self.{m}({t}), self.{n}({t})",
    "q{i} = self.{m}({t}) * self.{n}({t})",
]
ODD = [
    "q{i} = self.{m}(self.inplace({t}))",
    "q{i} = self.{m}({t}), {t}.data.add_(1), self.{n}({t})",
    "q{i} = spoiled({t}, self.{m}({t}), self.{n}({t}))",
    "q{i} = self.{m}({t}).add_(1)",
    "q{i} = self.{m}({t})\nF.relu(q{i}, inplace=True)",
    "q{i} = self.{m}({t}) if {t}.sum() > 0 else self.{n}({t})",
    "q{i} = [self.{m}({t}) for _ in range(2)]",
    "q{i} = self.{m}({t})\n{t} = {t} * 2",
    "for q{i} in range(2):\n    p{i} = self.{m}({t}), self.{n}({t})",
    "q{i} = (lambda v: self.{m}(v))({t})",
]
ALIASES = ["z = x", "z = x.view(1, -1, x.shape[-1])", "z = x.detach()", "z = x.data", "z = x[:1]"]
CALLS = st.sampled_from(PLAIN * 3 + ODD)
LETTERS = st.sampled_from("abcd")
EXAMPLES = int(os.environ.get("METALMM_FUSE_EXAMPLES", "300"))


@st.composite
def forwards(draw: Callable[..., Any]) -> list[str]:
    """Straight-line code of calls and writes, which returns every output and the input."""
    lines = [draw(st.sampled_from(ALIASES))]
    for i in range(draw(st.integers(2, 5))):
        name = draw(st.sampled_from("xxxz"))
        m, n = draw(LETTERS), draw(LETTERS)
        lines.append(draw(CALLS).format(i=i, m=m, n=n, t=name))
        if draw(st.integers(0, 3)) == 0:
            lines.append(
                draw(st.sampled_from([*WRITES, "{t} = {t} + 1"])).format(
                    t=draw(st.sampled_from("xz"))
                )
            )
    return [*lines, "return {k: v for k, v in locals().items() if k[0] in 'pqxz'}"]


def run(module: nn.Module, mode: Callable[[], Any]) -> list[Any]:
    """Outputs of two forwards, the input filled again between them, or what was raised."""
    out: list[Any] = []
    with mode():
        x = activations(3, K)
        for seed in (1, 2):
            try:
                found = torch.utils._pytree.tree_leaves(module(x))
                out += [t.clone() if isinstance(t, Tensor) else t for t in found]
            except Exception as error:
                out.append(repr(error))
            module.a(x)
            x.data.copy_(activations(3, K, seed=seed))
    return out


def agree(lines: list[str]) -> int:
    """Fused equals unfused bit for bit, in every mode. The number of merged layers."""
    kind = parent_of(lines)
    model = fuse_(nn.Sequential(kind()), "swiglu")
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        got, want = run(model[0], mode), run(kind(), mode)
        assert len(got) == len(want), lines
        for a, b in zip(got, want, strict=True):
            same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
            assert same, (mode.__name__, lines)
    linecache.cache.pop(kind.file, None)  # type: ignore[attr-defined]
    return sum(isinstance(module, MergedLinear) for module in model.modules())


MERGED: list[int] = []


@settings(max_examples=EXAMPLES)
@given(forwards())
def agree_at_random(lines: list[str]) -> None:
    MERGED.append(agree(lines))


def test_fused_equals_unfused() -> None:
    """METALMM_FUSE_EXAMPLES=10000 runs more by hand; some of the forwards have merged layers."""
    MERGED.clear()
    agree_at_random()
    assert len(MERGED) >= EXAMPLES
    assert 0.1 * len(MERGED) < sum(map(bool, MERGED)) < 0.9 * len(MERGED)
