"""The tensors of safetensors files, by the names that a model has for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .headers import Found, read_headers

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Source:
    """The tensors that a model of this config has a use for; the files are open while entered."""

    def __init__(
        self,
        path: Path,
        files: Sequence[str],
        config: Any,
        rename: Callable[[str], str | None] = str,
    ) -> None:
        """path: of the checkpoint, in errors. rename gives the model's name of a tensor, None of
        one without use.

        ValueError as read_headers.
        """
        self.path = path
        self._opened = ExitStack()
        self._files: dict[str, Any] = {}
        self._found: dict[str, Found] = {}
        self.keys: dict[str, str] = {}  # name in the model: name in the checkpoint
        # The model's tensor of that name, from the checkpoint's.
        self.convert: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
        tied = config.get_text_config().tie_word_embeddings
        for key, found in read_headers(files).items():
            self._found[key] = found
            unused = key.endswith("rotary_emb.inv_freq") or (tied and key == "lm_head.weight")
            name = None if unused else rename(key)
            if name is not None:  # mlx-lm and transformers drop others; a packed head says untied
                self.keys[name] = key

    def dense_dtype(self, but: tuple[str, ...]) -> torch.dtype | None:
        """The commonest dtype of the float tensors whose names do not end with one of `but`."""
        counts = Counter(
            _FLOATS[found.dtype]
            for key, found in self._found.items()
            if found.dtype in _FLOATS and not key.endswith(but)
        )
        return counts.most_common(1)[0][0] if counts else None

    def dims(self, key: str) -> int:
        """The number of dimensions of the tensor with that name in the checkpoint."""
        return len(self._found[key].shape)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def read(self, name: str) -> Tensor:
        """The tensor with that name in the model."""
        from safetensors import safe_open

        key = self.keys[name]
        file = self._found[key].file
        if file not in self._files:
            self._files[file] = self._opened.enter_context(safe_open(file, framework="pt"))
        return self.convert(name, self._files[file].get_tensor(key))

    def take(self, name: str) -> Tensor:
        """The tensor that read() gives; the name leaves the keys. ValueError: there is none."""
        if name not in self.keys:
            raise ValueError(f"{self.path} has no tensor for {name}")
        tensor = self.read(name)
        del self.keys[name]
        return tensor

    def take_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As take(), of this shape; another float dtype becomes this one. ValueError, too: it is of
        neither."""
        key, value = self.keys.get(name), self.take(name)
        fits = value.dtype == dtype or (value.is_floating_point() and dtype.is_floating_point)
        if tuple(value.shape) != shape or not fits:
            raise ValueError(
                f"{self.path}: {key} is {value.dtype} {list(value.shape)}; the model makes it "
                f"{dtype} {list(shape)}"
            )
        return value.to(dtype)
