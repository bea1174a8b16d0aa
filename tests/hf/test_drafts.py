"""generate(custom_generate=decode, draft=...): the tokens are those without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from drafters import Fixed, Told
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_models import fused, ids, small
from replay_pair import held, steps_of
from test_decoding import Kept
from test_graphs import Captured
from torch import Tensor, nn
from transformers import DynamicCache, StoppingCriteriaList

from torch_metalmm import PackedCache
from torch_metalmm.hf import answer as hf_answer
from torch_metalmm.hf import graphs
from torch_metalmm.hf.answer import Chooser, Copied
from torch_metalmm.hf.caches.hybrid import States, states_of
from torch_metalmm.hf.decoding import _Steps, decode, drafter_of
from torch_metalmm.hf.drafts import Lookup, Pace, SmallModel
from torch_metalmm.models.cache_argument import cache_of_generate
from torch_metalmm.nn.again import Again
from torch_metalmm.testing import emulated

NEW = 30
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20}
GREEDY = {"do_sample": False}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "layer_types": ["mamba", "attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 16},
    "qwen3_moe": _EXPERTS,
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": _MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 64},
}


def model_of(kind: str = "llama") -> Any:
    heads = {} if kind in ("lfm2", "granitemoehybrid") else {"head_dim": 32}
    return fused(kind, "f32", max_position_embeddings=256, **heads, **KINDS[kind])


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def answer(model: Any, prompt: Tensor, cache: Any = None, **how: Any) -> Tensor:
    torch.manual_seed(3)
    cache = PackedCache(model.config, "f32") if cache is None else cache
    own = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
    own |= {"attention_mask": torch.ones_like(prompt)} | how  # a token 0 is no padding here
    out: Tensor = model.generate(
        prompt, **{cache_of_generate(): cache}, custom_generate=decode, **own
    )
    return out


def test_rows_that_are_drawn_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: of a seed the tokens and the next draw are those of rows one by one."""
    model, prompt = model_of(), ids(1, 9)
    want = answer(model, prompt, **SAMPLED)
    draw, drawn = torch.rand(4), list[int]()
    ahead = Chooser._drawn

    def counted(self: Chooser, logits: Tensor) -> Any:
        drawn.append(logits.shape[1])
        return ahead(self, logits)

    monkeypatch.setattr(hf_answer, "_draws_ahead", lambda _: True)
    monkeypatch.setattr(Chooser, "_drawn", counted)
    for wrong, most in ((99, 7), (1, 1), (3, 3)):
        drawn.clear()
        draft = Told(want[0].tolist(), wrong)
        got = answer(model, prompt, draft=draft, pace=Fixed(most), **SAMPLED)
        assert torch.equal(got, want) and torch.equal(torch.rand(4), draw)
        assert max(drawn) == most + 1
        penalised = answer(model, prompt, **SAMPLED, repetition_penalty=1.4)  # which reads tokens
        drawn.clear()
        given = SAMPLED | {"draft": Told(penalised[0].tolist(), wrong), "pace": Fixed(most)}
        assert torch.equal(answer(model, prompt, **given, repetition_penalty=1.4), penalised)
        assert not drawn


@pytest.mark.parametrize("given", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_drafts(
    kind: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether drafted tokens are right, wrong, or both in turn; and so is the cache. No token is
    read twice by the model, whose states go on from before a step by their own ops alone."""
    forward, forwards = _Steps._forward, list[int]()

    def counted(self: _Steps, read: Tensor, others: dict[str, Any]) -> Tensor:
        forwards.append(read.shape[1])
        return forward(self, read, others)

    monkeypatch.setattr(_Steps, "_forward", counted)
    model, prompt = model_of(kind), ids(1, 9)
    caches = [PackedCache(model.config, "f32") for _ in range(5)]
    want = answer(model, prompt, caches[0], **given)
    for cache, wrong, most in zip(caches[1:], (99, 1, 3, 5), (7, 1, 3, 7), strict=True):
        pace = Fixed(most)
        draft = Told(want[0].tolist(), wrong)
        forwards.clear()
        got = answer(model, prompt, cache, draft=draft, pace=pace, **given)
        assert torch.equal(got, want) and forwards == [9, *pace.rows]
        assert max(pace.rows) == most + 1 and sum(pace.rows) >= NEW - 1
        assert (pace.accepted == 0) if wrong == 1 else (len(pace.rows) < NEW - 1)
        assert cache.get_seq_length() == caches[0].get_seq_length()
        for mine, others in zip(cache.layers, caches[0].layers, strict=True):
            assert all(map(torch.equal, held(mine), held(others)))


def test_states_go_back_by_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recurrent ops of the rows that stay, where a device has graphs."""
    monkeypatch.setitem(graphs.GRAPHS, "cpu", Captured)
    model, prompt, how = model_of("qwen3_5_text"), ids(1, 9), GREEDY | {"max_new_tokens": 18}
    want, cache = answer(model, prompt, **how), PackedCache(model.config, "f32")
    with emulated():
        for _ in range(2):
            cache.reset()
            draft = Told(want[0].tolist(), 4)
            got = answer(model, prompt, cache, draft=draft, pace=Fixed(7), **how)
            assert torch.equal(got, want)
    (backs,) = (kind.backs for kind in steps_of(model).kinds() if kind.backs)
    assert any(back.graph is not None for back in backs.values())


def test_states_whose_copies_were_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_5_text")
    cache, states = PackedCache(model.config, "f32"), States()
    answer(model, ids(1, 9), cache, **GREEDY)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Tensor, "clone", interrupted)
        states.take(cache.layers)
    states.take(cache.layers)
    held, want = states_of(cache.layers), [t.clone() for t in states_of(cache.layers)]
    for each in held:
        each.zero_()
    states.restore()
    assert all(map(torch.equal, held, want))


def test_states_that_no_known_call_has_moved() -> None:
    again, moved, other = Again(), torch.zeros(1), torch.zeros(1)
    again.calls.append((lambda state: state, (), moved))
    assert again.moves([moved]) and not again.moves([moved, other])
    assert not Again().moves([moved])


def test_states_of_layers_that_are_not_fused() -> None:
    """They go on from before a step by reading its right tokens again."""
    kind = "qwen3_5_text"
    model = small(kind, num_hidden_layers=2, max_position_embeddings=256, **KINDS[kind])
    how, prompt = GREEDY | {"exact": False}, ids(1, 9)
    want = answer(model, prompt, **GREEDY)
    got = answer(model, prompt, draft=Told(want[0].tolist(), 3), pace=Fixed(3), **how)
    assert torch.equal(got, want)


@pytest.mark.parametrize("given", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_steps_without_a_draft_are_queued(given: dict[str, Any]) -> None:
    """Where nothing has been proposed for two tokens, as without drafts, and only there."""
    model, prompt, rows = model_of(), ids(1, 9), list[list[int]]()
    want = answer(model, prompt, **given)
    for late in (False, True):
        pace = Fixed(3)
        draft = Told(want[0].tolist(), 7, "----------")
        how = {"draft": draft, "pace": pace, "reads_late": late}
        caches = [PackedCache(model.config, "f32") for _ in range(2)]
        assert torch.equal(answer(model, prompt, caches[0], **how, **given), want)
        end = {"eos_token_id": int(want[0, 33])}
        ended = answer(model, prompt, caches[1], **how, **given, **end)
        assert ended.shape[1] <= 34 and torch.equal(ended, want[:, : ended.shape[1]])
        assert caches[1].get_seq_length() == ended.shape[1] - 1
        rows.append(pace.rows)
    assert {1, 4} == set(rows[0]) == set(rows[1])


@pytest.mark.parametrize("given", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_processors_ends_and_streams(given: dict[str, Any]) -> None:
    """They see each token once, in order, whichever step computed it."""
    model, prompt = model_of(), ids(1, 9)
    for others in ({"repetition_penalty": 1.4}, {"min_new_tokens": 5}, {"max_new_tokens": 1}):
        want = answer(model, prompt, **given, **others)
        draft = Told(want[0].tolist(), 99)
        got = answer(model, prompt, draft=draft, pace=Fixed(7), **given, **others)
        assert torch.equal(got, want)
    want, kept, seen = answer(model, prompt, **given), Kept(), list[int]()

    def is_over(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        seen.append(tokens.shape[1])
        return torch.tensor([tokens.shape[1] == 22])

    torch.manual_seed(3)
    cache = PackedCache(model.config, "f32")
    how = partial(decode, streamer=kept, draft=Told(want[0].tolist(), 99), pace=Fixed(7))
    criteria = StoppingCriteriaList([is_over])
    got = model.generate(
        *(prompt, None, None, criteria),
        **{cache_of_generate(): cache},
        **(given | {"max_new_tokens": NEW, "custom_generate": how}),
    )
    assert torch.equal(got, want[:, :22]) and kept.tokens == got[0, 9:, None].tolist()
    assert seen == list(range(10, 23)) and cache.get_seq_length() == 21


def test_what_raises_leaves_the_rows_of_the_tokens_before() -> None:
    """In the middle of the rows of a step."""
    model, prompt = model_of(), ids(1, 9)
    want, cache = answer(model, prompt, **GREEDY), PackedCache(model.config, "f32")

    def fail(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        if tokens.shape[1] == 13:
            raise LookupError("a criterion")
        return torch.tensor([False])

    draft = Told(want[0].tolist(), 99)
    with pytest.raises(LookupError):
        answer(
            *(model, prompt, cache),
            **GREEDY,
            draft=draft,
            pace=Fixed(7),
            stopping_criteria=StoppingCriteriaList([fail]),
        )
    assert cache.get_seq_length() == 12
    longer = torch.cat([want[:, :13], ids(1, 2)], 1)
    assert torch.equal(answer(model, longer, cache, **GREEDY), answer(model, longer, **GREEDY))


@pytest.mark.parametrize("kind", ("llama", "qwen3_5_text"))
def test_an_interrupt_where_the_host_waits_for_a_draft(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the rows of the tokens before."""
    model, prompt = model_of(kind), ids(1, 9)
    want, cache = answer(model, prompt, **GREEDY), PackedCache(model.config, "f32")
    advance = _Steps.advance

    def interrupting(self: _Steps, tokens: Tensor, may_forget: bool = False) -> None:
        advance(self, tokens, may_forget)
        monkeypatch.setattr(Copied, "read", interrupted)

    monkeypatch.setattr(_Steps, "advance", interrupting)
    with pytest.raises(KeyboardInterrupt):
        answer(model, prompt, cache, draft=Told(want[0].tolist(), 2), pace=Fixed(7), **GREEDY)
    monkeypatch.undo()
    assert cache.get_seq_length() == 10
    assert torch.equal(answer(model, want[:, :11], cache, **GREEDY)[:, : 9 + NEW], want)


@pytest.mark.parametrize("kind", ("llama", "qwen3_5_text", "lfm2", "granitemoehybrid"))
def test_a_small_model(kind: str) -> None:
    """Of the same model all drafts are right, of another few. Its rows stay for the next answer,
    and states for one that goes on from there."""
    model, prompt = model_of(kind), ids(1, 9)
    for own in (True, False):
        draft = SmallModel(model_of(kind) if own else small("llama", "q2_k", hidden_size=256))
        read = list[int]()
        hook = draft.model.register_forward_pre_hook(
            lambda _, args, kwargs, read=read: read.append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        more = ids(1, 3, seed=2)
        longer = torch.cat([answer(model, prompt, **GREEDY), more], 1)
        anew = 9 if own and kind != "llama" else 0
        for seen, most in ((prompt, 10), (longer, 8), (torch.cat([prompt, more], 1), 4 + anew)):
            pace, given = Fixed(3), GREEDY | {"attention_mask": torch.ones_like(seen)}
            want = answer(model, seen, **given)
            read.clear()
            assert torch.equal(answer(model, seen, draft=draft, pace=pace, **given), want)
            assert max(read) == most if seen is not longer else 4 <= max(read) <= most
            # Of the same model all are right, up to the answer's end.
            assert (pace.accepted > 15 and pace.accepted == pace.drafted) == own
        hook.remove()


@pytest.mark.parametrize("kind", ("qwen3_5_text", "lfm2", "granitemoehybrid"))
def test_the_states_of_a_small_model(kind: str) -> None:
    """Behind right and wrong drafts, and in another text, they are those of the text alone."""
    model, draft, text = model_of(kind), SmallModel(model_of(kind)), ids(1, 9)[0].tolist()
    for i in range(16):
        if i in (0, 7, 8):
            text = text[: 9 - i]
            draft.begin(text)
        right, fresh = draft.propose(3), SmallModel(model)
        fresh.begin(text)
        assert fresh.propose(3) == right and fresh._held == draft._held
        for got, want in zip(*(states_of(d._cache.layers) for d in (draft, fresh)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        for token in [*right[: i % 4], (right[i % 3] + 1) % 96]:
            draft.add(token)
            text.append(token)


def test_an_interrupted_draft_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of(), ids(1, 9)
    want, draft = answer(model, prompt, **GREEDY), SmallModel(model_of())
    forward = draft.model.model.layers[1].forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(draft.model.model.layers[1], "forward", forward)
        raise KeyboardInterrupt

    monkeypatch.setattr(draft.model.model.layers[1], "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(model, prompt, draft=draft, pace=Fixed(3), **GREEDY)
    pace = Fixed(3)
    assert torch.equal(answer(model, prompt, draft=draft, pace=pace, **GREEDY), want)
    assert pace.accepted == pace.drafted


@pytest.mark.quick
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(1, 9),
)
def test_lookup(text: list[int], shortest: int, first: int, most: int) -> None:
    """What stood behind the last tokens, where most before agree, of the last 16 places."""
    lookup = Lookup(shortest)
    lookup.begin(text[:first])
    for token in text[first:]:
        lookup.add(token)

    def agreeing(end: int) -> int:
        count = 0
        while count < min(end, 16) and text[end - 1 - count] == text[-1 - count]:
            count += 1
        return count

    places = [end for end in range(1, len(text)) if agreeing(end) >= shortest][-16:]
    if not places:
        assert lookup.kind() is None
        return
    best = max(map(agreeing, places))
    place = next(end for end in reversed(places) if agreeing(end) == best)
    assert lookup.kind() == best.bit_length()
    assert lookup.propose(most) == (text[place:] * 9)[:most]


CHEAP = {1: 1.0, 2: 1.05, 4: 1.2, 8: 1.4}
DEAR = {1: 1.0, 2: 1.9, 4: 3.8, 8: 7.6}


def drafted(
    right: Callable[[int, int], int], seconds: Callable[[int, int], float], steps: int = 400
) -> tuple[list[int], float]:
    """(rows of each step, tokens of a unit of time), where so many tokens of a draft are right, and
    a step takes that long: by its number, and the tokens of its draft or its rows."""
    pace, rows = Pace(), list[int]()
    for i in range(steps):
        count = pace.count("kind")
        rows.append(count + 1)
        pace.took(count + 1, seconds(i, count + 1))
        if count:
            pace.saw("kind", count, right(i, count))
    return rows, (len(rows) + pace.accepted) / sum(seconds(*each) for each in enumerate(rows))


def drafted_by_chance(right: float, times: dict[int, float]) -> tuple[list[int], float]:
    """Where each token of a draft is right with this probability."""
    draw = torch.Generator().manual_seed(0)

    def hits(i: int, count: int) -> int:
        return [*(torch.rand(count, generator=draw) < right).tolist(), False].index(False)

    return drafted(hits, lambda i, m: times[m])


def test_first_steps_say_nothing_of_later_ones() -> None:
    """Those that are recorded, of each number of rows."""
    model, prompt, pace = model_of(), ids(1, 9), Fixed(3)
    want = answer(model, prompt, **GREEDY)
    answer(model, prompt, draft=Told(want[0].tolist(), 5), pace=pace, **GREEDY)
    assert pace.firsts == sum(min(count, 2) for count in Counter(pace.rows).values()) < NEW / 3
    timed = Pace()
    for _ in range(9):
        timed.took(4, 9.0, is_first=True)
        timed.took(4, 1.0)
    assert timed._seconds(4) == 1.0


@pytest.mark.quick
def test_drafts_are_as_long_as_they_pay() -> None:
    rows, speed = drafted_by_chance(0.95, CHEAP)
    assert rows[-50:].count(8) >= 44 and speed > 4
    rows, speed = drafted_by_chance(0.6, {1: 1.0, 2: 1.1, 4: 1.3, 8: 9.0})
    assert rows[-50:].count(4) > 40 and speed > 1.4
    for right, times in ((0.0, CHEAP), (0.3, DEAR), (0.8, DEAR)):
        rows, speed = drafted_by_chance(right, times)
        assert rows[-200:].count(1) > 100 and speed > 0.94, speed


@pytest.mark.quick
def test_a_slow_start_is_forgotten() -> None:
    """Steps of one row that were slow at first do not make drafts look cheap for long."""
    rows, _ = drafted(lambda i, n: n // 2, lambda i, m: 9.0 if i < 12 else DEAR[m], 600)
    assert max(rows[12:60]) > 1 and rows[-300:].count(1) > 250


@pytest.mark.quick
def test_drafts_are_tried_again() -> None:
    """Where they were wrong for long, and become right."""
    rows, _ = drafted(lambda i, n: n if i > 300 else 0, lambda i, m: CHEAP[m], 1000)
    assert rows[250:300].count(1) > 25 and rows[-50:].count(8) >= 44


def test_what_drafts_are_not_for() -> None:
    model, prompt = model_of(), ids(1, 9)
    with pytest.raises(ValueError, match='draft: 3; allowed: "lookup", a model, an MtpHead'):
        answer(model, prompt, draft=3)
    with pytest.raises(ValueError, match="draft: 2 sequences; drafts are of one"):
        answer(model, ids(2, 9), draft="lookup")
    with pytest.raises(ValueError, match="draft: drafts are of one text in ids"):
        answer(model, prompt, draft="lookup", num_beams=2)
    own = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="draft: exact, but the cache is a DynamicCache"):
        answer(model, prompt, own, draft="lookup")
    hybrid = model_of("qwen3_5_text")
    with pytest.raises(
        ValueError, match="the cache, a DynamicCache, cannot forget its last tokens"
    ):
        answer(hybrid, prompt, DynamicCache(config=hybrid.config), draft="lookup", exact=False)
    with pytest.raises(ValueError, match="draft: a model of 128 tokens; the model has 96"):
        drafter_of(small("llama", vocab_size=128), model)
    dense = model_of()
    dense.lm_head = nn.Linear(64, 96, bias=False)
    with pytest.raises(ValueError, match="exact, but lm_head is a Linear of torch"):
        answer(dense, prompt, draft="lookup")
