"""generate()'s loop in which the host reads a token while the device computes the next step.

What transformers' own loop (GenerationMixin._sample, 5.24) does beside the model's forward and the
choice of a token are a dozen small ops on the device: ids joined by cat, flags of the sequences
that are over, inputs cut from all ids. Here only the chosen token and its position lie on the
device; all else is the host's, one step late. On MPS transformers reads late, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from ..models.cache_argument import NAMES, cache_in, with_cache
from ..models.mtp import MtpHead
from ..nn.again import noted
from ..nn.exact import MOST, exact_rows
from .answer import Answer, Chooser, Copied, Token
from .cache import PackedCache
from .caches.hybrid import States, crop_entries
from .caches.layers import PackedLayer
from .caches.slots import Numbers
from .drafts import EXPECTED, Drafter, Lookup, Pace, Sees, SmallModel
from .graphs import firsts
from .mtp import Mtp

# Modes of generate() that choose one token of each sequence, and those of several.
_ONE_EACH = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
Processors = Callable[[Tensor, Tensor], Tensor]
# Methods that define a model's steps; those of a model's own may read all tokens anew.
_OWN = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
# Arguments of generate() that this loop knows how to give to a step.
_KNOWN = frozenset((*NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"))


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Processors,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    keeps_last: bool = False,
    reads_late: bool | None = None,
    draft: Any = None,
    exact: bool = True,
    pace: Pace | None = None,
    **model_kwargs: Any,
) -> Any:
    """The sequences, int64 [B, S + new], of `model.generate(..., custom_generate=decode)`.

    input_ids: int64 [B, S]. Tokens are those of transformers' own loop, also of the same seed.
    generate() hands no streamer to a custom_generate: give functools.partial(decode,
    streamer=...), whose put() gets each token, and the prompt by none. Stopping criteria get
    tokens on the CPU, and no scores.

    reads_late: a step is queued before the token that it reads is known to the host; None: where
    the model is not on a CPU. The step behind the last token is forgotten, which caches of
    recurrent layers cannot: with these tokens are read at once. keeps_last: the cache may keep
    that step, whose token is the last one.

    draft: what proposes tokens, up to 7 of which the model then reads in one step with the last
    one: "lookup" (what followed the same tokens before), a model of the same vocabulary, the
    model's own head (load_mtp), or a drafts.Drafter. Each token is chosen as without: a drafted one
    is kept where it is the one that was chosen. exact: a step of several rows has the bits of
    single ones, so that the tokens are those of decoding without drafts, of a seed, too; False: the
    fastest kernels. pace: what earlier answers have shown, and this one will.

    transformers' own loop runs where this one knows too little: padded batches, encoders, images,
    no cache, beams, prompts in chunks, results beside the sequences, models with inputs of a step
    of their own (Phi-3's long factors, vision).

    ValueError: a mode that needs more than generate() hands to a custom_generate: assistants,
    prompt lookup; a streamer of beams; drafts of several sequences, beside a cache that cannot go
    back, or exact where steps of several rows cannot be. RuntimeError: the logits that a token is
    drawn from are NaN or infinite.
    """
    config, cache = generation_config, cache_in(model_kwargs)
    unread = None
    if not synced_gpus and _is_plain(model, input_ids, config, model_kwargs):
        unread = _unread(input_ids, cache, config, model_kwargs.get("attention_mask"))
    if unread is None and draft is not None:
        raise ValueError(
            "draft: drafts are of one text in ids, on a cache, without padding, beams, images or "
            "prompts in chunks"
        )
    if unread is None:
        own, streamed = _own_loop(model, config, streamer)
        given = (logits_processor, stopping_criteria, config, synced_gpus)
        return own(model, input_ids, *given, **streamed, **model_kwargs)
    if reads_late is None:
        reads_late = input_ids.device.type != "cpu"
    is_late = reads_late and (keeps_last or _can_crop(cache))
    answer = Answer(input_ids, stopping_criteria, config, streamer)
    chooser = Chooser(logits_processor, bool(config.do_sample), input_ids, answer)
    drafts = None
    if draft is not None:
        check_drafts(model, cache, input_ids, exact)
        drafts = _Drafts(drafter_of(draft, model), pace or Pace(), exact, input_ids, is_late)
    if isinstance(cache, PackedCache) and (room := answer.room()) is not None:
        cache.expect(input_ids.shape[1] + min(room, EXPECTED))
    steps = _Steps(model, cache, unread, model_kwargs, None if drafts is None else drafts.sees)
    is_over, token = False, None
    while not is_over:
        token = chooser.choose(steps.logits[:, -1]) if token is None else token
        copied = Copied(token)
        # The last token that there is room for needs no step.
        queued = is_late and not answer.is_last() and (drafts is None or drafts.is_resting())
        if queued:
            steps.advance(token.chosen)
        is_over = True  # where a criterion or the streamer raises, too
        try:
            read = copied.read()
            drafted = None if drafts is None else drafts.follow(int(read), answer, queued)
            is_over = answer.take(read)
        finally:
            if is_over and queued and not keeps_last:
                cache.crop(-1)
        if is_over or queued:
            token = None
        elif drafts is not None and drafted is not None:
            token = drafts.verify(drafted, steps, chooser, answer)
            is_over = token is None
        else:
            steps.advance(token.chosen)
            token = None
    return answer.sequences()


def _own_loop(model: Any, config: Any, streamer: Any) -> tuple[Any, dict[str, Any]]:
    """transformers' loop for what generate() was asked for, and its arguments beside the usual."""
    mode = config.get_generation_mode()
    if mode in _ONE_EACH:
        return type(model)._sample, {"streamer": streamer}
    if mode not in _BEAMS or streamer is not None:
        allowed = ", ".join(m.value for m in (*_ONE_EACH, *_BEAMS))
        raise ValueError(
            f"custom_generate: decode; the mode is {mode.value}"
            + (" with a streamer" if streamer is not None else "")
            + f"; allowed: {allowed}, the last two without a streamer"
        )
    return type(model)._beam_search, {}


def _has_own_steps(model: Any) -> bool:
    """Whether a step is more than a token of each sequence, its position and the cache."""
    if any(getattr(type(model), name) is not getattr(GenerationMixin, name) for name in _OWN):
        return True
    return bool(model.config.is_encoder_decoder)


def _is_plain(model: Any, ids: Tensor, config: Any, given: dict[str, Any]) -> bool:
    """Whether a step is a token of each sequence, its position and the cache."""
    if _has_own_steps(model) or ids.dim() != 2 or ids.shape[1] == 0:
        return False
    if config.get_generation_mode() not in _ONE_EACH:
        return False
    if config.return_dict_in_generate or config.prefill_chunk_size:
        return False
    if any(value is not None and name not in _KNOWN for name, value in given.items()):
        return False
    cache = cache_in(given)
    if cache is None or all(getattr(cache, "is_linear", [False])):  # which counts no tokens
        return False
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not bool((mask == 1).all()):
        return False
    return given.get("use_cache") is True and (positions is None or positions.dim() == 2)


def _unread(ids: Tensor, cache: Any, config: Any, mask: Tensor | None) -> Tensor | None:
    """The tokens that the cache has no entries of; None: it cannot be told which."""
    held = int(cache.get_seq_length())
    if held == 0:
        return ids
    # generate() may be given the new tokens alone: then the mask, which it drops, was longer.
    known = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    return ids[:, held:] if known == ids.shape[1] > held else None


def _can_crop(cache: Any) -> bool:
    """Whether the last entry of every layer may be forgotten."""
    return not any(
        hasattr(layer, "recurrent_states")
        or (getattr(layer, "is_sliding", False) and not isinstance(layer, PackedLayer))
        for layer in cache.layers
    )


class _Steps:
    """The model's steps on a cache. logits: of the last one, [B, tokens, vocabulary]."""

    def __init__(
        self, model: Any, cache: Any, ids: Tensor, given: dict[str, Any], sees: Sees | None
    ) -> None:
        """ids: of the first step. sees: who is shown what each step computes."""
        self._model, self._cache, self._sees = model, cache, sees
        kept = {n: given[n] for n in ("logits_to_keep",) if n in given}
        self._given = {**kept, "use_cache": True, "return_dict": True}
        self._all_logits = {n: 0 for n in kept}  # of each token of a step
        self._tokens = ids  # of the last step
        self._before = States()  # the last step that may be forgotten
        self._positions: Tensor | None = given.get("position_ids")
        self._numbers = Numbers()
        self._end: int | None = None  # behind them, where they are those of the cache's entries
        if self._positions is not None:
            self._positions = self._positions[:, -ids.shape[1] :].expand(len(ids), -1)
            held = int(cache.get_seq_length())
            end = held + ids.shape[1]
            if bool((self._positions == self._numbers.part(held, end, ids.device)).all()):
                self._end = end
        self.logits = self._forward(ids, {})

    def _forward(self, ids: Tensor, others: dict[str, Any]) -> Tensor:
        if self._positions is not None:
            self._given["position_ids"] = self._positions
        start = 0 if self._sees is None else int(self._cache.get_seq_length())
        cache = with_cache(self._model, self._cache)
        logits: Tensor = self._model(input_ids=ids, **cache, **self._given | others).logits
        if self._sees is not None and self._sees.hidden.rows is not None:
            self._sees.see(start, self._sees.hidden.rows)
        return logits

    def advance(self, tokens: Tensor, may_forget: bool = False) -> None:
        """Queue the step of these tokens [B] or [B, S], of which forget() may forget the last."""
        tokens = (tokens if tokens.dim() == 2 else tokens[:, None]).to(self.logits.device)
        count = tokens.shape[1]
        if self._end is not None:
            self._end += count
            own = self._numbers.part(self._end - count, self._end, tokens.device)
            self._positions = own.expand(len(tokens), -1)
        elif self._positions is not None:
            more = torch.arange(1, count + 1, device=tokens.device)
            self._positions = self._positions[:, -1:] + more
        self._tokens = tokens
        if may_forget:
            self._before.take(self._cache.layers)
        with noted(self._before.again if may_forget else None):
            self.logits = self._forward(tokens, self._all_logits if count > 1 else {})

    def forget(self, count: int) -> None:
        """The last so many tokens of the step, of which one stays."""
        if not count:
            return
        if self._positions is not None:
            self._positions = self._positions[:, :-count]
        if self._end is not None:
            self._end -= count
        if self._before.again is None:
            self._cache.crop(-count)
            return
        whole = self._before.go_back(self._tokens.shape[1] - count)
        crop_entries(self._cache.layers, count if whole else self._tokens.shape[1])
        if not whole:
            self._forward(self._tokens[:, :-count], self._all_logits)


class _Drafts:
    """Drafts behind the tokens of one text, and the steps that read them."""

    _REST = 2  # tokens without a draft, from which on steps are queued before a token is read

    def __init__(
        self, drafter: Drafter, pace: Pace, exact: bool, ids: Tensor, is_late: bool
    ) -> None:
        """is_late: steps may be queued before a token is read."""
        self._drafter, self._pace, self._exact, self._is_late = drafter, pace, exact, is_late
        self._last, self._idle = 0, 0
        self._kind: Hashable | None = None
        self._rows, self._begun = 0, 0.0  # of the step that is under way; 0: none is timed
        self._firsts = 0
        self.sees = drafter if isinstance(drafter, Sees) else None
        drafter.begin(ids[0].tolist())

    def is_resting(self) -> bool:
        return self._idle >= self._REST

    def follow(self, token: int, answer: Answer, queued: bool) -> Tensor | None:
        """The draft behind the token that a step has brought, int64 [n] or None; no draft holds the
        last token that there is room for. queued: the next step is queued, without a draft."""
        self._timed()
        self._drafter.add(token)
        self._last, self._kind = token, self._drafter.kind()
        room, most = answer.room(), 0
        if self._kind is not None:
            most = self._pace.count(self._kind, MOST if room is None else max(0, room - 2))
        self._idle = 0 if most else self._idle + 1
        # Steps of one row are timed as those without drafts: queued, where that is possible.
        self._rows = 1 if queued or not self._is_late else 0
        return torch.as_tensor(self._drafter.propose(most)) if most and not queued else None

    def _timed(self) -> None:
        """Tell the pace the time of the step that has ended: from one token read to another."""
        now = time.perf_counter()
        if self._rows:
            self._pace.took(self._rows, now - self._begun, firsts.count > self._firsts)
        self._begun, self._rows, self._firsts = now, 0, firsts.count

    def verify(
        self, drafted: Tensor, steps: _Steps, chooser: Chooser, answer: Answer
    ) -> Token | None:
        """One step of the last token and of those: what is chosen behind the right ones, which the
        answer has taken; None: it is over. The host sees them while the device computes the step.
        """
        device, count, right, is_over = steps.logits.device, len(drafted), 0, False
        copied = Copied(Token(drafted, None))
        last = torch.full((1,), self._last, device=device)
        with exact_rows(self._exact):
            steps.advance(torch.cat([last, drafted.to(device)])[None], may_forget=True)
            token: Token | None = None
            tokens = chooser.of_rows(steps.logits)
            try:
                expected = copied.read().tolist()
                for token in tokens:
                    if right == count:
                        break
                    read = Copied(token).read()
                    if int(read) != expected[right]:
                        break
                    self._drafter.add(int(read))
                    is_over = answer.take(read)
                    if is_over:
                        break
                    right += 1
            finally:
                tokens.close()
                steps.forget(count - right)
        self._rows = 1 + count
        self._timed()
        if is_over:
            return None
        self._pace.saw(self._kind, count, right)
        return token


def drafter_of(draft: Any, model: Any) -> Drafter:
    """The Drafter of an argument `draft`: "lookup", a model, an MtpHead, a Drafter. ValueError:
    none of these, or a model of more tokens than the model knows."""
    if draft == "lookup":
        return Lookup()
    if isinstance(draft, MtpHead):
        return Mtp(model, draft)
    if isinstance(draft, nn.Module):
        both: tuple[Any, Any] = draft, model
        own, most = (m.config.get_text_config(decoder=True).vocab_size for m in both)
        if own > most:
            raise ValueError(f"draft: a model of {own} tokens; the model has {most}")
        return SmallModel(draft)
    if isinstance(draft, Drafter):
        return draft
    raise ValueError(
        f'draft: {draft!r}; allowed: "lookup", a model, an MtpHead, a Drafter (hf/drafts.py)'
    )


def check_drafts(model: Any, cache: Any, ids: Tensor, exact: bool) -> None:
    """ValueError: steps of drafted tokens cannot be computed, or not exactly."""
    if len(ids) != 1:
        raise ValueError(f"draft: {len(ids)} sequences; drafts are of one")
    if why := why_undrafted(model, cache):
        raise ValueError(f"draft: {why}")
    if exact and (why := why_inexact(model, cache)):
        raise ValueError(f"draft: exact, but {why}; exact=False takes what is fastest")


def why_undrafted(model: Any, cache: Any) -> str:
    """Why no drafted tokens are read on such a cache, or ""."""
    if _has_own_steps(model):
        return f"a step of {type(model).__name__} has inputs of its own"
    if not isinstance(cache, PackedCache) and not _can_crop(cache):
        kind = type(cache).__name__
        return f"the cache, a {kind}, cannot forget its last tokens; a PackedCache can"
    return ""


def why_inexact(model: Any, cache: Any) -> str:
    """Why rows of a step may have other bits than single ones, or ""."""
    if not isinstance(cache, PackedCache):
        return f"the cache is a {type(cache).__name__}, no PackedCache"
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            return f"{name} is a Linear of torch, whose rows depend on their number"
    return ""
