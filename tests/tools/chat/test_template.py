"""Chat templates run apart: what they may not do, and that others work afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_metalmm.tools.chat import template as module
from torch_metalmm.tools.chat.template import Template

GOOD = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = {
    "loops": "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power of variables": "{% set a = 9 %}{{ a ** (a ** a) }}",
    "a power of constants": "{{ 9 ** (9 ** 9) }}",
}
LARGE = {
    "a product": "{% set n = 10 ** 11 %}{{ 'a' * n }}",
    "a product of constants": "{{ 'a' * 10 ** 11 }}",
    "a width": "{% set n = 10 ** 11 %}{{ 'a'.ljust(n) | length }}",
}


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    found = Template()
    found.start()
    yield found
    found.close()


def rendered(template: Template, text: str) -> str:
    tokenizer = SimpleNamespace(
        chat_template=text,
        get_chat_template=lambda *_: text,
        special_tokens_map={"eos_token": "</s>"},
    )
    assert template.use(tokenizer)
    return template.render(HELLO)


def test_a_good_one(template: Template) -> None:
    assert rendered(template, GOOD) == "[user]hello</s>"


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_none_runs_for_ever(template: Template, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert rendered(template, GOOD)  # its process is up
    with monkeypatch.context() as patch:
        patch.setattr(module, "SECONDS", 0.5)
        with pytest.raises(
            ValueError, match=r"chat template: it takes more than 0\.5 s; it was st"
        ):
            rendered(template, text)
    assert rendered(template, GOOD) == "[user]hello</s>"


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_none_takes_all_memory(template: Template, text: str) -> None:
    with pytest.raises(
        ValueError, match="chat template: (it takes more than 512 MiB|.*memory)|Mem"
    ):
        rendered(template, text)
    assert rendered(template, GOOD) == "[user]hello</s>"


def test_none_reads_files_or_runs_commands(template: Template, tmp_path: Path) -> None:
    """Neither by Jinja's own statements nor through Python's objects."""
    secret, made = tmp_path / "secret.txt", tmp_path / "made"
    secret.write_text("the secret")
    ways = (
        f"{{% include {str(secret)!r} %}}",
        f"{{% import {str(secret)!r} as s %}}{{{{ s }}}}",
        f"{{{{ cycler.__init__.__globals__.os.popen('touch {made}; cat {secret}').read() }}}}",
        f"{{{{ ''.__class__.__mro__[1].__subclasses__()[0]._open({str(secret)!r}) }}}}",
        f"{{{{ self._TemplateReference__context.open({str(secret)!r}) }}}}",
        f"{{{{ strftime_now.__globals__.__builtins__.open({str(secret)!r}).read() }}}}",
        "{{ (messages|attr('__class__')).__init__.__globals__ }}",
    )
    for text in ways:
        try:
            said = rendered(template, text)
        except ValueError as error:
            said = str(error)
        assert "the secret" not in said
    assert not made.exists()


def test_what_it_refuses_is_said(template: Template) -> None:
    with pytest.raises(ValueError, match="^chat template: only users$"):
        rendered(template, "{{ raise_exception('only users') }}")
    with pytest.raises(ValueError, match="^chat template: .*tag"):
        rendered(template, "{% nonsense %}")


def test_it_ends_with_its_owner() -> None:
    """Its process is of another session, which no Ctrl-C and no closed terminal reaches."""
    template = Template()
    child = template.start()
    assert os.getsid(child.pid) != os.getsid(0)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(timeout=120) == 0
