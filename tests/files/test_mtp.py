"""load_mtp: heads for the token after the next, of GGUF files and of transformers' folders."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from converted_models import write_record
from gguf_files import fields_of, load_quietly, random_model, tensors_of, write_gguf
from mtp_models import FAMILIES, folder_with_head, step, trunk, with_nextn
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from torch_metalmm import PackedCache, QuantLinear, load_mtp, load_packed, quantize_, save_gguf
from torch_metalmm.files.heads import HEAD_FILE
from torch_metalmm.files.imatrix import Entry, Imatrix, write_imatrix
from torch_metalmm.hf.config import stored_config
from torch_metalmm.tools import cli

# {architecture: the case of its record, in f32}
GGUF = {
    **{"qwen35": "", "qwen35moe": "", "qwen3next": ""},
    **{"glm4moe": "glm4-moe", "deepseek2": "deepseek-v3"},
}


def file_of(architecture: str, path: Path) -> Path:
    """Without a head."""
    case = GGUF[architecture]
    if case:
        return write_record(path, case)
    return random_model(path, architecture, tied=False, kinds=("q8_0",))


@pytest.mark.parametrize("architecture", GGUF)
def test_a_gguf_file(architecture: str, tmp_path: Path) -> None:
    case, without = GGUF[architecture], file_of(architecture, tmp_path / "m.gguf")
    path = with_nextn(without, architecture)
    model, _, warnings = load_quietly(path)
    assert not [w for w in warnings if "nextn" in w]
    head = load_mtp(model, path)
    decoder, own = model.get_decoder(), head.block.get_decoder()
    last, layer = decoder.layers[-1].state_dict(), own.layers[0].state_dict()
    assert last.keys() == layer.keys() and all(torch.equal(last[n], layer[n]) for n in last)
    norm = decoder.norm.weight
    assert torch.equal(head.enorm.weight, norm.flip(0))
    assert torch.equal(head.hnorm.weight, norm.roll(1))
    assert torch.equal(own.norm.weight, norm.roll(2))
    format = "f32" if case else "q8_0"
    assert isinstance(head.eh_proj, QuantLinear) and head.eh_proj.format == format
    assert own.embed_tokens is decoder.embed_tokens and head.block.lm_head is model.lm_head
    (got, _), want = _both(model, head), model.lm_head.out_features
    assert got.shape == (1, want) and bool(got.isfinite().all())
    with pytest.raises(ValueError, match=r"m\.gguf has no layer that predicts later tokens"):
        load_mtp(model, without)


def test_a_gguf_file_without_a_part(tmp_path: Path) -> None:
    path = with_nextn(random_model(tmp_path / "m.gguf", "qwen35"), "qwen35")
    model, _, _ = load_quietly(path)
    values, tensors = fields_of(path, "qwen35."), dict(tensors_of(path))
    for missing in ("nextn.enorm", "nextn.eh_proj", "attn_k"):
        left = {n: t for n, t in tensors.items() if n != f"blk.4.{missing}.weight"}
        bad = write_gguf(tmp_path / "bad.gguf", "qwen35", left, values)
        with pytest.raises(ValueError, match="has no tensor"):
            load_mtp(model, bad)


def same(one: Any, other: Any) -> bool:
    both = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in both)


@pytest.mark.parametrize("architecture", GGUF)
def test_a_head_goes_back_into_a_file(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_nextn(file_of(architecture, tmp_path / "m.gguf"), architecture)
    model, tokenizer, _ = load_quietly(path)
    head, texts = load_mtp(model, path), list[Any]()
    for saved in (tmp_path / "once.gguf", tmp_path / "twice.gguf"):
        save_gguf(model, tokenizer, saved, head=head)
        assert fields_of(saved)[f"{architecture}.nextn_predict_layers"] == 1
        again, _, warnings = load_quietly(saved)
        found = load_mtp(again, saved)
        assert not warnings and len(again.model.layers) == len(model.model.layers)
        texts.append((again, found))
        if architecture != "deepseek2":
            assert same(again, model) and same(found, head)
        model, head = again, found
    # The first has the latent's keys and values as one matrix, packed, of two stacks.
    assert all(same(one, other) for one, other in zip(*texts, strict=True))
    assert torch.equal(_both(*texts[0])[0], _both(*texts[1])[0])
    with pytest.raises(ValueError, match=r"head must be the model's own, of load_mtp, got MtpHead"):
        save_gguf(texts[0][0], tokenizer, tmp_path / "other.gguf", head=found)
    made = tmp_path / "made.gguf"  # the installed gguf has a place for GLM's alone
    assert cli.main(["quantize", str(path), "--output", str(made)]) == 0
    said = "without the head for later tokens of" in capsys.readouterr().err
    assert said == (architecture != "glm4moe")
    assert bool(fields_of(made).get(f"{architecture}.nextn_predict_layers")) != said


def published(path: Path) -> tuple[Any, Path]:
    """(a model, its folder with a tokenizer and a head)."""
    like, tokenizer, _ = load_quietly(write_record(path / "m.gguf", "glm4-moe"))
    model = trunk("glm4_moe", vocab_size=like.config.vocab_size)
    folder = folder_with_head(model, path / "dense")
    tokenizer.save_pretrained(folder)
    return model, folder


def test_a_folder_becomes_a_file_with_its_head(tmp_path: Path) -> None:
    (model, folder), file = published(tmp_path), tmp_path / "x.gguf"
    flags = ["--format", "q8_0", "--output", str(file)]
    assert cli.main(["quantize", str(folder), *flags]) == 0
    loaded, _, _ = load_quietly(file)
    got, want = load_mtp(loaded, file), load_mtp(quantize_(model, "q8_0", progress=False), folder)
    assert got.eh_proj.format == want.eh_proj.format == "q8_0" and got.dtype == want.dtype
    (logits, row), (expected, wanted) = _both(loaded, got), _both(model, want)
    assert torch.equal(logits, expected) and torch.equal(row, wanted)


@pytest.mark.parametrize("missing", [None, "enorm"])
def test_a_file_without_a_head_that_cannot_be_read(
    missing: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second file of the same tensors, or a part that is missing, is the reason given."""
    (_, folder), file = published(tmp_path), tmp_path / "x.gguf"
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if n != f"model.layers.2.{missing}.weight"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if missing is None:
        shutil.copy(folder / "model.safetensors", folder / "model.fp16.safetensors")
    flags = ["--format", "q8_0", "--output", str(file)]
    assert cli.main(["quantize", str(folder), *flags]) == 0
    why = "no enorm.weight" if missing else "model.fp16.safetensors and in"
    assert re.search(f"without the head for later tokens of .*{why}", capsys.readouterr().err)
    assert "glm4moe.nextn_predict_layers" not in fields_of(file)
    assert load_quietly(file)[0].model.layers[1].self_attn.q_proj.format == "q8_0"


@pytest.mark.parametrize("output", ["x.gguf", "packed"])
def test_what_becomes_of_a_head_is_known_before_the_model_is_packed(
    output: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = with_nextn(random_model(tmp_path / "m.gguf", "qwen35"), "qwen35")
    said = list[str]()

    def quantize(*args: Any, **given: Any) -> None:
        said.append(capsys.readouterr().err)
        raise ValueError("not packed")

    monkeypatch.setattr("torch_metalmm.models.quantize.quantize_", quantize)
    flags = ["--format", "q8_0", "--output", str(tmp_path / output)]
    assert cli.main(["quantize", str(source), *flags]) == 1
    assert "without the head for later tokens of" in said[0]


@pytest.mark.filterwarnings("ignore:packed without an importance")
def test_an_importance_says_nothing_of_a_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, file, matrix = published(tmp_path)[1], tmp_path / "x.gguf", tmp_path / "i.gguf"
    sizes = {"model.layers.1.self_attn.q_proj": 64, "model.layers.2.self_attn.q_proj": 64}
    columns = {n: np.random.default_rng(0).random((1, k), np.float32) for n, k in sizes.items()}
    write_imatrix(matrix, Imatrix({n: Entry(c, np.ones(1)) for n, c in columns.items()}, ("a",), 1))
    heads, plain = list[Any](), list[Tensor]()
    for flags in ([], ["--imatrix", str(matrix)]):
        command = ["quantize", str(source), "--format", "q4_0", "--force", "--output", str(file)]
        assert cli.main([*command, *flags]) == 0
        assert ("tokens is packed without" in capsys.readouterr().err) == bool(flags)
        model, _, _ = load_quietly(file)
        heads.append(load_mtp(model, file))
        plain.append(model.model.layers[1].self_attn.q_proj.weight)
    assert not torch.equal(*plain)
    own = [head.block.model.layers[0].self_attn.q_proj.weight for head in heads]
    assert torch.equal(*own)


def test_the_command_packs_a_head_as_its_options_say(tmp_path: Path) -> None:
    """The head of a folder and, packed already, of a file."""
    source = published(tmp_path)[1]
    for own, rest in (("q8_0", "q5_0"), ("q5_1", "q4_0")):
        file = tmp_path / f"{rest}.gguf"
        command = ["--pattern", f"*.self_attn.*={own}", "--pattern", f"*.experts={own}"]
        command += ["--format", rest, "--output", str(file)]
        assert cli.main(["quantize", str(source), *command]) == 0
        head, source = load_mtp(load_quietly(file)[0], file), file
        packed = stored_config(head)
        assert packed is not None and head.eh_proj.format == rest
        layer = {n: f for n, f in packed.modules.items() if n.startswith("block.model.layers.0.")}
        named = {n for n in layer if ".self_attn." in n or ".experts." in n}
        assert len(named) == 7 and len(layer) > len(named)
        assert all(format == (own if n in named else rest) for n, format in layer.items()), layer


def _both(model: Any, head: Any) -> Any:
    tokens = torch.arange(3, 9)[None]
    hidden = model.get_decoder()(tokens)[0].detach()
    cache = PackedCache(head.block.config, "f32")
    return step(head, tokens[:, 1:], hidden[:, :-1], cache, torch.arange(1, 6)[None])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder(family: str, tmp_path: Path) -> None:
    """The logits are those of transformers' own head, whose layer runs the same ops."""
    model = trunk(family)
    folder = folder_with_head(model, tmp_path)
    head = load_mtp(model, folder)
    model.config._name_or_path = str(folder)
    text = model.config
    text.dtype = torch.float32
    model._keys_to_ignore_on_load_unexpected = [r"^mtp.*", r"model\.layers\.2\..*"]
    text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    text.mtp_mlp_layer_types = ["sparse"]
    theirs = MtpModel.from_pretrained(model).eval()
    for parameter in (*theirs.parameters(), *head.parameters()):
        parameter.data = parameter.data.clone()  # torch's products differ with W's place in a file
    tokens = torch.arange(3, 15)[None]
    with torch.inference_mode():
        hidden = model.get_decoder()(tokens)[0]
        positions = torch.arange(1, 12)[None]
        cache = MtpCache(config=text.get_mtp_config())
        want = theirs.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=tokens[:, 1:])
        logits = theirs.shared_head(want[:, -1])
        own = PackedCache(head.block.config, "f32")
        got, last = step(head, tokens[:, 1:], hidden[:, :-1], own, positions)
    assert torch.equal(got, logits) and torch.equal(last[:, 0], want[:, -1])


def test_a_packed_model_packs_its_head(tmp_path: Path) -> None:
    model = trunk("glm4_moe")
    folder = folder_with_head(model, tmp_path)
    quantize_(model, "q8_0", progress=False)
    head = load_mtp(model, folder)
    assert isinstance(head.eh_proj, QuantLinear) and head.eh_proj.format == "q8_0"
    layers = [m for m in head.block.get_decoder().layers.modules() if isinstance(m, QuantLinear)]
    assert {m.format for m in layers} == {"q8_0"} and len(layers) >= 7
    assert load_mtp(model, folder, format="q4_0").eh_proj.format == "q4_0"


@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_keeps_the_head(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a packed folder as it is, so that load_mtp packs it."""
    model = trunk(family)
    source = folder_with_head(model, tmp_path / "dense")
    packed = tmp_path / "packed"
    flags = ["--format", "q8_0", "--output"]
    assert cli.main(["quantize", str(source), *flags, str(packed)]) == 0
    assert "without the head" not in capsys.readouterr().err
    loaded, _ = load_packed(packed)
    names = load_file(packed / HEAD_FILE)
    assert not any("embed_tokens" in n or "shared_head.head" in n for n in names)
    quantize_(model, "q8_0", progress=False)
    want, got = load_mtp(model, source), load_mtp(loaded, packed)
    assert isinstance(got.eh_proj, QuantLinear)
    assert same(got, want)
    trunk(family).save_pretrained(tmp_path / "none")
    assert cli.main(["quantize", str(tmp_path / "none"), *flags, str(packed), "--force"]) == 0
    assert not (packed / HEAD_FILE).exists()


def test_quantize_takes_what_has_no_head(tmp_path: Path) -> None:
    """A config without tied embeddings; a second file of the same tensors."""
    flags = ["--format", "q8_0", "--output"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.Dinov2Config(**sizes, num_attention_heads=2, image_size=28)
    transformers.Dinov2Model(config).save_pretrained(tmp_path / "seen")
    assert cli.main(["quantize", str(tmp_path / "seen"), *flags, str(tmp_path / "a")]) == 0
    source = folder_with_head(trunk("glm4_moe"), tmp_path / "twice")
    shutil.copy(source / "model.safetensors", source / "model.fp16.safetensors")
    assert cli.main(["quantize", str(source), *flags, str(tmp_path / "b")]) == 0
    assert load_file(tmp_path / "b" / HEAD_FILE)


def test_quantize_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = random_model(tmp_path / "m.gguf", "qwen35")
    for i, path in enumerate((without, with_nextn(without, "qwen35"))):
        assert cli.main(["quantize", str(path), "--output", str(tmp_path / f"out{i}")]) == 0
        said = "without the head for later tokens of" in capsys.readouterr().err
        assert said == (i == 1)


def test_of_several_heads_the_first_is_read(tmp_path: Path) -> None:
    path = with_nextn(random_model(tmp_path / "m.gguf", "qwen35"), "qwen35")
    model, _, _ = load_quietly(path)
    values, tensors = fields_of(path, "qwen35."), dict(tensors_of(path))
    second = {n.replace("blk.4.", "blk.5."): t for n, t in tensors.items() if "blk.4." in n}
    second["blk.5.nextn.enorm.weight"] = tensors["output_norm.weight"]
    values |= {"block_count": 6, "nextn_predict_layers": 2}
    two = write_gguf(tmp_path / "two.gguf", "qwen35", tensors | second, values)
    again, _, warnings = load_quietly(two)
    assert same(load_mtp(again, two), load_mtp(model, path)) and not warnings
    layers = {"glm4_moe": "model.layers.{}.", "qwen3_next": "mtp.layers.{}."}
    for family, first in (("glm4_moe", 2), ("qwen3_next", 0)):
        dense, name = trunk(family), layers[family]
        folder = folder_with_head(dense, tmp_path / family)
        want, weights = load_mtp(dense, folder), load_file(folder / "model.safetensors")
        own, other = name.format(first), name.format(first + 1)
        more = {n.replace(own, other): -t for n, t in weights.items() if n.startswith(own)}
        save_file(weights | more, folder / "model.safetensors")
        assert more and same(load_mtp(dense, folder), want)


def test_names_without_mtp_count_where_no_other_head_is(tmp_path: Path) -> None:
    model = trunk("qwen3_next")
    folder = folder_with_head(model, tmp_path)
    want, tensors = load_mtp(model, folder), load_file(folder / "model.safetensors")
    bare = {n.removeprefix("mtp."): -t for n, t in tensors.items() if n.startswith("mtp.")}
    save_file(bare, folder / "others.safetensors")
    assert same(load_mtp(model, folder), want)
    (tmp_path / "alone").mkdir()
    save_file(bare, tmp_path / "alone" / "model.safetensors")
    assert torch.equal(load_mtp(model, tmp_path / "alone").enorm.weight, -want.enorm.weight)


def test_an_index_of_files_elsewhere(tmp_path: Path) -> None:
    model = trunk("glm4_moe")
    path = folder_with_head(model, tmp_path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret"}}')
    with pytest.raises(ValueError, match=r"index\.json.*\.\./secret"):
        load_mtp(model, path)


def test_no_head(tmp_path: Path) -> None:
    model = trunk("glm4_moe")
    folder = folder_with_head(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder: nowhere"):
        load_mtp(model, "nowhere")
    other = trunk("glm4_moe", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"has no head for later tokens: .*model\.layers\.3\."):
        load_mtp(other, folder)
    wide = trunk("glm4_moe", hidden_size=32)
    with pytest.raises(ValueError, match="its tensors are no"):
        load_mtp(wide, folder)
    tensors = load_file(folder / "model.safetensors")
    for missing in ("enorm", "self_attn.k_proj"):
        left = {n: t for n, t in tensors.items() if n != f"model.layers.2.{missing}.weight"}
        (tmp_path / missing).mkdir()
        save_file(left, tmp_path / missing / "model.safetensors")
        with pytest.raises(ValueError, match=rf"no .*{missing}\.weight"):
            load_mtp(model, tmp_path / missing)
    shutil.copy(folder / "model.safetensors", folder / "again.safetensors")
    with pytest.raises(ValueError, match="is in .*again.safetensors and in"):
        load_mtp(model, folder)
