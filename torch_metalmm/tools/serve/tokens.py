"""Texts of requests as tokens: one text at a time, and none that must have too many.

A text of 4 MiB takes seconds and a gigabyte, of which malloc keeps most for the thread.
"""

from __future__ import annotations

import ctypes
import json
import threading
from typing import Any, NamedTuple

from .errors import too_long, wrong

LARGE = 1 << 16  # bytes of a text or a body, after which memory is given back


class Tokens:
    """The tokens of texts, for one model and tokenizer; used from any thread."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # How many tokens the model knows; its tokenizer may have more.
        self._known = int(model.config.get_text_config(decoder=True).vocab_size)
        self._bound = bound_of(tokenizer)
        self._lock = threading.Lock()
        # At a text's begin some tokens have no space.
        self._letter = list(tokenizer("a", add_special_tokens=False).input_ids)

    def of(self, text: str, name: str, most: int | None, **options: Any) -> list[int]:
        """The tokens of the text in the field `name`, of which no more than `most` are of use.

        ApiError 400: the text is no Unicode, has a token that the model does not know, or so many
        bytes that they are more than `most` tokens, before they are made.
        """
        try:
            encoded = text.encode()
        except UnicodeError:  # a lone surrogate
            raise wrong(name, "the text has half a surrogate pair") from None
        if most is not None and self._bound is not None and self._bound.exceeds(encoded, most):
            raise too_long(name, f"{len(encoded)} bytes, which are more than {most} tokens")
        with self._lock:
            try:
                ids = list(self._tokenizer(text, verbose=False, **options).input_ids)
            finally:
                if len(encoded) > LARGE:
                    give_memory_back()
        return self.checked(ids, name)

    def spelled(self, token: int) -> str:
        """The text that the token adds to a text."""
        before = self._tokenizer.decode(self._letter, clean_up_tokenization_spaces=False)
        both = self._tokenizer.decode([*self._letter, token], clean_up_tokenization_spaces=False)
        return str(both[len(before) :])

    def checked(self, ids: list[int], name: str) -> list[int]:
        """ApiError 400: one of them is no token of the model; a text may have such, too."""
        for token in ids:
            if not 0 <= token < self._known:
                raise wrong(name, f"token {token}; must be from 0 to {self._known - 1}")
        return ids


class Bound(NamedTuple):
    """A lower bound of the number of a text's tokens."""

    longest: int  # the most bytes of a text that one token stands for
    dropped: bytes  # the bytes that no token stands for

    def exceeds(self, text: bytes, most: int) -> bool:
        """Whether the text is more than so many tokens."""
        if len(text) <= most * self.longest:
            return False
        return len(text.translate(None, self.dropped)) > most * self.longest


def bound_of(tokenizer: Any) -> Bound | None:
    """None: no bound is known.

    There is one where tokens stand for bytes, so that no run of them becomes one unknown word, and
    where no normalizer makes a text shorter.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    said, added = json.loads(backend.to_str()), tokenizer.added_tokens_decoder.values()
    model = said["model"]
    if any(token.lstrip or token.rstrip for token in added):  # these tokens take spaces
        return None
    if model["type"] != "BPE" or not _grows(said["normalizer"]):
        return None
    words, dropped = model["vocab"].keys(), b""
    if model["byte_fallback"] and {f"<0x{i:02X}>" for i in range(256)} <= words:
        lengths = [len(word.encode()) for word in words]
    elif "ByteLevel" in json.dumps(said["pre_tokenizer"]) and model["unk_token"] is None:
        lengths = [len(word) for word in words]
        dropped = bytes(byte for byte, letter in _letters().items() if letter not in words)
    else:
        return None
    return Bound(max(*lengths, *(len(token.content.encode()) for token in added), 1), dropped)


def _letters() -> dict[int, str]:
    """The letters that byte-level tokenizers write for each byte that UTF-8 has."""
    from tokenizers.pre_tokenizers import ByteLevel

    codes = [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]
    text = "".join(map(chr, codes))
    ((word, _),) = ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    return dict(zip(text.encode(), word, strict=True))


def _grows(normalizer: Any) -> bool:
    """Whether what it makes of a text has no fewer bytes."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_grows, normalizer["normalizers"]))
    if normalizer["type"] != "Replace" or "String" not in normalizer["pattern"]:
        return False
    return len(normalizer["pattern"]["String"].encode()) <= len(normalizer["content"].encode())


def give_memory_back() -> None:
    """Let malloc return what is free: glibc keeps it for each thread, macOS for each zone."""
    here = ctypes.CDLL(None)
    if hasattr(here, "malloc_trim"):
        here.malloc_trim(0)
    elif hasattr(here, "malloc_zone_pressure_relief"):
        here.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
