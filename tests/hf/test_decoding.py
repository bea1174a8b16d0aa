"""generate(custom_generate=decode) beside transformers' own loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from layer_models import fused, ids, small
from replay_pair import held, steps_of
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList
from transformers.generation import utils
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from torch_metalmm import PackedCache
from torch_metalmm.hf import decoding
from torch_metalmm.hf.decoding import decode
from torch_metalmm.models.cache_argument import cache_of_generate

NEW = 12
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}


class Kept:
    """A streamer."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def model_of(kind: str = "llama") -> Any:
    return fused(kind, "f32", head_dim=32)


def both(model: Any, prompt: Tensor, how: dict[str, Any], **given: Any) -> tuple[Tensor, Tensor]:
    """The sequences of this loop and of transformers', from one seed."""
    found = []
    for own in (how, {}):
        torch.manual_seed(7)
        given = {"max_new_tokens": NEW, "pad_token_id": 0, **given}
        found.append(model.generate(prompt, **given, **own))
    return found[0], found[1]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("given", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_sequences_are_those_of_transformers(given: dict[str, Any], batch: int, late: bool) -> None:
    model, how = model_of(), {"custom_generate": decode, "reads_late": late}
    prompt = ids(batch, 5)
    got, want = both(model, prompt, how, **given)
    assert torch.equal(got, want)
    assert got.shape == (batch, 5 + NEW)
    # Ends at tokens that come, in other steps of each sequence; the rest is padding.
    ends = sorted({int(row[8 + i]) for i, row in enumerate(want)})
    got, want = both(model, prompt, how, eos_token_id=ends, **given)
    assert torch.equal(got, want)
    assert got.shape[1] < 5 + NEW
    got, want = both(model, prompt, how, repetition_penalty=1.5, min_new_tokens=3, **given)
    assert torch.equal(got, want)  # which read the tokens before


@pytest.mark.parametrize("first", [0, 5])
def test_positions_are_those_that_generate_is_given(first: int) -> None:
    """RoBERTa, left to itself, counts from another number on."""
    model = small("roberta", is_decoder=True, pad_token_id=1, initializer_range=0.2)
    prompt, how = ids(2, 5), {"custom_generate": decode, "reads_late": False}
    given = {"position_ids": torch.arange(first, first + 5).expand(2, -1)}
    given |= {"attention_mask": torch.ones_like(prompt), "eos_token_id": None}
    got, want = both(model, prompt, how, do_sample=False, **given)
    assert torch.equal(got, want)


def test_criteria_that_are_asked_without_a_tensor() -> None:
    """The shortest of two lengths; an end without a dimension."""
    model, how = model_of(), {"custom_generate": decode}
    end = int(both(model, ids(1, 5), how, do_sample=False)[0][0, 9])
    lengths = [MaxLengthCriteria(5 + NEW), MaxLengthCriteria(11)]
    for criteria in (lengths, [EosTokenCriteria(torch.tensor(end))]):
        given = {"stopping_criteria": StoppingCriteriaList(criteria), "do_sample": False}
        got, want = both(model, ids(1, 5), how, **given)
        assert torch.equal(got, want) and got.shape[1] <= 11


def test_steps_are_replayed() -> None:
    model = model_of()
    found = steps_of(model)
    for late in (False, True):
        before = found.replays
        model.generate(ids(1, 5), max_new_tokens=NEW, custom_generate=decode, reads_late=late)
        assert found.replays - before == NEW - 1 - 2, found.why  # two are recorded


def test_room_is_made_once() -> None:
    """For the whole answer, up to 1024 tokens; not by transformers' own loop."""
    model, found = model_of(), list[list[int]]()
    model.config.max_position_embeddings = 4096
    for most, how in (
        (300, {"custom_generate": decode}),
        (300, {}),
        (3000, {"custom_generate": decode}),
    ):
        sizes = list[int]()
        cache: Any = PackedCache(model.config, "f32")

        def is_over(
            tokens: Tensor, scores: Any, sizes: Any = sizes, cache: Any = cache, **_: Any
        ) -> Tensor:
            sizes.append(cache.layers[0].keys.shape[2])
            return torch.tensor([tokens.shape[1] >= 300])

        criteria = StoppingCriteriaList([is_over])
        given = {cache_of_generate(): cache, "stopping_criteria": criteria, "eos_token_id": None}
        model.generate(
            ids(1, 5), max_new_tokens=most, do_sample=False, pad_token_id=0, **given, **how
        )
        found.append([*dict.fromkeys(sizes)])
    assert found == [[305], [256, 512], [1029]]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("own", [False, True], ids=["packed", "transformers"])
def test_a_cache_has_the_rows_that_it_had(kind: str, own: bool) -> None:
    """After an end that was read late, too; and the answer goes on from it."""
    mixed = {"layer_types": ["linear_attention", "full_attention"]} if "qwen" in kind else {}
    model = small(kind, head_dim=32, num_hidden_layers=2, **mixed)
    prompt, lengths, rest = ids(1, 5), [], []
    first = model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0]
    for how in ({"custom_generate": decode, "reads_late": True}, {}):
        cache = DynamicCache(config=model.config) if own else PackedCache(model.config, "f32")
        given = {cache_of_generate(): cache, "do_sample": False, "pad_token_id": 0, **how}
        out = model.generate(prompt, max_new_tokens=NEW, eos_token_id=int(first[8]), **given)
        assert torch.equal(out[0], first[: out.shape[1]])
        lengths.append(cache.get_seq_length())
        longer = torch.cat([out, ids(1, 3, seed=4)], 1)
        rest.append(model.generate(longer, max_new_tokens=3, **given))
    assert lengths[0] == lengths[1]
    assert torch.equal(*rest)


@pytest.mark.parametrize("late", [False, True])
def test_a_sequence_that_is_over_is_fed_padding(late: bool) -> None:
    """As in transformers' loop, so that the rows of the cache are the same."""
    model, prompt, rows = model_of(), ids(3, 5), []
    plain = model.generate(prompt, max_new_tokens=NEW, do_sample=False)
    ends = [int(plain[1, -1])]  # which the others have not
    for how in ({"custom_generate": decode, "reads_late": late}, {}):
        cache: Any = PackedCache(model.config, "f32")
        given = {cache_of_generate(): cache, "eos_token_id": ends, "pad_token_id": 0, **how}
        out = model.generate(prompt, max_new_tokens=NEW, do_sample=False, **given)
        rows.append([t for layer in cache.layers for t in held(layer)])
    assert (out == 0).any() and (out[:, -1] != 0).any()
    assert all(map(torch.equal, *rows))


@pytest.mark.parametrize("late", [False, True])
def test_what_raises_leaves_the_rows_of_the_tokens_before(late: bool) -> None:
    model, cache = model_of(), PackedCache(model_of().config, "f32")

    def fail(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        raise LookupError("a criterion")

    given = {cache_of_generate(): cache, "stopping_criteria": StoppingCriteriaList([fail])}
    how = {"custom_generate": decode, "reads_late": late}
    with pytest.raises(LookupError):
        model.generate(ids(1, 5), max_new_tokens=NEW, do_sample=False, **given, **how)
    assert cache.get_seq_length() == 5


def test_a_cache_may_keep_the_last_step() -> None:
    model, prompt = model_of(), ids(1, 5)
    end = int(model.generate(prompt, max_new_tokens=4, do_sample=False)[0, 7])
    cache = PackedCache(model.config, "f32")
    given = {cache_of_generate(): cache, "eos_token_id": end, "pad_token_id": 0}
    how = {"custom_generate": decode, "reads_late": True, "keeps_last": True}
    out = model.generate(prompt, max_new_tokens=NEW, do_sample=False, **given, **how)
    assert cache.get_seq_length() == out.shape[1]


def test_a_step_is_queued_before_a_token_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    advance, read = decoding._Steps.advance, decoding.Copied.read
    monkeypatch.setattr(
        decoding._Steps, "advance", lambda *a: (order.append("step"), advance(*a))[1]
    )
    monkeypatch.setattr(decoding.Copied, "read", lambda *a: (order.append("read"), read(*a))[1])
    model = model_of()
    for late, want in ((True, "step read step read read"), (False, "read step read step read")):
        order.clear()
        model.generate(ids(1, 5), max_new_tokens=3, custom_generate=decode, reads_late=late)
        assert " ".join(order) == want


@pytest.mark.parametrize("late", [False, True])
def test_a_streamer_and_criteria(late: bool) -> None:
    model, kept, seen = model_of(), Kept(), []

    def is_over(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        seen.append(tokens.tolist())
        return torch.full((len(tokens),), tokens.shape[1] == 9)

    how = partial(decode, streamer=kept, reads_late=late)
    given = {"max_new_tokens": NEW, "do_sample": False}
    criteria = StoppingCriteriaList([is_over])
    out = model.generate(ids(1, 5), custom_generate=how, stopping_criteria=criteria, **given)
    assert out.shape == (1, 9)
    assert [one for (one,) in kept.tokens] == out[0, 5:].tolist()
    assert kept.ended == 1
    assert seen == [[out[0, :n].tolist()] for n in range(6, 10)]


def test_what_another_loop_is_for() -> None:
    """Hidden tokens, beams, results beside the sequences: as transformers gives them."""
    model, how, prompt = model_of(), {"custom_generate": decode}, ids(2, 5)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    assert torch.equal(*both(model, prompt, how, attention_mask=mask, do_sample=False))
    assert torch.equal(*both(model, prompt, how, use_cache=False, do_sample=False))
    assert torch.equal(*both(model, prompt, how, num_beams=2, do_sample=False))
    assert torch.equal(*both(model, prompt, how, num_return_sequences=2, do_sample=True))
    got, want = both(model, prompt, how, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(*each) for each in zip(got.scores, want.scores, strict=True))


def test_transformers_own_late_loop_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of MPS, which crops a cache by nothing after each step."""
    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("transformers reads tokens late from 5.24 on")

    class Event:  # a CPU has none
        def __init__(self, *_: Any, **__: Any) -> None: ...

        record = synchronize = __init__

    is_known = utils.DeferredStopCheck.is_supported
    mps = torch.device("mps")
    monkeypatch.setattr(
        utils.DeferredStopCheck,
        "is_supported",
        lambda _, *args, **kwargs: is_known(mps, *args, **kwargs),
    )
    monkeypatch.setattr(torch, "Event", Event)
    model = fused("gemma3_text", "f32", head_dim=32, sliding_window=8)
    found, cache = steps_of(model), PackedCache(model.config, "f32")
    given = {cache_of_generate(): cache, "max_new_tokens": 20, "do_sample": False}
    out = model.generate(ids(1, 5), **given)
    assert found.replays == 20 - 1 - 2, found.why
    assert cache.get_seq_length() == out.shape[1] - 1


def test_a_mode_of_more_arguments_is_refused() -> None:
    model, prompt = model_of(), ids(1, 5)
    with pytest.raises(ValueError, match="custom_generate: decode; the mode is assisted_gen"):
        model.generate(prompt, prompt_lookup_num_tokens=2, max_new_tokens=4, custom_generate=decode)
    how = partial(decode, streamer=Kept())
    with pytest.raises(ValueError, match="beam_search with a streamer; allowed: greedy_search"):
        model.generate(prompt, num_beams=2, max_new_tokens=4, custom_generate=how)


def test_nan_is_not_drawn_from() -> None:
    model = model_of()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="logits: NaN or Inf"):
        model.generate(ids(1, 5), max_new_tokens=2, do_sample=True, custom_generate=decode)
