"""The entries of prompts in a file, for the next server of the same model.

A safetensors file: "layers.0.keys", "layers.0.values" [kv_heads, pages, 64, entry] and so on,
"tokens" int64 [pages, 64], "before" int64 [pages], the place in the file of the page before, or
-1 - i of a text's first page, whose owner is the i-th. Of recurrent layers "states.0" and so on,
each [kept, ...], and "behind" int64 [kept], the pages behind which they are. In the metadata
"metalmm_prompts", JSON: version; model, which the entries are of; owners, in hex digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ... import _C
from ...files.staging import check_writable, replaced
from ...hf.caches.paged import PagedCache, PagedLayer
from ...hf.caches.pages import SLOTS

if TYPE_CHECKING:
    from .batch import Batch

KEY, VERSION = "metalmm_prompts", 1


class SavedPrompts:
    """The file, of one model and the cache of its answers."""

    def __init__(self, path: Path, batch: Batch) -> None:
        """OSError: no file can be written there."""
        check_writable(path.parent)
        self._path, self._cache = path, batch.cache
        self._model = _digest(batch.model, batch.cache)

    def read(self) -> None:
        """Give the cache, which holds nothing, what the file has, as far as there is room.

        ValueError: the file is of another model or cache, or none of these.
        """
        if not self._path.exists():
            return
        try:
            self._read()
        except (SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"--prompts {self._path}: {error}") from None

    def _read(self) -> None:
        with safe_open(self._path, framework="pt") as file:
            said = json.loads((file.metadata() or {}).get(KEY, "{}"))
            if said.get("version") != VERSION:
                raise ValueError(f"no prompts of version {VERSION}")
            if said["model"] != self._model:
                raise ValueError("of another model, format of its cache or kind of arithmetic")
            owners = [bytes.fromhex(owner) for owner in said["owners"]]
            tokens, before = (file.get_tensor(name) for name in ("tokens", "before"))
            count = len(before)
            _check("tokens", tokens, torch.int64, [count, SLOTS])
            follows = [i if i >= 0 else owners[-1 - i] for i in before.tolist()]
            given = self._cache.pages.restore(follows, [tuple(t) for t in tokens.tolist()])
            for name, own in self._tensors():
                entries = file.get_tensor(name)
                _check(name, entries, own.dtype, [own.shape[0], count, *own.shape[2:]])
                own[:, given] = entries[:, : len(given)].to(own.device)
            if self._cache.states:
                self._read_states(file, given, count)

    def _read_states(self, file: Any, pages: list[int], count: int) -> None:
        states, behind = self._cache.states, file.get_tensor("behind")
        _check("behind", behind, torch.int64, [len(behind)])
        tensors = []
        for i, (dtype, shape) in enumerate(states.shapes()):
            tensors.append(file.get_tensor(f"states.{i}"))
            _check(f"states.{i}", tensors[i], dtype, [len(behind), *shape])
        places = behind.tolist()
        if len({*places}) < len(places) or not {*places} <= {*range(count)}:
            raise ValueError(f"behind: {places}; must be different ones of {count} pages")
        # The last used ones are the first, and stay where there is not room for all.
        for i, place in reversed([*enumerate(places)][: states.most_kept]):
            if place < len(pages):
                states.put(self._cache.pages.serial(pages[place]), [t[i] for t in tensors])

    def write(self) -> None:
        """Writes the pages that no answer reads, the last used first. OSError: as replaced.

        The write takes as much memory once more. Others may not read the file: it has texts.
        """
        kept = self._cache.pages.kept()
        owners = list({f: None for _, f, _ in kept if isinstance(f, bytes)})
        before = [-1 - owners.index(f) if isinstance(f, bytes) else f for _, f, _ in kept]
        numbers = [page for page, _, _ in kept]
        tensors = {
            "tokens": torch.tensor([t for *_, t in kept], dtype=torch.int64).view(-1, SLOTS),
            "before": torch.tensor(before, dtype=torch.int64),
        }
        for name, own in self._tensors():
            tensors[name] = own[:, numbers].cpu()
        if self._cache.states:
            tensors |= self._states(numbers)
        hexes = [owner.hex() for owner in owners]
        said = json.dumps({"version": VERSION, "model": self._model, "owners": hexes})
        with replaced(self._path) as new:
            new.touch(0o600)
            save_file(tensors, new, metadata={KEY: said})
            new.chmod(0o600)

    def _states(self, pages: list[int]) -> dict[str, Tensor]:
        """The states of recurrent layers, and behind which of these pages they are kept."""
        of_serial = {self._cache.pages.serial(page): i for i, page in enumerate(pages)}
        states = self._cache.states
        kept = {of_serial[s]: own for s, own in states.kept().items() if s in of_serial}
        found = {"behind": torch.tensor([*kept], dtype=torch.int64)}
        for i, (dtype, shape) in enumerate(states.shapes()):
            own = [each[i].cpu() for each in kept.values()]
            found[f"states.{i}"] = torch.stack(own) if own else torch.empty(0, *shape, dtype=dtype)
        return found

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, entries [kv_heads, pages, 64, entry] of the cache)."""
        for i, layer in enumerate(self._cache.layers):
            if not isinstance(layer, PagedLayer):
                continue
            for name in ("keys", "values"):
                entries: Tensor = getattr(layer, name)[0]
                yield f"layers.{i}.{name}", entries.view(len(entries), -1, SLOTS, entries.shape[2])


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        is_now = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name}: {is_now}; must be {dtype} {shape}")


def _digest(model: Any, cache: PagedCache) -> str:
    """A digest of all that entries' bits depend on: weights, config, formats, how they are used."""
    first: Any = cache.with_entries[0]
    kinds = [f"{type(x).__name__} {getattr(x, 'activations', None)}" for x in model.modules()]
    native: Any = _C  # mypy does not see into the module
    device = native.cpu_isa() if model.device.type == "cpu" else model.device.type
    said = [str(model.dtype), device, *first.formats, model.config.to_json_string()]
    found = hashlib.sha256(json.dumps(said + kinds).encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()
