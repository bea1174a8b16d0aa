"""Where save_gguf and `metalmm quantize` write GGUF files, and what they say if that cannot be."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
from gguf_files import load_quietly, random_model

from torch_metalmm import save_gguf
from torch_metalmm.files import staging
from torch_metalmm.tools import packing
from torch_metalmm.tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # the command's


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Any, Any]:
    return load_quietly(random_model(tmp_path / "tiny.gguf", "llama"))[:2]


def test_errors_name_the_path_that_was_given(
    tmp_path: Path, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"no/x.gguf: there is no folder .*no$"):
        save_gguf(*tiny, tmp_path / "no" / "x.gguf")
    asked = []

    def denied(prefix: str, dir: object) -> NoReturn:
        asked.append((prefix, dir))
        raise PermissionError(13, "Permission denied", f"{dir}/{prefix}abc")

    monkeypatch.setattr(tempfile, "mkdtemp", denied)  # a folder that is only read
    with pytest.raises(PermissionError, match=f"{tmp_path}/x.gguf: Permission denied") as raised:
        save_gguf(*tiny, tmp_path / "x.gguf")
    assert raised.value.errno == 13
    ((prefix, folder),) = asked
    assert folder == tmp_path
    assert prefix and not prefix.startswith(staging._PREFIX)  # whose folders others remove


def test_the_command_refuses_before_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_model(tmp_path / "a.gguf", "qwen2")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "b.gguf").write_text("mine")
    monkeypatch.setattr("torch_metalmm.tools.generate.load_model", None)
    for output, format, message in (
        ("no/b.gguf", "q8_0", "no/b.gguf: there is no folder"),
        ("folder.gguf", "q8_0", "folder.gguf is a folder"),
        ("b.gguf", "q8_0", "b.gguf exists; --force replaces it"),
        ("c.gguf", "affine4_g64", "GGUF does not have the format affine4_g64"),
    ):
        command = ["quantize", str(source), "--output", str(tmp_path / output)]
        assert main([*command, "--format", format]) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "b.gguf").read_text() == "mine" and not (tmp_path / "c.gguf").exists()


def test_the_command_writes_no_file_without_a_tokenizer(
    tmp_path: Path, tiny: tuple[Any, Any]
) -> None:
    with pytest.raises(ValueError, match="source has no tokenizer"):
        packing.to_file(
            tmp_path / "source",
            tmp_path / "x.gguf",
            False,
            {},
            lambda: (tiny[0], None),
            pytest.fail,
        )
    assert not (tmp_path / "x.gguf").exists()
