"""The metalmm command: its output, its files and its errors."""

from __future__ import annotations

import itertools
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from failing import failure
from gguf_files import random_model
from hf_models import change_config

from bench.models.families import new_model, sizes
from torch_metalmm import _C, load_gguf, load_packed, quantize_, save_mlx
from torch_metalmm.engines import engines
from torch_metalmm.tools import generate, packing
from torch_metalmm.tools.cli import main


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("cli") / "tiny.gguf", "qwen2")


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory, gguf: Path) -> Path:
    """A dense Hugging Face folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("hf")
    new_model("qwen2", sizes(64, 96, num_hidden_layers=1), torch.bfloat16).save_pretrained(folder)
    load_gguf(gguf)[1].save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def keep_settings() -> Iterator[None]:
    """The command sets them for its process."""
    threads, verbosity = torch.get_num_threads(), transformers.utils.logging.get_verbosity()
    yield
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity(verbosity)


def test_info_lists_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with the sizes that the native table has."""
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()[1:] if re.match(r"\w+ +[\d.]+ ", line)]
    native = [f for f in _C.formats() if not f["name"].endswith(("_bf16", "_f32"))]
    assert [(n, int(v), int(b), kind) for n, _, v, b, kind in rows] == [
        (f["name"], f["block_values"], f["block_bytes"], f["layout"]) for f in native
    ]
    assert re.search(r"^q4_k +4\.5 +256 +144 +block$", out, re.M)
    assert f"torch {torch.__version__}, Python {sys.version.split()[0]}" in out


def test_generate_answers_with_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    question = "What is the capital of France?"
    assert main(["generate", question, "--max-new-tokens", "16", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out and "<|im" not in out
    numbers = (
        r"prompt 37 tokens, [\d.]+ tokens/s · first token after [\d.]+ s · decode \d+ tokens, "
    )
    assert re.search(numbers + r"[\d.]+ tokens/s · peak memory \d+ MB\n$", err)


def test_generate_options(capsys: pytest.CaptureFixture[str], gguf: Path) -> None:
    common = ["generate", "hello", "--model", str(gguf), "--max-new-tokens", "5", "--raw"]
    for threads in (2, 1):
        assert main([*common, "--threads", str(threads), "--dtype", "bfloat16"]) == 0
        assert torch.get_num_threads() == threads
    texts = []
    for seed in ("1", "1", "2"):
        capsys.readouterr()
        assert main([*common, "--temperature", "1.5", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_generate_with_a_packed_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gguf: Path
) -> None:
    from torch_metalmm import PackedCache

    made: list[str | None] = []
    create = PackedCache.__init__
    monkeypatch.setattr(
        PackedCache,
        "__init__",
        lambda self, config, format: made.append(format) or create(self, config, format),
    )
    common = ["generate", "hello", "--model", str(gguf), "--max-new-tokens", "5", "--raw"]
    texts = []
    for options in ([], ["--cache", "f32"], ["--cache", "Q8_0"]):
        assert main([*common, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and made == ["f32", "f16/q8_0"]
    assert "--cache: unknown 'q9'" in failure(capsys, *common, "--cache", "q9")
    assert "cache: 'f16/q4_k'; its blocks of 256" in failure(capsys, *common, "--cache", "q4_k")


def test_quantize_a_folder_and_generate_from_it(
    capsys: pytest.CaptureFixture[str], hf_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "packed"
    command = ["quantize", str(hf_folder), "--format", "Q4_K", "--output", str(out)]
    with pytest.warns(UserWarning, match="q4_k -> q5_0: model.embed_tokens, model.layers.0"):
        assert main([*command, "--pattern", "lm_head=q8_0", "--pattern", "*.k_proj=none"]) == 0
    err = capsys.readouterr().err
    assert "Quantizing" in err and re.search(r"packed: 0\.\d MB\n$", err)
    model, tokenizer = load_packed(out)
    layer = model.model.layers[0]
    assert layer.mlp.down_proj.format == "q5_0" and model.lm_head.format == "q8_0"
    assert type(layer.self_attn.k_proj) is torch.nn.Linear
    assert model.dtype == torch.bfloat16 and tokenizer is not None
    assert main(["generate", "hello", "--model", str(out), "--max-new-tokens", "3"]) == 0


def test_quantize_a_gguf(gguf: Path, tmp_path: Path) -> None:
    assert main(["quantize", str(gguf), "--output", str(tmp_path / "same")]) == 0
    source, _ = load_gguf(gguf)
    same, _ = load_packed(tmp_path / "same")
    ids = torch.arange(9)[None]
    assert torch.equal(same(ids).logits, source(ids).logits)
    command = ["quantize", str(gguf), "--format", "q8_0", "--output", str(tmp_path / "q8")]
    assert main(command) == 0
    packed, _ = load_packed(tmp_path / "q8")
    assert {m.format for m in packed.modules() if hasattr(m, "format")} == {"q8_0"}
    command = ["quantize", str(gguf), "--format", "Q3_K_M", "--pattern", "*.k_proj=q8_0"]
    assert main([*command, "--output", str(tmp_path / "mixed.gguf")]) == 0
    mixed = load_gguf(tmp_path / "mixed.gguf")[0].model.layers[0]
    projections = (mixed.self_attn.q_proj, mixed.self_attn.k_proj, mixed.self_attn.v_proj)
    assert [layer.format for layer in projections] == ["q3_k", "q8_0", "q5_k"]


def test_quantize_replaces_a_folder_if_forced(
    capsys: pytest.CaptureFixture[str], gguf: Path, tmp_path: Path
) -> None:
    command = ["quantize", gguf, "--output", tmp_path / "out", "--format"]
    assert main([str(a) for a in (*command, "q8_0")]) == 0
    before = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    assert "out holds a packed model; --force replaces it" in failure(capsys, *command, "q4_0")
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == before
    assert main([str(a) for a in (*command, "q4_0", "--force")]) == 0
    assert load_packed(tmp_path / "out")[0].model.embed_tokens.format == "q4_0"
    (tmp_path / "out" / "config.json").write_text('{"model_type": "llama"}')
    capsys.readouterr()
    message = failure(capsys, *command, "q8_0", "--force")
    assert "out holds another model; choose an empty folder" in message


def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["fly"],
        ["generate", "x", "--top-p", "1.5"],
        ["chat", "--ctx", "0"],
        ["generate", "x", "--max-new-tokens", "0"],
        ["generate", "x", "--temperature", "-1"],
        ["generate", "x", "--dtype", "int8"],
        ["quantize", "x"],
    ):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2
        assert "usage: metalmm" in capsys.readouterr().err


def test_alone_it_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([])
    shown = capsys.readouterr().err
    assert exit.value.code == 2 and "error" not in shown
    assert all(f"\n    {name} " in shown for name in ("generate", "chat", "quantize", "info"))


def test_libraries_that_transformers_imports_are_quiet(
    capsys: pytest.CaptureFixture[str], gguf: Path
) -> None:
    assert main(["generate", "x", "--model", str(gguf), "--max-new-tokens", "1"]) == 0
    capsys.readouterr()
    for name in ("torchao", "torch.utils._pytree"):  # what torchao 0.18 says when imported
        logging.getLogger(name).warning("Failed to load _C.so")
    assert capsys.readouterr().err == ""


def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], gguf: Path, hf_folder: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGML" + bytes(100))
    assert "no such GGUF file" in failure(capsys, "generate", "x", "--model", "/nothing.gguf")
    assert "magic" in failure(capsys, "generate", "x", "--model", bad)
    assert "is not packed; run `metalmm q" in failure(capsys, "generate", "x", "--model", hf_folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no config.json" in failure(capsys, "generate", "x", "--model", empty)
    out = ("--output", tmp_path / "out")
    assert "unknown 'q9'" in failure(capsys, "quantize", gguf, "--format", "q9", *out)
    assert "is not NAME=FORMAT" in failure(capsys, "quantize", gguf, "--pattern", "q4_0", *out)
    assert "no layer is named 'x'" in failure(capsys, "quantize", gguf, "--pattern", "x=q8_0", *out)
    assert "give --format" in failure(capsys, "quantize", hf_folder, *out)
    assert "neither a .gguf" in failure(capsys, "quantize", empty, "--format", "q8_0", *out)
    source = ("quantize", hf_folder, "--format", "q8_0", "--output")
    assert "--output is the source" in failure(capsys, *source, hf_folder)
    assert "cannot write to the folder" in failure(capsys, *source, bad / "x")
    assert not (tmp_path / "out").exists()


def test_an_unknown_format_names_near_ones(capsys: pytest.CaptureFixture[str], gguf: Path) -> None:
    out = ("--output", gguf.parent / "out")
    for given, near in (("q4k", "q4_k"), ("Q8-0", "q8_0"), ("afine4_g64", "affine4_g64")):
        message = failure(capsys, "quantize", gguf, "--format", given, *out)
        assert f"unknown '{given}'; allowed: f32, f16, " in message
        assert f"; did you mean {near}" in message and message.endswith("?\n")
        shape = ("--shape", "1x256x256", "--chip", "m1")
        assert f"mean {near}" in failure(capsys, "explain", *shape, "--format", given)
    assert "did you mean" not in failure(capsys, "quantize", gguf, "--format", "zzz", *out)
    for mixture, most in (("Q4_K_M", "q4_k"), ("q3_k_l", "q3_k"), ("Q5_K_S", "q5_k")):
        message = failure(capsys, "explain", *shape, "--format", mixture)
        assert f"'{mixture}' is a mixture of llama.cpp's" in message and f"'{most}'" in message


def test_an_absent_device_or_folder_is_found_before_loading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gguf: Path
) -> None:
    """Every command that takes a device says so in the words of the doctor."""

    def never(*_: object) -> None:
        raise AssertionError("loaded a model of no use")

    monkeypatch.setattr(generate, "load_model", never)
    monkeypatch.setattr(packing, "load_dense", never)
    absent = {d: f"device: {d}: {why}" for d, why in engines().items() if why}
    absent["nonsense"] = "device: nonsense: no engine of this name; allowed: cpu, mps, cuda"
    out = ("--output", gguf.parent / "out")
    for device, why in absent.items():
        for command in (
            ("generate", "x", "--model", gguf),
            ("quantize", gguf, *out),
            ("quantize", gguf.parent, "--format", "q8_0", *out),
            ("doctor",),
        ):
            assert why in failure(capsys, *command, "--device", device)
    assert not (gguf.parent / "out").exists()
    message = failure(capsys, "quantize", gguf, "--format", "q8_0", "--output", gguf / "x")
    assert "cannot write to the folder" in message


@pytest.mark.parametrize("mode", ["nvfp8", "mxfp6"])
def test_mlx_checkpoints_that_are_not_loaded_say_why(
    capsys: pytest.CaptureFixture[str], hf_folder: Path, tmp_path: Path, mode: str
) -> None:
    folder = Path(shutil.copytree(hf_folder, tmp_path / "mlx"))
    packing = {"group_size": 16, "bits": 4, "mode": mode}
    for name, other in itertools.permutations(("quantization", "quantization_config")):
        change_config(folder, **{name: packing, other: ...})
        out = ("--format", "q8_0", "--output", tmp_path / "out")
        for command in (("generate", "x", "--model", folder), ("quantize", folder, *out)):
            message = failure(capsys, *command)
            assert f"{folder}: quantization: the mode {mode!r} is not supported" in message
    with pytest.raises(ValueError, match="load_mlx reads MLX checkpoints"):
        load_packed(folder)


def test_models_that_another_method_quantized_are_not_packed(
    capsys: pytest.CaptureFixture[str], hf_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(hf_folder, tmp_path / "other"))
    change_config(folder, quantization_config={"quant_method": "fp8"})
    message = failure(capsys, "quantize", folder, "--format", "q8_0", "--output", tmp_path / "out")
    assert f"{folder} is quantized by 'fp8'; only dense models are packed" in message


def test_a_dense_folder_runs_no_code_and_no_pickle(
    capsys: pytest.CaptureFixture[str], hf_folder: Path, tmp_path: Path
) -> None:
    evil = Path(shutil.copytree(hf_folder, tmp_path / "evil"))
    (evil / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {"auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.M"}}
    out = ("--format", "q8_0", "--output", tmp_path / "out")
    for change in ({"model_type": "evil"}, {"model_type": "evil", "architectures": ["pipeline"]}):
        change_config(evil, **auto_map, **change)
        assert "trust_remote_code" in failure(capsys, "quantize", evil, *out)
    shutil.copy(hf_folder / "config.json", evil)
    (evil / "model.safetensors").rename(evil / "pytorch_model.bin")
    assert "no file named model.safetensors" in failure(capsys, "quantize", evil, *out)
    assert not (tmp_path / "ran").exists()


def test_generate_from_an_mlx_checkpoint(
    capsys: pytest.CaptureFixture[str], gguf: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_gguf(gguf)
    save_mlx(quantize_(model, "affine4_g32", progress=False), tokenizer, tmp_path)
    command = ["generate", "hello", "--max-new-tokens", "3", "--model"]
    assert main([*command, str(tmp_path)]) == 0
    assert "decode 3 tokens" in capsys.readouterr().err
