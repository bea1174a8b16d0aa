"""Calls and their results in a chat whose template is as strict as Mistral's."""

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


def test_results_bear_the_ids_of_their_calls(template: Template, tmp_path: Any) -> None:
    """Every turn is rendered, and no id comes twice; a chat that was saved goes on."""
    texts = iter([CALLS % "weather", "Cold.", CALLS % "tide", "High."])
    prompts: list[str] = []

    def answer(messages: list[Any], show: Any, tools: Any) -> Any:
        prompts.append(template.render(messages, tools))
        return SimpleNamespace(text=next(texts), finish="stop")

    session: Any = SimpleNamespace(answer=answer, context=None, template=template, prompt="")
    session.stop = session.resume = lambda: None
    talk = Conversation(session, "model")
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
