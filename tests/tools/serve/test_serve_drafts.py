"""`metalmm serve --draft`: answers that share steps are those without drafts, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from answered import Asked, answered, endless, pool, run
from drafters import Fixed, Known
from gguf_files import random_model
from mtp_models import folder_with_head, trunk
from serving import Served

from bench.models.families import family
from torch_metalmm import PackedCache, formats, fuse_, load_gguf, load_mtp, quantize_
from torch_metalmm.hf.decoding import decode
from torch_metalmm.hf.drafts import Drafter, Lookup, SmallModel
from torch_metalmm.hf.mtp import Mtp
from torch_metalmm.models.attach import set_cache
from torch_metalmm.models.cache_argument import cache_of_generate
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.tools.chat.session import Session
from torch_metalmm.tools.serve import guessing as guessing_module
from torch_metalmm.tools.serve.batch import ROWS, guessing_of
from torch_metalmm.tools.serve.guessing import Guessing
from torch_metalmm.tools.serve.single import Single
from torch_metalmm.tools.writing import Finish

PROMPT, NEW = 72, 40


def text(tokens: list[int], owner: bytes = b"") -> Any:
    """One under way that has no drafter yet."""
    return SimpleNamespace(tokens=tokens, owner=owner, drafter=None, may_draft=True)


def guessing(new: Callable[[], Drafter]) -> Guessing:
    """As many drafts as there are rows for."""
    return Guessing(new, ROWS // 2, lambda: Fixed(3))


# The last three have states: of the delta rule, of convolutions, of Mamba-2.
_KINDS = ("llama", "gemma3", "qwen3 fused", "qwen35 fused", "lfm2 fused", "falcon_h1")


@pytest.fixture(scope="module", params=_KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("m")
    if request.param != "falcon_h1":
        return endless(request.param, folder)
    model = fuse_(family(request.param))
    model.generation_config.eos_token_id = None
    return model, endless("llama", folder)[1]


def jobs(count: int = 5) -> list[Asked]:
    """Prompts that repeat themselves, some of them greedy, with ends at several lengths."""
    draw = random.Random(5)
    prompts = [draw.choices(range(3, 300), k=PROMPT // 8) * 8 for _ in range(count)]
    return [Asked(ids, NEW - 7 * i, i, temperature=0.01 * (i % 3)) for i, ids in enumerate(prompts)]


class Plain:
    """Jobs without guesses and beside no other, and their texts."""

    def __init__(self, loaded: Any, make: Callable[[], list[Asked]] = jobs) -> None:
        self.make, self.jobs, texts = make, make(), list[list[int]]()
        self.texts = texts

        class Silent(Lookup):
            def begin(self, tokens: list[int]) -> None:
                super().begin(tokens)
                texts.append(self._tokens)

            def kind(self) -> None:
                return None

        for job in self.jobs:
            answered(pool(loaded, 1, 32, guessing(Silent)), job)


@pytest.fixture(scope="module")
def plain(loaded: Any) -> Plain:
    return Plain(loaded)


@pytest.mark.parametrize("name", [n for n in formats.names() if formats.get(n).packs])
def test_rows_of_a_step(name: str) -> None:
    """Up to ROWS have the bits that each has alone."""
    kind = formats.get(name)
    w, x = kind.quantize(torch.randn(48, 512)), torch.randn(ROWS, 512)
    rows = [torch.ops.metalmm.linear(x[:n], w, None, name) for n in range(1, ROWS + 1)]
    alone = torch.cat([torch.ops.metalmm.linear(row[None], w, None, name) for row in x])
    assert all(torch.equal(y, alone[: len(y)]) for y in rows)


def check(
    plain: Plain, most: int, pages: int, loaded: Any, guesses: Guessing
) -> tuple[int, int, int]:
    """Answers are those of `plain`; (right and wrong guesses, tokens of prompts that were kept)."""
    made = plain.make()
    answered(pool(loaded, most, pages, guesses), *made)
    for job, alone in zip(made, plain.jobs, strict=True):
        assert len(job.logits) == len(alone.logits) == job.finish.new_tokens
        assert all(map(torch.equal, job.logits, alone.logits))
        assert job.told[:-1] == alone.told[:-1] and job.finish.reason == alone.finish.reason
        counts = {"kept_tokens": 0, "right_guesses": 0, "wrong_guesses": 0}
        assert alone.finish == alone.finish._replace(**counts)
    right, wrong, kept = (sum(job.finish[i] for job in made) for i in (4, 5, 2))
    return right, wrong, kept


@pytest.mark.covering
@pytest.mark.parametrize(("most", "pages"), [(1, 32), (2, 32), (4, 32), (4, 5)])
@pytest.mark.parametrize("every", (1, 2, 3, 5, 500))
def test_answers_are_those_without_guesses(
    loaded: Any, plain: Plain, most: int, pages: int, every: int
) -> None:
    """One, two or four in a step, and where the pages run out; a guess of so many is wrong."""
    found = guessing(partial(Known, plain.texts, every))
    right, wrong, _ = check(plain, most, pages, loaded, found)
    paces: list[Any] = [*found._paces.values()]  # the last step of an answer tells none
    assert 0 < sum(pace.drafted for pace in paces) <= right + wrong
    assert sum(pace.accepted for pace in paces) <= right and all(pace.rows for pace in paces)
    assert every == 1 or sum(pace.accepted for pace in paces) > 0
    assert (wrong > 9 * right) if every == 1 else (right > 0) and (wrong > 0) == (every < 99)


def conversation() -> list[Asked]:
    """Prompts of which each begins with the one before."""
    ids = random.Random(6).choices(range(3, 300), k=400)
    return [Asked(ids[: 140 + 65 * i], 9) for i in range(4)]


@pytest.mark.parametrize("most", (1, 2))
def test_prompts_that_begin_with_those_before(loaded: Any, most: int) -> None:
    """Beside drafts of which some are wrong, what is kept of a prompt is what it is without."""
    plain = Plain(loaded, conversation)
    right, wrong, kept = check(plain, most, 32, loaded, guessing(partial(Known, plain.texts, 2)))
    assert right > 0 and wrong > 0 and kept > 0


def test_states_of_layers_that_are_not_fused(tmp_path: Path) -> None:
    """They go on from before a step by reading its right tokens again."""
    loaded = endless("qwen35 fused", tmp_path)
    for layer in filter(None, map(fused_layer, loaded[0].modules())):
        layer.detach()
    plain, made = Plain(loaded), jobs()
    answered(pool(loaded, 2, 32, guessing(partial(Known, plain.texts, 3))), *made)
    assert [job.texts for job in made] == [job.texts for job in plain.jobs]
    assert sum(job.finish.right_guesses for job in made) > 9


@pytest.mark.parametrize("seed", (0, 1), ids=("right", "another"))
def test_a_small_model(
    loaded: Any, plain: Plain, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That reads a long text in parts; the other one's drafts are wrong."""
    monkeypatch.setattr(guessing_module, "CHUNK", 16)
    own = {"qwen3_5_text": "qwen35", "lfm2": "lfm2"}.get(loaded[0].config.model_type, "llama")
    small = load_gguf(random_model(tmp_path / "m.gguf", own, seed=seed))[0]
    read, forward = list[int](), SmallModel._read

    def noted(self: SmallModel, unread: list[int]) -> int:
        read.append(len(unread))
        return forward(self, unread)

    monkeypatch.setattr(SmallModel, "_read", noted)
    same = seed == 0 and loaded[0].config.model_type in ("llama", "qwen3_5_text", "lfm2")
    right, wrong, _ = check(plain, 2, 32, loaded, guessing(lambda: SmallModel(small)))
    assert max(read) == 16 and right + wrong > 9 and (right > 4 * wrong) == same


@pytest.mark.parametrize("most", (1, 2, 4))
@pytest.mark.parametrize("family", ("glm4_moe", "qwen3_5_text", "qwen3_next"))
def test_the_model_s_own_head(
    family: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It proposes what it does in generate(): beside others' texts, too, it sees its own, and reads
    it in parts."""
    monkeypatch.setattr(guessing_module, "CHUNK", 32)
    tokenizer = endless("llama", tmp_path)[1]
    model = trunk(family, vocab_size=tokenizer.vocab_size)
    path = folder_with_head(model, tmp_path / "head")
    model.generation_config.eos_token_id = None
    loaded = fuse_(quantize_(model, "q8_0", progress=False)), tokenizer
    head, plain = load_mtp(model, path), Plain(loaded)
    proposed, propose = dict[tuple[int, ...], int](), Mtp.propose

    def noted(self: Mtp, most: int) -> torch.Tensor:
        found = propose(self, most)
        proposed[tuple(self._tokens)] = int(found[0])
        return found

    read, read_on = list[int](), Mtp._read_on

    def counted(self: Mtp, count: int, most: int = 1) -> Any:
        read.append(count)
        return read_on(self, count, most)

    monkeypatch.setattr(Mtp, "propose", noted)
    for job in jobs()[::3]:  # the greedy ones
        cache = {cache_of_generate(): PackedCache(model.config, "q8_0")}
        given = {"do_sample": False, "max_new_tokens": NEW, "custom_generate": decode, **cache}
        model.generate(torch.tensor([job.ids]), draft=head, pace=Fixed(3), **given)
    alone = proposed.copy()
    proposed.clear()
    monkeypatch.setattr(Mtp, "_read_on", counted)
    found = guessing_of(head, *loaded)
    assert found is not None
    found._paces.default_factory = lambda: Fixed(3)
    right, wrong, _ = check(plain, most, 32, loaded, found)
    both = alone.keys() & proposed.keys()
    assert right + wrong > 3 and (len(both) > 20 or most == 4)
    assert all(alone[each] == proposed[each] for each in both) and max(read) == 32


@pytest.mark.parametrize("texts", (1, 2))
def test_a_drafter_sees_its_own_rows(texts: int) -> None:
    """It keeps no memory of others' rows, nor of those behind its own."""

    class Seeing(Lookup):
        hidden = SimpleNamespace(rows=torch.randn(texts, 3, 8))

        def see(self, start: int, hidden: torch.Tensor) -> None:
            seen.append((start, hidden))

    seen, found = list[Any](), guessing(Seeing)
    many = [text([1]) for _ in range(texts)]
    for each in many:
        found.lend(each)
    found.see(many, [5, 7][:texts], [2, 3][:texts])
    assert [start for start, _ in seen] == [5, 7][:texts]
    for (_, rows), whole, count in zip(seen, Seeing.hidden.rows.split(1), (2, 3), strict=False):
        assert torch.equal(rows, whole[:, :count])
        assert rows.untyped_storage().nbytes() == rows.numel() * rows.itemsize


def test_drafters_are_lent(loaded: Any) -> None:
    """To as many texts as there are; what one keeps of a text is for the same owner alone, and for
    the text that begins so."""
    found = guessing(lambda: SmallModel(loaded[0]))

    def lent(tokens: list[int], owner: bytes) -> Any:
        made = text(tokens, owner)
        found.lend(made)
        return made

    first, second, third = lent([4, 5, 6, 7], b"a"), lent([9, 8, 7, 6], b"a"), lent([4], b"a")
    assert first.drafter and second.drafter and third.drafter is None
    one, other = first.drafter, second.drafter
    for each in (first, second):
        each.drafter.propose(1)
        found.give_back(each)
    assert lent([4, 5, 6, 7, 3], b"a").drafter is one
    of_another = lent([9, 8, 7, 6, 3], b"b")
    assert of_another.drafter is not other and of_another.drafter.known([9, 8, 7, 6]) == 0


def test_a_text_that_comes_late_drafts_too(loaded: Any, plain: Plain) -> None:
    """Beside four others at first, of which two stay."""
    made = [Asked(job.ids, 4 if i < 2 else NEW) for i, job in enumerate(jobs(4))]
    answered(pool(loaded, 4, 32, guessing(partial(Known, plain.texts, 3))), *made)
    assert all(sum(job.finish[4:6]) > 9 for job in made[2:])


@pytest.mark.parametrize("what", ("begin", "propose", "see"))
def test_a_draft_that_fails(
    loaded: Any, plain: Plain, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends the text's drafts, and is told once."""

    class Broken(Lookup):
        hidden = SimpleNamespace(rows=None)

        def see(self, start: int, hidden: torch.Tensor) -> None: ...

    def fails(self: Any, *_: Any) -> Any:
        raise RuntimeError("no draft")

    found = guessing(Broken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Broken, what, fails)
        if what == "see":
            patch.setattr(Broken.hidden, "rows", torch.zeros(1, 99, 8))
        check(plain, 1, 32, loaded, found)
    assert 0 < sum("a draft failed" in record.message for record in caplog.records) <= 5
    assert len(found._idle) == ROWS // 2


def test_in_a_session_alone(tmp_path: Path) -> None:
    """Where answers share no steps, what was drafted is counted, too."""
    model, tokenizer = endless("llama", tmp_path)
    set_cache([model], "q8_0")
    session = Session(model, tokenizer, cache="q8_0", draft="lookup")
    session.pace, made = Fixed(3), [Asked([3, 4, 5] * 9, NEW, 0) for _ in range(2)]
    for job in made:
        run(Single(session), job)
    finish = made[1].finish
    assert finish.right_guesses + finish.wrong_guesses == session.pace.drafted // 2 > 0
    assert finish.right_guesses == session.pace.accepted // 2


def test_steps_that_are_saved(loaded: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each right guess is a step less."""
    batch = pool(loaded, 1, 32, guessing(partial(Known, plain.texts, 5)))
    (job,), steps, forward = jobs(1), list[int](), batch._forward

    def seen(ids: list[list[int]], *given: Any) -> Any:
        steps.append(len(ids[0]))
        return forward(ids, *given)

    monkeypatch.setattr(batch, "_forward", seen)
    answered(batch, job)
    finish = job.finish
    assert len(steps) == NEW - finish.right_guesses and max(steps[1:]) == 4
    assert finish.right_guesses + finish.wrong_guesses == sum(steps[1:]) - len(steps[1:])


@pytest.mark.parametrize("what", ("cancelled", "fails", "one fails"))
def test_a_step_of_guesses_that_does_not_end(loaded: Any, plain: Plain, what: str) -> None:
    """No page is lost, and the next answer is right."""
    batch = pool(loaded, 2, 32, guessing(partial(Known, plain.texts, 2)))
    first, second = jobs(2)
    batch.take(first)
    batch.take(second)
    forward, choose = batch._forward, batch._goes_on

    def broken(ids: list[list[int]], *given: Any) -> Any:
        logits = forward(ids, *given)
        if len(ids) == 2 and len(ids[0]) > 1:
            batch._forward = forward  # type: ignore[method-assign]
            if what == "fails":
                raise MemoryError
            if what == "cancelled":
                first.is_cancelled = True
            else:
                logits[0, 1] = torch.nan
                first.options.form = None
                batch._answers[0].chooser.choose = refuses  # type: ignore[method-assign]
        return logits

    def refuses(*_: Any) -> int:
        raise RuntimeError("no token")

    batch._forward = broken  # type: ignore[method-assign]
    with torch.inference_mode():
        while batch.is_busy():
            try:
                batch.step()
            except MemoryError as error:
                batch.fail(error)
    assert batch._forward == forward and batch._goes_on == choose
    assert batch.cache.pages.available == 32
    alone = plain.jobs[:2]
    if what == "fails":
        assert all(isinstance(job.told[-1], MemoryError) for job in (first, second))
    else:
        assert second.texts == alone[1].texts
        assert not any(isinstance(one, Finish) for one in first.told)
    again = jobs(2)
    answered(batch, *again)
    assert [job.texts for job in again] == [job.texts for job in alone]


def test_usage(tiny: Served) -> None:
    body = {"prompt": [3, 4, 5] * 30, "temperature": 0, "max_tokens": 40}
    usage = tiny.ask("/v1/completions", body | {"logit_bias": {"9": 100}})[2]["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert usage["completion_tokens"] == 40
