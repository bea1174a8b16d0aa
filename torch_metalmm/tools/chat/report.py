"""The time and tokens of an answer: a line for people, or an object for programs."""

from __future__ import annotations

import json
from typing import Any

from ..generate import peak_memory
from ..marks import CALL, calls_of, parts
from ..writing import Writing


def line(answer: Writing, loading: float | None = None) -> str:
    """Tokens per second, and beside the first answer of a process: loading and peak memory.

    loading: seconds before the answer began.
    """
    took = answer.result
    n, read = took.new_tokens, took.prompt_tokens - took.kept_tokens
    kept = f" ({took.kept_tokens} kept)" if took.kept_tokens else ""
    said = [] if loading is None else [f"load {loading:.2f} s"]
    if n:
        first = answer.times[0] - answer.begun
        said.append(f"prompt {took.prompt_tokens} tokens{kept}, {read / first:.1f} tokens/s")
        said.append(f"first token after {(loading or 0) + first:.2f} s")
    speed = _decode_speed(answer)
    if speed is not None:
        said.append(f"decode {n} tokens, {speed:.1f} tokens/s")
    if loading is not None:
        said.append(f"peak memory {peak_memory() / 1e6:.0f} MB")
    return " · ".join(said)


def as_json(answer: Writing, loading: float | None = None) -> str:
    """One line. Times in seconds; null: too few tokens to tell."""
    took = answer.result
    calls = [calls_of(text) for kind, text in parts(answer.text) if kind == CALL]
    first = answer.times[0] - answer.begun if answer.times else None
    read = took.prompt_tokens - took.kept_tokens
    said: dict[str, Any] = {
        "text": answer.text,
        "finish_reason": took.reason,
        "prompt_tokens": took.prompt_tokens,
        "kept_tokens": took.kept_tokens,
        "new_tokens": took.new_tokens,
        "load_seconds": loading,
        "first_token_seconds": first,
        "prompt_tokens_per_second": read / first if first else None,
        "new_tokens_per_second": _decode_speed(answer),
        "peak_memory_bytes": peak_memory(),
    }
    if calls:
        said["tool_calls"] = [call for found in calls for call in found or []]
    return json.dumps(said, ensure_ascii=False)


def _decode_speed(answer: Writing) -> float | None:
    """Tokens per second after those of the first step; a draft makes several at once."""
    times = answer.times
    later = sum(time > times[0] for time in times)
    return later / (times[-1] - times[0]) if later else None
