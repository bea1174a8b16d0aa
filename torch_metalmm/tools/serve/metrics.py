"""Counters of a server since it began, as Prometheus reads them."""

from __future__ import annotations

from collections import defaultdict

from ..writing import Finish
from .engine import Engine

_HELP = {
    "requests_total": "requests by route and status",
    "prompt_tokens_total": "tokens of prompts whose answers ended",
    "cached_tokens_total": "those of them that were read for an earlier prompt",
    "generated_tokens_total": "tokens of answers that ended",
    "answers_total": "answers that ended, by reason",
    "first_token_seconds_sum": "from a request's body to the first piece of its answer",
    "first_token_seconds_count": "requests that had a first piece",
}


class Metrics:
    """Counters; of the event loop alone."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, str], float] = defaultdict(float)

    def requested(self, route: str, status: int) -> None:
        """route: one of the server's, so that clients make no names."""
        self._counts["requests_total", f'{{route="{route}",status="{status}"}}'] += 1

    def began(self, seconds: float) -> None:
        self._counts["first_token_seconds_sum", ""] += seconds
        self._counts["first_token_seconds_count", ""] += 1

    def ended(self, finish: Finish) -> None:
        self._counts["prompt_tokens_total", ""] += finish.prompt_tokens
        self._counts["cached_tokens_total", ""] += finish.kept_tokens
        self._counts["generated_tokens_total", ""] += finish.new_tokens
        self._counts["answers_total", f'{{reason="{finish.reason}"}}'] += 1

    def text(self, engine: Engine) -> str:
        lines = []
        for name, help in _HELP.items():
            lines += [f"# HELP metalmm_{name} {help}", f"# TYPE metalmm_{name} counter"]
            found = sorted((k, v) for k, v in self._counts.items() if k[0] == name)
            lines += [f"metalmm_{name}{labels} {value}" for (_, labels), value in found]
        waiting, is_busy = engine.load()
        for name, value, help in (
            ("requests_waiting", waiting, "requests that wait for a place"),
            ("busy", int(is_busy), "whether one is being answered"),
        ):
            lines += [f"# HELP metalmm_{name} {help}", f"# TYPE metalmm_{name} gauge"]
            lines.append(f"metalmm_{name} {value}")
        return "\n".join([*lines, ""])
