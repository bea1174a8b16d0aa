"""Caches of models that say how they are used: longrope's two kinds of keys, generation configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gguf_files import random_model
from greedy import greedy

from bench.models.families import new_model, sizes
from torch_metalmm import load_gguf
from torch_metalmm.tools import sequence as module
from torch_metalmm.tools.chat.session import Session
from torch_metalmm.tools.writing import Options

ORIGINAL = 32  # positions that the short factors are for
NEW = 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_gguf(random_model(tmp_path_factory.mktemp("words") / "g.gguf", "qwen2"))[1]


@pytest.fixture(scope="module")
def phi(tokenizer: Any) -> Any:
    """A Phi-3 whose long factors turn keys otherwise than its short ones."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0 + i for i in range(8)]}
    given = sizes(
        *(64, 128, len(tokenizer)),
        max_position_embeddings=4 * ORIGINAL,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope | {"original_max_position_embeddings": ORIGINAL},
        initializer_range=0.2,  # so that attention decides which token comes
        bos_token_id=None,
        eos_token_id=None,
    )
    return new_model("phi3", given, seed=1)


def answered(session: Session, ids: list[int]) -> tuple[list[int], int]:
    """The new tokens, and how many of the prompt's were kept."""
    answer = session.go_on("", ids, lambda _: None)
    return session._last[1][len(ids) :], answer.result.kept_tokens


def random_ids(tokenizer: Any, count: int) -> list[int]:
    g = torch.Generator().manual_seed(count)
    return torch.randint(3, len(tokenizer), (count,), generator=g).tolist()


@pytest.mark.parametrize("count", [20, ORIGINAL, ORIGINAL + 1, ORIGINAL + 2, 41, 60])
def test_parts_of_a_prompt_are_turned_as_the_whole(
    phi: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """By the long factors from its first token on, where it is longer than the short ones allow."""
    monkeypatch.setattr(module, "CHUNK", 8)
    ids = random_ids(tokenizer, count)
    session = Session(phi, tokenizer, Options(max_new_tokens=NEW))
    assert answered(session, ids) == (greedy(phi, ids, NEW), 0)


def test_a_chat_that_outgrows_the_short_factors(
    phi: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they turned is read again, once; and so is the rest where a chat begins anew."""
    monkeypatch.setattr(module, "CHUNK", 8)
    session = Session(phi, tokenizer, Options(max_new_tokens=NEW))
    chat: list[int] = []
    kept = []
    for count in (10, 10, 10, 10):  # prompts of 10, 28, 46 and 64 tokens
        chat += random_ids(tokenizer, count)
        new, held = answered(session, chat)
        assert new == greedy(phi, chat, NEW)
        kept.append(held)
        chat += new
    assert kept == [0, 17, 0, 53]  # the last token of an answer is not in the cache
    for ids in (chat[:20], chat[:25], chat[:50], chat[:36]):
        assert answered(session, ids)[0] == greedy(phi, ids, NEW)


@pytest.mark.parametrize("config", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_a_generation_config_that_speaks_of_caches(
    phi: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    """The cache is the session's; tokens and what is kept are as without it."""
    ids = random_ids(tokenizer, 12)
    wanted = greedy(phi, ids, NEW)
    for name, value in config.items():
        monkeypatch.setattr(phi.generation_config, name, value)
    session = Session(phi, tokenizer, Options(max_new_tokens=NEW))
    assert answered(session, ids) == (wanted, 0)
    assert answered(session, [*ids, *wanted, 5])[1] == len(ids) + NEW - 1
