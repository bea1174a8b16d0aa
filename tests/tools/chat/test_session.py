"""Sessions with the real SmolLM2: what is computed, what stays, and how answers end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import random_model
from greedy import greedy_chat
from layer_models import small
from mtp_models import with_nextn

from torch_metalmm import load_gguf
from torch_metalmm.models.attach import drop_cache, set_cache
from torch_metalmm.tools import sequence as module
from torch_metalmm.tools.chat.conversation import Conversation
from torch_metalmm.tools.chat.flags import add_flags
from torch_metalmm.tools.chat.loading import load
from torch_metalmm.tools.chat.session import Session
from torch_metalmm.tools.chat.template import Template
from torch_metalmm.tools.generate import demo_model
from torch_metalmm.tools.writing import Options

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Name a river there.")
Models = tuple[Any, Any, Template]


@pytest.fixture(scope="module")
def real() -> Iterator[Models]:
    model, tokenizer = load_gguf(demo_model())
    template = Template()
    assert template.use(tokenizer)
    yield model, tokenizer, template
    template.close()


def silent(_: str) -> None:
    pass


def session_of(real: Models, most: int = 8, **options: Any) -> Session:
    model, tokenizer, template = real
    given = {name: options.pop(name) for name in ("cache", "draft") if name in options}
    return Session(model, tokenizer, Options(max_new_tokens=most, **options), template, **given)


def fresh(real: Models, messages: list[dict[str, Any]], most: int = 8) -> str:
    """transformers' own answer to the chat: greedy, its template, no cache from before."""
    key = json.dumps((messages, most))
    if key not in _FRESH:
        _FRESH[key] = greedy_chat(*real[:2], messages, most)
    return _FRESH[key]


_FRESH = dict[str, str]()  # several tests ask the same


@contextmanager
def computed(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward computes."""
    counts: list[int] = []
    layer = model.get_input_embeddings()
    hook = layer.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
    try:
        yield counts
    finally:
        hook.remove()


@pytest.mark.parametrize("cache", (None, "q8_0"))
def test_a_chat_answers_as_transformers_does(
    real: Models, cache: str | None, request: pytest.FixtureRequest
) -> None:
    """From a cache that stays, each turn computes its new tokens alone."""
    if cache is not None:
        set_cache([real[0]], cache)
        request.addfinalizer(lambda: drop_cache([real[0]]))
    session, messages = session_of(real, cache=cache), list[Any]()
    held = 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        shown: list[str] = []
        with computed(real[0]) as counts:
            answer = session.answer(messages, shown.append)
        assert answer.text == "".join(shown)
        assert cache is not None or answer.text == fresh(real, messages)
        assert answer.result.kept_tokens == held
        # The last token that is chosen is not computed.
        held = answer.result.prompt_tokens + answer.result.new_tokens - 1
        assert sum(counts) == held - answer.result.kept_tokens
        messages.append({"role": "assistant", "content": answer.text})
    formats = {getattr(layer, "formats", None) for layer in session.sequence.cache.layers}
    assert formats == {None if cache is None else ("f16", "q8_0")}


def test_a_draft_changes_no_answer(real: Models) -> None:
    """Greedy, in a chat whose cache stays; a draft of another model is wrong, and no matter."""
    torch.manual_seed(0)
    wrong, tokenizer = load_gguf(demo_model())
    for parameter in wrong.model.norm.parameters():
        parameter.copy_(torch.randn_like(parameter))
    for draft in (real[:2], (wrong, tokenizer)):
        session, messages = session_of(real, draft=draft), []
        for question in QUESTIONS[:2]:
            messages.append({"role": "user", "content": question})
            answer = session.answer(messages, silent)
            assert answer.text == fresh(real, messages)
            assert len(answer.times) == answer.result.new_tokens
            messages.append({"role": "assistant", "content": answer.text})
        assert answer.result.kept_tokens > 0


def test_drafts_of_a_files_own_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--draft mtp`: the answers are those without; a file without a head is refused."""
    monkeypatch.setattr(module, "CHUNK", 16)
    without = random_model(tmp_path / "m.gguf", "qwen35")
    path, texts = with_nextn(without, "qwen35"), list[str]()
    for flags in ([], ["--draft", "mtp"]):
        args = argparse.ArgumentParser()
        add_flags(args)
        given = args.parse_args(["-m", str(path), "--fuse", *flags])
        loaded = load(given)
        session = Session(
            loaded.model, loaded.tokenizer, Options(), None, given.cache, loaded.draft
        )
        texts.append(session.complete("the answer" * 6, silent).text)  # in parts
        assert (session.pace.drafted > 0) == bool(flags)
    assert texts[0] == texts[1]
    assert session._drafter is not None and session._drafter._first == 0  # none is missing
    with pytest.raises(ValueError, match="has no layer that predicts later tokens"):
        load(args.parse_args(["-m", str(without), "--draft", "mtp"]))


def test_drafts_of_caches_that_our_loop_cannot_crop(real: Models) -> None:
    """Those of a model are transformers' then; lookup is refused before the first answer."""
    model = small("gemma3_text", head_dim=32, sliding_window=8)
    given = model, real[1], Options(), None
    assert Session(*given, draft=(model, real[1]))._drafter is None
    assert Session(*given, cache="q8_0", draft=(model, real[1]))._drafter is not None
    assert Session(*given, cache="q8_0", draft="lookup")._drafter is not None
    with pytest.raises(ValueError, match="draft: the cache, a DynamicCache, cannot forget"):
        Session(*given, draft="lookup")


def test_what_changed_is_read_again(real: Models) -> None:
    """Another question, another system message, a shorter chat: as if nothing were kept."""
    session = session_of(real)
    for messages in (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTIONS[0]}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTIONS[2]}],
        [{"role": "system", "content": "Shout!"}, {"role": "user", "content": QUESTIONS[2]}],
        [{"role": "user", "content": QUESTIONS[1]}],
    ):
        assert session.answer(messages, silent).text == fresh(real, messages)


def test_a_stop_keeps_the_beginning(real: Models) -> None:
    """As Ctrl-C does: the answer ends there, and the chat goes on from it."""
    session = session_of(real, most=24)
    messages = [{"role": "user", "content": "Count from one to twenty."}]
    pieces: list[str] = []
    answer = session.answer(messages, pieces.append, is_over=lambda: len(pieces) >= 4)
    whole = fresh(real, messages, most=24)
    assert answer.result.reason == "interrupted" and answer.text == "".join(pieces)
    assert whole.startswith(answer.text) and answer.text != whole
    messages += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "Go on."},
    ]
    after = session.answer(messages, silent)
    assert after.result.kept_tokens == answer.result.prompt_tokens + answer.result.new_tokens - 1
    assert after.text == fresh(real, messages, most=24) and after.result.reason != "interrupted"


def test_a_long_prompt_can_be_stopped(real: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of its parts; the parts that were read stay."""
    monkeypatch.setattr(module, "CHUNK", 16)
    session = session_of(real)
    messages = [{"role": "user", "content": "word " * 60 + QUESTIONS[0]}]
    with computed(real[0]) as counts:
        answer = session.answer(messages, silent, is_over=lambda: bool(counts))
    assert (answer.result.reason, answer.text, answer.result.new_tokens) == ("interrupted", "", 0)
    with computed(real[0]) as counts:
        again = session.answer(messages, silent)
    assert again.result.kept_tokens == 16 and max(counts) <= 16
    assert again.text == fresh(real, messages)


def test_an_interrupt_within_a_layer_forgets_the_cache(real: Models) -> None:
    """Some layers have the row of a token then, and others not."""
    session = session_of(real)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    calls: list[int] = []

    def interrupt(module: Any, args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = real[0].model.layers[7].register_forward_pre_hook(interrupt)
    answer = session.answer(messages, silent)
    hook.remove()
    assert answer.result.reason == "interrupted" and answer.result.new_tokens == 2
    again = session.answer(messages, silent)
    assert again.result.kept_tokens == 0 and again.text == fresh(real, messages)


def test_stop_strings_end_an_answer_and_are_not_told(real: Models) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    whole = fresh(real, messages)
    for stop in ("Paris", "ance is P", "never"):
        shown: list[str] = []
        answer = session_of(real, stops=[stop]).answer(messages, shown.append)
        assert "".join(shown) == answer.text == whole.partition(stop)[0]
        assert answer.result.reason == "stop"


def test_the_context_is_a_limit(real: Models) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    count = len(session_of(real).prompt_of(messages)[1])
    answer = session_of(real, context=count + 3).answer(messages, silent)
    assert (answer.result.reason, answer.result.new_tokens) == ("length", 3)
    with pytest.raises(ValueError, match=f"prompt: {count} tokens; the context has {count}"):
        session_of(real, context=count).answer(messages, silent)
    assert session_of(real, context=1 << 20).context == 8192  # the model's


def test_a_chat_beyond_the_context_loses_its_first_turns(real: Models) -> None:
    """Of what the model sees; the system message stays, and all messages in the chat."""
    chat = Conversation(session_of(real, context=110), "model", "Be brief.")
    for i in range(6):
        chat.ask({"role": "user", "content": f"{i}: {QUESTIONS[i % 3]}"}, silent)
    assert len(chat.messages) == 12 and chat.hidden > 0
    assert chat.messages[chat.hidden]["role"] == "user"
    assert chat._seen()[0] == {"role": "system", "content": "Be brief."}
    assert chat.session.prompt.count("<|im_start|>user") == (12 - chat.hidden) // 2


def test_an_error_leaves_the_chat_as_it_was(real: Models) -> None:
    chat = Conversation(session_of(real, context=60), "model")
    chat.ask({"role": "user", "content": "Hi"}, silent)
    before = list(chat.messages)
    with pytest.raises(ValueError, match="prompt: .* tokens; the context has 60"):
        chat.ask({"role": "user", "content": "word " * 100}, silent)
    assert chat.messages == before and chat.hidden == 0


def test_sampling_with_a_seed(real: Models) -> None:
    """Its options reach transformers: one token to choose from is the likeliest."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(session_of(real, temperature=1.5).answer(messages, silent).text)
    assert texts[0] == texts[1] != texts[2]
    for one in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        session = session_of(real, temperature=1.5, **one)
        assert session.answer(messages, silent).text == fresh(real, messages)


def test_windows_are_read_again(tmp_path: Path) -> None:
    """A sliding window's rows are gone when they are to be cropped."""
    model, tokenizer = load_gguf(random_model(tmp_path / "g.gguf", "gemma3"))
    session = Session(model, tokenizer, Options(max_new_tokens=4))
    text = "ab " * 40
    assert session.complete(text, silent).result.kept_tokens == 0
    assert session.complete(text[:150] + "cd", silent).result.kept_tokens == 0
    alone = Session(model, tokenizer, Options(max_new_tokens=4))
    assert session.complete(text, silent).text == alone.complete(text, silent).text
