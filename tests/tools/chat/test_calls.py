"""Calls and their results in a chat; the template of one is as strict as Mistral's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from torch_metalmm.tools.chat import commands, saved
from torch_metalmm.tools.chat.conversation import Conversation
from torch_metalmm.tools.chat.template import Template

# What mistral-common's protocol asks of ids, in Jinja: 9 characters, letters and digits.
STRICT = """
{%- macro check(id) -%}
  {%- if id is not defined or id | length != 9 or id | select("in", "_-. ") | list -%}
    {{ raise_exception("no id of 9 letters and digits") }}
  {%- endif -%}
  {{ id }}
{%- endmacro -%}
{%- for m in messages -%}
  {%- if m.tool_calls is defined -%}
    [TOOL_CALLS]{% for c in m.tool_calls %}{{ c.function.name }}#{{ check(c.id) }};{% endfor %}
  {%- elif m.role == "tool" -%}
    [RESULT]{{ m.content }}#{{ check(m.tool_call_id) }};
  {%- else -%}
    [{{ m.role }}]{{ m.content }}
  {%- endif -%}
{%- endfor -%}
"""
CALLS = '[TOOL_CALLS][{"name": "%s", "arguments": {}}, {"name": "time", "arguments": {}}]'


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    found = Template()
    found.text = STRICT
    found.start()
    yield found
    found.close()


def talk_of(*texts: str, template: Template | None = None) -> tuple[Conversation, list[Any]]:
    """A chat whose answers are these; what its model is asked: messages, or what the template
    makes of them."""
    answers, asked = iter(texts), list[Any]()

    def answer(messages: list[Any], show: Any, tools: Any, is_over: Any) -> Any:
        asked.append(messages if template is None else template.render(messages, tools))
        return SimpleNamespace(text=next(answers), result=SimpleNamespace(reason="stop"))

    session: Any = SimpleNamespace(answer=answer, context=None, template=template, prompt="")
    return Conversation(session, "model"), asked


def test_each_result_is_asked_for_by_name() -> None:
    """The last one is answered."""
    call = '<tool_call>{"name": "%s", "arguments": {"city": "Oslo"}}</tool_call>'
    talk, asked = talk_of(call % "weather" + call % "time", "Cold, and late.")
    talk.ask({"role": "user", "content": "How is Oslo?"}, print)
    assert talk.awaited() == ["weather", "time"]
    said = commands.run("/result -3", talk)
    assert said == "the result of weather; time is awaited, too" and talk.awaited() == ["time"]
    message: Any = commands.run("/result 23:00", talk)
    assert message == {"role": "tool", "name": "time", "content": "23:00"}
    talk.ask(message, print)
    assert [m["content"] for m in asked[1] if m["role"] == "tool"] == ["-3", "23:00"]
    assert talk.awaited() == []
    with pytest.raises(ValueError, match="/result: the last answer asks for no call"):
        commands.run("/result 1", talk)


def test_results_bear_the_ids_of_their_calls(template: Template, tmp_path: Any) -> None:
    """Every turn is rendered, and no id comes twice; a chat that was saved goes on."""
    texts = (CALLS % "weather", "Cold.", CALLS % "tide", "High.")
    talk, prompts = talk_of(*texts, template=template)
    for question in ("How is Oslo?", "And Bergen?"):
        talk.ask({"role": "user", "content": question}, print)
        saved.save(tmp_path / "chat.json", "model", talk.everything())
        talk.set(saved.load(tmp_path / "chat.json"))
        commands.run("/result one", talk)
        message = commands.run("/result two", talk)
        assert isinstance(message, dict)
        talk.ask(message, print)
    turns = "[user]How is Oslo?[TOOL_CALLS]weather#{0};time#{1};[RESULT]one#{0};[RESULT]two#{1};"
    turns += "[assistant]Cold.[user]And Bergen?"
    turns += "[TOOL_CALLS]tide#{2};time#{3};[RESULT]one#{2};[RESULT]two#{3};"
    ids = [call["id"] for m in talk.messages for call in m.get("tool_calls", [])]
    assert len({*ids}) == 4 and prompts[-1] == turns.format(*ids)
