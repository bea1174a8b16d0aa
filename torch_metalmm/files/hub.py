"""Names on the Hugging Face hub where a file or a folder is expected.

    org/name                a folder of transformers, MLX or PEFT; or the repository's GGUF model
    org/name:Q4_K_M         the GGUF model of this quantization, all of its parts
    org/name/file.gguf      this one, all of its parts

A name that exists as a path is that path. Downloads, cache, login, mirror (HF_ENDPOINT) and offline
mode (HF_HUB_OFFLINE) are huggingface_hub's. Weights are .gguf or .safetensors, never pickles.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..extras import require
from .gguf.split import model_of, part_names
from .untrusted import check_index

# Files of the top folder; originals, ONNX and other twins of the weights lie in folders below.
_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")
_MODULE = re.compile(r"\d+_\w+/[\w.]+\.(json|safetensors)")  # a file beside modules.json's model
_USUAL = "Q4_K_M"  # where a repository has several: the choice of llama.cpp and Ollama, too
_SECONDS = 10.0  # to wait for the hub's answer

_PREFIX = re.compile(r"^(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)")
_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?P<repo>{_ID})(?::(?P<tag>[\w.-]+)|(?:/(?:blob|resolve)/main)?/(?P<file>[^:]+\.gguf))?"
)
_LABEL = re.compile(
    r"(?:^|[-._/])((?:I?Q|TQ)\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32)(?=[-./]|$)", re.IGNORECASE
)


@dataclass(frozen=True)
class Named:
    """A name on the hub: a repository, and which of its GGUF models, if any is named."""

    repo: str
    tag: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return self.repo + (f":{self.tag}" if self.tag else f"/{self.file}" if self.file else "")


def hub_name(text: str) -> Named | None:
    """The model that the text names on the hub; None: only a path can be meant."""
    found = _NAME.fullmatch(_PREFIX.sub("", text, count=1))
    if found is None or found["repo"].endswith(".gguf"):
        return None
    return Named(found["repo"], found["tag"], found["file"])


def expanded(name: str | os.PathLike[str]) -> Path:
    """The path, with the user's folder in place of its ~. ValueError: there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ValueError(f"{os.fspath(name)}: no folder is known of the user after ~") from None


def fetch(name: str | os.PathLike[str], check: Callable[[Path], object] | None = None) -> Path:
    """The path itself if it is one, else what the hub has under the name: a file or a folder.

    check(folder) is called as soon as a folder's config.json is there, before its weights are
    fetched. What is in the cache already is not fetched again, and is enough without a network.

    FileNotFoundError: neither a path nor a repository, or the repository has no such model.
    PermissionError: it is gated. ConnectionError: the hub cannot be reached, and the cache does not
    have all of the model. ValueError: several GGUF models, of which the name chooses none; or ~ of
    no user.
    """
    path = expanded(name)
    named = hub_name(os.fspath(name))
    if path.exists() or named is None or (named.file and path.parent.is_dir()):
        return path  # the path's reader says what is wrong there
    require(f"{named}, a name on the hub,", "huggingface_hub")
    repo = _Repository(named.repo)
    folder = _folder_files(repo.files) if named == Named(named.repo) else []
    if folder:
        if check is not None and "config.json" in folder:
            check(repo.download(["config.json"]))
        return repo.download(folder)
    try:
        names = _gguf_files(named, repo.files)
    except (FileNotFoundError, ValueError) as error:
        if not repo.absence:
            raise
        raise ConnectionError(f"{error} in the cache, and {repo.absence}") from error
    return repo.download(names) / names[0]


def _folder_files(files: Iterable[str]) -> list[str]:
    """The files of a model or adapter folder; none where its weights are no safetensors.

    Repositories of GGUF files may have a config.json, too.
    """
    top = [f for f in files if "/" not in f and f.endswith(_SUFFIXES)]
    weights = [f for f in top if f.endswith(".safetensors")]
    if any(f.startswith("model") for f in weights):  # else its twin, Mistral's consolidated file
        top = [f for f in top if f not in weights or f.startswith("model")]
    modules = [f for f in files if "modules.json" in top and _MODULE.fullmatch(f)]
    return top + modules if weights else []


def _gguf_files(named: Named, files: Iterable[str]) -> list[str]:
    """All parts of the GGUF model that is named, the first part first."""
    models: dict[tuple[str, str | None], str] = {}  # the first of its files
    for file in sorted(f for f in files if f.lower().endswith(".gguf")):
        if "mmproj" not in file.lower() and "imatrix" not in file.lower():
            models.setdefault(model_of(file), file)
    if not models:
        raise FileNotFoundError(f"{named}: the repository has no weights as .gguf or .safetensors")
    labels = {file: _label(file) for file in models.values()}
    if named.file is not None:
        chosen = [file for key, file in models.items() if key == model_of(named.file)]
    elif named.tag is not None:
        chosen = [file for file in labels if _is_tagged(file, named.tag)]
    else:
        usual = [file for file, label in labels.items() if label.upper() == _USUAL]
        chosen = usual if len(labels) > 1 else list(labels)
    if len(chosen) != 1:
        has = f"it has {', '.join(sorted(set(labels.values())))}"
        if named == Named(named.repo):
            raise ValueError(f"{named}: name one of its GGUF models, as {named}:TAG; {has}")
        if chosen:
            raise ValueError(
                f"{named}: several have this name; give one as {named.repo}/FILE: "
                + ", ".join(chosen)
            )
        raise FileNotFoundError(f"{named}: the repository has no such GGUF model; {has}")
    parts = part_names(chosen[0])
    if missing := [part for part in parts if part not in files]:
        raise FileNotFoundError(f"{named}: {missing[0]}, one of {len(parts)} parts, is not there")
    return parts


def _is_tagged(file: str, tag: str) -> bool:
    return (
        re.search(rf"(?<![a-z0-9]){re.escape(tag.lower())}(?![a-z0-9_])", file.lower()) is not None
    )


def _label(file: str) -> str:
    """The quantization that a file's name states, else its name."""
    stem = model_of(file)[0].removesuffix(".gguf")
    found = _LABEL.findall(stem)
    return found[-1] if found else PurePosixPath(stem).name


class _Repository:
    """A repository, as the hub describes it, or what the cache has of it if the hub is away."""

    def __init__(self, repo: str) -> None:
        """FileNotFoundError, PermissionError, ConnectionError: as fetch."""
        self.repo = repo
        self.absence = ""  # why the hub does not answer
        self.revision: str | None = None
        self.files: list[str] = []
        try:
            self._ask()
        except ConnectionError as error:
            self.absence = str(error)
            cached = self._cached()
            if cached is None:
                raise ConnectionError(
                    f"{repo}: no such file or folder here, nor in the hub's cache, and {error}"
                ) from error
            self.files = [f.relative_to(cached).as_posix() for f in cached.rglob("*")]

    def _ask(self) -> None:
        from huggingface_hub import HfApi, errors

        try:
            info = HfApi().model_info(self.repo, timeout=_SECONDS)
        except errors.GatedRepoError:
            raise self._gated() from None
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            raise FileNotFoundError(
                f"{self.repo}: no such file or folder here, and {self._host()} has no such model, "
                "or a private one (`hf auth login`)"
            ) from None
        except Exception as error:  # errors of whichever HTTP library huggingface_hub uses
            raise self._unreachable(error) from error
        self.revision = info.sha
        self.files = [file.rfilename for file in info.siblings or []]

    def download(self, names: list[str]) -> Path:
        """The folder that has these files. ConnectionError: not all of them can be had."""
        from huggingface_hub import errors, snapshot_download

        if self.absence:
            folder = self._cached()
            assert folder is not None  # the folder told the names
            names = sorted({*names, *check_index(folder)})
            if missing := [name for name in names if not (folder / name).exists()]:
                raise ConnectionError(
                    f"{self.repo}: the cache lacks {len(missing)} of {len(names)} files, "
                    f"{missing[0]} among them, and {self.absence}"
                )
            return folder
        found = [self._in_cache(name) for name in names]
        if all(found):  # silently; a download shows its progress
            return Path(found[0]).parents[names[0].count("/")]
        try:
            return Path(snapshot_download(self.repo, allow_patterns=list(map(glob.escape, names))))
        except errors.GatedRepoError:
            raise self._gated() from None
        except OSError as error:
            if isinstance(error, errors.HfHubHTTPError | errors.LocalEntryNotFoundError):
                raise self._unreachable(error) from error
            raise  # a full disk
        except Exception as error:
            raise self._unreachable(error) from error

    def _in_cache(self, name: str) -> Any:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=self.revision)
        return found if isinstance(found, str) else None

    def _cached(self) -> Path | None:
        """The folder of what was fetched of the repository, whole or not."""
        from huggingface_hub import errors, snapshot_download

        try:
            return Path(snapshot_download(self.repo, local_files_only=True))
        except errors.LocalEntryNotFoundError as error:
            partial = getattr(error, "snapshot_path", None)
            return None if partial is None else Path(partial)

    def _gated(self) -> PermissionError:
        return PermissionError(
            f"{self.repo} is gated: accept its terms at {self._host()}/{self.repo}, then log in "
            "with `hf auth login`"
        )

    def _unreachable(self, error: Exception) -> ConnectionError:
        from huggingface_hub import errors

        if isinstance(error, errors.OfflineModeIsEnabled):
            return ConnectionError("HF_HUB_OFFLINE forbids asking the hub")
        return ConnectionError(f"asking {self._host()} failed: {_line(error)}")

    @staticmethod
    def _host() -> str:
        from huggingface_hub import constants

        return constants.ENDPOINT


def _line(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return said[0] if said else type(error).__name__
