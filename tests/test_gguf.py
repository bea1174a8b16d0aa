"""load_gguf against transformers' own loader, for every architecture it maps, and on bad files."""

from __future__ import annotations

import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf_files import ARCHITECTURES, MIXED, H, random_model, write_gguf
from torch import Tensor, nn

from torch_metalmm import QuantEmbedding, QuantLinear, formats, load_gguf
from torch_metalmm.generate import demo_model
from torch_metalmm.gguf_file import GgufFile
from torch_metalmm.gguf_map import Layout, TensorMap, supported_architectures

pytestmark = pytest.mark.filterwarnings("error")

# What cannot stay packed, by architecture: parts of the names the warning lists.
MOE = ("qwen2moe", "qwen3moe", "minimax-m2", "qwen35moe")
DECODED = {
    **{architecture: ("_exps",) for architecture in MOE},
    "t5": ("ffn_down",),
    "t5encoder": ("ffn_down",),
    "mamba": ("token_embd", "ssm_dt"),
}
LOADABLE = [a for a in ARCHITECTURES if a != "gpt-oss"]
UNTIED = ("llama", "gpt2", "bloom", "falcon", "t5", "gemma3", "qwen35")


@pytest.fixture(scope="module", autouse=True)
def quiet_and_single_threaded() -> Iterator[None]:
    """Models too small for two threads: on a busy machine those wait more than they compute."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity(verbosity)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="session")
def tiny_llama(folder: Path) -> Path:
    return random_model(folder / "tiny.gguf", "llama")


def load_quietly(path: Path, **options: Any) -> tuple[Any, Any, list[str]]:
    """load_gguf's model and tokenizer, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, tokenizer = load_gguf(path, **options)
    return model, tokenizer, [str(w.message) for w in caught]


def reference_model(path: Path, architecture: str) -> Any:
    """The model as transformers' own loader decodes it, in f32."""
    kinds = {"t5": "AutoModelForSeq2SeqLM", "t5encoder": "T5EncoderModel"}
    kind = getattr(transformers, kinds.get(architecture, "AutoModelForCausalLM"))
    options = {"experts_implementation": "eager"} if architecture in MOE else {}
    return kind.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **options)


def outputs(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's first output for these ids (twice for an encoder-decoder), as float64."""
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        return model(input_ids=ids, **extra)[0].double()


def check_equals_reference(model: nn.Module, reference: nn.Module, ids: Tensor) -> float:
    """Errs no more against float64 than a small multiple of what the decoded f32 model errs.

    Rounding accumulates over layers in ways no short formula bounds; the f32 model has the same
    weights and the same graph, so its own error is the measure. Returns the largest difference.
    """
    y, y32 = outputs(model, ids), outputs(reference, ids)
    y64 = outputs(reference.double(), ids)
    own, theirs = (y - y64).abs().max().item(), (y32 - y64).abs().max().item()
    spacing = torch.finfo(torch.float32).eps * y64.abs().max().item()
    print(f"error {own:.2e}, transformers' {theirs:.2e}, largest output {y64.abs().max():.1f}")
    assert own <= 6 * max(theirs, spacing)
    return (y - y32).abs().max().item()


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [(a, True) for a in LOADABLE] + [(a, False) for a in UNTIED],
)
def test_architecture_equals_transformers(folder: Path, architecture: str, tied: bool) -> None:
    path = random_model(folder / f"{architecture}-{tied}.gguf", architecture, tied)
    model, tokenizer, warned = load_quietly(path)
    expected = DECODED.get(architecture, ())
    assert len(warned) == (1 if expected else 0), warned
    if expected:
        assert "decoded to torch.float32" in warned[0]
        names = warned[0].split(": ")[1].split(", ")
        assert all(any(part in name for part in expected) for name in names), names
    reference = reference_model(path, architecture)
    ids = torch.randint(0, 256, (2, 19), generator=torch.Generator().manual_seed(1))
    check_equals_reference(model, reference, ids)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    check_everything_else_is_packed(model, bool(expected))
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "the man in the <|end|> other  room é 12345"
    assert tokenizer(text).input_ids == theirs(text).input_ids
    assert type(tokenizer) is type(theirs)


def check_everything_else_is_packed(model: nn.Module, has_exceptions: bool) -> None:
    dense = [n for n, m in model.named_modules() if type(m) in (nn.Linear, nn.Embedding)]
    packed = [m for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)]
    assert len(packed) >= 6
    if not has_exceptions:
        assert dense == []
    assert all(p.dtype in (torch.float32, torch.uint8) for p in model.parameters())


@pytest.mark.parametrize("architecture", LOADABLE)
def test_name_map_equals_the_full_one(folder: Path, architecture: str) -> None:
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    from torch_metalmm.gguf_map import _ProcessorMap, model_config, tensor_map
    from torch_metalmm.skeleton import empty_model

    path = random_model(folder / f"names-{architecture}.gguf", architecture)
    file = GgufFile(path)
    config, values = model_config(file)
    model = empty_model(config, torch.float32)
    mapping = tensor_map(file, model, values)
    if isinstance(mapping, _ProcessorMap):
        assert mapping._names == get_gguf_hf_weights_map(model, mapping._processor)


def test_supported_architectures_are_the_tested_ones() -> None:
    # deci needs a model class that transformers does not have; gpt-oss misses its experts' names.
    assert set(supported_architectures()) == set(ARCHITECTURES)


# The demo model


@pytest.fixture(scope="session")
def smollm() -> tuple[Any, Any]:
    model, tokenizer, warned = load_quietly(demo_model())
    assert warned == []
    return model, tokenizer


def test_demo_model_equals_transformers(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    text = "The history of Paris begins more than two thousand years ago, when a tribe settled. "
    ids = tokenizer(4 * text, return_tensors="pt").input_ids[:, :64]
    assert ids.shape == (1, 64)
    reference = reference_model(demo_model(), "llama")
    greedy = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    with torch.inference_mode():
        ours, theirs = model.generate(ids, **greedy), reference.generate(ids, **greedy)
    assert ours.shape == (1, 128) and torch.equal(ours, theirs)
    difference = check_equals_reference(model, reference, ids)
    print(f"largest difference of logits {difference:.2e}")


def test_demo_model_answers(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0, inputs["input_ids"].shape[1] :])


def test_weights_are_views_of_the_file(smollm: tuple[Any, Any]) -> None:
    model, _ = smollm
    path = str(demo_model())
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if path in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            spans.append((start, end))
    mapped = [
        name
        for name, p in model.named_parameters()
        if any(start <= p.data_ptr() < end for start, end in spans)
    ]
    copied = {n for n, p in model.named_parameters() if p.dtype == torch.uint8} - set(mapped)
    assert len(mapped) == 30 * 5 + 1  # v, o, gate, up, down and the embedding
    assert all(name.endswith(("q_proj.weight", "k_proj.weight")) for name in copied)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_loading_needs_little_memory_and_time() -> None:
    script = """
import time, torch, transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, modeling_gguf_pytorch_utils
from transformers.integrations.gguf import get_gguf_tokenizer
import gguf, torch_metalmm.gguf
from torch_metalmm.generate import demo_model, peak_memory
base, start = peak_memory(), time.perf_counter()
model, tokenizer = torch_metalmm.load_gguf(demo_model())
print(peak_memory() - base, time.perf_counter() - start)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    grown, seconds = (float(word) for word in run.stdout.split())
    size = demo_model().stat().st_size
    print(f"peak memory over imports {grown / size:.2f} x the file, {seconds:.2f} s")
    assert grown < 1.3 * size
    assert seconds < 10


# What a file may hold


def test_every_type_stays_packed_in_one_file(tiny_llama: Path) -> None:
    model, _, _ = load_quietly(tiny_llama)
    kinds = {m.format for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)}
    entries = GgufFile(tiny_llama).tensors.values()
    assert kinds == {entry.format for entry in entries if len(entry.shape) == 2}
    assert len(kinds) >= 14 and kinds <= set(MIXED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_is_that_of_activations_and_norms(tiny_llama: Path, dtype: torch.dtype) -> None:
    model, _, _ = load_quietly(tiny_llama, dtype=dtype)
    exact, _, _ = load_quietly(tiny_llama)
    assert model.dtype == model.config.dtype == dtype
    assert model.model.norm.weight.dtype == dtype and model.model.embed_tokens.dtype == dtype
    ids = torch.arange(12)[None]
    y = model(ids).logits
    assert y.dtype == dtype
    size = exact(ids).logits.abs().max()
    assert (y.float() - exact(ids).logits).abs().max() < 16 * torch.finfo(dtype).eps * size


def test_generation_stops_at_every_end_token(folder: Path) -> None:
    tensors = dict(_tensors_of(random_model(folder / "a.gguf", "llama")))
    extra = {"tokenizer.ggml.eot_token_id": 7}
    path = write_gguf(folder / "ends.gguf", "llama", tensors, ARCHITECTURES["llama"], extra)
    model, tokenizer, _ = load_quietly(path)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, 7]
    assert model.generation_config.bos_token_id == tokenizer.bos_token_id


def _tensors_of(path: Path) -> list[tuple[str, tuple[np.ndarray, str]]]:
    """The tensors of a file in the form write_gguf takes."""
    file = GgufFile(path)
    numpy_types = {"f32": np.float32, "f16": np.float16}
    found = []
    for name, entry in file.tensors.items():
        data = file.packed(name).numpy().copy()
        kind = numpy_types.get(entry.format)
        found.append((name, (data if kind is None else data.view(kind), entry.format)))
    return found


def test_llama3_rope_divisors_become_rope_scaling(folder: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "rope_theta": 5e5}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=H, num_attention_heads=4, rope_parameters=scaling)
    wanted = LlamaRotaryEmbedding(config).inv_freq
    plain = 5e5 ** (-torch.arange(32, dtype=torch.float64) / 32)
    tensors = dict(_tensors_of(random_model(folder / "a.gguf", "llama")))
    tensors["rope_freqs.weight"] = ((plain / wanted.double()).float().numpy(), "f32")
    values = ARCHITECTURES["llama"] | {"rope.freq_base": 5e5}
    model, _, warned = load_quietly(write_gguf(folder / "b.gguf", "llama", tensors, values))
    assert warned == []
    assert model.config.rope_parameters["rope_type"] == "llama3"
    assert torch.allclose(model.model.rotary_emb.inv_freq, wanted, rtol=1e-6, atol=0)


def test_unknown_rope_divisors_and_spare_tensors_are_named(folder: Path) -> None:
    tensors = dict(_tensors_of(random_model(folder / "a.gguf", "llama")))
    tensors["rope_freqs.weight"] = (np.linspace(1, 5, 32, dtype=np.float32), "f32")
    tensors["blk.0.spare.weight"] = (np.zeros((2, 32), np.float32), "f32")
    path = write_gguf(folder / "b.gguf", "llama", tensors, ARCHITECTURES["llama"])
    model, _, warned = load_quietly(path)
    assert warned == ["not used by the model: rope_freqs.weight, blk.0.spare.weight"]
    assert model.config.rope_parameters["rope_type"] == "default"


def test_missing_biases_are_zero_and_missing_weights_an_error(folder: Path) -> None:
    tensors = dict(_tensors_of(random_model(folder / "a.gguf", "qwen2")))
    del tensors["blk.1.attn_q.bias"]
    values = ARCHITECTURES["qwen2"]
    model, _, _ = load_quietly(write_gguf(folder / "b.gguf", "qwen2", tensors, values))
    assert not model.model.layers[1].self_attn.q_proj.bias.any()
    assert model.model.layers[0].self_attn.q_proj.bias.any()
    del tensors["blk.1.attn_v.weight"]
    path = write_gguf(folder / "b.gguf", "qwen2", tensors, values)
    with pytest.raises(ValueError, match="no tensor for the model's model.layers.1.self_attn.v"):
        load_gguf(path)


# How layouts are found


class _FakeMap(TensorMap):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def target(self, name: str) -> str:
        return name

    def convert(self, name: str, value: np.ndarray) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(self.change(value)))}


def counting_columns(value: np.ndarray) -> np.ndarray:
    return value.reshape(value.shape[0], 8, 2).swapaxes(1, 2).reshape(value.shape)


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        (lambda w: w, Layout()),
        (lambda w: w.T, Layout(transposed=True)),
        (lambda w: w[::-1], Layout(rows=np.arange(12)[::-1])),
        (counting_columns, Layout(columns=np.arange(16).reshape(8, 2).T.ravel())),
        (lambda w: w - 1, None),
        (lambda w: w[::-1, ::-1], None),
        (lambda w: w[:6], None),
        (lambda w: w[np.zeros(len(w), int)], None),
        (lambda w: w.reshape(12, 16).T.reshape(w.shape), None),
    ],
)
def test_layout_of_a_conversion(change: Any, layout: Layout | None) -> None:
    found = _FakeMap(change).layout("blk.0.x.weight", (12, 16))
    assert (found is None) == (layout is None)
    if found is not None and layout is not None:
        assert found.transposed == layout.transposed
        assert np.array_equal(found.rows, layout.rows)
        assert np.array_equal(found.columns, layout.columns)


# Bad files


def patched(path: Path, to: Path, offset: int, data: bytes) -> Path:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    to.write_bytes(content)
    return to


def test_a_missing_file_a_folder_and_a_wrong_dtype(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such GGUF file: .*nothing.gguf"):
        load_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(IsADirectoryError, match="is a folder, not a GGUF file"):
        load_gguf(tmp_path)
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16"):
        load_gguf(tiny_llama, dtype=torch.float64)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"GGML", "does not start with the GGUF magic"),
        (4, struct.pack("<I", 1), "GGUF version 1; versions 2 and 3"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**62), "claims .* tensors in"),
        (16, struct.pack("<Q", 2**62), "claims .* metadata values"),
        (8, struct.pack("<Q", 2000), "truncated|is not UTF-8|dimensions|not a power|appears twice"),
        (24, struct.pack("<Q", 2**60), "truncated"),
    ],
)
def test_a_wrong_header(
    tmp_path: Path, tiny_llama: Path, offset: int, data: bytes, message: str
) -> None:
    path = patched(tiny_llama, tmp_path / "bad.gguf", offset, data)
    with pytest.raises(ValueError, match=f"cannot read {path}: it .*({message})|{message}"):
        load_gguf(path)


@pytest.mark.parametrize("keep", [0, 3, 23, 24, 500, 5000, -1])
def test_a_truncated_file(tmp_path: Path, tiny_llama: Path, keep: int) -> None:
    content = tiny_llama.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(content[:keep])
    with pytest.raises(ValueError, match="truncated|shorter than a GGUF header"):
        load_gguf(path)


def test_a_tensor_type_without_a_format(tmp_path: Path, tiny_llama: Path) -> None:
    content = tiny_llama.read_bytes()
    name = b"blk.0.attn_v.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8
    for type_id, said in ((16, "IQ2_XXS"), (35, "TQ2_0"), (26, "I32"), (999, "#999")):
        path = patched(tiny_llama, tmp_path / "t.gguf", kind, struct.pack("<I", type_id))
        with pytest.raises(ValueError, match=f"'blk.0.attn_v.weight' has the type {said}.*Q4_K"):
            load_gguf(path)
    path = patched(tiny_llama, tmp_path / "t.gguf", kind + 4, struct.pack("<Q", 2**40))
    with pytest.raises(ValueError, match="truncated: tensor 'blk.0.attn_v.weight' ends at byte"):
        load_gguf(path)


def test_an_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    embedding = {"token_embd.weight": (np.zeros((320, H), np.float32), "f32")}
    path = write_gguf(tmp_path / "x.gguf", "rwkv7", embedding, {})
    with pytest.raises(ValueError, match="cannot map .* 'rwkv7'; supported: .*llama.*qwen3"):
        load_gguf(path)


def test_a_file_without_a_tokenizer_or_of_several_parts(tmp_path: Path, tiny_llama: Path) -> None:
    tensors = dict(_tensors_of(tiny_llama))
    values = ARCHITECTURES["llama"]
    path = write_gguf(tmp_path / "x.gguf", "llama", tensors, values, tokenizer=False)
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_gguf(path)
    path = write_gguf(tmp_path / "x.gguf", "llama", tensors, values, {"split.count": 3})
    with pytest.raises(ValueError, match="one of 3 parts; join them"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 2**31, "block_count = 2147483648, but it has 20 tensors"),
        ("block_count", 3, "no tensor for the model's model.layers.2"),
        ("embedding_length", 2**31, "embedding_length = 2147483648, but token_embd.weight is"),
        ("feed_forward_length", 1024, r"is \[512, 256\], but the model's .* is \[1024, 256\]"),
        ("attention.head_count", 0, "no model fits|no config"),
        ("attention.head_count", 2**30, "not a multiple of the number of attention heads"),
        ("attention.layer_norm_rms_epsilon", "text", "no config of its metadata|no model fits"),
    ],
)
def test_metadata_that_contradicts_the_tensors(
    tmp_path: Path, tiny_llama: Path, key: str, value: Any, message: str
) -> None:
    values = ARCHITECTURES["llama"] | {key: value}
    path = write_gguf(tmp_path / "x.gguf", "llama", dict(_tensors_of(tiny_llama)), values)
    with pytest.raises(ValueError, match=message):
        load_gguf(path)


@pytest.mark.filterwarnings("ignore")
def test_random_damage_never_hangs_or_crashes(tmp_path: Path, tiny_llama: Path) -> None:
    content = tiny_llama.read_bytes()
    header = content.index(b"output_norm.weight") if b"output_norm" in content else 4000
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.integers(4, header, size=random.integers(1, 4)):
            damaged[place] = random.integers(256)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            load_gguf(path)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error), error
    assert refused > 10


def test_dense_decodes_as_the_specification(tiny_llama: Path) -> None:
    file = GgufFile(tiny_llama)
    for name, entry in file.tensors.items():
        if len(entry.shape) == 2:
            decoded = formats.get(entry.format).dequantize(file.packed(name), entry.shape[1])
            assert torch.equal(file.dense(name), decoded)
