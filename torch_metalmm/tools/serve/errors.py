"""Errors that a request is refused with, in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer of this status instead of what was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """param: the field of the request that is wrong. retry_after: in seconds."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers: dict[str, str] = (
            {} if retry_after is None else {"Retry-After": str(retry_after)}
        )

    def body(self) -> dict[str, Any]:
        """As Unicode, which what it quotes need not be."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": _unicode(str(self)),
                "type": _KINDS.get(self.status, kind),
                "param": None if self.param is None else _unicode(self.param),
                "code": self.code,
            }
        }

    def named(self, names: Mapping[str, str]) -> ApiError:
        """This error for the field the client sent. names: {a field: the client's name of it}."""
        if (name := names.get(self.param or "")) is None:
            return self
        said = str(self).replace(f"{self.param}:", f"{name}:", 1)
        found = ApiError(self.status, said, name, self.code)
        found.headers = self.headers
        return found


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """A block whose ApiErrors are raised as named(names)."""
    try:
        yield
    except ApiError as error:
        raise error.named(names) from None


def wrong(field: str, what: str, code: str | None = None) -> ApiError:
    """The error of a field of a request."""
    return ApiError(400, f"{field}: {what}", field, code)


def unsupported(field: str, what: str) -> ApiError:
    return wrong(field, what, "unsupported")


def too_long(field: str, what: str) -> ApiError:
    return wrong(field, what, "context_length_exceeded")


def _unicode(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
