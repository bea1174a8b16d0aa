"""How a process of `metalmm doctor` tells the other what it does: JSON lines on its stdout.

{"start": name} before a step, {"text": …, "ok": …} after it, {} when all are done. What libraries
print goes to stderr. Importing this module does not import torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """The end of a step: its line, whether all is well, and what follows.

    "go on"; "anew": go on in another process, for this one may be in no state to do so; "stop".
    """

    text: str
    ok: bool = True
    then: Literal["go on", "anew", "stop"] = "go on"


Step = tuple[str, Callable[[], Outcome]]


def serve(given: Iterable[Step], skip: int) -> None:
    """Performs the steps but the first `skip`, announcing each on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1)

    def say(**message: object) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    for i, (name, run) in enumerate(given):
        if i < skip:
            continue
        say(start=name)
        outcome = run()
        say(text=outcome.text, ok=outcome.ok)
        if outcome.then == "anew":
            return
        if outcome.then == "stop":
            break
    say()
