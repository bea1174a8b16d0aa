"""Interleaved timing of cold calls: median and quartiles, never the best."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Found = TypeVar("Found")
# call(i) does the work on copy i of its weight; the engine waits until the work is done.
Call = Callable[[int], object]

MIN_ROUNDS = 5
MAX_BURST = 16
BURST_SECONDS = 0.01
# Idle workers of libgomp spin for milliseconds on cores of the next variant.
PAUSE_SECONDS = 0.01


def wall_clock(work: Callable[[], object]) -> float:
    """Seconds of work() on the host's clock."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Timing:
    """Seconds: median and quartiles of `count` calls."""

    median: float
    q1: float
    q3: float
    count: int

    @staticmethod
    def of(samples: list[float]) -> Timing:
        """The quartiles by linear interpolation; ValueError: no samples."""
        if not samples:
            raise ValueError("no samples")
        q1, median, q3 = map(float, np.quantile(samples, (0.25, 0.5, 0.75)))
        return Timing(median, q1, q3, len(samples))

    def fields(
        self, name: str, value: Callable[[float], float] = lambda seconds: seconds
    ) -> dict[str, float]:
        """A value of the median and of the quartiles, as a record has them: name, _q1, _q3."""
        q1, q3 = sorted((value(self.q1), value(self.q3)))
        return {name: value(self.median), f"{name}_q1": q1, f"{name}_q3": q3}


class Ticks:
    """A streamer of generate(): when the prompt and each token came."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, _: Any) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class Timed:
    """One variant of an interleaved run, by the host's clock; a device overrides _once and warm_up.

    copies = how many weights call(i) rotates over.
    """

    pause = PAUSE_SECONDS

    def __init__(self, call: Call, copies: int = 1) -> None:
        self.call, self.copies = call, copies
        self.samples: list[float] = []
        self._next = 0
        self._burst = 1

    def _once(self) -> float:
        i = self._next
        self._next = (i + 1) % self.copies
        return wall_clock(lambda: self.call(i))

    def _set_burst(self, most: int) -> None:
        """Three calls; sets how many make a burst."""
        seconds = min(self._once() for _ in range(3))
        self._burst = max(1, min(most, int(BURST_SECONDS / max(seconds, 1e-9))))

    def warm_up(self) -> None:
        """Before the first burst."""
        self._set_burst(MAX_BURST)

    def burst(self) -> None:
        """One untimed call, which wakes the worker threads, then those that are timed."""
        time.sleep(self.pause)
        if self._burst > 1:
            self._once()
        self.samples.extend(self._once() for _ in range(self._burst))


def interleave(
    variants: Mapping[str, Timed], repetitions: int, seconds: float = 0.0
) -> dict[str, Timing]:
    """Rounds over all variants in random order, until each has `repetitions` samples in at least
    MIN_ROUNDS rounds and `seconds` have passed."""
    shuffle = random.Random(0).shuffle
    for v in variants.values():
        v.warm_up()
    start, rounds = time.perf_counter(), 0
    min_rounds = min(MIN_ROUNDS, repetitions)
    while (
        rounds < min_rounds
        or time.perf_counter() - start < seconds
        or any(len(v.samples) < repetitions for v in variants.values())
    ):
        order = list(variants.values())
        shuffle(order)
        for v in order:
            v.burst()
        rounds += 1
    return {name: Timing.of(v.samples) for name, v in variants.items()}


def by_turns(ways: Mapping[str, Callable[[], Found]], turns: int) -> dict[str, list[Found]]:
    """The results of each way in so many rounds over all, in random order, behind a first round."""
    found: dict[str, list[Found]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name in random.sample(sorted(ways), len(ways)):
            given = ways[name]()
            found[name] += [given] if turn else []
    return found
