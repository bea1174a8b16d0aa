"""Loads a model of 170 MB with MetalMMConfig and prints what memory that took, as JSON.

Run by test_hf in a process of its own: `python hf_memory.py FOLDER`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import transformers

import torch_metalmm

LAYERS, H, FFN, VOCAB = 4, 1024, 4096, 16384


def anonymous_bytes() -> int:
    """Resident memory that no file backs: mapped safetensors are the kernel's to take back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not report RssAnon")


def write_model(folder: Path, vocabulary: int, hidden: int, inner: int, layers: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=torch_metalmm.MetalMMConfig("q8_0")
    )


def peak_growth(folder: Path) -> tuple[int, int]:
    """(growth of anonymous memory at its peak, packed bytes) of loading the folder in q8_0."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory of the heap would be reused, and not be growth
    done, peak, before = threading.Event(), 0, anonymous_bytes()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(folder)
    done.set()
    watcher.join()
    packed = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(peak, anonymous_bytes()) - before, packed


if __name__ == "__main__":
    path = Path(sys.argv[1])
    write_model(path, VOCAB, H, FFN, LAYERS)
    # A tiny model first: memory of imports and of warming up is not the model's.
    write_model(path / "tiny", 64, 64, 64, 1)
    load(path / "tiny")
    growth, packed = peak_growth(path)
    dense = (path / "model.safetensors").stat().st_size
    sizes = {"dense": dense, "packed": packed, "largest": 2 * VOCAB * H, "growth": growth}
    print(json.dumps(sizes))
