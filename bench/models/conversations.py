"""`python -m bench serve --turns N`: conversations of four clients at once, each turn longer.

At every turn all clients send what was said, and as many new tokens as at every other turn; they
do so at the same moment, and the next turn begins when all are answered. With --peer another server
of the same model, as llama.cpp's `llama-server -m FILE -np 4 -c 16384 --port PORT`, has such
conversations in turns with it.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from torch_metalmm.tools.generate import demo_model, load_model

from ..runner import Record, Run
from ..tables import status
from ..timing import Timing
from .served import CLIENTS, Streamed, server, streamed

NEW = 32  # tokens of an answer
FIRST, GROWTH = 224, 64  # tokens of the first prompt, and by which each is longer than the last
_SEEDS = count()

Turns = list[list[Streamed]]  # for each turn the answers to the clients


def run(run: Run) -> Iterator[Record]:
    turns = run.args.turns
    if turns < 2:
        raise ValueError(f"--turns {turns}: must be at least 2")
    path = run.args.model or demo_model()
    tokenizer = load_model(path, "cpu", None)[1]
    words = one_token_words(tokenizer)
    with server(str(path), "--threads", str(run.args.threads)) as started:
        ports = {"metalmm": started.port}
        if run.args.peer is not None:
            ports["peer"] = run.args.peer
        found: dict[str, list[Turns]] = {way: [] for way in ports}
        for repetition in range(run.args.repetitions):
            for way in random.sample(sorted(ports), len(ports)):
                status(f"conversations {repetition + 1} of {run.args.repetitions}: {way}")
                found[way].append(conversations(ports[way], tokenizer, words, turns))
        for way, runs in found.items():
            yield record(path.name, way, turns, runs)


def one_token_words(tokenizer: Any) -> list[str]:
    """ " word", such that each stays one token whatever words are beside it."""
    texts = (tokenizer.decode([i]) for i in range(1000, 6000))
    return [t for t in texts if t[0] == " " and t[1:].isalpha() and t.isascii() and t.islower()]


def conversations(port: int, tokenizer: Any, words: list[str], turns: int) -> Turns:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
        name = json.load(answer)["data"][0]["id"]
    draws = [random.Random(next(_SEEDS)) for _ in range(CLIENTS)]
    texts, found = [""] * CLIENTS, list[list[Streamed]]()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for turn in range(turns):
            size = FIRST + turn * GROWTH
            texts = [
                longer(text, size, tokenizer, words, own)
                for text, own in zip(texts, draws, strict=True)
            ]
            asked = [pool.submit(streamed, port, name, NEW, text, may_end=True) for text in texts]
            found.append([one.result() for one in asked])
            texts = [text + got.text for text, got in zip(texts, found[-1], strict=True)]
    return found


def longer(text: str, size: int, tokenizer: Any, words: list[str], draw: random.Random) -> str:
    """The text and as many words as make it so many tokens."""
    while (missing := size - len(tokenizer(text, verbose=False).input_ids)) > 0:
        text += "".join(draw.choices(words, k=missing))
    return text


def record(model: str, way: str, turns: int, runs: list[Turns]) -> Record:
    def first(turn: int) -> Timing:
        return Timing.of([1e3 * one.first for found in runs for one in found[turn]])

    def read(turn: int) -> float:
        return Timing.of([float(one.read) for found in runs for one in found[turn]]).median

    speeds = [
        sum(one.count for turn in found for one in turn)
        / sum(max(one.last for one in turn) for turn in found)
        for found in runs
    ]
    return {
        "kind": "serve-turns",
        "model": model,
        "way": way,
        "clients": CLIENTS,
        "turns": turns,
        "tokens": FIRST + (turns - 1) * GROWTH,
        "read_second": read(1),
        "read_end": read(-1),
        "ratio": first(-1).median / first(1).median,
        **first(1).fields("second"),
        **first(-1).fields("end"),
        **Timing.of(speeds).fields("tokens_s"),
    }
