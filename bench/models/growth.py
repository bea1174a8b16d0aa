"""`python -m bench.models.growth CACHE TOKENS DEVICE`: how much a process grows while it decodes.

On a CPU the largest resident set less the one before the first token; on cuda and mps the same of
what the allocator holds. The model has little to compute and keys of full size.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import torch_metalmm

from . import llamas

TOKENS = 4096
SHAPE = llamas.Shape(256, 4, 512, 512, 4, 4, 128)
STATUS = Path("/proc/self/status")


def resident(largest: bool) -> int:
    """Bytes of the resident set, now or at most so far; where /proc is missing, at most so far."""
    if STATUS.exists():
        name = "VmHWM" if largest else "VmRSS"
        found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found[1])
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def held(device: str, largest: bool) -> int:
    """Bytes that the process holds on the device; on mps now, whatever is asked."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved() if largest else torch.cuda.memory_reserved()
    return torch.mps.driver_allocated_memory() if device == "mps" else resident(largest)


def cache_of(name: str, config: Any) -> Any:
    """DynamicCache for "dynamic", else a PackedCache of the format."""
    from transformers import DynamicCache

    return DynamicCache() if name == "dynamic" else torch_metalmm.PackedCache(config, name)


def rows_of(cache: Any) -> int:
    """Bytes of the tensors of a cache."""
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def decode(model: Any, cache: Any, tokens: int, device: str) -> int:
    """Decodes so many tokens; the most that was held on the way."""
    ids, most = torch.zeros(1, 1, dtype=torch.long, device=device), 0
    for i in range(tokens):
        ids = model(ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        if i % 64 == 0 or i == tokens - 1:
            most = max(most, held(device, largest=True))
    return most


def main(cache_name: str, tokens: int, device: str) -> dict[str, int]:
    """Growth, and the bytes of the cache's own tensors at the end."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    model = llamas.random_llama(SHAPE).to(device, dtype)
    model.set_attn_implementation("sdpa" if cache_name == "dynamic" else "metalmm")
    with torch.inference_mode():
        decode(model, cache_of(cache_name, model.config), 2, device)  # what the first calls load
        before, cache = held(device, largest=False), cache_of(cache_name, model.config)
        most = decode(model, cache, tokens, device)
    return {"growth": most - before, "cache_bytes": rows_of(cache)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
