"""`python -m bench serve`: what HTTP costs beside generate(), and four clients at once.

SmolLM2 answers in this process, by generate(), and in a `metalmm serve` of its own, by turns; the
one that is not asked is idle. Both are greedy and make the same number of tokens.

With --turns the four clients have conversations: at every turn all send what was said, and as many
new tokens as at every other turn, at the same moment, and the next turn begins when all are
answered. With --peer another server of the same model, as llama.cpp's `llama-server -m FILE -np 4
-c 16384 --port PORT`, has such conversations in turns with it.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch

from torch_metalmm import fuse_, load_gguf
from torch_metalmm.tools.generate import demo_model, load_model

from ..devices import IMPORTED_FROM
from ..runner import Record, Run
from ..tables import status
from ..timing import Ticks, Timing, by_turns

PROMPT = "One, two, three, four, five, six, seven, eight, nine, ten,"
CLIENTS = 4


def run(run: Run) -> Iterator[Record]:
    """Turns of one client, then a minute of four."""
    quick, threads = run.args.quick, run.args.threads
    tokens, turns, seconds = (8, 2, 2.0) if quick else (96, 9, 60.0)
    model, tokenizer = load_gguf(demo_model())
    fuse_(model)  # as the server does
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with server("--threads", str(threads)) as started:
        ways = {
            "generate": lambda: generated(model, ids, tokens),
            "serve": lambda: streamed(started.port, started.name, tokens)[1:3],
        }
        status(f"one client: {turns} turns")
        for way, found in by_turns(ways, turns).items():
            yield one_client(way, tokens, found)
        status(f"{CLIENTS} clients for {seconds:g} s")
        yield four_clients(started, tokens, seconds)


def one_client(way: str, tokens: int, found: list[tuple[float, float]]) -> Record:
    """found: seconds to the first token and to the last, of each turn."""
    first = Timing.of([1e3 * a for a, _ in found])
    speed = Timing.of([(tokens - 1) / (b - a) for a, b in found])
    times = first.fields("first_ms") | speed.fields("tokens_s")
    return {"kind": "serve", "way": way, "tokens": tokens, **times}


def generated(model: Any, ids: Any, tokens: int) -> tuple[float, float]:
    """Seconds to the first token and to the last, of generate()."""
    ticks, start = Ticks(), time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            streamer=ticks,
        )
    return ticks.at[1] - start, ticks.at[-1] - start


class Streamed(NamedTuple):
    """The answer that a client got."""

    count: int  # tokens
    first: float  # seconds to the first text
    last: float  # to the last event
    text: str
    read: int  # tokens of the prompt that were not kept from another


def streamed(
    port: int, name: str, tokens: int, prompt: str = PROMPT, may_end: bool = False, **fields: Any
) -> Streamed:
    """An answer of so many tokens, where it may not end before.

    RuntimeError: the server refuses, or makes fewer tokens.
    """
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}} | fields
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start, first, last, text = time.perf_counter(), 0.0, 0.0, ""
    usage: dict[str, Any] = {}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    for line in answer:
        if line.startswith(b"data: {"):
            last = time.perf_counter() - start
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            text += "".join(choice["text"] for choice in event["choices"])
            first = first or (last if text else 0.0)
            usage = event.get("usage") or usage
    connection.close()
    came = usage.get("completion_tokens", 0)
    if came != tokens and not may_end:
        raise RuntimeError(f"{came} tokens came, {tokens} were asked for")
    kept = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Streamed(came, first or last, last, text, usage.get("prompt_tokens", 0) - kept)


def four_clients(started: Server, tokens: int, seconds: float) -> Record:
    """Answers, errors, and how the server's process grew after the first round."""
    counts, errors = [0] * CLIENTS, list[str]()

    def ask(client: int, until: float) -> None:
        while True:
            try:
                counts[client] += streamed(started.port, started.name, tokens)[0]
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                errors.append(str(error))
            if time.perf_counter() >= until:
                return

    def together(until: float) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda client: ask(client, until), range(CLIENTS)))

    together(0.0)
    before, start = resident(started.pid), time.perf_counter()
    counts[:] = [0] * CLIENTS
    together(start + seconds)
    took = time.perf_counter() - start
    return {
        "kind": "serve-clients",
        "clients": CLIENTS,
        "seconds": took,
        "tokens_s": sum(counts) / took,
        "answers": sum(counts) // tokens,
        "errors": len(errors),
        "resident": before,
        "growth": resident(started.pid) - before,
        "ok": not errors,
    }


def resident(pid: int) -> int:
    """Bytes of the process in memory."""
    import psutil

    return int(psutil.Process(pid).memory_info().rss)


class Server(NamedTuple):
    name: str  # the model's name
    url: str  # http://127.0.0.1:PORT
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def server(*flags: str, **variables: str) -> Iterator[Server]:
    """`metalmm serve` of these flags in a process of its own, on a free port of this machine.

    It has no key but of the variables. RuntimeError: it does not start.
    """
    command = [sys.executable, "-m", "torch_metalmm.tools.cli", "serve", "--port", "0", *flags]
    env = {name: value for name, value in os.environ.items() if name != "METALMM_API_KEY"}
    env |= {"PYTHONPATH": str(IMPORTED_FROM)} | variables
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:  # progress bars may come first
            said += line
            found = re.fullmatch(r"(.+): (http://.+:\d+)/v1\n", line.rpartition("\r")[2])
            if found is not None:
                break
        else:
            raise RuntimeError(said)
        # The server's log is read, since a full pipe would stop the server.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield Server(found[1], found[2], process.pid)
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()


# ---- conversations

NEW = 32  # tokens of an answer
FIRST, GROWTH = 224, 64  # tokens of the first prompt, and by which each is longer than the last
_SEEDS = count()

Turns = list[list[Streamed]]  # for each turn the answers to the clients


def run_turns(run: Run) -> Iterator[Record]:
    """A record for each server. ValueError: fewer than two turns."""
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
            yield of_turns(path.name, way, turns, runs)


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


def of_turns(model: str, way: str, turns: int, runs: list[Turns]) -> Record:
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
