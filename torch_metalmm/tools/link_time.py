"""How long a token takes on several machines, each with a part of the model: a prediction.

    token        beside + host + GPU + collectives
    host, GPU    those of token_time, for the products of a rank: N or K divided by the machines
    collectives  2 for each layer and 2 beside them, each WAIT_US + steps x latency + bytes / rate

A sum goes through host memory (gloo has no backend for MPS), so the host waits for the GPU at each,
and nothing overlaps. Steps and bytes are those of a ring: 2 (ranks - 1) of 1 / ranks of the tensor
for a sum, half of them for a gather. Nothing here was measured, on one Mac or on two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .chips import Chip
from .token_time import BESIDE_US, MODELS, WAIT_US, Model, token_time

VALUE_BYTES = 2  # x in f16


@dataclass(frozen=True)
class Link:
    """What a message of one machine to another takes: latency, then bytes at a rate."""

    latency_us: float
    gb_s: float
    source: str


LINKS = {
    # Half of a round trip of 0.38 to 0.95 ms on the bridge of four M3 Ultras. The rate is assumed;
    # a token's messages of 16 KB take 5 us at it.
    "Thunderbolt, TCP": Link(300.0, 3.0, "exo issue 2295"),
    # By RDMA, which torch has no backend for: the limit for one that did.
    "Thunderbolt 5, RDMA": Link(29.0, 6.3, "omlx pull request 3118: 27 to 31 us, 6.1 to 6.5 GB/s"),
}


@dataclass(frozen=True)
class RankTime:
    """Microseconds of a token, and what a machine sends for it."""

    compute: float  # host and GPU, and what lies beside the layers
    waiting: float  # for the GPU, before its results leave
    latency: float
    transfer: float
    collectives: int
    sent_bytes: int

    @property
    def total(self) -> float:
        return self.compute + self.waiting + self.latency + self.transfer


def part(model: Model, ranks: int) -> Model:
    """What one of the ranks has: its heads, its part of the MLPs and of the vocabulary."""
    return replace(
        model,
        intermediate=model.intermediate // ranks,
        vocabulary=model.vocabulary // ranks,
        heads=model.heads // ranks,
        kv_heads=max(1, model.kv_heads // ranks),
    )


def rank_time(
    model: str, format: str, chip: str | Chip, ranks: int, link: str, form: str = "fused"
) -> RankTime:
    """The prediction for `ranks` machines. ValueError: ranks below 2, an unknown model or link."""
    if ranks < 2 or link not in LINKS:
        raise ValueError(f"ranks, link: {ranks}, {link!r}; from 2 on, of {', '.join(LINKS)}")
    if model not in MODELS:
        raise ValueError(f"model: unknown {model!r}; allowed: {', '.join(MODELS)}")
    whole, wire = MODELS[model], LINKS[link]
    alone = token_time(part(whole, ranks), format, chip, form)
    sums, steps = 2 * whole.layers + 1, 2 * (ranks - 1)
    of_sum = steps * whole.hidden * VALUE_BYTES // ranks
    of_logits = (ranks - 1) * whole.vocabulary * VALUE_BYTES // ranks
    sent = sums * of_sum + of_logits
    return RankTime(
        compute=alone.gpu + alone.host + BESIDE_US[form] + WAIT_US,
        waiting=(sums + 1) * WAIT_US,
        latency=wire.latency_us * (sums * steps + ranks - 1),
        transfer=sent / (wire.gb_s * 1e3),
        collectives=sums + 1,
        sent_bytes=sent,
    )
