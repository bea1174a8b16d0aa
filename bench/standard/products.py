"""The roofs of a machine, and the products of a layer beside torch's own and the chip model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torch_metalmm import _C, formats
from torch_metalmm.tools.cost_model import Chip, predict

from .. import matmul
from ..devices import CPU, GPU_MAX_BURST, MIN_CALLS, ROW_SECONDS, Device
from ..problem import COLD_FACTOR, LABELS, NAMED, Checker, Problem, Setting, Shape, Variant
from ..roofs import Roof, matrix_probe, of_cpu, of_gpu
from ..runner import Record, run_cell
from ..timing import interleave

Progress = Callable[[str], None]
FORMATS = ("q4_0", "q4_k", "q8_0", "affine4_g64")
# {shape: how often}: the products of a layer of Llama 3.1 8B; q and o, k and v, gate and up, down.
LAYER = {"attn": 2, "kv": 2, "up-8b": 2, "down-8b": 1}
QUICK_LAYER = {"tiny": 1}
MS, QUICK_MS = (1, 8, 64, 512), (1, 8)
# Copies of W take at most this part of the memory, each variant having its own.
COPIES_PART = 1 / 64
# A cell of which all calls would take longer is left out: a run is to end within three minutes.
CELL_SECONDS = 15.0
QUICK_CALLS = 3
# Probes for an Apple GPU, ten cores of which do 2 f16 TFLOP/s: they run beside every cell; one
# of 8192³ and 1 GiB, as a data centre's GPU takes, is there half a second for each of 16 calls.
SMALL: Record = {"read_bytes": 256 << 20, "sizes": (2048,)}


@dataclass(frozen=True)
class Sampling:
    """How often a device is asked: repetitions of interleave(), and what they come to."""

    repetitions: int
    few: int  # where a sample takes longer than `slow`
    slow: float
    samples_each: int  # samples of a repetition
    before: int  # samples of check and warm-up
    least_seconds: float  # least duration of a sample


ON_CPU = Sampling(20, 5, 0.01, 1, 5, 0.0)
# A sample is a row of calls, of which a turn has GPU_MAX_BURST.
ON_GPU = Sampling(3, 1, 0.1, GPU_MAX_BURST, 2, ROW_SECONDS)


def setting_of(device: Device, threads: int, memory: float, quick: bool) -> Setting:
    """As `python -m bench` has it, with fewer copies of W where memory is small."""
    cold = min(device.cache_bytes * COLD_FACTOR, int(memory * COPIES_PART))
    return Setting(threads, (4 << 20) if quick else cold, device.dtype, device)


def chip_of(device: Device) -> Chip | None:
    """The chip of the model that this device is, with its cores; None: the model has none of it."""
    if device.type != "mps":
        return None
    facts = _C.mps_facts()
    name = str(facts["name"]).removeprefix("Apple ").lower().replace(" ", "-")
    if name != facts["plans_for"]:  # a later chip, for which plans are those of the last known
        return None
    chip = Chip.named(name)
    return replace(chip, cores=facts["cores"] or chip.cores)


def measure_roofs(device: Device, threads: int, quick: bool) -> tuple[Roof, Record]:
    """GB/s and GFLOP/s: the best of all candidates, and torch.mm in the dtypes of models."""
    sampling = ON_CPU if device == CPU else ON_GPU
    if device == CPU:
        found = of_cpu(threads, device.cache_bytes, quick=quick)
        # f16 has no fast product there, and bf16 has none below AVX-512: seconds at 1024.
        size, dtypes = (256 if quick else 1024), (torch.float32, torch.bfloat16)
    else:
        small = SMALL if device.type == "mps" else {}
        found = of_gpu(device, sampling.repetitions, quick, **small)
        size, dtypes = (512 if quick else 2048 if small else 4096), (torch.float32, torch.float16)
    probes = {LABELS[d]: matrix_probe(device, size, d) for d in dtypes}
    times = interleave({name: p.timed() for name, p in probes.items()}, sampling.few)
    best = {
        kind: max(found.candidates[p.name] for p in some)
        for kind, some in (("read_gb_s", found.read), ("gflop_s", found.fma))
    }
    mm = {name: p.work / times[name].median / 1e9 for name, p in probes.items()}
    return found, {**best, "mm_gflop_s": mm, "is_native": found.native}


def with_bounds(cell: Record, chip: Chip | None, dtype: str) -> Record:
    """The cell, with the time that its roofs allow and that the chip model predicts, if it does."""
    if "us" not in cell:
        return cell
    flops = 2.0 * cell["m"] * cell["n"] * cell["k"]
    by_read, by_arithmetic = (
        cell["weight_bytes"] / cell["roof_gbs"] / 1e3,
        flops / cell["roof_gflops"] / 1e3,
    )
    predicted = None
    if chip is not None and cell["engine"] == "metalmm":
        sizes = (cell["m"], cell["n"], cell["k"])
        predicted = predict(*sizes, cell["format"], chip, dtype).total
    return {**cell, "roof_us": max(by_read, by_arithmetic), "predicted_us": predicted}


def calls_of(m: int, variants: Sequence[Variant], shape: Shape, roofs: Record) -> tuple[int, float]:
    """The repetitions of a cell, and the seconds that it takes if all reach the roofs."""
    flops = 2.0 * m * shape.n * shape.k / (1e9 * roofs["gflop_s"])
    on_gpu = variants[0].device != CPU
    how = ON_GPU if on_gpu else ON_CPU
    each = []
    for v in variants:
        row = v.copies * -(-MIN_CALLS // v.copies) if on_gpu else 1
        call = max(flops, v.weight_bytes / (1e9 * roofs["read_gb_s"]))
        each.append(max(how.least_seconds, row * call))
    repetitions = how.few if max(each) > how.slow else how.repetitions
    return repetitions, sum(each) * (repetitions * how.samples_each + how.before)


def run(
    names: Sequence[str],
    layer: Mapping[str, int],
    ms: Sequence[int],
    setting: Setting,
    measured: tuple[Roof, Record],
    quick: bool,
    progress: Progress,
) -> Iterator[Record]:
    """A record for each shape, M and variant; one that says "skipped" for a cell left out."""
    found, roofs = measured
    chip, dtype = chip_of(setting.device), LABELS[setting.dtype]
    engines = ["metalmm", "linear_f32" if setting.device == CPU else "linear_f16"]
    for shape in (NAMED[name] for name in layer):
        problem = Problem(shape, setting)
        progress(f"{shape}: packing")
        variants = matmul.build(problem, names, engines)
        checker = Checker(problem)
        for m in ms:
            calls, seconds = calls_of(m, variants, shape, roofs)
            if seconds > CELL_SECONDS:
                why = f"would take {seconds:.0f} s, {CELL_SECONDS:.0f} are allowed"
                yield {"kind": "skipped", "what": f"W {shape}, {m} rows", "why": why}
                continue
            progress(f"{shape}, {m} rows of x")
            times = (QUICK_CALLS if quick else calls, 0.0)
            for cell in run_cell(matmul.cell(problem, variants, checker, m), found, *times):
                yield with_bounds(cell, chip, dtype)


def check_formats(names: Sequence[str], layer: Mapping[str, int]) -> tuple[str, ...]:
    """The formats as they are called, each once. ValueError: unknown, or one that nothing packs."""
    found = [formats.get(name) for name in names]
    for f in found:
        if not f.packs:
            raise ValueError(f"--formats: {f.name} is only read, nothing packs it")
        for shape in (NAMED[name] for name in layer):
            if shape.k % f.block_values:
                raise ValueError(f"--formats: {f.name}: its block does not divide K = {shape.k}")
    return tuple(dict.fromkeys(f.name for f in found))
