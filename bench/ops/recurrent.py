"""`python -m bench recurrent`: prompts through the gated delta rule and the state-space scan.

gated_delta stands beside the chunked form of torch's ops that transformers takes where no other
library is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..problem import LABELS, Setting
from ..runner import Cell, Record, Run, Way
from ..shapes import parse_ints, parse_product

ops = torch.ops.metalmm
CHECKED = 24  # positions that are computed one at a time, too
KEEPS = -4.0  # dt_bias: a state keeps some 98 of 100 a step, as those of trained models


def gated_delta(positions: int, heads: int, size: int, setting: Setting) -> dict[str, Any]:
    """Operands; two heads of v share q and k."""
    make = torch.Generator().manual_seed(positions)
    keys = -(-heads // 2)
    normal = lambda *s: setting.put(torch.randn(s, generator=make))  # noqa: E731
    return {
        "qkv": normal(1, positions, (2 * keys + heads) * size),
        "a": normal(1, positions, heads),
        "b": normal(1, positions, heads),
        "a_log": normal(heads).float(),
        "dt_bias": normal(heads).float() + KEEPS,
        "state": torch.zeros(1, heads, size, size, device=setting.device.type),
    }


def ssm_scan(positions: int, heads: int, size: int, setting: Setting) -> dict[str, Any]:
    """Operands; heads of half the values of b and c, of which there is one group."""
    make = torch.Generator().manual_seed(positions)
    normal = lambda *s: setting.put(torch.randn(s, generator=make))  # noqa: E731
    return {
        "xbc": normal(1, positions, heads * size // 2 + 2 * size),
        "dt": normal(1, positions, heads),
        "a_log": normal(heads).float(),
        "dt_bias": normal(heads).float() + KEEPS,
        "d": normal(heads).float(),
        "state": torch.zeros(1, heads, size // 2, size, device=setting.device.type),
    }


OPS = {"gated_delta": gated_delta, "ssm_scan": ssm_scan}


def in_chunks(given: dict[str, Tensor]) -> Callable[[int], Tensor]:
    """transformers' torch_chunk_gated_delta_rule, with what its layer computes for it."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    heads, dk, dv = given["state"].shape[1:]
    keys = (given["qkv"].shape[-1] - heads * dv) // 2

    def call(i: int) -> Tensor:
        parts = given["qkv"].split([keys, keys, heads * dv], -1)
        q, k, v = (p.unflatten(-1, (-1, d)) for p, d in zip(parts, (dk, dk, dv), strict=True))
        q, k = (t.repeat_interleave(heads * dk // keys, 2) for t in (q, k))
        gate = torch.nn.functional.softplus(given["a"].float() + given["dt_bias"])
        y: Tensor = torch_chunk_gated_delta_rule(
            q,
            k,
            v,
            g=-given["a_log"].exp() * gate,
            beta=given["b"].sigmoid(),
            initial_state=given["state"],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )[0]
        return y

    return call


def is_its_steps(op: Any, given: dict[str, Tensor]) -> Record:
    """Whether the first positions together have the bits of one after the other."""
    rows = {n: t[:, :CHECKED] for n, t in given.items() if n != "state" and t.dim() == 3}
    rest = {n: t for n, t in given.items() if t.dim() == 1}
    states = [given["state"].clone() for _ in range(2)]
    whole = op(**rows, **rest, state=states[0])
    steps = [
        op(**{n: t[:, i : i + 1] for n, t in rows.items()}, **rest, state=states[1])
        for i in range(whole.shape[1])
    ]
    return {"ok": torch.equal(whole, torch.cat(steps, 1)) and torch.equal(*states)}


def cell(name: str, positions: int, heads: int, size: int, setting: Setting) -> Cell:
    given, op = OPS[name](positions, heads, size, setting), getattr(ops, name)
    states = [given["state"].clone() for _ in range(2)]
    check = lambda: is_its_steps(op, given)  # noqa: E731
    beside = {}
    if name == "gated_delta":
        beside["of_chunks"] = "torch_chunk_gated_delta_rule"
    call = lambda i: op(**given | {"state": states[i]})  # noqa: E731
    ways = [Way(name, call, 2, check, against=beside)]
    ways += [Way(peer, in_chunks(given)) for peer in beside.values()]
    about = {"positions": positions, "w": f"{heads} heads of {size}"}
    title = f"Prompts through recurrent ops, x in {LABELS[setting.dtype]}"
    return Cell("recurrent", title, about, ways, setting.device)


def run(run: Run) -> Iterator[Record]:
    """The records of every op and number of positions."""
    args = run.args
    heads, size = parse_product("--states", args.states, "HEADSxSIZE")
    cells = (
        cell(name, positions, heads, size, run.setting)
        for name in OPS
        for positions in parse_ints(args.positions)
    )
    yield from run.cells(cells, has_roof=False)
