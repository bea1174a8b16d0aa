"""Every kind of save, killed at every change of the file system, into empty and full folders."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import CASES
from faults import Killed, faults
from gguf_files import random_model as random_gguf
from hf_models import random_model, same_bytes
from safetensors.torch import load_file, save_file

from torch_metalmm import load_gguf, load_mlx, load_packed, quantize_, save_mlx, save_packed
from torch_metalmm.files import heads
from torch_metalmm.files.mlx import save as mlx_save
from torch_metalmm.files.staging import settle, staged
from torch_metalmm.tools import cli, generate

Save = Callable[[Any, Any, Path], object]
Load = Callable[[Path], tuple[Any, Any]]


@dataclass
class Kind:
    """How the old and the new model get into a folder, and how they come back."""

    old: Save
    new: Save
    load: Load = load_packed


def pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def shards(model: Any, tokenizer: Any, folder: Path) -> None:
    save_packed(model, tokenizer, folder, max_shard_size="20KB")


def mlx_shards(model: Any, tokenizer: Any, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlx_save, "_SHARD", "20KB")
        save_mlx(model, tokenizer, folder)


def command(model: Any, tokenizer: Any, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "load_model", lambda *_: (model, tokenizer))
        patch.setattr(heads, "has_head", lambda *_: False)  # the source is no checkpoint
        arguments = cli._parser().parse_args(
            ["quantize", __file__, "--force", "--output", str(folder)]
        )
        cli._quantize(arguments)


KINDS = {
    "save_packed": Kind(save_packed, save_packed),
    "to shards": Kind(save_packed, shards),
    "from shards": Kind(shards, save_packed),
    "save_pretrained": Kind(pretrained, pretrained),
    "save_mlx": Kind(save_mlx, save_mlx, load_mlx),
    "to MLX shards": Kind(save_mlx, mlx_shards, load_mlx),
    "from MLX shards": Kind(mlx_shards, save_mlx, load_mlx),
    "quantize": Kind(save_packed, command),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    """The old and the new (model, tokenizer); the old tokenizer's templates are a folder."""
    path = random_gguf(tmp_path_factory.mktemp("saves") / "m.gguf", "llama")
    made = []
    for layers, template in ((1, {"default": "old", "tool": "old tool"}), (2, "new")):
        model = random_model(
            "llama", num_hidden_layers=layers, hidden_size=64, intermediate_size=64, vocab_size=96
        )
        tokenizer = load_gguf(path)[1]
        tokenizer.chat_template = template
        made.append((quantize_(model, "affine4_g32", progress=False), tokenizer))
    return made


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote; another test looks at what is on the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def contents(folder: Path) -> dict[str, bytes]:
    """What a reader finds in the folder, hidden folders of saves aside."""
    names = (f.relative_to(folder) for f in folder.rglob("*") if f.is_file())
    return {
        str(name): (folder / name).read_bytes()
        for name in names
        if not name.parts[0].startswith(".saving-")
    }


def leftovers(folder: Path) -> list[Path]:
    return [f for f in folder.rglob("*") if f.is_symlink() or f.name.startswith(".saving-")]


def check_reads(kind: Kind, folder: Path, model: Any) -> None:
    loaded, _ = kind.load(folder)
    assert same_bytes(loaded, model)
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)


def prepared(folder: Path, kind: Kind, models: list[Any], full: bool) -> Path:
    """A folder with a user's own files, and with the old model if full."""
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("mine")
    (folder / "README.md").write_text("mine")
    if full:
        kind.old(*models[0], folder)
    return folder


# Files that are replaced, added and removed: what staging.py does.
WHOLE = ("to shards", True)


def points(changes: int, every: bool = False) -> Iterable[int]:
    """The changes that fail: every one, or some."""
    if CASES == "all" or every:
        return range(changes)
    return (*range(0, changes - 4, 9), *range(changes - 4, changes))


@pytest.mark.parametrize("full", [True, False], ids=["full", "empty"])
@pytest.mark.parametrize("name", KINDS)
def test_killed_at_every_change(name: str, full: bool, models: list[Any], tmp_path: Path) -> None:
    kind = KINDS[name]
    start = prepared(tmp_path / "start", kind, models, full)
    old = contents(start)
    done = Path(shutil.copytree(start, tmp_path / "done"))
    with faults(None) as counted:
        kind.new(*models[1], done)
    new = contents(done)
    assert {"os.rename", "fsync", "write", "save_file", "os.symlink"} <= set(counted.seen)
    assert leftovers(done) == [] and new["README.md"] == b"mine" and new[".git/HEAD"] == b"mine"

    outcomes = []
    for k in points(len(counted.seen), (name, full) == WHOLE):
        folder = Path(shutil.copytree(start, tmp_path / "killed"))
        with faults(k), pytest.raises(Killed):
            kind.new(*models[1], folder)
        seen = contents(folder)
        assert seen in (old, new), f"a mixture after {k} changes, before {counted.seen[k]}"
        outcomes.append(seen == new)
        if any(f.is_symlink() for f in folder.rglob("*")) and (full or seen == new):
            check_reads(kind, folder, models[seen == new][0])
        if k % 9:
            settle(folder)
            assert contents(folder) == seen and leftovers(folder) == []
        else:
            kind.new(*models[1], folder)
            assert contents(folder) == new and leftovers(folder) == []
        shutil.rmtree(folder)
    assert outcomes == sorted(outcomes) and outcomes[-1] and not outcomes[0]


@pytest.mark.parametrize("name", ["to shards", "save_pretrained", "save_mlx", "quantize"])
def test_a_disk_that_is_full_from_any_change_on(
    name: str, models: list[Any], tmp_path: Path
) -> None:
    kind = KINDS[name]
    start = prepared(tmp_path / "start", kind, models, full=True)
    old = contents(start)
    done = Path(shutil.copytree(start, tmp_path / "done"))
    with faults(None, full=True) as counted:
        kind.new(*models[1], done)
    new = contents(done)
    for k in points(len(counted.seen), name == WHOLE[0]):
        folder = Path(shutil.copytree(start, tmp_path / "full"))
        with faults(k, full=True), pytest.raises(OSError, match="No space left") as raised:
            kind.new(*models[1], folder)
        assert str(folder) in str(raised.value) and raised.value.errno == errno.ENOSPC
        assert contents(folder) in (old, new), counted.seen[k]
        kind.new(*models[1], folder)
        assert contents(folder) == new and leftovers(folder) == []
        shutil.rmtree(folder)


SAVES: dict[str, Save] = {
    "save_packed": save_packed,
    "save_pretrained": pretrained,
    "save_mlx": save_mlx,
    "quantize": command,
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_folder_in_the_place_of_a_file(
    save: Save, name: str, models: list[Any], tmp_path: Path
) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(OSError, match=f"{tmp_path}.*{name}"):
        save(*models[0], tmp_path)
    assert [f.name for f in tmp_path.rglob("*")] == [name]


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_folder_that_cannot_be_written(save: Save, models: list[Any], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot write to the folder /proc/x"):
        save(*models[0], Path("/proc/x"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"cannot write to the folder {tmp_path}/file"):
        save(*models[0], tmp_path / "file")


FOREIGN = ("model.safetensors", "model-00001-of-00009.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("name", FOREIGN)
def test_weights_of_others_stay(save: Save, name: str, models: list[Any], tmp_path: Path) -> None:
    """Alone in the folder, and beside a config.json of ours."""
    dense = {"model.norm.weight": torch.ones(3), "lm_head.weight": torch.ones(3, 3)}
    save_file(dense, tmp_path / name, metadata={"format": "pt"})
    save(*models[0], tmp_path / "ours")
    for config in (None, tmp_path / "ours" / "config.json"):
        if config is not None:
            shutil.copy(config, tmp_path)
        before = contents(tmp_path)
        with pytest.raises(FileExistsError, match=f"{tmp_path}/{name} is no part of a model"):
            save(*models[0], tmp_path)
        assert contents(tmp_path) == before and leftovers(tmp_path) == []


@pytest.mark.parametrize("save", [save_packed, pretrained, command])
def test_a_folder_with_a_dense_or_another_model_stays(
    save: Save, models: list[Any], tmp_path: Path
) -> None:
    random_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    save_mlx(*models[0], tmp_path / "mlx")
    for folder in (tmp_path / "dense", tmp_path / "mlx"):
        before = contents(folder)
        with pytest.raises(FileExistsError, match=f"{folder} holds another model"):
            save(*models[0], folder)
        assert contents(folder) == before


def test_shards_belong_to_the_index(models: list[Any], tmp_path: Path) -> None:
    """A shard that another program wrote over one of ours, and an index that names it."""
    shards(*models[0], tmp_path)
    shard = max(tmp_path.glob("model-*.safetensors"))
    save_file({"another": torch.ones(3)}, shard)
    with pytest.raises(FileExistsError, match=shard.name):
        save_packed(*models[1], tmp_path)
    assert list(load_file(shard)) == ["another"]
    shards(*models[0], tmp_path / "again")
    save_packed(*models[1], tmp_path / "again")
    assert not list((tmp_path / "again").glob("model-*"))


def test_a_gguf_file_beside_the_model_stays(models: list[Any], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for model, tokenizer in models:
        save_packed(model, tokenizer, tmp_path)
    assert (tmp_path / "m.gguf").read_bytes() == b"GGUF"


def test_two_saves_at_a_time(models: list[Any], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with staged(tmp_path, lambda names: set()) as staging:
        (staging / "config.json").write_text("{}")
        assert staging.parent.stat().st_mode == tmp_path.stat().st_mode  # others read through it
        with pytest.raises(BlockingIOError, match=f"{tmp_path}: another process is saving there"):
            save_packed(*models[0], tmp_path)
    assert contents(tmp_path) == {"config.json": b"{}"}


def test_links_and_file_systems_without_hard_links(
    models: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder as in Hugging Face's cache: its files are links, what they link to stays."""
    save_packed(*models[0], tmp_path / "blobs")
    blobs = contents(tmp_path / "blobs")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in blobs:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(tmp_path / "blobs" / name)

    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", no_links)
    for model, tokenizer in models:
        save_packed(model, tokenizer, folder)
        check_reads(KINDS["save_packed"], folder, model)
    assert leftovers(folder) == [] and contents(tmp_path / "blobs") == blobs


def test_a_file_system_without_symbolic_links(
    models: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_packed(*models[0], tmp_path)
    before = contents(tmp_path)

    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", no_links)
    with pytest.raises(OSError, match=f"{tmp_path}: its file system has no symbolic links"):
        save_packed(*models[1], tmp_path)
    assert contents(tmp_path) == before and leftovers(tmp_path) == []


def test_everything_is_on_the_disk_before_the_switch(
    models: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links, too: a machine that loses power keeps the old or the new model."""
    save_packed(*models[0], tmp_path)
    synced: list[tuple[int, int]] = []
    missing: list[Path] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor)[1:3])

    def noted_replace(source: Path, place: Path) -> None:
        if Path(place).name == "current":
            work = Path(place).parent
            needed = [tmp_path, work, *(f for f in work.rglob("*") if not f.is_symlink())]
            missing.extend(f for f in needed if f.stat()[1:3] not in synced)
            synced.clear()
        replace(source, place)
        if Path(place).parent == tmp_path:  # a change of the folder that is not on the disk
            synced[:] = [s for s in synced if s != tmp_path.stat()[1:3]]

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    save_packed(*models[1], tmp_path)
    assert missing == [] and tmp_path.stat()[1:3] in synced


def test_variants_do_not_remove_each_other(models: list[Any], tmp_path: Path) -> None:
    save_packed(*models[0], tmp_path)
    models[0][0].save_pretrained(tmp_path, variant="x")
    assert {"model.safetensors", "model.x.safetensors"} <= set(contents(tmp_path))
    save_packed(*models[0], tmp_path, variant="x", max_shard_size="20KB")
    assert "model.x.safetensors" not in contents(tmp_path)
    assert "model.safetensors" in contents(tmp_path)
    check_reads(KINDS["save_packed"], tmp_path, models[0][0])
