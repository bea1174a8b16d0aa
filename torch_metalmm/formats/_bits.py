"""Bytes to small integers and back: bit fields, f16 scales, little-endian bit streams."""

from __future__ import annotations

import torch
from torch import Tensor


def _shifts(bits: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(0, bits * count, bits, dtype=torch.uint8, device=device).reshape(-1, 1)


def split_fields(data: Tensor, weaves: int, bits: int) -> Tensor:
    """q[b, (c * (8 / bits) + f) * width + l] = field f of byte l of weave c.

    data uint8 [B, weaves * width], field f = bits [f * bits, (f + 1) * bits) of a byte.
    Returns uint8 [B, 8 / bits * data.shape[1]]. This is the element order of every GGML block.
    """
    fields = data.reshape(data.shape[0], weaves, 1, -1) >> _shifts(bits, 8 // bits, data.device)
    return (fields & ((1 << bits) - 1)).reshape(data.shape[0], -1)


def join_fields(q: Tensor, weaves: int, bits: int) -> Tensor:
    """Inverse of split_fields: q uint8 [B, E], each < 2**bits -> uint8 [B, E * bits / 8]."""
    count = 8 // bits
    fields = q.reshape(q.shape[0], weaves, count, -1) << _shifts(bits, count, q.device)
    out = fields[:, :, 0]
    for f in range(1, count):
        out = out | fields[:, :, f]
    return out.reshape(q.shape[0], -1)


def as_bytes(x: Tensor) -> Tensor:
    """x [..., C] as uint8 [..., C * its item size]; a copy only where x is not contiguous.

    By one dimension: view() refuses a last dimension of 1 whose stride is not 1, contiguous() does
    not change it.
    """
    flat = x.contiguous().view(-1).view(torch.uint8)
    return flat.view(*x.shape[:-1], x.shape[-1] * x.itemsize)


def half_to_bytes(x: Tensor) -> Tensor:
    """f32 [B] -> its nearest f16 (ties to even, overflow to Inf) as bytes, uint8 [B, 2]."""
    return x.to(torch.float16)[:, None].view(torch.uint8)


def bytes_to_half(data: Tensor) -> Tensor:
    """uint8 [B, 2] of an f16 -> f32 [B, 1], exact."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def round_to_half(x: Tensor) -> Tensor:
    """f32 -> f32 of the nearest f16."""
    return x.to(torch.float16).float()


def stream_to_codes(data: Tensor, bits: int) -> Tensor:
    """Little-endian bit stream, uint8 [R, K * bits / 8] -> codes uint8 [R, K], K % 8 == 0."""
    if 8 % bits == 0:
        return split_fields(data.reshape(-1, 1), 1, bits).reshape(data.shape[0], -1)
    octets = data.reshape(data.shape[0], -1, bits).long()
    word = torch.zeros_like(octets[:, :, 0])
    for i in range(bits):
        word |= octets[:, :, i] << (8 * i)
    codes = [(word >> (bits * i)) & ((1 << bits) - 1) for i in range(8)]
    return torch.stack(codes, dim=2).to(torch.uint8).reshape(data.shape[0], -1)


def codes_to_stream(codes: Tensor, bits: int) -> Tensor:
    """Inverse of stream_to_codes."""
    if 8 % bits == 0:
        return join_fields(codes.reshape(-1, 8 // bits), 1, bits).reshape(codes.shape[0], -1)
    octets = codes.reshape(codes.shape[0], -1, 8).long()
    word = torch.zeros_like(octets[:, :, 0])
    for i in range(8):
        word |= octets[:, :, i] << (bits * i)
    data = [(word >> (8 * i)) & 255 for i in range(bits)]
    return torch.stack(data, dim=2).to(torch.uint8).reshape(codes.shape[0], -1)
