"""The largest bodies that `metalmm serve` takes: refused soon, and without memory that stays."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import psutil
import pytest
from serving import Served

from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.tokens import Tokens, bound_of

BODY = 4 << 20


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Four kinds, of all but 4 MiB each."""
    text, count = "word " * (BODY // 5 - 100), BODY // 3 - 100
    return [
        ("completions", {"prompt": text}),
        ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("embeddings", {"input": text}),
        ("completions", {"prompt": [1] * count}),
    ]


def test_memory_after_the_largest_bodies(smol: Served) -> None:
    """16 at once and 4 after them; one that is short is answered meanwhile."""
    short = {"model": "smol", "prompt": "Hi", "max_tokens": 1}
    assert smol.ask("/v1/completions", short)[0] == 200
    process, statuses = psutil.Process(smol.pid), list[int]()
    before = process.memory_info().rss

    def ask(path: str, body: dict[str, Any]) -> None:
        status, _, told = smol.ask(f"/v1/{path}", {"model": "smol"} | body)
        statuses.append(status)
        assert told["error"]["code"] in ("context_length_exceeded", "queue")

    given = bodies() * 4
    threads = [threading.Thread(target=ask, args=one) for one in given]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    assert smol.ask("/health")[0] == 200 and time.monotonic() - begun < 10
    for thread in threads:
        thread.join()
    for one in bodies():
        ask(*one)
    assert len(statuses) == 20 and set(statuses) <= {400, 429}
    assert smol.ask("/v1/completions", short)[0] == 200
    grown = process.memory_info().rss - before
    # Each of 16 bodies is held a few times at once, and malloc keeps pieces between what is used.
    assert grown < 320 << 20, f"{grown >> 20} MiB stay"


def test_no_text_is_refused_that_fits(demo: tuple[Any, Any]) -> None:
    """A token stands for no more bytes than the bound says, and one for as many."""
    tokenizer, chance = demo[1], random.Random(0)
    bound = bound_of(tokenizer)
    assert bound is not None
    words = [w for w in tokenizer.get_vocab() if len(w) > 12]
    texts = [tokenizer.decode(chance.choices(range(len(tokenizer)), k=50)) for _ in range(200)]
    texts += [tokenizer.convert_tokens_to_string([word]) for word in words]
    texts += [
        chr(chance.choice(range(32)) or chance.randrange(0xE000, 0x110000)) * 99 for _ in words
    ]
    found = [(t.encode(), len(tokenizer(t).input_ids)) for t in texts]
    assert not any(bound.exceeds(text, count) for text, count in found)
    assert any(text and not count for text, count in found)  # bytes without a token
    assert max(len(text) / count for text, count in found if count) == bound.longest
    tokens = Tokens(*demo)
    text = max(texts[200 : 200 + len(words)], key=len) * 3
    assert len(tokens.of(text, "prompt", 3)) == 3
    with pytest.raises(
        ApiError, match=f"^prompt: {len(text)} bytes, .* more than 2 tokens"
    ) as error:
        tokens.of(text, "prompt", 2)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("part", "value", "has"),
    (
        ("normalizer", {"type": "Lowercase"}, False),
        ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, True),
        ("normalizer", {"type": "Replace", "pattern": {"String": "  "}, "content": " "}, False),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"}, False),
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, False),
        ("pre_tokenizer", {"type": "Whitespace"}, False),
    ),
)
def test_tokenizers_that_lose_text_have_no_bound(
    loaded: tuple[Any, Any], part: str, value: dict[str, Any], has: bool
) -> None:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    said = json.loads(loaded[1].backend_tokenizer.to_str()) | {part: value}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(said)))
    assert (bound_of(made) is not None) == has
    made.add_tokens([AddedToken("<end>", rstrip=True)])  # takes the spaces behind it, however many
    assert bound_of(made) is None


def test_one_text_at_a_time(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = demo
    running, most = 0, 0

    def slow(text: str, **options: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return real(text, **options)

    tokens = Tokens(model, real)
    monkeypatch.setattr(tokens, "_tokenizer", slow)
    threads = [threading.Thread(target=tokens.of, args=("Hi", "prompt", 9)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
