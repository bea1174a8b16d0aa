"""A model that answers chats, and keeps what it has read from one answer to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...hf.drafts import Drafter, Pace, Sees
from ...models.cache_argument import cache_in, cache_of_generate
from ..sequence import Sequence
from .stream import Answer, Stream
from .template import Template

Message = dict[str, Any]


@dataclass
class Options:
    """How tokens are chosen, and how many. None: what the model's generation config says."""

    temperature: float = 0.0  # 0: the most likely token
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    stops: list[str] = field(default_factory=list)
    max_new_tokens: int | None = None  # None: as many as the context has room for
    context: int | None = None  # None: the model's
    form: Callable[[Tensor, Tensor], Tensor] | None = None  # leaves out tokens, for one answer
    bias: Callable[[Tensor, Tensor], Tensor] | None = None  # changes their logits
    scores: Callable[[int, Tensor], object] | None = None  # gets each token, and all logits there

    def own_processors(self) -> list[Callable[[Tensor, Tensor], Tensor]]:
        """The processors that transformers has not."""
        return [one for one in (self.bias, self.form) if one is not None]

    def generation(self) -> dict[str, Any]:
        """The arguments of generate()."""
        given: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        if own := self.own_processors():
            from transformers import LogitsProcessorList

            given["logits_processor"] = LogitsProcessorList(own)
        if not self.temperature:
            return given | {"temperature": None, "top_p": None, "top_k": None, "min_p": None}
        given["temperature"] = self.temperature
        # transformers' own default is the 50 most likely tokens.
        return given | {"top_p": self.top_p, "top_k": self.top_k or 0, "min_p": self.min_p}


class Session:
    """Answers of one model. Only tokens that differ from those of the answer before are computed.

    Its sequence stays between answers.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        options: Options,
        template: Template | None = None,
        cache: str | None = None,
        draft: Any = None,
    ) -> None:
        """cache: the format of a PackedCache, whose attention the model has. draft: "lookup", an
        MtpHead or (model, tokenizer), what proposes tokens, which the model accepts or not.
        ValueError: none can be proposed."""
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.template, self.draft = template, draft
        self.sequence = Sequence(model, cache)
        self._drafter, self.pace = self._own_drafter(), Pace()
        self.prompt = ""  # the text that is, or was, answered
        self._last: tuple[str, list[int]] = "", []  # the last prompt and answer, as text and tokens
        self._stopped = threading.Event()
        self._end_tokens = end_tokens(model)

    @property
    def context(self) -> int | None:
        """How many tokens a prompt and its answer may have together; None: no limit is known."""
        most = context_of(self.model)
        given = self.options.context
        return min(given, most) if given and most else given or most

    def stop(self) -> None:
        """Let the answer that is under way end with the token that is; from a signal handler."""
        self._stopped.set()

    def forget(self) -> None:
        """Keep nothing of the texts that were answered."""
        self.sequence.forget()
        self._drafter = self._own_drafter()

    def resume(self) -> None:
        """Forget a stop() that came when no answer was under way: it is not for the next one."""
        self._stopped.clear()

    # ---- prompts

    def tokens_of(self, messages: list[Message], tools: list[Message] | None = None) -> list[int]:
        """The prompt's tokens. ValueError: the chat template fails, or there is none."""
        if self.template is None:
            raise ValueError("the model has no chat template")
        return self._encode(self.template.render(messages, tools))

    def _encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt; where it goes on from the last answer, that answer's own.

        A text may have several encodings, and the model chose one.
        """
        text, ids = self._last
        if text and prompt.startswith(text):
            rest = self._ids(prompt[len(text) :])
            # Beside such a token the encoding of a text and of its parts are the same.
            if rest and rest[0] in self.tokenizer.added_tokens_decoder:
                return ids + rest
        return self._ids(prompt)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    # ---- answers

    def answer(
        self,
        messages: list[Message],
        show: Callable[[str], object],
        tools: list[Message] | None = None,
    ) -> Answer:
        """The assistant's next message, shown piece by piece.

        ValueError: the chat template fails, or the prompt leaves no room in the context.
        """
        if self.template is None:
            raise ValueError("the model has no chat template")
        prompt = self.template.render(messages, tools)
        return self.go_on(prompt, self._encode(prompt), show)

    def complete(self, text: str, show: Callable[[str], object]) -> Answer:
        """How the text goes on, without a chat template. ValueError: as answer()."""
        return self.go_on(text, list(self.tokenizer(text, verbose=False).input_ids), show)

    def go_on(self, prompt: str, ids: list[int], show: Callable[[str], object]) -> Answer:
        """The answer to the prompt, whose tokens are `ids`. ValueError: as answer()."""
        if not ids:
            raise ValueError("prompt: no tokens")
        room = self._room(len(ids))
        self.prompt = prompt
        stream = Stream(self.tokenizer, self.options.stops, show)
        begun, finish = time.perf_counter(), "length"
        kept = self.sequence.reuse(ids)
        try:
            with torch.inference_mode():
                finish = self._generate(ids, room, stream) if self._prefill(ids) else "interrupted"
        except KeyboardInterrupt:  # in the middle of a layer, whose rows may be half there
            self.sequence.forget()
            finish = "interrupted"
        except BaseException:
            self.sequence.forget()
            raise
        finally:
            self._stopped.clear()
        stream.finish()
        self._remember(prompt, ids, stream.ids)
        return Answer(stream.text, finish, len(ids), kept, len(stream.ids), begun, stream.times)

    def _room(self, count: int) -> int:
        """How many tokens may follow so many. ValueError: none."""
        context = self.context
        if context is None:
            return self.options.max_new_tokens or 1 << 30
        if count >= context:
            raise ValueError(
                f"prompt: {count} tokens; the context has {context}, the answer's included"
            )
        return min(context - count, self.options.max_new_tokens or context)

    def _prefill(self, ids: list[int]) -> bool:
        """Read all but the last tokens, which generate() reads; False: stopped before the end."""
        sees = self._drafter if isinstance(self._drafter, Sees) else None
        if sees is not None:
            sees.begin(ids)
        while not self._stopped.is_set():
            start = len(self.sequence.tokens)
            if not self.sequence.read_on(ids):
                return True
            if sees is not None and sees.hidden.rows is not None:
                sees.see(start, sees.hidden.rows)
        return False

    def _generate(self, ids: list[int], room: int, stream: Stream) -> str:
        """Let the model answer; how it ended."""
        from transformers import StoppingCriteriaList

        from ...hf.decoding import decode, why_inexact

        def is_over(input_ids: Tensor, _: Any, **__: Any) -> Tensor:
            over = self._stopped.is_set() or bool(stream.stops.found)
            return torch.full((len(input_ids),), over, device=input_ids.device)

        prompt = torch.tensor([ids], device=self.model.device)
        pads = (self.tokenizer.pad_token_id, *self._end_tokens, 0)
        options = self.options.generation()
        if self.sequence.keeps:
            # The model's generation config is overruled: without use_cache each step would append
            # the whole sequence to the cache, and a second kind of cache is refused.
            options |= {cache_of_generate(): self.sequence.cache, "use_cache": True}
            options["cache_implementation"] = None
        own = self.sequence.keeps and (self.draft is None or self._drafter is not None)
        if own:
            stream.put(prompt)  # as generate() does
            how: dict[str, Any] = {}
            if self._drafter is not None:
                exact = not why_inexact(self.model, self.sequence.cache)
                how = {"draft": self._drafter, "exact": exact, "pace": self.pace}
            options["custom_generate"] = partial(decode, streamer=stream, keeps_last=True, **how)
        else:
            options["streamer"] = stream
        with nullcontext() if own else self._assisted(options):
            self.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=room,
                stopping_criteria=StoppingCriteriaList([is_over]),
                pad_token_id=next(i for i in pads if i is not None),
                **options,
            )
        self.sequence.advanced(ids + stream.ids)
        if stream.stops.found or (stream.ids and stream.ids[-1] in self._end_tokens):
            return "stop"
        return "interrupted" if self._stopped.is_set() else "length"

    def _own_drafter(self) -> Drafter | None:
        """Our loop's drafter; None: there are none, or transformers' loop takes those of a model:
        it translates other vocabularies, and knows models and caches that ours does not."""
        from ...hf.decoding import why_undrafted

        if self.draft is None:
            return None
        make = drafters(self.draft, self.model, self.tokenizer)
        why = "the model goes on from no cache"
        if self.sequence.keeps:
            why = why_undrafted(self.model, self.sequence.new_cache())
        if why and not isinstance(self.draft, tuple):
            raise ValueError(f"draft: {why}")
        return None if why or make is None else make()

    @contextmanager
    def _assisted(self, options: dict[str, Any]) -> Iterator[None]:
        """Add the draft model to the arguments of generate(), for the time of a call."""
        if self.draft is None:
            yield
            return
        model, tokenizer = self.draft
        options["assistant_model"] = model
        options |= {"tokenizer": self.tokenizer, "assistant_tokenizer": tokenizer}
        if self.sequence.cache is None:
            yield
            return

        def once(*given: Any) -> Any:
            hook.remove()
            return _only_new_tokens(*given)

        hook = self.model.register_forward_pre_hook(once, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
        for layer in self.sequence.cache.layers:
            if hasattr(layer, "record_past"):  # set by assisted decoding; it keeps all rows
                layer.record_past = False

    # ---- what stays

    def _remember(self, prompt: str, ids: list[int], new: list[int]) -> None:
        while new and new[-1] in self._end_tokens:  # which the template writes, too
            new = new[:-1]
        answer = self.tokenizer.decode(new, clean_up_tokenization_spaces=False) if new else ""
        self._last = prompt + answer, ids + new


def drafters(draft: Any, model: Any, tokenizer: Any) -> Callable[[], Drafter] | None:
    """A maker of a text's drafter, by a draft of Session; None: the draft has other tokens, or
    more."""
    from ...hf.decoding import drafter_of

    if isinstance(draft, tuple):
        draft, own = draft
        sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (draft, model)]
        if own.get_vocab() != tokenizer.get_vocab() or sizes[0] > sizes[1]:
            return None
    return partial(drafter_of, draft, model)


def context_of(model: Any) -> int | None:
    """The tokens that the model was made for."""
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def _only_new_tokens(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The first forward of assisted decoding gets the whole prompt, also where a cache has most."""
    new = kwargs["input_ids"].shape[1] - int(cache_in(kwargs).get_seq_length())
    kwargs["input_ids"] = kwargs["input_ids"][:, -new:]
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = kwargs["position_ids"][..., -new:]
    return args, kwargs


def end_tokens(model: Any) -> tuple[int, ...]:
    found = model.generation_config.eos_token_id
    return () if found is None else tuple(found) if isinstance(found, list) else (found,)
