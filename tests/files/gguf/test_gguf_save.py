"""save_gguf: the files it writes are those that the model was read from, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from converted_models import Tensors, write_record
from converted_models import random_model as random_hf
from gguf import GGMLQuantizationType, GGUFReader
from gguf_files import fields_of, load_quietly, random_model
from mtp_models import FAMILIES, trunk

from bench.models.families import new_model, sizes
from bench.models.llamas import dense_state
from torch_metalmm import load_gguf, quantize_, save_gguf
from torch_metalmm.files.gguf.file import GgufFile
from torch_metalmm.files.gguf.load import model_of, open_gguf
from torch_metalmm.nn.packed import quantize_weight
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.generate import demo_model


def is_unread(key: str) -> bool:
    unread = ("tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix")
    return key.startswith(("general.", "GGUF.")) or key in unread


def check_same_file(made: Path, source: Path, but: Sequence[str] = ()) -> None:
    """The same tensors, bit for bit, and every value that the source states but these."""
    readers = GGUFReader(made), GGUFReader(source)
    found, wanted = ({t.name: t for t in reader.tensors} for reader in readers)
    assert found.keys() == wanted.keys()
    for name, theirs in wanted.items():
        ours = found[name]
        assert ours.tensor_type == theirs.tensor_type, name
        assert "ssm_" not in name or list(ours.shape) == list(theirs.shape), name
        data = (np.array(tensor.data).squeeze() for tensor in (ours, theirs))
        assert np.array_equal(*data), name
    ours_fields, fields = (reader.fields for reader in readers)
    for key, field in fields.items():
        if not is_unread(key) and key not in but:
            assert ours_fields[key].contents() == field.contents(), key


def check_same_model(made: Path, source: Any, tokenizer: Any) -> None:
    model, tokens, warned = load_quietly(made)
    assert warned == []
    ids = torch.randint(0, 256, (2, 19), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(input_ids=ids).logits, source(input_ids=ids).logits)
    text = "the man in the <|end|> other  room é 12345"
    assert tokens(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        *(("llama", True), ("llama", False), ("qwen35", False), ("qwen35moe", True)),
    ],
)
def test_a_saved_file_is_the_one_that_was_read(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    """Packed; test_converted.py has every architecture."""
    path = random_model(tmp_path / "a.gguf", architecture, tied)
    model, tokenizer, _ = load_quietly(path)
    save_gguf(model, tokenizer, tmp_path / "b.gguf")
    check_same_file(tmp_path / "b.gguf", path)
    check_same_model(tmp_path / "b.gguf", model, tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


@pytest.mark.parametrize("format", [None, "q8_0", "q4_0"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_heads_of_values_take_the_order_of_files(
    family: str, format: str | None, tmp_path: Path
) -> None:
    """Also as columns, in whole blocks, of a layer that was packed in the model's order."""
    model = family_of(family)
    if format is not None:
        quantize_(model, format, progress=False)
    save_gguf(model, None, tmp_path / "a.gguf")
    read, _ = model_of(open_gguf(tmp_path / "a.gguf"), "cpu", torch.float32)
    assert read.model.layers[0].linear_attn.out_proj.input_order is not None
    wanted, found = dense_state(model), dense_state(read)
    assert wanted.keys() == found.keys()
    for name, value in found.items():
        # Files have norms and 1, and exp of A_log: two roundings.
        most = 2.0**-23 * (1 + wanted[name].abs()) * name.endswith(("A_log", "norm.weight"))
        assert bool(((value - wanted[name]).abs() <= most).all()), name
    ids = torch.arange(3, 22)[None]
    dense = family_of(family)
    dense.config._experts_implementation = "eager"  # in float64, too
    error = (dense(ids).logits - copy.deepcopy(dense).double()(ids).logits).abs().max()
    assert (read(ids).logits - model(ids).logits).abs().max() <= 8 * error


def family_of(kind: str, **options: Any) -> Any:
    """The same at each call."""
    sizes = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 32}
    own = FAMILIES["qwen3_next"] if kind == "qwen3_5_moe_text" else {}
    return trunk(kind, **(own | sizes | options))


def test_blocks_that_an_order_parts_are_packed_again(tmp_path: Path) -> None:
    model = family_of("qwen3_5_text", linear_value_head_dim=64)
    quantize_(model, {"*.out_proj": "q4_k"}, progress=False)
    with pytest.warns(UserWarning, match=r"out_proj.weight: .* parts the blocks of q4_k: written"):
        save_gguf(model, None, tmp_path / "a.gguf")
    read, _ = model_of(open_gguf(tmp_path / "a.gguf"), "cpu", torch.float32)
    found, given = (m.model.layers[0].linear_attn.out_proj for m in (read, model))
    again = quantize_weight(given.dequantize()[:, found.input_order], "q8_0")
    assert found.format == "q8_0" and torch.equal(found.weight, again)


@pytest.mark.parametrize(("multiplier", "width"), [(1.0, 64), (1.5, 96)])
def test_a_file_of_lfm2_states_the_adjusted_width(
    tmp_path: Path, multiplier: float, width: int
) -> None:
    config = transformers.Lfm2Config(
        hidden_size=64,
        intermediate_size=96,
        block_ffn_dim_multiplier=multiplier,
        block_multiple_of=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
        layer_types=["conv", "full_attention"],
        num_hidden_layers=2,
    )
    model = quantize_(transformers.Lfm2ForCausalLM(config).eval(), "q4_0", progress=False)
    save_gguf(model, None, tmp_path / "a.gguf")
    assert model.model.layers[0].feed_forward.w1.out_features == width
    assert fields_of(tmp_path / "a.gguf")["lfm2.feed_forward_length"] == width
    ids = torch.arange(19)[None]
    model.config.full_attn_idxs = [1]  # as checkpoints have it, beside layer_types or alone
    save_gguf(model, None, tmp_path / "a.gguf", replace=True)
    model.config.conv_bias = True
    with pytest.raises(ValueError, match="no biases of LFM2's convolutions"):
        save_gguf(model, None, tmp_path / "b.gguf")
    read, _ = model_of(open_gguf(tmp_path / "a.gguf"), "cpu", torch.float32)
    assert torch.equal(read(ids).logits, model(ids).logits)


def test_a_latent_is_saved_as_one_matrix(tmp_path: Path) -> None:
    """Of two stacks in the file; a model that llama.cpp, too, computes without turned keys."""
    model, _, _ = load_quietly(write_record(tmp_path / "a.gguf", "deepseek-v3"))
    save_gguf(model, None, tmp_path / "b.gguf")
    made = {t.name: np.array(t.data) for t in GGUFReader(tmp_path / "b.gguf").tensors}
    for i, layer in enumerate(model.model.layers):
        whole = made[f"blk.{i}.attn_kv_b.weight"]
        assert np.array_equal(whole, layer.self_attn.kv_b_proj.weight.numpy())
    assert not any("attn_k_b" in name or "attn_v_b" in name for name in made)
    fields = fields_of(tmp_path / "b.gguf")
    assert fields["deepseek2.attention.head_count_kv"] == 4
    assert fields["deepseek2.attention.key_length"] == 10 + 6


def test_dense_matrices_keep_their_dtype(tmp_path: Path) -> None:
    """Which the converter of llama.cpp does, too; its f32 files are those of test_converted.py."""

    def to_bf16(tensors: Tensors) -> None:
        for name, (value, _) in list(tensors.items()):
            if value.ndim == 2:
                tensors[name] = torch.from_numpy(value).bfloat16().view(torch.uint8).numpy(), "bf16"

    model = random_hf("granite")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.weight.data = module.weight.data.bfloat16()
    path = write_record(tmp_path / "a.gguf", "granite", to_bf16)
    tokenizer = load_quietly(path)[1]
    save_gguf(model, tokenizer, tmp_path / "b.gguf")
    check_same_file(tmp_path / "b.gguf", path)


def test_the_demo_model_comes_back_with_its_tokenizer(tmp_path: Path) -> None:
    model, tokenizer, _ = load_quietly(demo_model())
    save_gguf(model, tokenizer, tmp_path / "b.gguf")
    content, made = (tmp_path / "b.gguf").read_bytes(), GgufFile(tmp_path / "b.gguf")
    source = GgufFile(demo_model())  # the gguf package takes seconds for such a vocabulary
    for key, (start, end) in source._spans.items():
        if not is_unread(key):
            assert bytes(source._bytes[start:end]) in content, key
    assert made.tensors.keys() == source.tensors.keys()
    for name, entry in source.tensors.items():
        assert made.tensors[name].format == entry.format
        assert torch.equal(made.packed(name), source.packed(name)), name


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Any, Any]:
    model, tokenizer, _ = load_quietly(random_model(tmp_path / "tiny.gguf", "llama"))
    return model, tokenizer


# What is refused


def test_what_gguf_has_no_place_for(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    path = tmp_path / "x.gguf"

    def refuses(message: str, given: Any = model, tokens: Any = tokenizer) -> None:
        with pytest.raises(ValueError, match=message):
            save_gguf(given, tokens, path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]

    refuses("must be a transformers model, got Linear", torch.nn.Linear(2, 2))
    bloom = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=320)
    refuses(
        "of bloom models are not written; those of .*llama", transformers.BloomForCausalLM(bloom)
    )
    untied = random_hf("gemma", tie_word_embeddings=False)
    refuses("lm_head.weight has no place in a GGUF file of a gemma", untied, None)
    refuses("tokenizer must be a fast one, got str", tokens="gpt2")
    llama = partial(new_model, "llama", sizes(64, 64, 64, num_hidden_layers=1))
    small = llama()
    refuses("beyond the model's 64 rows", small)
    refuses(
        "model.layers.0.mlp.up_proj.weight is affine4_g64, which GGUF does not have",
        quantize_(llama(), {"*.up_proj": "affine4_g64"}),
        None,
    )
    if "Q2_0" not in GGMLQuantizationType.__members__:
        two_bits = quantize_(llama(), {"*.up_proj": "q2_0"})
        refuses("up_proj.weight is q2_0, which the installed gguf .* cannot write", two_bits, None)
    small.model.layers[0].mlp.up_proj.double()
    refuses("up_proj.weight is torch.float64, which is neither", small, None)
    dynamic = llama()
    dynamic.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    refuses("no key of GGUF says rope_type = 'dynamic'", dynamic)
    narrow, _, _ = load_quietly(random_model(tmp_path / "tiny.gguf", "gemma2"))
    narrow.config.query_pre_attn_scalar = 256
    refuses("no key of GGUF says query_pre_attn_scalar = 256, not 64", narrow)
    random_model(tmp_path / "tiny.gguf", "llama")
    gathers, _, _ = load_quietly(tmp_path / "tiny.gguf")
    gathers.model.layers[0].mlp.down_proj.input_order = torch.arange(512).flip(0)
    refuses("down_proj.weight: its layer gathers its input", gathers)


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", "gelu"), ("rms_norm_eps", 2e-5), ("attention_bias", True)]
)
def test_a_config_that_readers_would_not_find(tmp_path: Path, key: str, value: Any) -> None:
    model = random_hf("olmo2")
    setattr(model.config, key, value)
    path = tmp_path / "x.gguf"
    if key == "rms_norm_eps":  # a file says it
        save_gguf(model, None, path)
        assert fields_of(path)["olmo2.attention.layer_norm_rms_epsilon"] == np.float32(value)
        return
    with pytest.raises(ValueError, match=f"its config has {key} = {value!r}, .*finds"):
        save_gguf(model, None, path)
    assert list(tmp_path.iterdir()) == []


def test_files_are_replaced_only_if_asked(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    path = tmp_path / "x.gguf"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="x.gguf exists; replace=True replaces it"):
        save_gguf(model, tokenizer, path)
    assert path.read_text() == "mine"
    save_gguf(model, tokenizer, path, replace=True)
    ids = torch.arange(9)[None]
    logits = model(ids).logits
    save_gguf(
        model, tokenizer, tmp_path / "tiny.gguf", replace=True
    )  # which the model is a view of
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(load_gguf(tmp_path / "tiny.gguf")[0](ids).logits, logits)
    with pytest.raises(IsADirectoryError, match="give the name of a file"):
        save_gguf(model, tokenizer, tmp_path)


@pytest.mark.filterwarnings("ignore")  # fallbacks, and progress bars
def test_the_command_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = random_model(tmp_path / "a.gguf", "qwen2"), tmp_path / "b.gguf"
    assert main(["quantize", str(source), "--output", str(out)]) == 0
    check_same_file(out, source)
    assert main(["quantize", str(source), "--output", str(out), "--format", "q8_0"]) == 1
    assert "b.gguf exists; --force replaces it" in capsys.readouterr().err
    command = ["quantize", str(source), "--output", str(out), "--format", "q8_0", "--force"]
    assert main(command) == 0
    kinds = {t.tensor_type.name for t in GGUFReader(out).tensors if len(t.shape) == 2}
    assert kinds == {"Q8_0"}
    assert main(["quantize", str(source), "--output", str(source), "--force"]) == 1
    assert "--output is the source" in capsys.readouterr().err
