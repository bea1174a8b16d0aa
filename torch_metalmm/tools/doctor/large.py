"""The checks of `metalmm doctor` that are larger than a kernel: 4 GiB, a model, the speed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ... import formats
from ...nn.place import place
from ..generate import peak_memory
from .compare import (
    Found,
    Prepared,
    Skipped,
    compare,
    exactly,
    packed_and_decoded,
    random,
    synchronize,
)

_FAR = 1 << 32  # bytes, where a 32-bit offset begins anew
_FAR_MEMORY = 8e9  # below, the tensor would crowd out everything else
TOKENS = 20  # tokens that the model generates
MEASURED = (14336, 4096)  # N x K of the matrix whose speed is measured
_COLD_BYTES = 3 * (96 << 20)  # three times the largest cache that Apple builds
_SAMPLE_SECONDS = 0.03  # seconds of a sample, to which the 10 µs of a command buffer add nothing


def memory_of(device: str) -> float:
    """Bytes that tensors of the device may take together, at most."""
    if device == "mps":
        return float(torch.mps.recommended_max_memory())
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def beyond_4_gib(device: str) -> Prepared:
    """The last rows of a W of more than 4 GiB: alone, among all, by embedding and dequantize.

    The other rows are never written; on a CPU their pages take no memory.
    """
    name, n, k = "q8_0", 97, 8192
    memory = memory_of(device)
    if memory < _FAR_MEMORY:
        raise Skipped(f"needs {_FAR_MEMORY / 1e9:.0f} GB of memory, here {memory / 1e9:.1f}")
    packed, w = packed_and_decoded(name, n, k)
    rows = _FAR // packed.shape[1] + n
    try:
        table = torch.empty(rows, packed.shape[1], dtype=torch.uint8, device=device)
        table[-n:] = packed.to(device)
        is_there = torch.equal(table[-n:].cpu(), packed)
    except RuntimeError as error:
        raise Skipped(f"torch gives no tensor of 4 GiB: {error}") from None
    if not is_there:
        raise Skipped("torch itself does not copy beyond 4 GiB")
    x = random(1 if device == "cpu" else 65, k, seed=1).half()
    ids, given = torch.arange(rows - n, rows).to(device), x.to(device)
    ops = torch.ops.metalmm

    def call() -> Tensor:
        products = [ops.linear(given[:m], table, None, name)[:, -n:] for m in {1, len(x)}]
        products.append(ops.linear(given, table[-n:], None, name))
        decoded = [ops.embedding(ids, table, name), ops.dequantize(table[-n:], name)]
        parts = [t.float().reshape(-1) for t in (*products, *decoded)]
        return torch.cat(parts)

    def judge(y: Tensor) -> Found:
        sizes = [*(m * n for m in {1, len(x)}), len(x) * n, n * k, n * k]
        *products, embedded, dense = torch.split_with_sizes(y.cpu(), sizes)
        for part in (embedded, dense):
            if (found := exactly(part.view(n, k), w)).error:
                return found
        results = [compare(p.view(-1, n), x[: len(p) // n], w) for p in products]
        return max(results, key=lambda found: found.error)

    return call, judge


def _llama() -> tuple[Any, Any]:
    """(a random Llama packed in q4_k, the same dense, as the specification decodes it)."""
    if find_spec("transformers") is None:
        raise Skipped("needs transformers: pip install '.[hf]'")
    from transformers import LlamaConfig, LlamaForCausalLM

    from ...models.quantize import quantize_

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    model.eval().requires_grad_(False)
    dense, spec = deepcopy(model), formats.get("q4_k")
    for module in dense.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            k = module.weight.shape[1]
            module.weight.copy_(spec.dequantize(spec.quantize(module.weight), k))
    return quantize_(model, "q4_k", progress=False), dense


def _generated(model: Any, prompt: Tensor) -> Tensor:
    tokens = model.generate(
        prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
    )
    answer: Tensor = tokens[0, prompt.shape[1] :]
    return answer


def generation(device: str) -> Prepared:
    """Greedy tokens of a packed model in f32 on the device; those of torch's own on the CPU.

    The reference's two largest logits are apart by at least 2e-3 at each token; those of the packed
    model differ from them by 7e-7 on a CPU.
    """
    packed, dense = _llama()
    prompt = torch.arange(1, 9)[None]
    want = _generated(dense, prompt)
    model, given = packed.to(device), prompt.to(device)

    def judge(y: Tensor) -> Found:
        different = (y.cpu() != want).nonzero()
        if not len(different):
            return Found(0.0, 0.0)
        first = int(different[0])
        note = f"token {first} of {TOKENS} is {int(y[first])}, not {int(want[first])}"
        return Found(float(len(different)), 0.0, note)

    return lambda: _generated(model, given), judge


def _seconds(call: Callable[[int], object], device: str) -> float:
    """The time of one call among many in a row, on the host's clock: the median of five samples."""

    def sample(count: int) -> float:
        start = time.perf_counter()
        for i in range(count):
            call(i)
        synchronize(device)
        return (time.perf_counter() - start) / count

    sample(1)
    count = 1
    while sample(count) * count < _SAMPLE_SECONDS:
        count *= 2
    return median(sample(count) for _ in range(5))


def loading(device: str) -> Prepared:
    """Packed rows of a mapped file to the memory of the device: GB/s, and the process's growth.

    One copy is the least, and all where the pages of the file are let go of. On a CPU, whose ops
    read such rows where they lie, it is a copy for comparison. The growth is of the process's peak:
    no check before this one may take as much.
    """
    n, k, at_once = 1 << 16, 4096, 64  # 151 MB
    packed, w = packed_and_decoded("q4_k", at_once, k)
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115  # until the result is judged
    for _ in range(n // at_once):
        file.write(packed.numpy().tobytes())
    file.flush()
    size, seconds, grown = n * packed.shape[1], [], []

    def call() -> Tensor:
        before, start = peak_memory(), time.perf_counter()
        rows = torch.from_file(file.name, size=size, dtype=torch.uint8).view(n, -1)
        rows = rows.clone() if device == "cpu" else place(rows, device)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        grown.append(peak_memory() - before)
        y: Tensor = torch.ops.metalmm.dequantize(rows[-at_once:], "q4_k")
        return y

    def judge(y: Tensor) -> Found:
        file.close()
        found = exactly(y, w)
        note = f"{size / min(seconds) / 1e9:.3g} GB/s, {max(grown) / size:.2g} of the bytes more"
        return Found(found.error, found.bound, "; ".join(filter(None, (found.note, note))))

    return call, judge


def speed(device: str) -> Prepared:
    """One row of x by a W that no cache holds, and beside it a copy of as many bytes."""
    (n, k), repeated = MEASURED, 28
    dtype = torch.float32 if device == "cpu" else torch.float16
    packed, w = packed_and_decoded("q4_k", n // repeated, k)
    weight, x = packed.repeat(repeated, 1), random(1, k, seed=1).to(dtype)
    given, copies = x.to(device), -(-_COLD_BYTES // weight.nbytes)
    weights = [weight.to(device, copy=True) for _ in range(copies)]

    def linear(i: int) -> Tensor:
        y: Tensor = torch.ops.metalmm.linear(given, weights[i % copies], None, "q4_k")
        return y

    def judge(y: Tensor) -> Found:
        source = torch.cat(weights)
        target = torch.empty_like(source)
        copied = 2 * source.nbytes / _seconds(lambda _: target.copy_(source), device) / 1e9
        read = weight.nbytes / _seconds(linear, device) / 1e9
        found = compare(y.view(repeated, -1), x.expand(repeated, -1), w)
        note = f"{read:.3g} GB/s of weights, {read / copied:.0%} of a copy's {copied:.3g}"
        return Found(found.error, found.bound, "; ".join(filter(None, (found.note, note))))

    return lambda: linear(0), judge
