"""Answers in pieces: stop strings, thoughts and calls, wherever the pieces are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_metalmm.tools.marks import (
    CALL,
    TEXT,
    THOUGHT,
    Splitter,
    Stops,
    assistant_message,
    calls_of,
    parts,
)

CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces, as tokens come."""
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


places = st.lists(st.integers(0, 40), max_size=8)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1), max_size=3),
    at=places,
)
def test_text_up_to_the_first_stop(text: str, stops: list[str], at: list[int]) -> None:
    """Whatever the pieces: all before the place where the first stop string is complete."""
    reader = Stops(stops)
    told = "".join(reader.feed(piece) for piece in cut(text, at)) + reader.end()
    begins = [text.find(stop) for stop in stops if stop in text]
    assert bool(reader.found) == bool(begins)
    if not begins:
        assert told == text
        return
    # Of two that overlap, the pieces decide which is complete first; none is ever told whole.
    assert text.startswith(told) and len(told) in {text.find(s) for s in stops if s in text}
    assert not any(stop in told for stop in stops)


@given(at=places)
def test_an_answer_in_parts(at: list[int]) -> None:
    text = f"<think>2 < 3</think>so {CALLED}<b> <too"
    splitter = Splitter()
    found = [part for piece in cut(text, at) for part in splitter.feed(piece)] + [*splitter.end()]
    merged: list[tuple[str, str]] = []
    for kind, part in found:
        if merged and merged[-1][0] == kind:
            merged[-1] = kind, merged[-1][1] + part
        else:
            merged.append((kind, part))
    call = '\n{"name": "f", "arguments": {"x": 1}}\n'
    assert merged == [(THOUGHT, "2 < 3"), (TEXT, "so "), (CALL, call), (TEXT, "<b> <too")]


def test_a_prompt_may_open_the_thought() -> None:
    assert parts("a</think>b", "<|im_start|>assistant\n<think>\n") == [(THOUGHT, "a"), (TEXT, "b")]
    assert parts("a</think>b", "assistant\n") == [(TEXT, "a</think>b")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "f", "arguments": {"x": 1}}', [{"name": "f", "arguments": {"x": 1}}]),
        ('[{"name": "f", "parameters": {}}]', [{"name": "f", "arguments": {}}]),
        *((text, None) for text in ("f(1)", "[]", "3", '{"name": 1, "arguments": {}}', '{"name"')),
        ("[" * 100_000, None),
    ],
)
def test_calls(text: str, found: object) -> None:
    assert calls_of(text) == found


def test_the_message_of_an_answer() -> None:
    """Calls become fields where the template knows these, and stay text elsewhere."""
    text = f"Well.\n{CALLED}"
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    plain = {"role": "assistant", "content": text}
    assert assistant_message(text, takes_calls=False) == plain
    call["id"] = "000007000"
    wanted = {"role": "assistant", "content": "Well.", "tool_calls": [call]}
    assert assistant_message(text, takes_calls=True, place=7) == wanted
    broken = "<tool_call>f(1)</tool_call>"
    assert assistant_message(broken, takes_calls=True)["content"] == broken


def test_a_mark_within_a_thought_is_no_call() -> None:
    """The thought stays whole, whether the answer or the prompt opened it."""
    thought = "<tool_call> is the mark, [TOOL_CALLS] another's.</think>\n\nWell."
    for opened, prompt in ((f"<think>{thought}", ""), (thought, "assistant\n<think>\n")):
        message = assistant_message(f"{opened}\n{CALLED}", True, prompt)
        assert message["content"] == opened and len(message["tool_calls"]) == 1
