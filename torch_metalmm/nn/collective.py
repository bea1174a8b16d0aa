"""Messages between the ranks of sharded layers: torch.distributed's collectives, no others.

Sums and gathers have the gradients of tensor parallelism, and torch.compile traces them as
functional collectives. A tensor on a device for which the group has no backend (gloo and MPS) goes
through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class Ranks:
    """A process group by its name, which copies and pickles where a group does not."""

    group: str
    rank: int
    size: int

    @staticmethod
    def of(mesh: Any) -> Ranks:
        """The ranks of a DeviceMesh of one dimension, or of its dimension "tp".

        ValueError: it has more dimensions and none of that name. TypeError: no DeviceMesh.
        """
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
        if mesh.ndim > 1:
            if "tp" not in (mesh.mesh_dim_names or ()):
                names = mesh.mesh_dim_names or mesh.ndim
                raise ValueError(f'mesh has the dimensions {names}; one of them must be "tp"')
            mesh = mesh["tp"]
        return Ranks(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())

    def process_group(self) -> Any:
        return c10d._resolve_process_group(self.group)  # type: ignore[attr-defined, arg-type]


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of x over the ranks, in the dtype of x; every rank gets the same bits."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Sum.apply(x, ranks)  # type: ignore[no-untyped-call]
    return _sum(x, ranks)


def copied(x: Tensor, ranks: Ranks) -> Tensor:
    """x, which every rank has; its gradient is the sum of the ranks' gradients."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Copy.apply(x, ranks)  # type: ignore[no-untyped-call]
    return x


def all_gather(x: Tensor, sizes: tuple[int, ...], ranks: Ranks) -> Tensor:
    """The ranks' x side by side along the last dimension, which is sizes[rank] long."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Gather.apply(x, sizes, ranks)  # type: ignore[no-untyped-call]
    return _gather(x, sizes, ranks)


class FailedElsewhere(RuntimeError):
    """Another rank could not take part."""


def gather_bytes(
    make: Callable[[], Tensor], sizes: tuple[int, ...], ranks: Ranks
) -> list[Tensor] | None:
    """Every rank's make(), 1-D uint8 of sizes[rank], on rank 0, None on the others.

    Nothing is sent where a rank has no memory or its make() fails: that rank raises its error and
    the others FailedElsewhere, instead of waiting for it.
    """
    group = ranks.process_group()
    device = "cpu" if _has_backend("cpu", group) else "cuda"
    problem: Exception | None = None
    try:
        mine = make()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        padded = padded.to(device)
        out = [torch.empty_like(padded) for _ in sizes] if ranks.rank == 0 else None
    except Exception as error:
        problem = error
    if not on_every_rank(problem is None, device, ranks):
        raise problem or FailedElsewhere("another rank could not take part")
    dist.gather(padded, out, group=group, group_dst=0)
    if out is None:
        return None
    return [part[:size] for part, size in zip(out, sizes, strict=True)]


def on_every_rank(true: bool, device: torch.device | str, ranks: Ranks) -> bool:
    """Whether it is true on every rank."""
    return not bool(_sum(torch.full((), float(not true), device=device), ranks))


def _has_backend(kind: str, group: Any) -> bool:
    return any(device.type == kind for device in group._device_types)


def _staged(x: Tensor, ranks: Ranks) -> bool:
    """Whether x must go through host memory."""
    return not _has_backend(x.device.type, ranks.process_group())


def _sum(x: Tensor, ranks: Ranks) -> Tensor:
    if torch.compiler.is_compiling():
        host = x.cpu() if x.device.type == "mps" else x
        y: Tensor = _functional.wait_tensor(_functional.all_reduce(host, "sum", ranks.group))
        return y.to(x.device)
    y = x.cpu() if _staged(x, ranks) else x.contiguous()
    # Summed in place: x is a product that nothing else has seen, or a copy of it.
    dist.all_reduce(y, group=ranks.process_group())
    return y.to(x.device)


def _gather(x: Tensor, sizes: tuple[int, ...], ranks: Ranks) -> Tensor:
    longest = max(sizes)
    short = longest - x.shape[-1]
    sent = torch.nn.functional.pad(x, (0, short)) if short else x.contiguous()
    if torch.compiler.is_compiling():
        host = sent.cpu() if x.device.type == "mps" else sent
        got = _functional.all_gather_into_tensor(host, ranks.size, ranks.group)
        parts = list(_functional.wait_tensor(got).to(x.device).chunk(ranks.size))
    else:
        sent = sent.cpu() if _staged(x, ranks) else sent
        parts = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(parts, sent, group=ranks.process_group())
        parts = [part.to(x.device) for part in parts]
    return torch.cat([p.narrow(-1, 0, n) for p, n in zip(parts, sizes, strict=True)], -1)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return _sum(x.clone(), ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad.clone(), ctx.ranks), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], ranks: Ranks) -> Tensor:
        ctx.begin, ctx.size = sum(sizes[: ranks.rank]), x.shape[-1]
        return _gather(x, sizes, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Each rank computes on with all of it, so each has the whole gradient of its part.
        return grad.narrow(-1, ctx.begin, ctx.size), None, None
