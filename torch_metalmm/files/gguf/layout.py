"""The layouts that a conversion of transformers gives GGUF tensors, found by running it.

The conversion runs on tensors whose values say where they are, a byte for each value, so that no
tensor of the file is decoded to learn whether it may stay packed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

_Key = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass
class Layout:
    """The model's matrix is the file's, transposed or with its rows or its columns in this order.

    rows[i] is the file's row that is the model's row i; columns likewise.
    """

    transposed: bool = False
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None


class TensorMap(ABC):
    """Where a GGUF tensor goes in the model, and what transformers does to it on the way."""

    def __init__(self) -> None:
        self._layouts: dict[_Key, Layout | None] = {}
        self._shapes: dict[_Key, tuple[int, ...] | None] = {}
        self._open: dict[str, Any] = {}  # model tensors that wait for another of the file

    @abstractmethod
    def names(self) -> dict[str, str]:
        """{name in the model: name in the file}, which may have names of neither."""

    @abstractmethod
    def target(self, name: str) -> str | None:
        """The model's name for the tensor; None if the model has no place for it."""

    @abstractmethod
    def convert(self, name: str, value: np.ndarray) -> dict[str, Tensor]:
        """The model tensors that are complete once this one is given: {model name: tensor}."""

    def restored(self, name: str, value: Tensor) -> Tensor | None:
        """The file's vector for a vector of the model; None: no more is known of the vector than
        convert() shows."""
        return None

    def sources(self, target: str) -> dict[str, int]:
        """{tensor of the file: how many rows}, of which the target has all; none if it is not such.
        A file may have another tensor for the target instead."""
        return {}

    def shape(self, tensors: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
        """The shape of the one model tensor that these tensors of the file, {name: shape}, make.

        None if they make none, or more than one. Found by converting zeros, a byte for each value.
        """
        key = _key_of(tensors)
        if key not in self._shapes:
            zeros = {
                name: as_strided(np.zeros(1, np.int8), shape, [0] * len(shape))
                for name, shape in tensors.items()
            }
            made = self._try(zeros)
            self._shapes[key] = None if made is None else tuple(made.shape)
        return self._shapes[key]

    def layout(self, tensors: dict[str, tuple[int, ...]]) -> Layout | None:
        """How the model has the rows of these tensors of the file, {name: [N, K]} of one K, as one
        matrix.

        None if it is more than an order of rows or of columns, or has other values. The model may
        have it as [N, 1, K].
        """
        key = _key_of(tensors)
        if key not in self._layouts:
            self._layouts[key] = self._find_layout(tensors)
        return self._layouts[key]

    def _find_layout(self, tensors: dict[str, tuple[int, ...]]) -> Layout | None:
        """Found by converting matrices of this very shape: smaller ones may be treated otherwise.

        The matrices hold digits of the row, then of the column, that a value is in: a signed byte
        for each value (transformers takes unsigned bytes for blocks), and no memory where the
        conversion changes nothing, as for large embeddings.
        """
        counts = {name: shape[0] for name, shape in tensors.items()}
        n, k = sum(counts.values()), next(iter(tensors.values()))[1]
        for transposed in (False, True):
            rows = self._order(counts, np.arange(n)[:, None], (n, k), transposed)
            columns = None
            if rows is not None:
                columns = self._order(counts, np.arange(k)[None], (n, k), transposed)
            if rows is None or columns is None:
                continue
            other_rows = None if np.array_equal(rows, np.arange(n)) else rows
            other_columns = None if np.array_equal(columns, np.arange(k)) else columns
            both = other_rows is not None and other_columns is not None
            if both or (transposed and not (other_rows is other_columns is None)):
                return None
            return Layout(transposed, other_rows, other_columns)
        return None

    def _order(
        self, counts: dict[str, int], index: np.ndarray, shape: tuple[int, int], transposed: bool
    ) -> np.ndarray | None:
        """Which row or column of the file each of the model's is; None if it is not an order.

        counts: of rows. index numbers the rows (as a column) or the columns (as a row).
        """
        order, ends = np.zeros(index.size, np.int64), [*accumulate(counts.values())][:-1]
        for shift in range(0, max(1, (index.size - 1).bit_length()), 7):
            digits = np.ascontiguousarray(index >> shift & 127, np.int8)
            strides = np.broadcast_to(digits, shape).strides
            parts = np.split(as_strided(digits, shape, strides), ends)
            made = self._try(dict(zip(counts, parts, strict=True)))
            if made is None:
                return None
            out = made.numpy()
            out = out.T if transposed else out
            if out.ndim == 3 and out.shape[1] == 1:  # taps of each channel
                out = out[:, 0]
            if out.dtype != np.int8 or out.shape != shape:
                return None
            first = out[:, :1] if index.shape[1] == 1 else out[:1]
            if strides != out.strides and not (out == first).all():
                return None
            order += first.ravel().astype(np.int64) << shift
        return order if np.array_equal(np.sort(order), np.arange(order.size)) else None

    def _try(self, values: dict[str, np.ndarray]) -> Tensor | None:
        """The one tensor that convert makes of these; None: not one, or it cannot."""
        made: dict[str, Tensor] = {}
        try:
            with np.errstate(all="ignore"):
                for name, value in values.items():
                    made |= self.convert(name, value)
        except Exception:  # transformers' arithmetic on a strange shape may raise anything
            return None
        finally:
            self._forget()
        return next(iter(made.values())) if len(made) == 1 else None

    def _forget(self) -> None:
        """Drop the tensors that wait for another."""
        self._open.clear()


def negated_exp(value: np.ndarray, name: str) -> np.ndarray:
    """The f32 of which log(-x) is that f32. ValueError: -exp(value) is not finite, or 0."""
    with np.errstate(over="ignore"):
        found = np.exp(value)
    if (bad := value[~(np.isfinite(found) & (found > 0))]).size:
        raise ValueError(f"{name}: exp({bad[0]}) is not a positive f32")
    for end in (0, np.inf):  # rounded twice, log(exp(value)) may be a neighbour of value
        other = np.nextafter(found, np.float32(end))
        found = np.where((np.log(found) != value) & (np.log(other) == value), other, found)
    return -found


def _key_of(tensors: Mapping[str, tuple[int, ...]]) -> _Key:
    """Without the layers' numbers: transformers treats all layers alike."""
    return tuple((re.sub(r"\.\d+\.", ".#.", name), shape) for name, shape in tensors.items())
