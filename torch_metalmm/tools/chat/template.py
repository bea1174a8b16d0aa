"""A file's chat template, run where it can neither read files nor run for ever.

A template is a program in Jinja. transformers runs it in Jinja's sandbox, without a loader, so that
it reaches no file and no module; but the sandbox bounds one range() only: nested loops, 9**9**9 and
"a" * 10**10 take all time and memory there are, some of them while the template is compiled. So
it runs in a process of its own, which is ended where it takes too much. That process imports
transformers' templates and no torch, 0.8 s of a core, while the model loads.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

SECONDS = 10.0  # a chat of 100,000 words takes 0.01; a machine may be busy
MEMORY = 512 << 20  # bytes beside those of the process before; a text is held a few times
_START = 120.0  # seconds, to import transformers from a slow disk
_WAIT = 0.02  # between two looks at its memory: at 10 GB/s it takes 200 MB more

# The path of `python -c` begins with the current directory: until it is ours, nothing but the
# interpreter's own sys may be imported.
_CHILD = (
    "import sys; seconds, sys.path[:] = int(sys.argv[1]), sys.argv[2:]; "
    "from torch_metalmm.tools.chat.template import serve; serve(seconds)"
)


class Template:
    """The chat template of a tokenizer. close() ends its process, as the end of ours does."""

    def __init__(self) -> None:
        self.text = ""
        self._variables: dict[str, Any] = {}  # special tokens, beside messages and tools
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def use(self, tokenizer: Any, tools: list[dict[str, Any]] | None = None) -> bool:
        """Be the tokenizer's template; False: it has none.

        ValueError: it has several, and none is the default.
        """
        if not tokenizer.chat_template:
            return False
        self.text = tokenizer.get_chat_template(None, tools)
        self._variables = dict(tokenizer.special_tokens_map)
        return True

    def start(self) -> subprocess.Popen[bytes]:
        """Let the process come up, without waiting for it; render() needs no start."""
        if self._child is not None and self._child.poll() is not None:
            self.close()  # the process ended between two chats' turns: a new one takes its place
        if self._child is None:
            self._is_ready = False
            self._child = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(int(2 * SECONDS)), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )
        return self._child

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of the chat, up to where the assistant's answer begins.

        variables: what the template knows beside those of the tokenizer, which they go before.
        ValueError: the template refuses the messages, fails, or takes more than SECONDS or MEMORY.
        """
        request = {
            "template": self.text,
            "variables": self._variables | (variables or {}),
            "messages": messages,
            "tools": tools,
        }
        try:
            answer = self._answer(self.start(), json.dumps(request).encode() + b"\n")
        except BrokenPipeError:  # which means elsewhere that nobody reads our own output
            self.close()
            raise ValueError("chat template: its process ended") from None
        except BaseException:  # the next request must not get the answer of this one
            self.close()
            raise
        if "error" in answer:
            raise ValueError(f"chat template: {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _answer(self, child: subprocess.Popen[bytes], request: bytes) -> Any:
        if not self._is_ready:
            self._line(child, _START)
            self._is_ready = True
        assert child.stdin is not None
        child.stdin.write(request)
        child.stdin.flush()
        return json.loads(self._line(child, SECONDS))

    def _line(self, child: subprocess.Popen[bytes], seconds: float) -> bytes:
        """The next line of the process. ValueError: why there is none."""
        assert child.stdout is not None
        said, why = b"", f"it takes more than {seconds:g} s"
        end, before = time.monotonic() + seconds, _memory(child.pid)
        with selectors.DefaultSelector() as ready:
            ready.register(child.stdout, selectors.EVENT_READ)
            while time.monotonic() < end:
                if ready.select(_WAIT):
                    piece = os.read(child.stdout.fileno(), 1 << 20)
                    said += piece
                    if said.endswith(b"\n"):
                        return said
                    if not piece:
                        why = "its process ended"
                        break
                if self._is_ready and _memory(child.pid) - before > MEMORY:
                    why = f"it takes more than {MEMORY >> 20} MiB"
                    break
        raise ValueError(f"chat template: {why}; it was stopped")


def _memory(pid: int) -> int:
    """Bytes of the process in memory, 0 if it is gone."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def serve(seconds: int) -> None:
    """The process of a template: a line of JSON in, one out, until standard input ends."""
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
