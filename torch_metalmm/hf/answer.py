"""The tokens of an answer: chosen on the device, copied to the host, kept there."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as of
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

# Processors that look at the scores alone, not at the tokens before.
_OF_SCORES = {
    *(of.TemperatureLogitsWarper, of.TopKLogitsWarper, of.TopPLogitsWarper, of.MinPLogitsWarper),
    *(of.TypicalLogitsWarper, of.EpsilonLogitsWarper, of.EtaLogitsWarper),
    *(of.LogitNormalization, of.InfNanRemoveLogitsProcessor),
}


class Token:
    """chosen: int64 [B]. weight: of each what its draw was decided by, NaN or Inf where the logits
    are; None: the likeliest was taken."""

    def __init__(self, chosen: Tensor, weight: Tensor | None) -> None:
        self.chosen, self.weight = chosen, weight


class Chooser:
    """The next token of logits, by generate()'s processors, all on the device."""

    def __init__(self, processors: Any, draws: bool, ids: Tensor, answer: Answer) -> None:
        self._processors, self._draws, self._answer = processors, draws, answer
        self._ids = ids
        reads = any(type(p) not in _OF_SCORES for p in processors)
        self._tokens = _Growing(ids) if reads else None

    def choose(self, logits: Tensor) -> Token:
        """logits: [B, vocabulary]."""
        token = self._chosen(logits)
        token.chosen = self._answer.padded(token.chosen)
        if self._tokens is not None:
            self._tokens.append(token.chosen)
        return token

    def of_rows(self, logits: Tensor) -> Generator[Token]:
        """The tokens behind each row of logits [1, rows, vocabulary], as far as they are asked for:
        a processor may read those before."""
        if self._tokens is not None or (self._draws and not _draws_ahead(logits.device)):
            for row in range(logits.shape[1]):
                yield self.choose(logits[:, row])
        elif self._draws:
            yield from self._drawn(logits)
        else:
            chosen = Copied(self._chosen(logits[0])).read()
            for row in range(len(chosen)):
                yield Token(chosen[row : row + 1], None)

    def _drawn(self, logits: Tensor) -> Generator[Token]:
        """All rows are drawn before the host waits; once no more are asked for the generator goes
        back to where the last of them has left it."""
        device, tokens, states = logits.device, list[Token](), list[Tensor]()
        for row in range(logits.shape[1]):
            tokens.append(self._chosen(logits[:, row]))
            states.append(_generator_state(device))
        weights = [t.weight for t in tokens if t.weight is not None]
        all_rows = Token(torch.cat([t.chosen for t in tokens]), torch.cat(weights))
        chosen, weight = Copied(all_rows).on_host()
        asked = 0
        try:
            for asked in range(len(tokens)):
                yield Token(chosen[asked : asked + 1], weight[asked : asked + 1])
        finally:
            _generator_state(device, states[asked])

    def _chosen(self, logits: Tensor) -> Token:
        before = self._ids if self._tokens is None else self._tokens.all()
        if not (self._processors or self._draws):
            return Token(logits.argmax(-1), None)
        scores: Tensor = self._processors(before, logits.float())
        if not self._draws:
            return Token(scores.argmax(-1), None)
        # torch.multinomial of one sample, with its generator and by its formula, but for its look
        # at the shares, for which the host waits: shares over draws of an exponential distribution.
        shares = scores.softmax(-1)
        weight, chosen = (shares / torch.empty_like(shares).exponential_(1)).max(-1)
        return Token(chosen, weight)


def _draws_ahead(device: torch.device) -> bool:
    """Whether rows are drawn that may not be asked for: on a CPU no draw is saved a wait."""
    return device.type != "cpu"


def _generator_state(device: torch.device, state: Tensor | None = None) -> Tensor:
    """The state of the device's default generator, which gets `state` where there is one."""
    module: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)
    which = (device,) if device.type == "cuda" else ()
    if state is not None:
        module.set_rng_state(state, *which)
        return state
    found: Tensor = module.get_rng_state(*which)
    return found


def on_device(tokens: list[int], device: torch.device) -> Tensor:
    """int64 [n]; where CUDA has pinned memory the host does not wait for what is queued."""
    is_pinned = device.type == "cuda"
    held = torch.tensor(tokens, pin_memory=is_pinned)
    return held.to(device, non_blocking=is_pinned)


class Copied:
    """A token that is copied to the host while the device goes on."""

    def __init__(self, token: Token) -> None:
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

    def on_host(self) -> list[Tensor]:
        """The chosen tokens and, if they were drawn, their weights."""
        if self._event is not None:
            self._event.synchronize()
        return self._parts

    def read(self) -> Tensor:
        """int64 [B]. RuntimeError: drawn from logits that are NaN or infinite."""
        self.on_host()
        if len(self._parts) > 1 and not bool(self._parts[1].isfinite().all()):
            raise RuntimeError("logits: NaN or Inf; no token can be drawn from them")
        return self._parts[0]


class Answer:
    """The tokens on the host, and whether they are all."""

    def __init__(self, ids: Tensor, criteria: Any, config: Any, streamer: Any) -> None:
        self._device, self._streamer, self._criteria = ids.device, streamer, criteria
        self._tokens = _Growing(ids.cpu())
        self._is_open = torch.ones(len(ids), dtype=torch.bool)
        self._opened: Tensor | None = None  # this on the device, once a sequence is over
        lengths = [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)]
        self._most = min(lengths, default=None)
        self._last = _last_tokens(criteria) if len(ids) == 1 else None
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
        if self._last is not None:
            is_full = self._most is not None and self._tokens.count >= self._most
            return is_full or int(token) in self._last
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


def _last_tokens(criteria: Any) -> frozenset[int] | None:
    """The tokens that end an answer, where these and its length alone do: asked without a tensor,
    1 us in place of 20 a token. None: the criteria are to be asked."""
    found: list[int] = []
    for each in criteria:
        if type(each) is EosTokenCriteria:
            found += each.eos_token_id.flatten().tolist()
        elif type(each) is not MaxLengthCriteria or _warns(each):
            return None
    return frozenset(found)


def _warns(criterion: Any) -> bool:
    """Whether a length is allowed of which transformers says that the model was not made for it."""
    most = criterion.max_position_embeddings
    return most is not None and criterion.max_length > most


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
