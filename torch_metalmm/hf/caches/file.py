"""A PackedCache as a safetensors file: its entries, and in the metadata what they are.

Tensors "layers.0.keys", "layers.0.values" [B, kv_heads, length, entry]. In the metadata
"metalmm_cache", JSON: version; format, "K/V" or one of both, or null; layers, null where there are
no entries, else
    length  how many entries are held; of a sliding window the last ones
    base    the position of the first
    dtype   the model's
    dims    values of an entry of keys and of values
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DummyLayer

from ...files.staging import replaced
from . import pair_of
from .layers import DTYPE_NAMES, PackedLayer

KEY, VERSION = "metalmm_cache", 1
_FIELDS = ("length", "base", "dtype", "dims")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
_MOST = 1 << 40  # positions, and values in an entry
_BOTH = ("keys", "values")


def write(layers: Iterable[Any], format: str | None, path: str | os.PathLike[str]) -> None:
    """The file replaces another at once.

    ValueError: a layer has other states than entries. OSError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    fields: list[dict[str, Any] | None] = []
    for i, layer in enumerate(layers):
        if isinstance(layer, DummyLayer):
            fields.append(None)
            continue
        if not isinstance(layer, PackedLayer) or layer.has_states:
            kind = type(layer).__name__
            raise ValueError(f"layers[{i}]: a {kind}; only keys and values can be saved")
        held = layer.held()
        fields.append(None)
        if held is not None:
            base, *entries = held
            dtype = str(layer.dtype).removeprefix("torch.")
            values = entries[0].shape[2], base, dtype, list(layer.dims)
            fields[i] = dict(zip(_FIELDS, values, strict=True))
            for name, t in zip(_BOTH, entries, strict=True):
                tensors[f"layers.{i}.{name}"] = t.contiguous().cpu()
    said = json.dumps({"version": VERSION, "format": format, "layers": fields})
    with replaced(Path(path)) as new:
        new.open("xb").close()
        mode = new.stat().st_mode & 0o777
        save_file(tensors, new, metadata={KEY: said})
        new.chmod(mode)  # safetensors makes a file for its owner alone


class File:
    """A file that write() made, or one that says so: each field is checked before it is used."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with safe_open(self.path, framework="pt") as file:
                said = (file.metadata() or {}).get(KEY)
                names = file.keys()
                self.tensors: dict[str, Tensor] = {n: file.get_tensor(n) for n in names}
        except SafetensorError as error:
            raise ValueError(f"cannot read {self.path}: {error}") from None
        if said is None:
            self.refuse(KEY, "missing from the metadata; PackedCache.save writes it")
        try:
            fields = json.loads(said)
        except (ValueError, RecursionError) as error:
            self.refuse(KEY, f"no JSON: {error}")
        if not isinstance(fields, dict) or fields.keys() != {"version", "format", "layers"}:
            self.refuse(KEY, "must be an object of version, format and layers")
        if type(fields["version"]) is not int or fields["version"] != VERSION:
            self.refuse("version", f"{fields['version']!r}; allowed: {VERSION}")
        self.format: str | None = fields["format"]
        if self.format is not None:
            names = str(self.format).split("/")
            try:
                pair_of(self.format)
            except (ValueError, AttributeError):
                self.refuse("format", f"unknown {self.format!r}")
            self.format = f"{names[0]}/{names[-1]}"
        if not isinstance(fields["layers"], list):
            self.refuse("layers", f"{fields['layers']!r}; must be a list")
        self.layers: list[Any] = fields["layers"]

    def refuse(self, field: str, problem: str) -> NoReturn:
        raise ValueError(f"{self.path}: {field}: {problem}")

    def fill(self, layers: list[Any], config: Any, device: torch.device | str) -> None:
        """Give the layers of an empty cache of this format their entries."""
        if len(self.layers) != len(layers):
            self.refuse("layers", f"{len(self.layers)}; the config has {len(layers)}")
        found: dict[str, tuple[int, int, torch.dtype]] = {}
        for i, (fields, layer) in enumerate(zip(self.layers, layers, strict=True)):
            where = f"layers[{i}]"
            if fields is None:
                if isinstance(layer, PackedLayer) and any(self.layers):
                    self.refuse(where, "null; other layers have keys and values")
                continue
            if not isinstance(layer, PackedLayer) or layer.has_states:
                kind = type(layer).__name__
                self.refuse(where, f"keys and values; a {kind} of this config has none")
            length, base, dtype, dims = self._fields(where, fields)
            entries = [self._entries(i, name, length) for name in _BOTH]
            if entries[0].shape[:3] != entries[1].shape[:3]:
                keys, values = (list(t.shape) for t in entries)
                self.refuse(f"layers.{i}.values", f"{values}; keys are {keys}")
            self._check_heads(i, config, entries[0].shape[1], dims)
            found[where] = entries[0].shape[0], base + length, dtype
            try:
                layer.hold(base, dtype, dims, entries[0], entries[1], torch.device(device))
            except ValueError as error:
                self.refuse(where, str(error))
        if self.tensors:
            self.refuse(min(self.tensors), "is a tensor of no layer")
        for where, (batch, end, dtype) in found.items():
            first, (want, length, other) = next(iter(found.items()))
            if dtype != other:
                self.refuse(f"{where}.dtype", f"{dtype}; {first} has {other}")
            if (batch, end) != (want, length):
                self.refuse(
                    f"{where}.length",
                    f"{batch} sequences of {end} positions; {first} has {want} of {length}",
                )

    def _check_heads(self, i: int, config: Any, heads: int, dims: tuple[int, int]) -> None:
        """ValueError: heads or dims are not those that the config says, where it says them."""
        if getattr(config, "kv_lora_rank", None):
            return  # a model with a latent puts entries of sizes of its own in a cache
        said = config.per_layer_config[i]
        sizes = _said(said, "head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
        for size in dims:
            if sizes and size not in sizes:
                self.refuse(f"layers[{i}].dims", f"{list(dims)}; heads of this config: {sizes}")
        counts = _said(said, "num_key_value_heads", "num_global_key_value_heads")
        if counts and heads not in counts:
            self.refuse(f"layers.{i}.keys", f"{heads} kv_heads; this config has {counts}")

    def _fields(self, where: str, fields: Any) -> tuple[int, int, torch.dtype, tuple[int, int]]:
        if not isinstance(fields, dict) or fields.keys() != set(_FIELDS):
            self.refuse(where, f"must be null or an object of {', '.join(_FIELDS)}")
        for name, least in (("length", 1), ("base", 0)):
            if not _is_count(fields[name], least):
                self.refuse(
                    f"{where}.{name}", f"{fields[name]!r}; must be a number from {least} on"
                )
        dtype = _DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
        if dtype is None:
            self.refuse(f"{where}.dtype", f"{fields['dtype']!r}; allowed: {', '.join(_DTYPES)}")
        dims = fields["dims"]
        if not isinstance(dims, list) or len(dims) != 2 or not all(_is_count(d, 1) for d in dims):
            self.refuse(f"{where}.dims", f"{dims!r}; must be two numbers from 1 on")
        return fields["length"], fields["base"], dtype, (dims[0], dims[1])

    def _entries(self, i: int, name: str, length: int) -> Tensor:
        key = f"layers.{i}.{name}"
        entries = self.tensors.pop(key, None)
        if entries is None:
            self.refuse(key, "is missing")
        if entries.dim() != 4 or entries.shape[2] != length:
            self.refuse(key, f"{list(entries.shape)}; must be [B, kv_heads, {length}, entry]")
        if entries.numel() == 0:
            self.refuse(key, f"{list(entries.shape)}; no size may be 0")
        return entries


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST


def _said(config: Any, *names: str) -> list[int]:
    """The numbers that the config has under these names."""
    values = (getattr(config, name, None) for name in names)
    return sorted({value for value in values if isinstance(value, int)})
