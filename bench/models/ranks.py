"""`python -m bench tokens --tp 2`: whole models over several processes, a device each.

First one process, then `--tp` of them: NCCL on cuda, gloo on the CPU. Each makes its part of the
same random model. All logits are compared with those of one process that computes in f32: of 80
layers of random weights the rounding to f16 alone moves them by 2 to 6 % (8 B: 0.7 %).
Beside them the dense model under transformers' own tensor parallelism, of other random weights.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from torch_metalmm import formats, fuse_

from ..problem import parse_ints
from ..runner import Record, Run
from ..tables import status
from . import llamas
from .systems import ROUNDED_LIMIT, Graph, Transformers
from .tokens import (
    CHECKED_TOKENS,
    Race,
    dense_name,
    distance,
    last_logits,
    slots,
)


@dataclass(frozen=True)
class Job:
    """The settings that every process is told."""

    model: str
    formats: tuple[str, ...]
    device: str
    dtype: torch.dtype
    prompt: int
    context: int
    new_tokens: int
    repetitions: int
    threads: int
    dense: bool
    folder: str
    count: int = 1

    @property
    def over(self) -> str:
        return f"{self.count} process" + ("es" if self.count > 1 else "")

    @property
    def records(self) -> Path:
        return Path(self.folder) / f"{self.count}.pt"

    def wanted(self, format: str) -> Path:
        """The logits in f32."""
        return Path(self.folder) / f"{format}.logits"

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        pick, vocabulary = random.Random(1), llamas.SHAPES[self.model].vocabulary
        return [pick.randrange(vocabulary) for _ in range(self.prompt)]


def run(run: Run) -> Iterator[Record]:
    """The records of every model named, on one process and on args.tp."""
    args, device, dtype = run.args, run.device, run.device.dtype
    if args.tp < 2 or args.cache or args.overhead:
        raise ValueError(f"--tp {args.tp}: at least 2, and not with --cache or --overhead")
    names = tuple(formats.get(name).name for name in args.formats.split(","))
    known = [name for name, shape in llamas.SHAPES.items() if not shape.experts]
    devices = torch.cuda.device_count() if device.type == "cuda" else args.tp
    if devices < args.tp:
        raise ValueError(f"--tp {args.tp}: {devices} GPUs")
    context = parse_ints(args.context)[0]
    for model in args.models.split(","):
        if model not in known:
            raise ValueError(f"--tp: model {model!r}; must be of {', '.join(known)}")
        with tempfile.TemporaryDirectory() as folder:
            alone = Job(
                *(model, names, device.type, dtype, args.prompt, context, args.new_tokens),
                *(args.repetitions, args.threads, not args.no_peers, folder),
            )
            for job in (alone, replace(alone, count=args.tp)):
                status(f"{model}: {job.over}, {job.device}")
                (Path(folder) / "store").unlink(missing_ok=True)
                mp.spawn(_rank, (job,), nprocs=job.count)
                yield from torch.load(job.records)


def _rank(rank: int, job: Job) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(job.threads)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.count)}
    device = job.device
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    store = dist.FileStore(str(Path(job.folder) / "store"), job.count)
    backend = "nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.count)
    mesh = init_device_mesh(job.device, (job.count,), mesh_dim_names=("tp",))
    with torch.inference_mode():
        records = []
        for name in job.formats:
            records += _of_format(job, name, device, mesh)
            _clear(job)
        if job.dense:
            records += _of_dense(job, device, mesh)
            _clear(job)
    if rank == 0:
        torch.save(records, job.records)
    if backend == "nccl":
        # destroy_process_group() waits for ever where graphs were captured that hold its kernels
        # (torch 2.11, two H200s): a process that has said all ends without it.
        dist.barrier()
        os._exit(0)
    dist.destroy_process_group()


def _clear(job: Job) -> None:
    """Frees models that were fused or captured, which refer to themselves."""
    gc.collect()
    if job.device == "cuda":
        torch.cuda.empty_cache()


def _of_format(job: Job, name: str, device: str, mesh: Any) -> list[Record]:
    model = llamas.packed_llama(llamas.SHAPES[job.model], name, device, job.dtype, mesh)
    title = f"metalmm {name}"
    if job.count == 1:
        _save_wanted(job, Transformers(title, model), name)
    records = [_measured(job, Transformers(title, model), name)]
    fused = fuse_(model)
    records.append(_measured(job, Transformers(f"{title}, fuse_", fused), name))
    return records + _graph(job, f"{title}, fuse_", fused, name)


def _of_dense(job: Job, device: str, mesh: Any) -> list[Record]:
    """The dense model; or why it does not run, as where one process has no room for it."""
    dtype = torch.float16 if job.device == "cuda" else torch.float32
    title = dense_name(dtype)
    try:
        model = dense_llama(llamas.SHAPES[job.model], dtype, device, mesh)
        records = [_measured(job, Transformers(title, model), None)]
        return records + _graph(job, title, model, None)
    except torch.OutOfMemoryError as error:
        return [skipped(job, title, error)]


def dense_llama(shape: llamas.Shape, dtype: torch.dtype, device: str, mesh: Any) -> Any:
    """A random Llama under transformers' tensor parallelism; each rank makes its part."""
    from torch.distributed.tensor import DTensor
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = llamas.empty(shape.config(), dtype, device)
    if mesh.size() > 1:
        config = DistributedConfig(tp_size=mesh.size(), tp_plan="auto")
        apply_tensor_parallelism(model, mesh, model._resolve_parallel_plans(config)[0])
    for module in model.modules():
        for name, p in module._parameters.items():
            if isinstance(p, DTensor):
                local = torch.empty(p._local_tensor.shape, dtype=dtype, device=device)
                options = {"run_check": False, "shape": p.shape, "stride": p.stride()}
                made = DTensor.from_local(local.normal_(0, 0.02), mesh, p.placements, **options)
                module._parameters[name] = nn.Parameter(made, requires_grad=False)
    return llamas.filled(model, device)


def _graph(job: Job, title: str, model: nn.Module, name: str | None) -> list[Record]:
    """The step as a captured graph, collectives included."""
    if job.device != "cuda":
        return []
    system = Graph(f"{title}, graph", model, length=slots(job.context, job.new_tokens))
    try:
        return [_measured(job, system, name)]
    except RuntimeError as error:
        return [skipped(job, system.name, error)]


def skipped(job: Job, system: str, error: RuntimeError) -> Record:
    """The record of a system that does not run.

    What cannot be captured fails on every rank alike. Memory may lack on one of several, for which
    the others wait in a collective: there the error is raised, which ends them all.
    """
    if job.count > 1 and isinstance(error, torch.OutOfMemoryError | dist.DistError):
        raise error
    what = f"{job.model}, {system}, {job.over}"
    return {"kind": "skipped", "what": what, "why": str(error).splitlines()[0]}


def _measured(job: Job, system: Any, name: str | None) -> Record:
    """A system's times, and how far its logits are from those in f32."""
    prompt, error = job.tokens, _error(job, system, name)
    title = f"random Llama, {llamas.SHAPES[job.model].parameters / 1e6:.0f} M parameters"
    # A wrong layer is off by about 1 (tokens.py); sums in f32 in another order by 1e-6.
    ok = error <= (ROUNDED_LIMIT if job.dtype.itemsize == 2 else ROUNDED_LIMIT / 1e3)
    fields = {"kind": "tokens", "system": f"{system.name}, {job.over}", "prompt": job.prompt}
    fields |= {"weight_bytes": _local_bytes(system.model), "error": error, "ok": ok}
    fields |= {"model": title, "device": job.device, "context": job.context}
    race = Race(system, fields)
    race.round(prompt, job.context, 2)
    race.clear()
    for _ in range(job.repetitions):
        dist.barrier()
        race.round(prompt, job.context, job.new_tokens)
    return race.record(job.prompt)


def _save_wanted(job: Job, system: Any, name: str) -> None:
    """The logits of the model in f32, after which it is in the job's dtype again."""
    model = system.model.float()
    torch.save(_logits(job, system), job.wanted(name))
    model.to(job.dtype)


def _logits(job: Job, system: Any) -> Tensor:
    """The logits after CHECKED_TOKENS of the prompt."""
    return last_logits(system, job.tokens[:CHECKED_TOKENS])


def _error(job: Job, system: Any, name: str | None) -> float:
    """|logits - wanted| / |wanted|; 0 of a dense model, which has other weights, where finite."""
    given = _logits(job, system)
    if name is None:
        return 0.0 if bool(given.isfinite().all()) else torch.inf
    return distance(given, torch.load(job.wanted(name)))


def _local_bytes(model: nn.Module) -> int:
    return sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
