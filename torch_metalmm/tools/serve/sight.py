"""Images for a model: its processor makes tokens and tensors of texts with images."""

from __future__ import annotations

import inspect
import logging
import threading
from pathlib import Path
from typing import Any

from ...files.blame import of_machine
from ..sequence import keeps_cache
from .errors import ApiError, unsupported, wrong
from .pictures import MOST, opened
from .tokens import give_memory_back

_LOG = logging.getLogger(__name__)
_WAITING = 4  # requests whose images are read or wait for it, each in a thread that texts need, too


class Sight:
    """The images that one model sees, or, without a processor, why they are refused.

    The images of one request are read at a time: they and what is made of them take 600 MB where
    they have all the pixels that they may have.
    """

    def __init__(self, processor: Any, why: str = "") -> None:
        self._processor, self._why = processor, why
        self._lock, self._places = threading.Lock(), threading.Semaphore(_WAITING)

    def __bool__(self) -> bool:
        return self._processor is not None

    def check(self, urls: list[str]) -> None:
        """ApiError 400: the model sees none, or not so many."""
        if urls and self._processor is None:
            raise unsupported("images", f"no images: {self._why}")
        if len(urls) > MOST:
            raise wrong("images", f"{len(urls)} images; at most {MOST}")

    def read(self, text: str, urls: list[str]) -> dict[str, Any]:
        """The arguments of generate() for the text, in which each image has a place:
        input_ids int64 [1, S] and tensors beside them.

        ApiError 400: the processor takes no such, or as opened(). 429: others wait already.
        """
        if not self._places.acquire(blocking=False):
            raise ApiError(429, "the images of others are read", code="images", retry_after=1)
        try:
            with self._lock:
                return self._made(text, urls)
        finally:
            self._places.release()
            give_memory_back()

    def _made(self, text: str, urls: list[str]) -> dict[str, Any]:
        images = opened(urls)
        try:
            made = self._processor(
                text=[text], images=images, return_tensors="pt", add_special_tokens=False
            )
        except Exception as error:  # each processor has rules of its own
            if of_machine(error):
                raise
            said = " ".join(str(error).split()) or type(error).__name__
            what = f"the model's processor takes no such text and images: {said}"
            raise wrong("images", what) from None
        return dict(made)


def sight_of(model: Any, folder: Path) -> Sight:
    """The Sight of the model that was loaded from the folder or file."""
    from ...files.processor import read_processor

    takes = inspect.signature(model.forward).parameters
    if "pixel_values" not in takes or not keeps_cache(model):
        return Sight(None, "the model sees none")
    try:
        processor = read_processor(folder) if folder.is_dir() else None
    except (ImportError, ValueError, OSError) as error:
        why = " ".join(str(error).split())
        _LOG.warning("images are refused: %s", why)
        return Sight(None, why)
    if processor is None:
        return Sight(None, f"{folder.name} has no preprocessor_config.json")
    return Sight(processor)
