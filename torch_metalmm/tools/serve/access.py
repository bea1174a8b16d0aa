"""Who may use the server, and which bodies it reads."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import anyio
from starlette.requests import Request

from .errors import ApiError
from .tokens import LARGE

_BODY_SECONDS = 30.0  # to send a body


@dataclass(frozen=True)
class Access:
    owners: dict[bytes, bytes]  # {SHA-256 of a key: whose prompts its own may begin with}; or none
    hosts: list[str]  # names that a request may give the server; none: any
    origins: list[str]  # origins of pages whose scripts may use the server

    def check(self, request: Request, is_open: bool) -> None:
        """Note whose the request is. ApiError 400, 401, 403: it may not.

        is_open: those without a key may.
        """
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
        if self.hosts and host not in self.hosts:
            # A page of another site, whose name leads to this machine, is refused by its name.
            raise ApiError(400, f"Host {host!r} is no name of this server", code="wrong_host")
        origin = request.headers.get("origin")
        if origin is not None and origin not in self.origins:
            message = f"pages of {origin!r} may not use this server, unless --origin names it"
            raise ApiError(403, message, code="wrong_origin")
        if not is_open:
            request.state.owner = self._owner(request)

    def _owner(self, request: Request) -> bytes:
        """By the key, as OpenAI's clients give it, or as Anthropic's."""
        if not self.owners:
            return b""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        keys = [given] if kind.lower() == "bearer" else []
        for key in (*keys, request.headers.get("x-api-key", "")):
            # The time of a comparison of hashes says nothing about a key.
            owner = self.owners.get(hashlib.sha256(key.encode()).digest())
            if owner is not None:
                return owner
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


def _is_from_a_browser(request: Request) -> bool:
    names = request.headers.keys()
    return any(name in ("origin", "referer") or name.startswith("sec-fetch-") for name in names)


async def body_of(request: Request, most: int) -> bytes:
    """ApiError 408, 413, 415: it comes too slowly, has more bytes, is not said to be JSON."""
    # A page of any site may post other types to this machine without being asked; browsers say
    # where a request comes from. Others, as curl -d, say little.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and _is_from_a_browser(request):
        raise ApiError(415, "Content-Type must be application/json")
    body = bytearray()
    try:
        with anyio.fail_after(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    message = f"the body has more than {most} bytes"
                    raise ApiError(413, message, code="body_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body took more than {_BODY_SECONDS:g} s") from None
    request.state.is_large = len(body) > LARGE
    return bytes(body)
