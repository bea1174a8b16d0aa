"""What a model sees: its processor, which makes tokens and tensors of texts with images."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ApiError
from .pictures import opened

if TYPE_CHECKING:
    from PIL.Image import Image

_LOG = logging.getLogger(__name__)


class Sight:
    """Of one model. Without a processor it says why images are refused."""

    def __init__(self, processor: Any, why: str = "") -> None:
        self._processor, self._why = processor, why

    def __bool__(self) -> bool:
        return self._processor is not None

    def images(self, urls: list[str]) -> list[Image]:
        """ApiError 400: the model sees none, or as opened()."""
        if urls and self._processor is None:
            raise ApiError(400, f"messages: images: {self._why}", "messages", "unsupported")
        return opened(urls)

    def read(self, text: str, images: list[Image]) -> dict[str, Any]:
        """What the model's generate() takes of the text, in which each image has a place:
        input_ids int64 [1, S] and tensors beside them. ApiError 400: it takes no such."""
        try:
            made = self._processor(
                text=[text], images=images, return_tensors="pt", add_special_tokens=False
            )
        except Exception as error:  # each processor has rules of its own
            said = " ".join(str(error).split()) or type(error).__name__
            message = f"messages: the model's processor takes no such text and images: {said}"
            raise ApiError(400, message, "messages") from None
        return dict(made)


def sight_of(model: Any, folder: Path) -> Sight:
    """Of the model that was loaded from the folder or file."""
    from ...files.processor import read_processor

    if "pixel_values" not in inspect.signature(model.forward).parameters:
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
