"""Sessions with `metalmm chat` and `metalmm serve` as docs/chat.md and docs/serve.md show them.

    PYTHONPATH=tests:. .venv/bin/python tests/site/transcripts.py

holds both with the real SmolLM2 and writes them into the pages. Answers are greedy and nowhere
near a tie, so that every machine gives them; what no two runs share is an ellipsis.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import pyte
import support  # noqa: F401  (its modules by their plain names)

# isort: split
from places import ROOT
from terminal import Terminal

WIDTH, HEIGHT = 120, 300  # of the terminal: nothing is wrapped, nothing scrolls away
SIZED = f'stty rows {HEIGHT} cols {WIDTH}; cd "$0"; exec "$@"'
STOP_AFTER = "When sunlight"  # of the answer that Ctrl-C ends
# What is typed: lines of messages and commands.
CHAT = (
    "What is the capital of France?",
    '"""\rWhich of these is a river?\r- Rome\r- the Rhine\r"""',
    "/system Answer in one sentence.",
    "Who wrote Hamlet?",
    "Why is the sky blue?",
    "Thank you. Who wrote Faust?",
    "/save chat.json",
)
TIMED = re.compile(r"[\d.]+(?= (?:s|tokens/s)\b)")
OF_ONE_RUN = re.compile(r'(?<="id": "chatcmpl-)\w+|(?<="id":")[\w-]+|(?<="created":) ?\d+')
SHELL = 'python() { "$0" "$@"; }\n'  # the Python that this runs in
PORT = 8000
SERVE = f"metalmm serve --name smollm2 --port {PORT}"
CLIENTS = (
    f"curl -sN http://127.0.0.1:{PORT}/v1/chat/completions --json "
    """'{"model": "smollm2", "temperature": 0,
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "max_tokens": 2, "stream": true}'""",
    f"curl -s http://127.0.0.1:{PORT}/v1/chat/completions -d "
    """'{"messages": [{"role": "user", "content": "Is it cold in Oslo?"}], "temperature": 0,
  "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "weather",
  "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}},
  "required": ["city"], "additionalProperties": false}}}]}'""",
    f"curl -s http://127.0.0.1:{PORT}/v1/messages -d "
    """'{"max_tokens": 20, "temperature": 0,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]}'""",
    f"""python - <<END
import openai

client = openai.OpenAI(base_url="http://127.0.0.1:{PORT}/v1", api_key="none")
question = {{"role": "user", "content": "What is the capital of France?"}}
for chunk in client.chat.completions.create(
    model="smollm2", messages=[question], temperature=0, stream=True
):
    print(chunk.choices[0].delta.content or "", end="|")
print()

texts = ["a river", "a stream", "an invoice"]
first, *others = [e.embedding for e in client.embeddings.create(model="smollm2", input=texts).data]
print(len(first), *(f"{{sum(a * b for a, b in zip(first, other)):.2f}}" for other in others))
END""",
)


def environment(folder: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": folder}
    env.pop("METALMM_API_KEY", None)
    return env


def chat(folder: str) -> str:
    """What a terminal shows at the end of the chat, whose file is in the folder."""
    command = [sys.executable, "-m", "torch_metalmm", "chat", "--threads", "1"]
    with Terminal(["/bin/sh", "-c", SIZED, folder, *command], environment(folder)) as terminal:
        terminal.expect(r"loaded in .*\n>")
        for typed in CHAT:
            before = len(terminal.text)
            terminal.type(f"{typed}\r")
            if "sky" in typed:
                terminal.expect(STOP_AFTER, before)
                terminal.type("\x03")
            terminal.expect(r"\n[^\n]*(?:tokens/s|message)[^\n]*\n.*>", before)
        terminal.type("/exit\r")
        if terminal.wait():
            raise ValueError(f"the chat failed: {terminal.text}")
    screen = pyte.Screen(WIDTH, HEIGHT)
    pyte.Stream(screen).feed(terminal.raw)
    shown = "\n".join(line.rstrip() for line in screen.display).rstrip()
    return f"$ {' '.join(['metalmm', *command[3:]])}\n{TIMED.sub('…', shown)}"


def serve(folder: str) -> str:
    """What two clients are answered by a server of any port, which is shown as the default."""
    command = [sys.executable, "-m", "torch_metalmm", *SERVE.split()[1:-1], "0"]
    env = environment(folder)
    with Terminal(command, env) as server:
        said = server.expect(r"[^\n]*http://127.0.0.1:(\d+)/v1")
        shown = [f"$ {SERVE} &", said[0]]
        for client in CLIENTS:
            script = SHELL + client.replace(str(PORT), said[1])
            run = subprocess.run(
                ["/bin/sh", "-c", script, sys.executable],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
            )
            if run.returncode or run.stderr:
                raise ValueError(f"{client}\n{run.stderr}")
            shown += [f"$ {client}", *(line for line in run.stdout.splitlines() if line)]
    return OF_ONE_RUN.sub("…", "\n".join(shown).replace(f":{said[1]}/", f":{PORT}/"))


# {page of docs/: what makes its transcript}
PAGES: dict[str, Callable[[str], str]] = {"chat.md": chat, "serve.md": serve}


def place(text: str, page: str) -> tuple[int, int]:
    """Where the transcript of a page begins and ends. ValueError: it has no such marks."""
    begin, end = "<!-- tests/site/transcripts.py -->\n", "\n<!-- end of the transcript -->"
    if begin not in text or end not in text:
        raise ValueError(f"docs/{page}: must have {begin.strip()} and {end.strip()}")
    return text.index(begin) + len(begin), text.index(end)


def committed(page: str) -> str:
    text = (ROOT / "docs" / page).read_text("utf-8")
    block = text[slice(*place(text, page))]
    return "\n".join(line.removeprefix("    ") for line in block.strip("\n").splitlines())


def write(page: str, transcript: str) -> None:
    file = ROOT / "docs" / page
    text = file.read_text("utf-8")
    begin, end = place(text, page)
    block = "\n".join(f"    {line}".rstrip() for line in transcript.splitlines())
    file.write_text(f"{text[:begin]}\n{block}\n{text[end:]}", "utf-8")


if __name__ == "__main__":
    for page, session in PAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            write(page, session(folder))
        sys.stdout.write(f"docs/{page}\n")
