"""Drafts by a model's own head for the token after the next."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_models import ids
from mtp_models import FAMILIES, folder_with_head, step, trunk
from replay_pair import steps_of
from test_drafts import GREEDY, SAMPLED, Fixed, answer
from test_graphs import Captured
from transformers import DynamicCache

from torch_metalmm import PackedCache, fuse_, load_mtp, quantize_
from torch_metalmm.hf import graphs
from torch_metalmm.hf.caches import layers, slots
from torch_metalmm.hf.drafts import ROWS
from torch_metalmm.hf.mtp import Mtp
from torch_metalmm.nn.exact import MOST


def pair(family: str, folder: Path) -> tuple[Any, Any]:
    """(the packed and fused model, its head)."""
    model = trunk(family)
    folder_with_head(model, folder)
    quantize_(model, "q8_0", progress=False)
    head = load_mtp(model, folder)
    fuse_(model, "swiglu", cache="f32")
    fuse_(head, "swiglu", cache="f32")
    return model, head


class Seen(Mtp):
    """proposals: (the text before them, the tokens)."""

    def __init__(self, model: Any, head: Any) -> None:
        super().__init__(model, head, PackedCache(head.block.config, "f32"))
        self.model = model
        self.proposals: list[tuple[list[int], list[int]]] = []

    def propose(self, most: int) -> torch.Tensor:
        found = super().propose(most)
        self.proposals.append(([*self._tokens], found.tolist()))
        assert self._cache.get_seq_length() == self._read - self._first + most - 1
        return found

    def check(self) -> None:
        """Each is the head's of the whole text, whatever earlier drafts it has kept."""
        assert self.proposals
        with torch.inference_mode():
            for text, found in self.proposals:
                assert found == chain(self.model, self.head, text, len(found))


def chain(model: Any, head: Any, text: list[int], most: int) -> list[int]:
    """What the head proposes behind the text, from nothing that was kept."""
    tokens = torch.tensor([text])
    hidden = model.get_decoder()(tokens[:, :-1], use_cache=False)[0]
    cache, found, end = DynamicCache(config=head.block.config), list[int](), len(text)
    given, positions = tokens[:, 1:], torch.arange(1, end)[None]
    for i in range(most):
        logits, hidden = step(head, given, hidden, cache, positions)
        given, positions = logits.argmax(-1, keepdim=True), torch.tensor([[end + i]])
        found.append(int(given))
    return found


@pytest.mark.parametrize("given", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_drafts(
    family: str, given: dict[str, Any], tmp_path: Path
) -> None:
    model, head = pair(family, tmp_path)
    draft, prompt = Seen(model, head), ids(1, 9)
    want = answer(model, prompt, **given)
    for most in (1, 3, 7) if given is GREEDY else (3,):
        pace = Fixed(most)
        assert torch.equal(answer(model, prompt, draft=draft, pace=pace, **given), want)
        assert max(pace.rows) == most + 1 and pace.drafted > 15
    assert torch.equal(answer(model, prompt, draft=head, **given), want)
    for each in (model, head):
        steps = steps_of(each)
        assert steps.replays > 20 or family == "deepseek_v3"
        assert {kind.ids.shape[1] for kind in steps.kinds()} <= set(ROWS)
    draft.check()


def test_a_proposal_is_one_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each number of rows that its first step has, as a graph where there are such."""
    monkeypatch.setitem(graphs.GRAPHS, "cpu", Captured)
    model, head = pair("glm4_moe", tmp_path)
    draft = Seen(model, head)
    for seed in range(6):
        prompt = ids(1, 9, seed=seed)
        got = answer(model, prompt, draft=draft, pace=Resting(seed), **GREEDY)
        assert torch.equal(got, answer(model, prompt, **GREEDY))
    draft.check()
    chains = [
        (kind.ids.shape[1], count, chain)
        for kind in steps_of(head).kinds()
        for count, (_, chain) in kind.chains.items()
    ]
    assert {rows for rows, *_ in chains} == set(ROWS)
    assert {count for _, count, _ in chains} == {3, 7}
    assert sum(chain.graph is not None for *_, chain in chains) > 2
    cache = weakref.ref(draft._cache)
    del draft
    gc.collect()
    assert cache() is None


def test_an_interrupted_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots have moved on, by a number that nobody knows: they are written anew."""
    model, head = pair("glm4_moe", tmp_path)
    draft, advance = Seen(model, head), slots.Fixed.advance

    def late(self: slots.Fixed) -> None:
        advance(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(slots.Fixed, "advance", late)
        answer(model, ids(1, 9), draft=draft, pace=Fixed(7), **GREEDY)
    draft.proposals.clear()
    prompt = ids(1, 9, seed=1)
    got = answer(model, prompt, draft=draft, pace=Fixed(7), **GREEDY)
    assert torch.equal(got, answer(model, prompt, **GREEDY))
    draft.check()


def test_a_chain_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache of the head is full within it, its steps are computed one by one."""
    monkeypatch.setattr(layers, "FIRST", 16)
    monkeypatch.setattr(PackedCache, "expect", lambda *_: None)
    model, head = pair("glm4_moe", tmp_path)
    draft, prompt, how = Seen(model, head), ids(1, 9), GREEDY | {"max_new_tokens": 70}
    held = list[int]()
    for most in (3, 7):
        got = answer(model, prompt, draft=draft, pace=Fixed(most), **how)
        assert torch.equal(got, answer(model, prompt, **how))
        held.append(draft._cache.layers[0].keys.shape[2])
    assert held == [128, 128] and any(kind.chains for kind in steps_of(head).kinds())
    draft.check()


class Resting(Fixed):
    """Drafts, or none for some tokens, of which the head then has any number to read."""

    def __init__(self, seed: int) -> None:
        super().__init__(7)
        self._draws = random.Random(seed)

    def count(self, kind: Hashable, most: int = 7) -> int:
        drafted = super().count(kind, most)
        return min(drafted, self._draws.choice((0, 0, 0, 1, 3, 7)))


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
def test_positions_that_are_read_once_more(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, head = pair(family, tmp_path)
    draft, own, again = Seen(model, head), Mtp._steps, list[int]()

    def counted(self: Mtp, *args: Any) -> Any:
        again.append(args[3])
        return own(self, *args)

    monkeypatch.setattr(Mtp, "_steps", counted)
    for seed in range(3):
        prompt = ids(1, 9 + 20 * seed, seed=seed)
        got = answer(model, prompt, draft=draft, pace=Resting(seed), **GREEDY)
        assert torch.equal(got, answer(model, prompt, **GREEDY))
    assert sum(map(bool, again)) > 5
    assert {kind.ids.shape[1] for kind in steps_of(head).kinds()} <= set(ROWS)
    draft.check()


@pytest.mark.parametrize("at", ["crop", "forward"])
def test_an_interrupt_while_positions_are_read_once_more(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, head = pair("glm4_moe", tmp_path)
    draft, own = Seen(model, head), Mtp._steps

    def interrupted(self: Mtp, *args: Any) -> Any:
        if args[3]:
            monkeypatch.setattr(Mtp, "_steps", own)
            if at == "forward":
                monkeypatch.setattr(head, "forward", raises)
            else:
                monkeypatch.setattr(self, "_cache", Cropping(self._cache))
        return own(self, *args)

    def raises(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    class Cropping:
        def __init__(self, cache: PackedCache) -> None:
            self._cache = cache

        def crop(self, count: int) -> None:
            self._cache.crop(count)
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self._cache, name)

    monkeypatch.setattr(Mtp, "_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for seed in range(9):
            answer(model, ids(1, 9), draft=draft, pace=Resting(seed), **GREEDY)
    monkeypatch.undo()
    text = torch.tensor([[*draft._tokens]])
    got = answer(model, text, draft=draft, pace=Fixed(3), **GREEDY)
    assert torch.equal(got, answer(model, text, **GREEDY))


def test_the_next_prompt(tmp_path: Path) -> None:
    """What the head has read of the same tokens stays; of others it reads anew."""
    model, head = pair("qwen3_5_text", tmp_path)
    read = list[int]()
    head.eh_proj.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    draft = Seen(model, head)
    first = ids(1, 80)
    cache = PackedCache(model.config, "f32")
    text = answer(model, first, cache, draft=draft, pace=Fixed(3), **GREEDY)
    assert max(read) == 80
    longer = torch.cat([text, ids(1, 12, seed=1)], 1)
    read.clear()
    got = answer(model, longer, cache, draft=draft, pace=Fixed(3), **GREEDY)
    assert torch.equal(got, answer(model, longer, **GREEDY)) and max(read) == MOST
    other = torch.cat([first[:, :50], ids(1, 8, seed=2)], 1)
    read.clear()
    got = answer(model, other, draft=draft, pace=Fixed(3), **GREEDY)
    assert torch.equal(got, answer(model, other, **GREEDY)) and max(read) == MOST
    draft.check()


def test_a_text_whose_beginning_only_the_model_has_read(tmp_path: Path) -> None:
    """As of a prompt's file: the head sees the text from there on."""
    model, head = pair("glm4_moe", tmp_path)
    cache, draft = PackedCache(model.config, "f32"), Seen(model, head)
    text = answer(model, ids(1, 20), cache, **GREEDY)
    longer = torch.cat([text, ids(1, 5, seed=1)], 1)
    got = answer(model, longer, cache, draft=draft, pace=Fixed(3), **GREEDY)
    assert torch.equal(got, answer(model, longer, **GREEDY)) and draft.proposals


def test_an_interrupted_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = pair("glm4_moe", tmp_path)
    draft, prompt = Seen(model, head), ids(1, 9)
    want, calls = answer(model, prompt, **GREEDY), list[int]()
    forward = head.forward

    def interrupted(**given: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return forward(**given)

    monkeypatch.setattr(head, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(model, prompt, draft=draft, pace=Fixed(3), **GREEDY)
    assert torch.equal(answer(model, prompt, draft=draft, pace=Fixed(3), **GREEDY), want)


def test_steps_without_a_draft_are_queued(tmp_path: Path) -> None:
    """Their rows are seen, too, so that later drafts are the same."""
    model, head = pair("glm4_moe", tmp_path)
    draft, prompt = Seen(model, head), ids(1, 9)
    want = answer(model, prompt, **GREEDY)

    class Sometimes(Fixed):
        def count(self, kind: Any, most: int = 7) -> int:
            drafted = super().count(kind, most)
            return drafted if len(self.rows) % 8 > 4 else 0

    pace = Sometimes(3)
    got = answer(model, prompt, draft=draft, pace=pace, reads_late=True, **GREEDY)
    assert torch.equal(got, want) and {1, 4} == set(pace.rows)
    draft.check()
