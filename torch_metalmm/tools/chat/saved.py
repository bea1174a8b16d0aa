"""A chat in a file: JSON that other programs read, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...files.staging import replaced

_ROLES = ("system", "user", "assistant", "tool")
_MOST = 64 << 20  # bytes


def save(path: Path, model: str, messages: list[dict[str, Any]]) -> None:
    """Write the chat; another chat in the file is replaced at once.

    FileExistsError: the file is something else. OSError: it cannot be written.
    """
    if path.exists():
        try:
            load(path)
        except ValueError:
            raise FileExistsError(f"{path} is no chat; it stays as it is") from None
    text = json.dumps({"model": model, "messages": messages}, ensure_ascii=False, indent=1)
    with replaced(path) as new:
        new.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> list[dict[str, Any]]:
    """The messages of save(), or of a list of messages as OpenAI's API takes it.

    ValueError: the file is no chat. OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_MOST + 1)
    if len(data) > _MOST:
        raise ValueError(f"{path}: more than {_MOST} bytes")
    try:
        given = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    messages = given.get("messages") if isinstance(given, dict) else given
    if not isinstance(messages, list):
        raise ValueError(f'{path} is no chat: it has no list of "messages"')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"{path}: messages[{i}] has no role of {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{path}: messages[{i}]: its content is no text")
        _check_characters(path, i, message)
        if message["role"] == "system" and i:
            raise ValueError(f"{path}: messages[{i}]: the system's message must be the first")
        _check_calls(path, i, message.get("tool_calls"))
    return messages


def _check_characters(path: Path, i: int, message: dict[str, Any]) -> None:
    """JSON can escape half of a surrogate pair, which no tokenizer takes and no file has."""
    try:
        json.dumps(message, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise ValueError(f"{path}: messages[{i}] has {half}, which is no character") from None


def _check_calls(path: Path, i: int, calls: Any) -> None:
    if calls is None:
        return
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{path}: messages[{i}]: tool_calls is no list of functions")
