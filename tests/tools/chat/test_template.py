"""Chat templates run apart: what they may not do, and that others work afterwards."""

from __future__ import annotations

import os
import sys
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
    "a power of constants": "{{ 9 ** (9 ** 9) }}",
}
LARGE = {
    # Each piece is one that a kernel grants; 10**11 bytes at once it may refuse by itself.
    "pieces": "{% for i in range(99999) %}{{ 'a' * (1000000 + i) }}{% endfor %}",
    "a product of constants": "{{ 'a' * 3 * 10 ** 9 }}",  # as the template is compiled
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
    with pytest.raises(ValueError, match="^chat template: it takes more than 512 MiB; it was stop"):
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


def test_it_imports_nothing_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a chat begins may be a folder that somebody else filled."""
    made = tmp_path / "made"
    for name in ("json", "selectors", "signal", "typing", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"open({str(made)!r}, 'w')\nraise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [place for place in sys.path if place not in ("", ".")])
    template = Template()
    try:
        assert rendered(template, GOOD) == "[user]hello</s>"
    finally:
        template.close()
    assert not made.exists()


def test_a_process_that_ended_is_replaced(template: Template) -> None:
    """Whoever ended it: it is no end of the chat, as a broken pipe of our own output is."""
    assert rendered(template, GOOD)
    child = template.start()
    child.kill()
    child.wait()
    assert rendered(template, GOOD) == "[user]hello</s>" and template.start() is not child


def test_a_process_that_takes_no_request(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while it is written to: poll() has not told so before."""
    assert rendered(template, GOOD)
    child = template.start()
    child.kill()
    child.wait()
    with monkeypatch.context() as patch:
        patch.setattr(child, "poll", lambda: None)
        with pytest.raises(ValueError, match="^chat template: its process ended$"):
            rendered(template, GOOD)
    assert rendered(template, GOOD) == "[user]hello</s>"


def test_an_interrupt_leaves_no_answer_behind(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request gets its own answer."""
    assert rendered(template, GOOD)

    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(template, "_line", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rendered(template, "the first")
    assert rendered(template, "the second") == "the second"


def test_it_ends_with_its_owner() -> None:
    """Its process is of another session, which no Ctrl-C and no closed terminal reaches."""
    template = Template()
    child = template.start()
    assert os.getsid(child.pid) != os.getsid(0)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(timeout=120) == 0
