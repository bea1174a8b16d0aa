"""Images in messages: from what clients of each API send to what a processor takes."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

from .blocks import objects
from .errors import ApiError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST = 32  # of one request
_PIXELS = 1 << 26  # of all its images: 200 MB
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

Object = dict[str, Any]


def content_of(content: Any, kinds: tuple[str, ...], field: str) -> str | list[Object]:
    """A text; where images are among the parts, these: {"type": "text", "text"} and {"type":
    "image", "url"}, in their order. kinds: the types of parts that are texts.

    ApiError 400: it is neither.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in objects(content, field):
        text, url = part.get("text"), _url_of(part)
        if part.get("type") in kinds and isinstance(text, str):
            parts.append({"type": "text", "text": text})
        elif isinstance(url, str):
            parts.append({"type": "image", "url": url})
        else:
            message = f"{field}: parts must be images, or texts of type {', '.join(kinds)}"
            raise ApiError(400, message, field, "unsupported")
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _url_of(part: Object) -> Any:
    """Of an image of OpenAI's chats and responses, of Anthropic's messages; None: it is none."""
    kind, given = part.get("type"), part.get("image_url")
    if kind == "image_url":
        return given.get("url") if isinstance(given, dict) else given
    if kind == "input_image":
        return given
    if kind != "image":
        return None
    source = part.get("source", part)
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return source.get("url") if isinstance(source, dict) else None


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
    image; there are more than MOST, or they have too many pixels.
    """
    if len(urls) > MOST:
        raise ApiError(400, f"messages: {len(urls)} images; at most {MOST}", "messages")
    found: list[Image] = []
    room = _PIXELS
    for url in urls:
        found.append(_opened(url, room))
        room -= found[-1].width * found[-1].height
    return found


def _opened(url: str, room: int) -> Image:
    from PIL import Image, ImageOps

    head, _, data = url.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64")):
        message = "messages: images come as data: URLs in base64; the server fetches none"
        raise ApiError(400, message, "messages", "unsupported")
    try:
        raw = io.BytesIO(base64.b64decode(data, validate=True))
        with Image.open(raw, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > room:
                raise ValueError(f"{width} x {height} pixels; a request's have {_PIXELS} in all")
            upright: Image.Image = ImageOps.exif_transpose(image)
            return upright.convert("RGB")
    except Exception as error:  # Pillow raises what a file makes it raise
        said = str(error).partition("<")[0].strip() or type(error).__name__
        message = f"messages: an image cannot be read as {', '.join(_FORMATS)}: {said}"
        raise ApiError(400, message, "messages") from None
