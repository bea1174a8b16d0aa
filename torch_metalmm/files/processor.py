"""transformers' processor in a model folder, for images beside texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .blame import blaming

_CONFIGS = ("preprocessor_config.json", "processor_config.json")
_BESIDE = ("video_preprocessor_config.json", "chat_template.json")


def processor_files(folder: Path) -> dict[str, Path]:
    """{name: file} of those that the folder has; none without a processor."""
    found = {n: folder / n for n in (*_CONFIGS, *_BESIDE) if (folder / n).is_file()}
    return found if found.keys() & {*_CONFIGS} else {}


def read_processor(folder: Path) -> Any:
    """The processor, None if the folder has none. No code of the folder is run.

    ValueError: transformers makes none of its files. ImportError names the package that it needs.
    """
    import transformers

    kind: Any = transformers.AutoProcessor
    if not processor_files(folder):
        return None
    with blaming(folder, "transformers makes no processor of its files"):
        return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
