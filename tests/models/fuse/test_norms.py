"""Which modules are norms, and what computes those that no fused layer does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torch_metalmm.models.fuse.layers import _fuse_norms
from torch_metalmm.models.fuse.norms import as_norm
from torch_metalmm.models.fuse.runs import normal


class Norm(nn.Module):
    def __init__(self, offset: float = 0.0, *, clamp: float = 1e9, mean: float = 0.0) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)  # some are above 1.2: the clamp is reached
        self.gain = nn.Parameter(torch.randn(48, generator=make))
        self.decoy, self.small = 0.5, 1e-4
        self.offset, self.clamp, self.mean = int(offset), clamp, mean

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.mean * x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.small)
        return (y * (self.offset + self.gain)).clamp(-self.clamp, self.clamp)


def test_norms_are_known_by_what_they_compute() -> None:
    for offset in (0.0, 1.0):
        norm = as_norm(Norm(offset), 48)
        assert norm is not None and (norm.eps, norm.offset, norm.name) == (1e-4, offset, "gain")
    rms = as_norm(nn.RMSNorm(48, eps=1e-6), 48)
    assert rms is not None and rms.eps == 1e-6
    bare = as_norm(nn.RMSNorm(48, eps=1e-6, elementwise_affine=False), 48)
    assert bare is not None and bare.weight() is None and bare.offset == 0
    assert as_norm(Norm(), 32) is None
    for other in (Norm(2.0), Norm(clamp=8.0), Norm(mean=1.0), nn.LayerNorm(48), nn.Identity()):
        assert as_norm(other, 48) is None


class Bare(nn.Module):
    """A norm without a weight, of rows of any size."""

    def __init__(self, mean: float, takes_half: bool = True) -> None:
        super().__init__()
        self.small, self.mean, self.takes_half = 1e-4, mean, takes_half

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.half and not self.takes_half:
            raise TypeError("no halves")
        x = x - self.mean * x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.small)


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_norms_without_a_weight_take_any_row(mean: float) -> None:
    """Of any size and dtype; one that refuses halves is left alone."""
    bare, other = Bare(mean), Bare(mean, takes_half=False)
    _fuse_norms(nn.ModuleList([bare, other]))
    assert "forward" in vars(bare) and "forward" not in vars(other)
    for dtype in (torch.float32, torch.float64):
        x = normal(3, 128).to(dtype)
        got, want = bare(x), Bare.forward(bare, x)
        assert got.dtype == dtype and (got - want).norm() <= 128 * 2.0**-24 * want.norm()
