"""A model that answers chats, and keeps what it has read from one answer to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...hf.drafts import Drafter, Pace, Sees
from ...models.cache_argument import cache_in, cache_of_generate
from ..sequence import Sequence, context_of, room_behind
from ..writing import Options, Writing, end_tokens, never
from .template import Template

Message = dict[str, Any]


class Session:
    """Answers of one model. Only tokens that differ from those of the answer before are computed.

    Its sequence stays between answers.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        options: Options | None = None,
        template: Template | None = None,
        cache: str | None = None,
        draft: Any = None,
    ) -> None:
        """cache: the format of a PackedCache, whose attention the model has. draft: "lookup", an
        MtpHead or (model, tokenizer), what proposes tokens, which the model accepts or not.
        ValueError: none can be proposed."""
        self.model, self.tokenizer, self.options = model, tokenizer, options or Options()
        self.template, self.draft = template, draft
        self.sequence = Sequence(model, cache)
        self._drafter, self.pace = self._own_drafter(), Pace()
        self.prompt = ""  # the text that is, or was, answered
        self._last: tuple[str, list[int]] = "", []  # the last prompt and answer, as text and tokens
        self._end_tokens = end_tokens(model)

    @property
    def context(self) -> int | None:
        """How many tokens a prompt and its answer may have together; None: no limit is known."""
        return context_of(self.model, self.options.context)

    def forget(self) -> None:
        """Keep nothing of the texts that were answered."""
        self.sequence.forget()
        self._drafter = self._own_drafter()

    # ---- prompts

    def prompt_of(
        self, messages: list[Message], tools: list[Message] | None = None
    ) -> tuple[str, list[int]]:
        """As text and tokens. ValueError: the chat template fails, or there is none."""
        if self.template is None:
            raise ValueError("the model has no chat template")
        prompt = self.template.render(messages, tools)
        return prompt, self._encode(prompt)

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
        is_over: Callable[[], bool] = never,
    ) -> Writing:
        """The assistant's next message, shown piece by piece.

        is_over: asked before each part of a prompt and each token, whether the answer ends there.
        ValueError: the chat template fails, or the prompt leaves no room in the context.
        """
        return self.go_on(*self.prompt_of(messages, tools), show, is_over)

    def complete(self, text: str, show: Callable[[str], object]) -> Writing:
        """How the text goes on, without a chat template. ValueError: as answer()."""
        return self.go_on(text, list(self.tokenizer(text, verbose=False).input_ids), show)

    def go_on(
        self,
        prompt: str,
        ids: list[int],
        show: Callable[[str], object],
        is_over: Callable[[], bool] = never,
    ) -> Writing:
        """The answer to the prompt, whose tokens are `ids`. is_over, ValueError: as answer()'s."""
        if not ids:
            raise ValueError("prompt: no tokens")
        options = self.options
        room = room_behind("prompt", len(ids), self.context, options.max_new_tokens)
        options = replace(options, max_new_tokens=room)
        self.prompt = prompt
        answer = Writing(self.model, self.tokenizer, ids, options, show, is_over)
        drafted, right = self.pace.drafted, self.pace.accepted
        kept = self.sequence.reuse(ids)
        try:
            with torch.inference_mode():
                self._prefill(answer)
                if not answer.reason():
                    self._generate(answer)
            reason = answer.reason() or "length"
        except KeyboardInterrupt:  # in the middle of a layer, whose entries may be half there
            self.sequence.forget()
            reason = "interrupted"
        except BaseException:
            self.sequence.forget()
            raise
        right = self.pace.accepted - right
        answer.finish(reason, kept, right, self.pace.drafted - drafted - right)
        self._remember(prompt, ids, answer.new)
        return answer

    def _prefill(self, answer: Writing) -> None:
        """Read all but the last tokens, which generate() reads, up to where the answer is over."""
        ids = answer.tokens
        sees = self._drafter if isinstance(self._drafter, Sees) else None
        if sees is not None:
            sees.begin(ids)
        start = len(self.sequence.tokens)
        while not answer.reason() and self.sequence.read_on(ids):
            if sees is not None and sees.hidden.rows is not None:
                sees.see(start, sees.hidden.rows)
            start = len(self.sequence.tokens)

    def _generate(self, answer: Writing) -> None:
        from transformers import StoppingCriteriaList

        from ...hf.decoding import decode, why_inexact

        def is_over(input_ids: Tensor, _: Any, **__: Any) -> Tensor:
            over = bool(answer.reason())
            return torch.full((len(input_ids),), over, device=input_ids.device)

        prompt = torch.tensor([answer.tokens], device=self.model.device)
        pads = (self.tokenizer.pad_token_id, *self._end_tokens, 0)
        options = _arguments(self.options)
        if self.sequence.keeps:
            # The model's generation config is overruled: without use_cache each step would append
            # the whole sequence to the cache, and a second kind of cache is refused.
            options |= {cache_of_generate(): self.sequence.cache, "use_cache": True}
            options["cache_implementation"] = None
        own = self.sequence.keeps and (self.draft is None or self._drafter is not None)
        if own:
            how: dict[str, Any] = {}
            if self._drafter is not None:
                exact = not why_inexact(self.model, self.sequence.cache)
                how = {"draft": self._drafter, "exact": exact, "pace": self.pace}
            options["custom_generate"] = partial(decode, streamer=answer, keeps_last=True, **how)
        else:
            options["streamer"], answer.is_prompt_next = answer, True
        with nullcontext() if own else self._assisted(options):
            self.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=answer.left(),
                stopping_criteria=StoppingCriteriaList([is_over]),
                pad_token_id=next(i for i in pads if i is not None),
                **options,
            )
        self.sequence.advanced(answer.tokens)

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
            if hasattr(layer, "record_past"):  # set by assisted decoding; it keeps all entries
                layer.record_past = False

    # ---- what stays

    def _remember(self, prompt: str, ids: list[int], new: list[int]) -> None:
        while new and new[-1] in self._end_tokens:  # which the template writes, too
            new = new[:-1]
        answer = self.tokenizer.decode(new, clean_up_tokenization_spaces=False) if new else ""
        self._last = prompt + answer, ids + new


def _arguments(options: Options) -> dict[str, Any]:
    """The options as arguments of generate()."""
    given: dict[str, Any] = {"do_sample": options.temperature > 0}
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    if own := options.own_processors():
        from transformers import LogitsProcessorList

        given["logits_processor"] = LogitsProcessorList(own)
    if not options.temperature:
        return given | {"temperature": None, "top_p": None, "top_k": None, "min_p": None}
    given["temperature"] = options.temperature
    # transformers' own default is the 50 most likely tokens.
    return given | {"top_p": options.top_p, "top_k": options.top_k or 0, "min_p": options.min_p}


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


def _only_new_tokens(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The first forward of assisted decoding gets the whole prompt, also where a cache has most."""
    new = kwargs["input_ids"].shape[1] - int(cache_in(kwargs).get_seq_length())
    kwargs["input_ids"] = kwargs["input_ids"][:, -new:]
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = kwargs["position_ids"][..., -new:]
    return args, kwargs
