"""save_gguf: the files it writes are those that the model was read from, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader
from gguf_cases import HEAD
from gguf_files import ARCHITECTURES, HEADS, load_quietly, random_model, tensors_of, write_gguf
from gguf_models import convert, fields_of, random_hf
from tokenizers import Regex, pre_tokenizers

from torch_metalmm import load_gguf, quantize_, save_gguf
from torch_metalmm.files.gguf.load import model_of, open_gguf
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.generate import demo_model

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.usefixtures("quiet_transformers"),
]

READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "lfm2")
TIED = ("command-r", "command-r+", "cohere2", "gemma")  # which have no output.weight


def wide(architecture: str) -> dict[str, Any]:
    return ARCHITECTURES[architecture] | {"attention.key_length": 256}


def check_same_file(made: Path, source: Path) -> None:
    """The same tensors, bit for bit, and every value that the source states."""
    readers = GGUFReader(made), GGUFReader(source)
    tensors = [{t.name: t for t in reader.tensors} for reader in readers]
    assert tensors[0].keys() == tensors[1].keys()
    for name, theirs in tensors[1].items():
        ours = tensors[0][name]
        assert ours.tensor_type == theirs.tensor_type, name
        assert np.array_equal(np.array(ours.data), np.array(theirs.data)), name
    ours_fields, fields = (reader.fields for reader in readers)
    unread = {"tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix"}
    for key, field in fields.items():
        if not key.startswith(("general.", "GGUF.")) and key not in unread:
            assert ours_fields[key].contents() == field.contents(), key


def check_same_model(made: Path, source: Any, tokenizer: Any) -> None:
    model, tokens, warned = load_quietly(made)
    assert warned == []
    ids = torch.randint(0, 256, (2, 19), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(input_ids=ids).logits, source(input_ids=ids).logits)
    text = "the man in the <|end|> other  room é 12345"
    assert tokens(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", READ_BY_TRANSFORMERS)
def test_a_saved_file_is_the_one_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, tied: bool
) -> None:
    if architecture.startswith("gemma"):  # whose heads are of 256 values; transformers assumes it
        monkeypatch.setitem(ARCHITECTURES, architecture, wide(architecture))
    path = random_model(tmp_path / "a.gguf", architecture, tied)
    model, tokenizer, _ = load_quietly(path)
    save_gguf(model, tokenizer, tmp_path / "b.gguf")
    check_same_file(tmp_path / "b.gguf", path)
    check_same_model(tmp_path / "b.gguf", model, tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


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
    read = model_of(open_gguf(tmp_path / "a.gguf"), "cpu", torch.float32)
    assert torch.equal(read(ids).logits, model(ids).logits)


def test_a_latent_is_saved_as_one_matrix(tmp_path: Path) -> None:
    """Of two stacks in the file; a model that llama.cpp, too, computes without turned keys."""
    path = convert(random_hf("deepseek2+"), "deepseek2+", tmp_path / "a.gguf")
    model, _, _ = load_quietly(path)
    save_gguf(model, None, tmp_path / "b.gguf")
    made = {t.name: np.array(t.data) for t in GGUFReader(tmp_path / "b.gguf").tensors}
    for i, layer in enumerate(model.model.layers):
        whole = made[f"blk.{i}.attn_kv_b.weight"]
        assert np.array_equal(whole, layer.self_attn.kv_b_proj.weight.numpy())
    assert not any("attn_k_b" in name or "attn_v_b" in name for name in made)
    fields = fields_of(tmp_path / "b.gguf")
    assert fields["deepseek2.attention.head_count_kv"] == HEADS
    assert fields["deepseek2.attention.key_length"] == 64 + HEAD


@pytest.mark.parametrize("case", ["granite", "gemma", "command-r+", "phi2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_model_is_saved_as_it_is(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Matrices in their dtype, which the converter of llama.cpp does, too."""
    original = random_hf(case, case in TIED)
    kind = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    path = convert(original, case, tmp_path / "a.gguf", (kind,))  # rounds the model's matrices
    for module in original.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.weight.data = module.weight.data.to(dtype)
    save_gguf(original, None, tmp_path / "b.gguf")
    made, source = fields_of(tmp_path / "b.gguf"), fields_of(path)
    assert {k: v for k, v in source.items() if "tokenizer" not in k}.items() <= made.items()
    write_gguf(path, made["general.architecture"], dict(tensors_of(path)), tokenizer=False)
    check_same_file(tmp_path / "b.gguf", path)


def test_the_demo_model_comes_back_with_its_tokenizer(tmp_path: Path) -> None:
    model, tokenizer, _ = load_quietly(demo_model())
    save_gguf(model, tokenizer, tmp_path / "b.gguf")
    check_same_file(tmp_path / "b.gguf", demo_model())


def test_llama3_scaling_becomes_divisors(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "rope_theta": 5e5}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=320,
        rope_parameters=scaling,
    )
    model = transformers.LlamaForCausalLM(config)
    _, tokenizer, _ = load_quietly(random_model(tmp_path / "a.gguf", "llama"))
    save_gguf(model, tokenizer, tmp_path / "b.gguf")
    again, _, warned = load_quietly(tmp_path / "b.gguf")
    assert warned == []
    assert again.config.rope_parameters == scaling
    wanted = model.model.rotary_emb.inv_freq
    assert torch.allclose(again.model.rotary_emb.inv_freq, wanted, rtol=1e-6, atol=0)
    config.rope_parameters["low_freq_factor"] = 2.0
    with pytest.raises(ValueError, match="its config has rope_parameters = .*finds"):
        save_gguf(model, tokenizer, tmp_path / "c.gguf")
    assert not (tmp_path / "c.gguf").exists()


# Tokenizers


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Any, Any]:
    model, tokenizer, _ = load_quietly(random_model(tmp_path / "tiny.gguf", "llama"))
    return model, tokenizer


def saved(tiny: tuple[Any, Any], tmp_path: Path) -> dict[str, Any]:
    save_gguf(*tiny, tmp_path / "saved.gguf", replace=True)
    return fields_of(tmp_path / "saved.gguf")


def test_the_splitting_has_the_name_of_the_file(tmp_path: Path) -> None:
    """Also after transformers saved and read the tokenizer: it does not know all of them."""
    tensors = dict(tensors_of(random_model(tmp_path / "a.gguf", "llama")))
    path = write_gguf(tmp_path / "b.gguf", "llama", tensors, ARCHITECTURES["llama"])
    path.write_bytes(path.read_bytes().replace(b"qwen2", b"poro-"))
    model, tokenizer, _ = load_quietly(path)
    tokenizer.save_pretrained(tmp_path / "t")
    for given in (tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path / "t")):
        assert saved((model, given), tmp_path)["tokenizer.ggml.pre"] == "poro-"


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITTINGS = {
    "gpt-2": [GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2],
    "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES],
    "": [pre_tokenizers.Digits(individual_digits=False), GPT2],
    "-": [pre_tokenizers.Split(Regex(LLAMA3), "removed"), BYTES],
}


@pytest.mark.parametrize("name", SPLITTINGS)
def test_the_splitting_of_other_tokenizers_is_found(
    tmp_path: Path, tiny: tuple[Any, Any], name: str
) -> None:
    tokenizer = tiny[1]
    del tokenizer.init_kwargs["gguf_pre"]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITTINGS[name])
    tokenizer.backend_tokenizer.model.ignore_merges = name == "llama3"
    if len(name) > 1:
        assert saved(tiny, tmp_path)["tokenizer.ggml.pre"] == name
    else:
        with pytest.raises(ValueError, match=r"no name of llama.cpp is known.*'gguf_pre'"):
            save_gguf(*tiny, tmp_path / "b.gguf")


def test_added_tokens_ends_and_the_template(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    tokenizer.add_tokens(["<think>"])  # beyond the rows of the model
    tokenizer.add_tokens(["he"])  # one of the vocabulary
    tokenizer.chat_template = "{{ messages }}"
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 7, 9]
    fields = saved(tiny, tmp_path)
    types = dict(
        zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    )
    assert types["he"] == 4 and types["<|end|>"] == 3 and types["th"] == 1
    assert "<think>" not in types
    assert fields["tokenizer.chat_template"] == "{{ messages }}"
    assert fields["tokenizer.ggml.eot_token_id"] == 7 and fields["tokenizer.ggml.eom_token_id"] == 9
    assert not fields["tokenizer.ggml.add_bos_token"]
    again, tokens, _ = load_quietly(tmp_path / "saved.gguf")
    assert again.generation_config.eos_token_id == [tokenizer.eos_token_id, 7, 9]
    assert tokens.tokenize("the he") == tokenizer.tokenize("the he")


def test_scores_say_the_order_of_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp merges the neighbours of the highest score first."""
    monkeypatch.setitem(ARCHITECTURES, "gemma2", wide("gemma2"))
    model, tokenizer, _ = load_quietly(random_model(tmp_path / "a.gguf", "gemma2"))
    fields = saved((model, tokenizer), tmp_path)
    scores = dict(
        zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], strict=True)
    )
    assert fields["tokenizer.ggml.model"] == "llama"
    merged = ["".join(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    assert {"he", "\u2581t", "\u2581the"} <= set(merged)
    first = dict.fromkeys(merged)
    assert sorted(first, key=lambda token: -scores[token]) == list(first)
    assert all(scores[token] < min(scores[m] for m in merged) for token in scores.keys() - first)


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
    refuses("lm_head.weight has no place in a GGUF file of a gemma", random_hf("gemma"))
    refuses("tokenizer must be a fast one, got str", tokens="gpt2")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    small = transformers.LlamaForCausalLM(config)
    refuses("beyond the model's 64 rows", small)
    refuses(
        "model.layers.0.mlp.up_proj.weight is affine4_g64, which GGUF does not have",
        quantize_(transformers.LlamaForCausalLM(config), {"*.up_proj": "affine4_g64"}),
        None,
    )
    if "Q2_0" not in GGMLQuantizationType.__members__:
        two_bits = quantize_(transformers.LlamaForCausalLM(config), {"*.up_proj": "q2_0"})
        refuses("up_proj.weight is q2_0, which the installed gguf .* cannot write", two_bits, None)
    small.model.layers[0].mlp.up_proj.double()
    refuses("up_proj.weight is torch.float64, which is neither", small, None)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    refuses("no key of GGUF says rope_type = 'dynamic'", transformers.LlamaForCausalLM(config))
    narrow, _, _ = load_quietly(random_model(tmp_path / "tiny.gguf", "gemma2"))
    narrow.config.query_pre_attn_scalar = 256
    refuses("no key of GGUF says query_pre_attn_scalar = 256, not 64", narrow)
    random_model(tmp_path / "tiny.gguf", "llama")
    gathers, _, _ = load_quietly(tmp_path / "tiny.gguf")
    gathers.model.layers[0].mlp.down_proj.input_order = torch.arange(512)
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
