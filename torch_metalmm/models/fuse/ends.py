"""The numbers that a model applies to results of its embedding and its output head: found by
running the model with results that wait for numbers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ...nn import QuantEmbedding, QuantLinear
from ...nn.awaiting import Awaiting
from ...nn.fused import unhooked
from .confirm import roundoff
from .observe import quietly
from .runs import numbers


def fuse_ends(model: Any) -> None:
    """Let a packed embedding and head compute such numbers, too, where both forms agree."""
    found = [Awaiting(m) for m in _ends(model) if unhooked(m)]
    if not found:
        return
    for each in found:
        each.attach()
    with quietly(model):
        try:
            with suppress(Exception):  # the model takes something else
                ids = numbers(model.config.get_text_config().vocab_size, 1, 2)
                model(input_ids=ids.to(found[0].module.weight.device), use_cache=False)
        finally:
            for each in found:
                if not _agrees(each):
                    each.detach()


def _ends(model: Any) -> list[Any]:
    """The packed embedding and head of the model, as far as it has them."""
    ends = []
    for get in (model.get_input_embeddings, model.get_output_embeddings):
        with suppress(NotImplementedError, AttributeError):  # images, sound, several towers
            ends.append(get())
    return [m for m in ends if type(m) in (QuantEmbedding, QuantLinear)]


def _agrees(end: Awaiting) -> bool:
    """Whether something is applied, all of which an op computes."""
    seen = end.last
    if seen is None or not seen.steps:
        return False
    try:
        end.expect(seen.steps)
        want, got = seen.computed(), end.made(seen.x)
    except Exception:  # steps that no op has, or no kernel for them
        return False
    u = roundoff(want.dtype)
    if not want.is_cpu:
        u = max(u, roundoff(torch.float16))
    rounding = u + seen.x.shape[-1] ** 0.5 * roundoff(torch.float32)
    # A tanh makes no relative error larger, and is itself within two roundings.
    error = (got.float() - want.float()).norm()
    return bool(error <= (len(seen.steps) + 2) * rounding * want.float().norm())
