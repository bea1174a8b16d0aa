"""The process in which `metalmm doctor` runs the checks of a device.

`python -m torch_metalmm.tools.doctor.child DEVICE --skip N` performs the steps from number N on and
says what it does as steps.py describes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial

import torch

from ... import _C
from .checks import checks
from .compare import Check, Skipped, synchronize
from .steps import Outcome, Step, serve

_MESSAGE_LINES = 60


def steps(device: str) -> Iterator[Step]:
    """The step of the facts that the device reports, then its checks."""
    yield "device", partial(_device, device)
    for check in checks(device):
        yield check.name, partial(perform, check, device)


def perform(check: Check, device: str) -> Outcome:
    """Runs a check twice, for the first run may compile; the error is the second run's."""
    times = []
    try:
        call, judge = check.prepare()
        synchronize(device)
        for _ in range(2):
            start = time.perf_counter()
            y = call()
            synchronize(device)
            times.append(time.perf_counter() - start)
        found = judge(y)
    except Skipped as why:
        return Outcome(f"skip  {why}")
    except Exception as failure:
        lines = f"{type(failure).__name__}: {failure}".splitlines()[:_MESSAGE_LINES]
        return Outcome("FAIL  " + "\n      ".join(lines), ok=False, then="anew")
    ok = found.error <= found.bound
    ratio = f"{found.error / found.bound:.2f} of its bound" if found.bound else "0"
    if found.error and not found.bound:
        ratio = f"{found.error:g}, must be 0"
    first, second = (f"{1e3 * t:.2f} ms" for t in times)
    text = f"first {first:>10}  then {second:>10}  error {ratio}"
    note = f"; {found.note}" if found.note else ""
    return Outcome(f"{'ok  ' if ok else 'FAIL'}  {text}{note}", ok)


def _device(device: str) -> Outcome:
    try:
        return Outcome("ok    " + ", ".join(_facts(device)))
    except RuntimeError as error:  # a GPU that the engine refuses
        return Outcome(f"skip  {error}", then="stop")


def _facts(device: str) -> Iterator[str]:
    if device == "cpu":
        yield f"{_C.cpu_isa()} of {', '.join(_C.cpu_isas())}; {torch.get_num_threads()} threads"
    elif device == "cuda":
        yield torch.cuda.get_device_name()
    else:
        facts = _C.mps_facts()
        yield f"{facts['name']}, planned for as {facts['plans_for']}"
        yield f"Apple{facts['family']}, {facts['cores']} cores, macOS {facts['macos']}"
        yield f"{facts['max_threadgroup_memory']} bytes and {facts['max_threads']} threads a group"
        yield f"kernels from {facts['archive'] or 'source, compiled when first used'}"


def run_alone(device: str, name: str) -> Outcome:
    """One check, in this process and without a time limit. ValueError: no check of that name."""
    for step, run in steps(device):
        if step == name:
            return run()
    names = ", ".join(repr(step) for step, _ in steps(device))
    raise ValueError(f"check: unknown {name!r}; allowed on {device}: {names}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("--skip", type=int, default=0)
    given = parser.parse_args()
    serve(steps(given.device), given.skip)
