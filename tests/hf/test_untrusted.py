"""Folders whose files ask for code to be run or fetched, or for files elsewhere; none is obeyed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_odd_folders import folders
from transformers.integrations import hub_kernels

from torch_metalmm import load_mlx, load_packed
from torch_metalmm.files.untrusted import forget_kernels
from torch_metalmm.tools.cli import main

__all__ = ["folders"]  # the fixture

Load = Callable[[Path], Any]


def quantize(folder: Path) -> None:
    """`metalmm quantize`, which reports errors by its status."""
    out = folder.with_name("out")
    command = ["quantize", str(folder), "--format", "q8_0", "--output", str(out)]
    if main(command) != 0:
        raise ValueError("metalmm quantize failed")


LOADERS: dict[str, tuple[str, Load]] = {
    "load_packed": ("packed", load_packed),
    "from_pretrained": ("packed", transformers.AutoModelForCausalLM.from_pretrained),
    "load_mlx": ("mlx", load_mlx),
    "quantize": ("dense", quantize),
    "quantize mlx": ("mlx", quantize),
}
OURS = [name for name in LOADERS if name != "from_pretrained"]  # its options are the caller's


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def copy(folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(folders / kind, tmp_path / kind))


_opened: list[list[str]] = []
_hooks: list[Any] = []  # a hook cannot be removed: one for the process


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened and isinstance(args[0], str | bytes):
        _opened[-1].append(str(args[0]))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The files that Python code opens during the test."""
    if not _hooks:
        _hooks.append(_audit)
        sys.addaudithook(_audit)
    _opened.append([])
    yield _opened[-1]
    _opened.pop()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The repositories that transformers would fetch kernels from, were `kernels` installed."""
    asked: list[str] = []

    def fetch(name: str, *_: Any, **__: Any) -> None:
        asked.append(name)
        raise AssertionError(f"fetched {name}")

    for module in (hub_kernels, transformers.modeling_utils):
        for function in ("load_and_register_attn_kernel", "lazy_import_flash_attention"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, fetch)
        monkeypatch.setattr(module, "is_kernels_available", lambda *_: True)
    monkeypatch.setattr(hub_kernels, "lazy_load_kernel", fetch, raising=False)
    return asked


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", ["evil/kernel", "evil/kernel@main:f", {"": "evil/kernel"}])
def test_repositories_of_kernels_are_refused(
    name: str, key: str, value: Any, copy: Any, fetched: list[str], capsys: Any
) -> None:
    kind, load = LOADERS[name]
    folder = copy(kind)
    change(folder / "config.json", **{key: value})
    with pytest.raises(ValueError) as raised:
        load(folder)
    said = str(raised.value) + capsys.readouterr().err
    assert "attn_implementation is 'evil/kernel" in said and "would be fetched" in said
    assert fetched == []


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(
    "choice",
    [
        {"attn_implementation": "flash_attention_2"},
        {"_attn_implementation": "flash_attention_3"},
        {"experts_implementation": "sonicmoe"},
    ],
)
def test_kernels_that_may_have_to_be_fetched_are_the_callers_choice(
    name: str, choice: dict[str, str], copy: Any, fetched: list[str]
) -> None:
    kind, load = LOADERS[name]
    folder = copy(kind)
    change(folder / "config.json", **choice)
    made = load(folder)
    assert fetched == []
    if made is not None:
        assert made[0].config._attn_implementation == "sdpa"


def test_parts_of_a_config_are_looked_at(tmp_path: Path) -> None:
    """A model of several parts, each with a config of its own."""
    config = transformers.LlavaConfig()
    config.text_config._attn_implementation = "flash_attention_2"
    forget_kernels(tmp_path, config)
    assert config.text_config._attn_implementation is None
    config.vision_config._attn_implementation = "evil/kernel"
    with pytest.raises(ValueError, match="attn_implementation is 'evil/kernel'"):
        forget_kernels(tmp_path, config)


@pytest.mark.parametrize("name", ["load_packed", "from_pretrained", "quantize"])
@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "parent"])
@pytest.mark.parametrize("count", ["one", "all"])
def test_an_index_names_files_of_its_folder(
    name: str, absolute: bool, count: str, copy: Any, capsys: Any
) -> None:
    """Shards moved to another folder, where the index finds them."""
    kind, load = LOADERS[name]
    folder = copy(kind)
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir()
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    assert len(set(table.values())) > 2
    moved = {min(table.values())} if count == "one" else set(table.values())
    for shard in moved:
        (folder / shard).rename(elsewhere / shard)
    prefix = f"{elsewhere}/" if absolute else "../elsewhere/"
    change(index, weight_map={k: prefix + v if v in moved else v for k, v in table.items()})
    with pytest.raises(ValueError) as raised:
        load(folder)
    said = str(raised.value) + capsys.readouterr().err
    assert "elsewhere/model-" in said and "folder" in said


@pytest.mark.parametrize("name", ["load_packed", "quantize"])
@pytest.mark.parametrize("weights", ["../x.safetensors", "sub/x.safetensors.index.json", 4])
def test_a_config_names_weights_of_its_folder(
    name: str, weights: Any, copy: Any, capsys: Any
) -> None:
    kind, load = LOADERS[name]
    folder = copy(kind)
    change(folder / "config.json", transformers_weights=weights)
    with pytest.raises(ValueError) as raised:
        load(folder)
    said = str(raised.value) + capsys.readouterr().err
    assert f"names the weights {weights!r}, which is no file of the folder" in said


ELSEWHERE = (
    ("_name_or_path", "name_or_path", "configuration_files", "base_model_name_or_path"),
    ("vocab_file", "merges_file", "tokenizer_file", "added_tokens_file", "special_tokens_map_file")
    + ("chat_template_file", "fast_tokenizer_files", "name_or_path", "tokenizer_config_file"),
)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("where", [0, 1], ids=["config", "tokenizer_config"])
def test_paths_in_configs_are_not_read(name: str, where: int, copy: Any, opened: list[str]) -> None:
    kind, load = LOADERS[name]
    folder = copy(kind)
    secret = folder.with_name("secret")
    shutil.copytree(folder, secret)
    file = folder / ("config.json", "tokenizer_config.json")[where]
    for key in ELSEWHERE[where]:
        path = str(secret / "tokenizer.json" if where else secret)
        change(file, **{key: [path] if key.endswith("files") else path})
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(secret), "peft_type": "LORA"})
    )
    opened.clear()
    with suppress(OSError, ValueError):  # refusing is fine
        load(folder)
    assert [f for f in opened if f.startswith(str(secret))] == []
    assert any(f.startswith(str(folder)) for f in opened)


# ---- code


class Runs:
    """Unpickling this creates the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def test_pickled_weights_are_not_read(copy: Any) -> None:
    folder = copy("packed")
    for file in folder.glob("model*"):
        file.unlink()
    torch.save({"lm_head.weight": Runs(folder / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors only, not from .*pytorch_model.bin"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(OSError, match="no file named model.safetensors"):
        load_packed(folder)
    assert not (folder / "ran").exists()


def test_code_beside_the_weights_is_not_run(copy: Any) -> None:
    folder = copy("packed")
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    config = folder / "config.json"
    change(config, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    load_packed(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"})
    )
    change(config, model_type="evil", architectures=["M"])
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_packed(folder)
    assert not (folder / "ran").exists()
