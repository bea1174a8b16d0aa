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

import torch
import transformers
from safetensors.torch import save_file

import torch_metalmm

LAYERS, H, FFN, VOCAB = 4, 1024, 4096, 16384


def anonymous_bytes() -> int:
    """Resident memory that no file backs: mapped safetensors are the kernel's to take back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not report RssAnon")


def write_model(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=H,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(config).state_dict()
    row = torch.randn(1, FFN, dtype=torch.bfloat16)
    state = {n: row[:, : t.shape[-1]].expand(t.shape) for n, t in state.items() if t.dim() == 2} | {
        n: torch.ones(t.shape, dtype=torch.bfloat16) for n, t in state.items() if t.dim() == 1
    }
    del state["lm_head.weight"]
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    config.save_pretrained(folder)


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
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=torch_metalmm.MetalMMConfig("q8_0")
    )
    done.set()
    watcher.join()
    packed = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(peak, anonymous_bytes()) - before, packed


if __name__ == "__main__":
    path = Path(sys.argv[1])
    write_model(path)
    # A tiny model first: memory of imports and of warming up is not the model's.
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path / "tiny")
    transformers.AutoModelForCausalLM.from_pretrained(
        path / "tiny", quantization_config=torch_metalmm.MetalMMConfig("q8_0")
    )
    growth, packed = peak_growth(path)
    print(
        json.dumps(
            {
                "dense": (path / "model.safetensors").stat().st_size,
                "packed": packed,
                "largest": 2 * VOCAB * H,
                "growth": growth,
            }
        )
    )
