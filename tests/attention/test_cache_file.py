"""PackedCache.save and load: what goes on from a file, and files that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import Backend
from layer_models import ids, padded, small
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from torch import Tensor
from transformers import JambaConfig

from torch_metalmm import PackedCache
from torch_metalmm.hf.caches.file import KEY

pytestmark = pytest.mark.usefixtures("quiet_transformers")

FORMATS = (None, "f32", "f16", "q8_0/q8_0", "q4_0/q4_0_rotated")


def continued(model: Any, cache: Any, tokens: Tensor, mask: Tensor) -> Any:
    """Logits of six tokens more, one by one, and what they are."""
    found = []
    with torch.no_grad():
        for _ in range(6):
            out = model(tokens, attention_mask=mask, past_key_values=cache).logits[:, -1:]
            found.append(out)
            tokens = out.argmax(-1)
            mask = torch.cat((mask, torch.ones_like(tokens)), 1)
    return torch.cat(found, 1)


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "smollm3"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("prompt", [3, 20])
def test_a_prompt_goes_on(tmp_path: Path, kind: str, format: str | None, prompt: int) -> None:
    """The bits of the cache that was not saved; windows of 4 whose rows were moved, too."""
    model = small(kind, head_dim=32)
    model.set_attn_implementation("metalmm")
    given = padded(3, prompt)
    cache = PackedCache(model.config, format)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    file = tmp_path / "prompt.safetensors"
    cache.save(file)
    assert [f.name for f in tmp_path.iterdir()] == ["prompt.safetensors"]
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    loaded = PackedCache.load(file, model.config)
    assert loaded.format == cache.format and loaded.get_seq_length() == prompt
    for queries in (1, 5):
        for layer in range(len(cache.layers)):
            assert loaded.get_mask_sizes(queries, layer) == cache.get_mask_sizes(queries, layer)
    tokens, mask = ids(3, 1, seed=7), torch.ones(3, prompt + 1, dtype=torch.long)
    mask[:, :prompt] = given["attention_mask"]
    want = continued(model, cache, tokens, mask)
    assert torch.equal(continued(model, loaded, tokens, mask), want)
    loaded.save(file)  # the file that it was read from
    assert PackedCache.load(file, model.config).get_seq_length() == prompt + 6


def test_a_save_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, file = tiny_llama().config, tmp_path / "c"
    PackedCache(config, "q8_0/q8_0").save(file)

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("torch_metalmm.hf.caches.file.save_file", full)
    with pytest.raises(OSError, match=f"cannot write {file}: .*No space left"):
        PackedCache(config, "q4_0/q4_0").save(file)
    assert (
        list(tmp_path.iterdir()) == [file] and PackedCache.load(file, config).format == "q8_0/q8_0"
    )


def test_static_slots(tmp_path: Path) -> None:
    """Rows of a cache of fixed shapes go on in any cache that has room, and the other way round."""
    model = small("llama", head_dim=32)
    model.set_attn_implementation("metalmm")
    tokens, mask = ids(2, 1, seed=7), torch.ones(2, 10, dtype=torch.long)
    file, results = tmp_path / "c", []
    for slots in (None, 20):
        cache = PackedCache(model.config, "q8_0/q8_0", slots)
        with torch.no_grad():
            model(ids(2, 9), past_key_values=cache)
        cache.save(file)
        for later in (None, 20, 30):
            loaded = PackedCache.load(file, model.config, later)
            assert loaded.layers[0].keys.shape[2] == (later or 9)
            results.append(continued(model, loaded, tokens, mask))
    assert all(torch.equal(result, results[0]) for result in results)
    with pytest.raises(ValueError, match=r"layers\[0\]: length: 9; the cache has 8 slots"):
        PackedCache.load(file, model.config, 8)


def test_an_empty_cache(tmp_path: Path) -> None:
    config = tiny_llama().config
    PackedCache(config, "q8_0/q8_0").save(tmp_path / "c")
    loaded = PackedCache.load(tmp_path / "c", config)
    assert loaded.get_seq_length() == 0 and loaded.format == "q8_0/q8_0"


def test_a_file_holds_no_more_than_is_needed(tmp_path: Path) -> None:
    """Rows, not slots; of a window those that the next query sees."""
    model = small("gemma3_text")
    cache = PackedCache(model.config, "q8_0/q8_0")
    with torch.no_grad():
        model(ids(1, 30), past_key_values=cache)
    cache.save(tmp_path / "c")
    shapes = {name: list(t.shape) for name, t in load_file(tmp_path / "c").items()}
    assert shapes["layers.0.keys"] == [1, 2, 3, 34] and shapes["layers.1.keys"] == [1, 2, 30, 34]


def test_onto_a_device(tmp_path: Path, backend: Backend) -> None:
    model = tiny_llama().to(backend.device)
    model.set_attn_implementation("metalmm")
    cache = PackedCache(model.config, "q8_0/q8_0")
    with torch.no_grad():
        model(ids(1, 5).to(backend.device), past_key_values=cache)
    cache.save(tmp_path / "c")
    loaded = PackedCache.load(tmp_path / "c", model.config, device=backend.device)
    assert loaded.layers[0].keys.device.type == torch.device(backend.device).type
    token = ids(1, 1).to(backend.device)
    with torch.no_grad():
        want, got = (model(token, past_key_values=c).logits for c in (cache, loaded))
    assert torch.equal(want, got)


def test_states_that_are_no_rows(tmp_path: Path) -> None:
    config = JambaConfig(num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1)
    with pytest.raises(ValueError, match=r"layers\[0\]: a LinearAttentionLayer; only keys"):
        PackedCache(config).save(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def said(**changes: Any) -> Change:
    return lambda fields, tensors: fields.update(changes)


def layer(i: int, **changes: Any) -> Change:
    return lambda fields, tensors: fields["layers"][i].update(changes)


def tensor(name: str, f: Callable[[Tensor], Tensor] | None) -> Change:
    def change(fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        old = tensors.pop(name, torch.zeros(1))
        if f is not None:
            tensors[name] = f(old).contiguous()

    return change


def both(*changes: Change) -> Change:
    return lambda *given: [change(*given) for change in changes]


K0, V1 = "layers.0.keys", "layers.1.values"
# A cache of a Gemma 3, q8_0: a window of 4 and a full layer, heads of 32 values, 30 tokens.
HOSTILE: dict[str, tuple[Change, str]] = {
    "version": (said(version=2), "version: 2; allowed: 1"),
    "version of truth": (said(version=True), "version: True; allowed: 1"),
    "version that is no whole number": (said(version=1.0), "version: 1.0; allowed: 1"),
    "format": (said(format="q9"), "format: unknown 'q9'"),
    "a format that is a number": (said(format=3), "format: unknown 3"),
    "another format": (said(format="q4_0"), r"layers\[0\]: keys are entries of 34 .*; q4_0 has 18"),
    "no format": (
        said(format=None),
        r"layers\[0\]: keys are entries of 34 torch.uint8; f32 has 32",
    ),
    "blocks that do not fit": (said(format="q4_k"), r"layers\[0\]: q4_k: K = 32 is not a multiple"),
    "layers": (said(layers=4), "layers: 4; must be a list"),
    "too few layers": (said(layers=[None]), "layers: 1; the config has 2"),
    "a field more": (said(run="x"), "must be an object of version, format and layers"),
    "a layer of words": (said(layers=["x", None]), r"layers\[0\]: must be null or an object"),
    "a field less": (lambda f, t: f["layers"][0].pop("base"), r"layers\[0\]: must be null or an"),
    "length below 0": (layer(0, length=-1), r"layers\[0\].length: -1; must be a number"),
    "length of words": (layer(0, length="3"), r"layers\[0\].length: '3'; must be a number"),
    "length of truth": (layer(0, length=True), r"layers\[0\].length: True; must be a number"),
    "no rows of many sequences": (
        both(
            layer(0, length=0),
            tensor(K0, lambda t: torch.empty(1 << 34, 16, 0, 34, dtype=torch.uint8)),
        ),
        r"layers\[0\].length: 0; must be a number from 1 on",
    ),
    "no sequences": (tensor(K0, lambda t: t[:0]), rf"{K0}: \[0, 2, 3, 34\]; no size may be 0"),
    "a layer without rows": (
        both(
            lambda f, t: f["layers"].__setitem__(0, None),
            tensor(K0, None),
            tensor("layers.0.values", None),
        ),
        r"layers\[0\]: null; other layers have keys and values",
    ),
    "another dtype": (layer(1, dtype="float16"), r"layers\[1\].dtype: torch.float16; layers\[0\]"),
    "no dims": (layer(0, dims=[0, 32]), r"layers\[0\].dims: \[0, 32\]; must be two numbers"),
    "other heads in keys and values": (
        both(tensor("layers.1.keys", lambda t: t[:, :1]), tensor(V1, lambda t: t[:, :1])),
        r"layers.1.keys: 1 kv_heads; this config has \[2\]",
    ),
    "other length": (layer(0, length=2), r"layers.0.keys: \[1, 2, 3, 34\]; must be .*, 2, entry"),
    "huge base": (layer(0, base=2**63), r"layers\[0\].base: 9223372036854775808; must be"),
    "base of a full layer": (layer(1, base=1), r"layers\[1\]: base: 1; must be 0"),
    "base elsewhere": (layer(0, base=4), r"layers\[1\].length: 1 sequences of 30 .* has 1 of 7"),
    "a window without its rows": (
        both(layer(0, length=2), tensor(K0, lambda t: t[:, :, 1:])),
        r"layers.0.values: \[1, 2, 3, 34\]; must be",
    ),
    "a shorter window": (
        both(
            layer(0, length=2, base=28),
            tensor(K0, lambda t: t[:, :, 1:]),
            tensor("layers.0.values", lambda t: t[:, :, 1:]),
        ),
        r"layers\[0\]: length: 2; a window of 4 needs one less",
    ),
    "dtype": (layer(0, dtype="float64"), r"layers\[0\].dtype: 'float64'; allowed: float32"),
    "dtype of a list": (layer(0, dtype=[1]), r"layers\[0\].dtype: \[1\]; allowed"),
    "dims": (layer(0, dims=[32]), r"layers\[0\].dims: \[32\]; must be two numbers"),
    "huge dims": (
        layer(0, dims=[2**40, 32]),
        r"dims: \[1099511627776, 32\]; heads of this config: ",
    ),
    "other dims": (layer(0, dims=[64, 32]), r"dims: \[64, 32\]; heads of this config: \[32\]"),
    "rows are missing": (tensor(V1, None), f"{V1}: is missing"),
    "rows of floats": (
        tensor(V1, Tensor.float),
        r"layers\[1\]: values are entries of 34 torch.float",
    ),
    "three dimensions": (tensor(V1, lambda t: t[0]), rf"{V1}: \[2, 30, 34\]; must be \[B, "),
    "other heads": (tensor(V1, lambda t: t[:, :1]), rf"{V1}: \[1, 1, 30, 34\]; keys are \[1, 2"),
    "other batch": (
        both(
            tensor("layers.1.keys", lambda t: t.repeat(2, 1, 1, 1)),
            tensor(V1, lambda t: t.repeat(2, 1, 1, 1)),
        ),
        r"layers\[1\].length: 2 sequences of 30 positions; layers\[0\] has 1 of 30",
    ),
    "a tensor more": (tensor("evil", lambda t: t), "evil: is a tensor of no layer"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = small("gemma3_text")
    cache = PackedCache(model.config, "q8_0/q8_0")
    with torch.no_grad():
        model(ids(1, 30), past_key_values=cache)
    file = tmp_path_factory.mktemp("good") / "cache.safetensors"
    cache.save(file)
    return file, model.config


def rewritten(file: Path, to: Path, change: Change) -> Path:
    with safe_open(file, "pt") as opened:
        fields = json.loads(opened.metadata()[KEY])
    tensors = load_file(file)
    change(fields, tensors)
    save_file(tensors, to, metadata={KEY: json.dumps(fields)})
    return to


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(good: tuple[Path, Any], tmp_path: Path, case: str) -> None:
    change, message = HOSTILE[case]
    file = rewritten(good[0], tmp_path / "c", change)
    with pytest.raises(ValueError, match=f"^{file}: .*{message}"):
        PackedCache.load(file, good[1])


def test_other_files(good: tuple[Path, Any], tmp_path: Path) -> None:
    file, config = tmp_path / "c", good[1]
    content = good[0].read_bytes()
    for spoiled in (content[:-10], b"", (2**62).to_bytes(8, "little") + content[8:], b"\x80\x04K."):
        file.write_bytes(spoiled)
        with pytest.raises(ValueError, match=f"cannot read {file}"):
            PackedCache.load(file, config)
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=f"{file}: {KEY}: missing from the metadata"):
        PackedCache.load(file, config)
    for text in ("{", "[" * 100_000, "null"):
        save_file({"a": torch.zeros(1)}, file, metadata={KEY: text})
        with pytest.raises(ValueError, match=f"{file}: {KEY}: (no JSON|must be an object)"):
            PackedCache.load(file, config)
    with pytest.raises(FileNotFoundError):
        PackedCache.load(tmp_path / "none", config)
    with pytest.raises(OSError, match="No such file"):
        PackedCache(config).save(tmp_path / "no" / "folder")
