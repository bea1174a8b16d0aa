"""generate()'s loop in which the host reads a token while the device computes the next step.

What transformers' own loop (GenerationMixin._sample, 5.24) does beside the model's forward and the
choice of a token are a dozen small ops on the device: ids joined by cat, flags of the sequences
that are over, inputs cut from all ids. Here only the chosen token and its position lie on the
device; all else is the host's, one step late. On MPS transformers reads late, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from ..models.cache_argument import NAMES, cache_in, with_cache
from ..nn.exact import exact_rows
from .cache import PackedCache
from .caches.hybrid import States, states_of
from .caches.layers import PackedLayer
from .drafts import ROWS, Drafter, Pace, drafter_of

# Modes of generate() that choose one token of each sequence, and those of several.
_ONE_EACH = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
Processors = Callable[[Tensor, Tensor], Tensor]
# Where a model has one of its own, a step is what that says: long rotary factors read all anew.
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
    one: "lookup" (what followed the same tokens before), a model of the same vocabulary, or a
    drafts.Drafter. Each token is chosen as without: a drafted one is kept where it is the one that
    was chosen. exact: a step of several rows has the bits of single ones, so that the tokens are
    those of decoding without drafts, of a seed, too; False: the fastest kernels. pace: what earlier
    answers have shown, and this one will.

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
    answer = _Answer(input_ids, stopping_criteria, config, streamer)
    chooser = _Chooser(logits_processor, bool(config.do_sample), input_ids, answer)
    if draft is not None:
        check_drafts(model, cache, input_ids, exact)
        steps = _Steps(model, cache, unread, model_kwargs)
        drafts = _Drafts(drafter_of(draft, model), pace or Pace(), exact, input_ids)
        drafts.decode(steps, chooser, answer)
        return answer.sequences()
    steps = _Steps(model, cache, unread, model_kwargs)
    is_over = False
    while not is_over:
        token = chooser.choose(steps.logits[:, -1])
        copied = _Copied(token)
        # Of the last token that there is room for no step is needed.
        queued = is_late and not answer.is_last()
        if queued:
            steps.advance(token.chosen)
        is_over = True  # where a criterion or the streamer raises, too
        try:
            is_over = answer.take(copied.read())
        finally:
            if is_over and queued and not keeps_last:
                cache.crop(-1)
        if not (is_over or queued):
            steps.advance(token.chosen)
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


def _is_plain(model: Any, ids: Tensor, config: Any, given: dict[str, Any]) -> bool:
    """Whether a step is a token of each sequence, its position and the cache."""
    if any(getattr(type(model), name) is not getattr(GenerationMixin, name) for name in _OWN):
        return False
    if model.config.is_encoder_decoder or ids.dim() != 2 or ids.shape[1] == 0:
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
    """The tokens that the cache has no rows of; None: it cannot be told which."""
    held = int(cache.get_seq_length())
    if held == 0:
        return ids
    # generate() may be given the new tokens alone: then the mask, which it drops, was longer.
    known = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    return ids[:, held:] if known == ids.shape[1] > held else None


def _can_crop(cache: Any) -> bool:
    """Whether the last row of every layer may be forgotten."""
    return not any(
        hasattr(layer, "recurrent_states")
        or (getattr(layer, "is_sliding", False) and not isinstance(layer, PackedLayer))
        for layer in cache.layers
    )


class _Token:
    """chosen: int64 [B]. weight: of each what its draw was decided by, NaN or Inf where the logits
    are; None: the likeliest was taken."""

    def __init__(self, chosen: Tensor, weight: Tensor | None) -> None:
        self.chosen, self.weight = chosen, weight


class _Chooser:
    """The next token of logits, by generate()'s processors, all on the device."""

    def __init__(self, processors: Any, draws: bool, ids: Tensor, answer: _Answer) -> None:
        self._processors, self._draws, self._answer = processors, draws, answer
        # A processor may read the tokens before; without one they are not kept here.
        self._tokens = _Growing(ids) if len(processors) else None

    def choose(self, logits: Tensor) -> _Token:
        """logits: [B, vocabulary]."""
        scores = logits.float()
        if self._tokens is not None:
            scores = self._processors(self._tokens.all(), scores)
        token = self._chosen(scores)
        token.chosen = self._answer.padded(token.chosen)
        if self._tokens is not None:
            self._tokens.append(token.chosen)
        return token

    def _chosen(self, scores: Tensor) -> _Token:
        if not self._draws:
            return _Token(scores.argmax(-1), None)
        # torch.multinomial of one sample, with its generator and by its formula, but for its look
        # at the shares, for which the host waits: shares over draws of an exponential distribution.
        shares = scores.softmax(-1)
        weight, chosen = (shares / torch.empty_like(shares).exponential_(1)).max(-1)
        return _Token(chosen, weight)


class _Copied:
    """A token that is copied to the host while the device goes on."""

    def __init__(self, token: _Token) -> None:
        self._event: Any = None
        device = token.chosen.device
        parts = [token.chosen] if token.weight is None else [token.chosen, token.weight]
        self._parts = parts
        if device.type == "cpu":
            return
        pinned = device.type == "cuda"
        held = [torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for p in parts]
        self._parts = [h.copy_(p, non_blocking=True) for h, p in zip(held, parts, strict=True)]
        self._event = torch.Event(device=device)
        self._event.record()

    def read(self) -> Tensor:
        """int64 [B]. RuntimeError: drawn from logits that are NaN or infinite."""
        if self._event is not None:
            self._event.synchronize()
        if len(self._parts) > 1 and not bool(self._parts[1].isfinite().all()):
            raise RuntimeError("logits: NaN or Inf; no token can be drawn from them")
        return self._parts[0]


class _Steps:
    """The model's steps on a cache. logits: of the last one, [B, tokens, vocabulary]."""

    def __init__(self, model: Any, cache: Any, ids: Tensor, given: dict[str, Any]) -> None:
        """ids: of the first step."""
        self._model, self._cache = model, cache
        kept = {n: given[n] for n in ("logits_to_keep",) if n in given}
        self._given = {**kept, "use_cache": True, "return_dict": True}
        self._all_logits = {n: 0 for n in kept}  # of each token of a step
        self._tokens = ids  # of the last step
        self._before: States | None = None
        self._positions: Tensor | None = given.get("position_ids")
        if self._positions is not None:
            self._positions = self._positions[:, -ids.shape[1] :].expand(len(ids), -1)
        self.logits = self._forward(ids, {})

    def _forward(self, ids: Tensor, others: dict[str, Any]) -> Tensor:
        if self._positions is not None:
            self._given["position_ids"] = self._positions
        cache = with_cache(self._model, self._cache)
        logits: Tensor = self._model(input_ids=ids, **cache, **self._given | others).logits
        return logits

    def advance(self, tokens: Tensor) -> None:
        """Queue the step of these tokens [B] or [B, S]."""
        tokens = tokens if tokens.dim() == 2 else tokens[:, None]
        if self._positions is not None:
            more = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
            self._positions = self._positions[:, -1:] + more
        self._tokens = tokens
        self.logits = self._forward(tokens, self._all_logits if tokens.shape[1] > 1 else {})

    def may_forget(self) -> None:
        """The next step's last tokens, by forget()."""
        self._before = States(self._cache.layers) if states_of(self._cache.layers) else None

    def forget(self, count: int) -> None:
        """The last so many tokens of the step, of which one stays."""
        if not count:
            return
        if self._positions is not None:
            self._positions = self._positions[:, :-count]
        if self._before is None:
            self._cache.crop(-count)
            return
        self._before.restore()
        for layer in self._cache.layers:
            if isinstance(layer, PackedLayer):
                PackedLayer.crop(layer, -self._tokens.shape[1])
        self._forward(self._tokens[:, :-count], self._all_logits)


class _Drafts:
    """Decoding one text by steps of the last token and of drafted ones."""

    def __init__(self, drafter: Drafter, pace: Pace, exact: bool, ids: Tensor) -> None:
        self._drafter, self._pace, self._exact = drafter, pace, exact
        drafter.begin(ids[0].tolist())

    def decode(self, steps: _Steps, chooser: _Chooser, answer: _Answer) -> None:
        token, is_over = self._take(chooser, answer, steps.logits[:, -1])
        while not is_over:
            begun = time.perf_counter()
            kind, drafted = self._proposed(answer)
            rows = torch.tensor([[token, *drafted]], device=steps.logits.device)
            with exact_rows(self._exact):
                if drafted:
                    steps.may_forget()
                steps.advance(rows)
                accepted = 0
                try:
                    for row in range(len(drafted) + 1):
                        token, is_over = self._take(chooser, answer, steps.logits[:, row])
                        if is_over or row == len(drafted) or token != drafted[row]:
                            break
                        accepted += 1
                finally:
                    steps.forget(len(drafted) - accepted)
            self._pace.took(len(drafted) + 1, time.perf_counter() - begun)
            if drafted and not is_over:
                self._pace.saw(kind, len(drafted), accepted)

    def _take(self, chooser: _Chooser, answer: _Answer, logits: Tensor) -> tuple[int, bool]:
        """(the next token, whether it is the last)."""
        chosen = _Copied(chooser.choose(logits)).read()
        token = int(chosen)
        self._drafter.add(token)
        return token, answer.take(chosen)

    def _proposed(self, answer: _Answer) -> tuple[Any, list[int]]:
        """(the kind of the drafted tokens, those), none of which would be behind the last token."""
        room, kind = answer.room(), self._drafter.kind()
        most = 0 if kind is None else self._pace.count(kind, self._drafter.seconds)
        if room is not None:
            most = min(most, max(m - 1 for m in ROWS if m <= room))
        return kind, self._drafter.propose(most) if most else []


def check_drafts(model: Any, cache: Any, ids: Tensor, exact: bool) -> None:
    """ValueError: steps of drafted tokens cannot be computed, or not exactly."""
    if len(ids) != 1:
        raise ValueError(f"draft: {len(ids)} sequences; drafts are of one")
    if not isinstance(cache, PackedCache) and not _can_crop(cache):
        raise ValueError(
            f"draft: the cache, a {type(cache).__name__}, cannot forget its last rows; a "
            "PackedCache can"
        )
    if exact and (why := why_inexact(model, cache)):
        raise ValueError(f"draft: exact, but {why}; exact=False takes what is fastest")


def why_inexact(model: Any, cache: Any) -> str:
    """Why rows of a step may have other bits than single ones, or ""."""
    if not isinstance(cache, PackedCache):
        return f"the cache is a {type(cache).__name__}, no PackedCache"
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            return f"{name} is a Linear of torch, whose rows depend on their number"
        if getattr(module, "activations", None) is not None:
            return f"{name} rounds its input to {module.activations}"
    return ""


class _Answer:
    """The tokens on the host, and whether they are all."""

    def __init__(self, ids: Tensor, criteria: Any, config: Any, streamer: Any) -> None:
        self._device, self._streamer, self._criteria = ids.device, streamer, criteria
        self._tokens = _Growing(ids.cpu())
        self._is_open = torch.ones(len(ids), dtype=torch.bool)
        self._opened: Tensor | None = None  # this on the device, once a sequence is over
        self._most = criteria.max_length
        ends = any(hasattr(each, "eos_token_id") for each in criteria)
        pad = getattr(config, "_pad_token_tensor", None)
        self._pad = pad.to(ids.device) if ends and pad is not None else None

    def is_last(self) -> bool:
        """Whether the next token is the last that there is room for."""
        return self._most is not None and self._tokens.count + 1 >= self._most

    def take(self, token: Tensor) -> bool:
        """Keep a token of each sequence; whether all of them are over."""
        self._tokens.append(token)
        if self._streamer is not None:
            self._streamer.put(token)
        now = self._is_open & ~self._criteria(self._tokens.all(), None)
        if not torch.equal(now, self._is_open):
            self._is_open, self._opened = now, now.to(self._device, non_blocking=True)
        return not bool(now.any())

    def room(self) -> int | None:
        """How many tokens there is room for; None: no end is known."""
        return None if self._most is None else self._most - self._tokens.count

    def padded(self, token: Tensor) -> Tensor:
        """The next tokens [B] on the device, which of sequences that are over is padding."""
        if self._opened is None or self._pad is None:
            return token
        return torch.where(self._opened, token, self._pad)

    def sequences(self) -> Tensor:
        if self._streamer is not None:
            self._streamer.end()
        return self._tokens.all().to(self._device, copy=True)


class _Growing:
    """Tokens [B, count], whose memory doubles."""

    def __init__(self, ids: Tensor) -> None:
        self.count = ids.shape[1]
        self._memory = torch.cat([ids, torch.zeros_like(ids)], 1)

    def append(self, token: Tensor) -> None:
        if self.count == self._memory.shape[1]:
            self._memory = torch.cat([self._memory, torch.zeros_like(self._memory)], 1)
        self._memory[:, self.count] = token
        self.count += 1

    def all(self) -> Tensor:
        return self._memory[:, : self.count].contiguous()
