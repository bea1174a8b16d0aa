"""Input and output of `metalmm quantize`: dense models, packed folders and GGUF files."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..models.mtp import MtpHead

Head = TypeVar("Head")


def load_dense(folder: Path, device: str, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """(model, tokenizer or None) of a Hugging Face model folder."""
    from transformers import AutoModel

    from ..files.blame import blaming
    from ..files.folder import check_dense, read_tokenizer
    from ..files.untrusted import load_config
    from ..models.skeleton import named_class

    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} is neither a .gguf file nor a folder with a config.json")
    check_dense(folder)
    config = load_config(folder)
    kind = named_class(config) or AutoModel
    options = {"dtype": dtype or "auto", "use_safetensors": True, "trust_remote_code": False}
    with blaming(folder, "its files make no such model"):
        model = kind.from_pretrained(folder, config=config, local_files_only=True, **options)
    return model.to(device), read_tokenizer(folder)


def importance_of(path: Path | None, model: Any, source: Path) -> dict[str, Tensor] | None:
    """The file's importance for the model that the source became, but none for a head for later
    tokens, which neither `metalmm imatrix` nor llama-imatrix runs. ValueError, OSError: it cannot.
    """
    from ..files.imatrix import read_importance
    from .generate import reads_gguf

    if path is None:
        return None
    return read_importance(path, model, as_packed=reads_gguf(source))


def to_file(
    source: Path,
    output: Path,
    force: bool,
    spec: Mapping[str, str | None],
    load: Callable[[], tuple[Any, Any]],
    pack: Callable[[Any], object],
    imatrix: Path | None = None,
) -> None:
    """Write the model that `load` makes of the source, packed by `pack`, as a GGUF file, its head
    packed by the spec, too, without the imatrix that `pack` reads, which is said.

    ValueError, before anything is loaded: GGUF does not have a format, or the file is one of those
    that the source is made of. ValueError, before anything is packed: the source has no tokenizer.
    """
    from ..files.gguf.save import check_target, save_gguf
    from ..files.gguf.split import is_gguf, part_paths
    from ..models.ggml import type_names
    from ..models.mixtures import MIXTURES

    check_target(output, force, "--force")
    if output.exists() and is_gguf(source):
        read = part_paths(source)
        if any(output.samefile(path) for path in read):
            raise ValueError(f"--output {output} is one of the {len(read)} files of the source")
    for format in spec.values():
        if format is not None and format not in {*type_names().values(), *MIXTURES}:
            raise ValueError(f"--output {output}: GGUF does not have the format {format}")
    model, tokenizer = load()
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer, without which no program reads a GGUF file")
    head = _kept(source, output, lambda: _head_for_file(model, source, spec))
    pack(model)
    if head is not None:
        head.share(model)
        if imatrix is not None:
            print(
                f"{output}: its head for later tokens is packed without {imatrix}", file=sys.stderr
            )
    save_gguf(model, tokenizer, output, replace=force, head=head)


def to_folder(
    source: Path,
    output: Path,
    force: bool,
    load: Callable[[], tuple[Any, Any]],
    pack: Callable[[Any], object],
) -> None:
    """Write the model that `load` makes of the source, packed by `pack`, as a packed folder, with
    the modules that sentence-transformers has there, and the heads for later tokens that the source
    has, as they are; a new folder is gone again if that fails."""
    from ..files.folder import is_packed, replaceable_weights
    from ..files.heads import HEAD_FILE
    from ..files.owned import prepare_folder
    from ..files.processor import processor_files
    from ..hf.packed import save_beside
    from .sentences import files_beside

    beside = files_beside(source) | processor_files(source)
    is_new = not output.exists()
    prepare_folder(output, replaceable_weights)
    if is_packed(output) and not force:
        raise FileExistsError(f"{output} holds a packed model; --force replaces it")
    try:
        with tempfile.TemporaryDirectory() as folder:
            head = _kept(source, output, lambda: _head_for_folder(source, Path(folder)))
            if head is not None:
                beside[HEAD_FILE] = head
            model, tokenizer = load()
            pack(model)
            save_beside(model, tokenizer, output, beside, stale={HEAD_FILE})
    except BaseException:
        if is_new:
            with suppress(OSError):  # the folder has files of others meanwhile
                output.rmdir()
        raise


def _kept(source: Path, output: Path, head: Callable[[], Head]) -> Head | None:
    """The head of the source as the output gets it; None: it has none, or one that the output
    cannot have (ValueError of `head`), which is said."""
    from ..files.heads import has_head

    try:
        return head() if has_head(source) else None
    except ValueError as error:
        print(f"{output}: without the head for later tokens of {source}: {error}", file=sys.stderr)
        return None


def _head_for_file(model: Any, source: Path, spec: Mapping[str, str | None]) -> MtpHead:
    from ..files.gguf.experts import check_format
    from ..files.gguf.save import has_nextn
    from ..files.mtp import load_mtp
    from ..hf.config import stored_config

    if not has_nextn(model.config):
        raise ValueError(f"GGUF files of {model.config.model_type} have no place for it")
    head = load_mtp(model, source, spec or None)
    shared = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    own = tuple(name for name, module in head.named_modules() if id(module) in shared)
    packed = stored_config(head)
    for name, format in packed.modules.items() if packed is not None else ():
        if format is not None and name not in own:  # the model's are not packed yet
            check_format(name, format)
    return head


def _head_for_folder(source: Path, folder: Path) -> Path:
    from ..files.gguf.split import is_gguf
    from ..files.heads import HEAD_FILE, copy_head
    from ..files.quantized import is_quantized

    if is_gguf(source) or is_quantized(source):
        raise ValueError("packed folders have heads of dense and MLX folders only")
    copy_head(source, folder / HEAD_FILE)
    return folder / HEAD_FILE
