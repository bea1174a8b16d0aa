"""The process that runs a chat template: a line of JSON in, a line of JSON out. See template.py."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any


def main(seconds: int) -> None:
    """Answer requests until standard input ends. A request may take that long at most."""
    from transformers.utils.chat_template_utils import render_jinja_template

    print(flush=True)  # ready
    for line in sys.stdin:
        signal.alarm(seconds)  # whose default action ends the process, should the parent be gone
        print(json.dumps(_rendered(render_jinja_template, json.loads(line))), flush=True)
        signal.alarm(0)


def _rendered(render: Any, request: dict[str, Any]) -> dict[str, str]:
    try:
        texts, _ = render(
            conversations=[request["messages"]],
            tools=request["tools"],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["variables"],
        )
    except Exception as error:  # a template is a program of the file's, and raises what it likes
        return {"error": " ".join(str(error).split()) or type(error).__name__}
    return {"text": texts[0]}
