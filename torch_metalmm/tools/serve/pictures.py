"""Images in messages: from what clients of each API send to what a processor takes."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

from .blocks import objects
from .errors import unsupported, wrong

if TYPE_CHECKING:
    from PIL.Image import Image

MOST = 32  # images of one request
_PIXELS = 1 << 26  # pixels of a request's images: 200 MB
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_SCANS = 64  # scans of a JPEG: a progressive one has 10; each costs a walk over all pixels
_KINDS = ("image", "image_url", "input_image")

Object = dict[str, Any]


def content_of(content: Any, kinds: tuple[str, ...], field: str) -> str | list[Object]:
    """A text, or where images are among the parts the parts: {"type": "text", "text"} and {"type":
    "image", "url"}, in their order. kinds: the types of parts that are texts; none: any.

    ApiError 400: the content is neither.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(field, "content must be a text, or a list of parts")
    parts = []
    for part in objects(content, field):
        kind, text = part.get("type"), part.get("text")
        if kind in _KINDS:
            parts.append({"type": "image", "url": _url_of(part, field)})
        elif isinstance(text, str) and (kind in kinds or not kinds):
            parts.append({"type": "text", "text": text})
        else:
            of = f" of type {', '.join(kinds)}" if kinds else ""
            raise unsupported(field, f"parts must be images, or texts{of}")
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _url_of(part: Object, field: str) -> str:
    """The URL of an image in OpenAI's chats and responses, and in Anthropic's messages."""
    given = part.get("image_url", part.get("source", part))
    if isinstance(given, dict):
        data = given.get("data")
        of_data = f"data:;base64,{data}" if isinstance(data, str) else None
        given = of_data if given.get("type") == "base64" else given.get("url")
    if not isinstance(given, str):
        raise unsupported(field, "images come as data: URLs in base64")
    return given


def taken_out(messages: list[Object]) -> tuple[list[Object], list[str]]:
    """(the messages as chat templates read them, the URLs of their images in order)."""
    urls, found = list[str](), []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            urls += [part["url"] for part in content if part["type"] == "image"]
            bare = [{k: v for k, v in part.items() if k != "url"} for part in content]
            message = message | {"content": bare}
        found.append(message)
    return found, urls


def opened(urls: list[str]) -> list[Image]:
    """The images of data: URLs, in RGB and upright.

    ApiError 400: one is at another place, which the server does not visit for a client, or no
    image; they have too many pixels.
    """
    found: list[Image] = []
    room = _PIXELS
    for url in urls:
        found.append(_opened(url, room))
        room -= found[-1].width * found[-1].height
    return found


def _opened(url: str, room: int) -> Image:
    import numpy as np
    from PIL import Image, ImageOps

    head, _, data = url.partition(",")
    head = head.lower()
    if not (head.startswith("data:") and head.endswith(";base64")):
        what = "images come as data: URLs in base64; the server fetches none"
        raise unsupported("images", what)
    try:
        raw = base64.b64decode("".join(data.split()), validate=True)  # some write it in lines
        with Image.open(io.BytesIO(raw), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > room:
                raise ValueError(f"{width} x {height} pixels; a request's have {_PIXELS} in all")
            if image.format == "JPEG" and raw.count(b"\xff\xda") > _SCANS:
                raise ValueError(f"more than {_SCANS} scans")
            upright: Image.Image = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits of grey, which convert() would clip
                grey = np.asarray(upright).clip(0, 65535) >> 8
                upright = Image.fromarray(grey.astype(np.uint8))
            return upright.convert("RGB")
    except MemoryError:  # the server's
        raise
    except Exception as error:  # Pillow raises what a file makes it raise
        said = str(error).partition("<")[0].strip() or type(error).__name__
        formats = ", ".join(_FORMATS)
        raise wrong("images", f"an image cannot be read as {formats}: {said}") from None
