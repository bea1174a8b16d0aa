"""`python -m bench serve`: both ways make the same tokens, and what a client counts is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from measured import records_of

from bench.models import served

pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def started() -> Iterator[served.Server]:
    with served.server("--threads", "1") as server:
        yield server


def test_the_records(
    tmp_path: Path,
    started: served.Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(served, "server", lambda *_: nullcontext(started))
    records = records_of(tmp_path, "serve", "--markdown")
    ways = {r["way"]: r for r in records if r["kind"] == "serve"}
    (together,) = [r for r in records if r["kind"] == "serve-clients"]
    assert set(ways) == {"generate", "serve"}
    for r in ways.values():
        assert r["tokens"] == 8 and r["first_ms"] > 0
        assert 0 < r["tokens_s_q1"] <= r["tokens_s"] <= r["tokens_s_q3"]
    assert together["errors"] == 0 and together["answers"] >= served.CLIENTS
    assert together["resident"] > 100 << 20  # the model alone has 98 MB
    assert "| generate |" in capsys.readouterr().out


def test_an_answer_of_fewer_tokens_is_an_error(started: served.Server) -> None:
    assert served.streamed(started.port, started.name, 3)[0] == 3
    with pytest.raises(RuntimeError, match="tokens; the context has"):
        served.streamed(started.port, started.name, 3, prompt="word " * 9000)


def test_turns_of_conversations(
    tmp_path: Path, started: served.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads what is new, and what lies in no whole page, beside the server or its peer."""
    monkeypatch.setattr(served, "server", lambda *_: nullcontext(started))
    monkeypatch.setattr(served, "NEW", 8)
    records = records_of(tmp_path, "serve", "--turns", "3", "--peer", str(started.port))
    ways = {r["way"]: r for r in records if r["kind"] == "serve-turns"}
    assert set(ways) == {"metalmm", "peer"}
    for r in ways.values():
        assert r["read_second"] == r["read_end"] == 64 + 32
        assert r["tokens"] == 224 + 2 * 64 and r["ratio"] > 0 and r["tokens_s"] > 0
