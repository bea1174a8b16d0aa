"""load_gguf of packed files, and the demo model; test_converted.py has each architecture in f32."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from converted_models import CASES as RECORDED
from converted_models import records
from gguf_files import RARE, decoded, load_quietly, mapped, random_model
from places import ROOT
from torch import nn

from bench.models.llamas import dense_state
from torch_metalmm import MetalMMConfig, QuantEmbedding, QuantLinear, load_packed
from torch_metalmm.files.gguf.architectures import supported_architectures
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.generate import demo_model

# What cannot stay packed, by architecture: parts of the names the warning lists.
DECODED = {"t5": ("ffn_down",), "mamba": ("token_embd", "ssm_dt")}


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        *((a, True) for a in ("llama", "gemma2", "gemma4", "mamba", "t5", "qwen35", "qwen35moe")),
        *(("llama", False), ("t5", False)),
    ],
)
def test_a_packed_file_has_the_values_of_its_tensors(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    path = random_model(tmp_path / "m.gguf", architecture, tied)
    model, tokenizer, given = load_quietly(path)
    warned = [text for text in given if "scale_decoder_outputs" not in text]
    expected = DECODED.get(architecture, ())
    assert len(warned) == (1 if expected else 0), warned
    if expected:
        assert "decoded to torch.float32" in warned[0]
        names = warned[0].split(": ")[1].split(", ")
        assert all(any(part in name for part in expected) for name in names), names
    check_values(model, path, architecture)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    check_everything_else_is_packed(model, bool(expected))
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "the man in the <|end|> other  room é 12345"
    assert tokenizer(text).input_ids == theirs(text).input_ids
    assert type(tokenizer) is type(theirs)


def check_values(model: nn.Module, path: Path, architecture: str) -> None:
    """Those of the same tensors in f32, which test_converted.py compares with transformers'."""
    found, wanted = dense_state(model), dense_state(load_quietly(decoded(path, architecture))[0])
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def test_rare_types_are_packed_as_in_the_file(tmp_path: Path) -> None:
    """Codes of grids, ternary ones and small floats."""
    path = random_model(tmp_path / "rare.gguf", "llama", kinds=RARE)
    model, _, warned = load_quietly(path)
    assert warned == []
    kinds = {m.format for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)}
    assert kinds == set(RARE)
    check_values(model, path, "llama")
    check_everything_else_is_packed(model, False)


def check_everything_else_is_packed(model: nn.Module, has_exceptions: bool) -> None:
    # The gate of a shared expert is a vector in the file.
    dense = [
        n
        for n, m in model.named_modules()
        if type(m) in (nn.Linear, nn.Embedding) and len(m.weight) > 1
    ]
    packed = [m for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)]
    assert len(packed) >= 6
    if not has_exceptions:
        assert dense == []
    assert all(p.dtype in (torch.float32, torch.uint8) for p in model.parameters())


def test_supported_architectures_are_the_tested_ones() -> None:
    converted = {records()[case]["architecture"] for case in RECORDED}
    assert set(supported_architectures()) == converted


def test_from_pretrained_with_our_config_names_load_gguf(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", "llama")
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        with pytest.raises(ValueError, match=rf"keep {path.name} packed .*load_gguf\(path\) keeps"):
            kind.from_pretrained(
                tmp_path, gguf_file=path.name, quantization_config=MetalMMConfig("q8_0")
            )


# The demo model


@pytest.fixture(scope="session")
def smollm() -> tuple[Any, Any]:
    model, tokenizer, warned = load_quietly(demo_model())
    assert warned == []
    return model, tokenizer


def test_demo_model_equals_transformers(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    text = "The history of Paris begins more than two thousand years ago, when a tribe settled. "
    ids = tokenizer(text, return_tensors="pt").input_ids
    config = copy.deepcopy(model.config)  # else transformers reads the vocabulary once more
    del config.quantization_config
    reference = transformers.LlamaForCausalLM.from_pretrained(
        demo_model().parent, gguf_file=demo_model().name, dtype=torch.float32, config=config
    )
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    with torch.inference_mode():
        ours, theirs = model.generate(ids, **greedy), reference.generate(ids, **greedy)
    assert ours.shape[1] == ids.shape[1] + 8 and torch.equal(ours, theirs)


def answer_of(model: Any, tokenizer: Any) -> str:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    text: str = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :])
    return text


def test_demo_model_answers(smollm: tuple[Any, Any]) -> None:
    assert "Paris" in answer_of(*smollm)


@pytest.mark.filterwarnings("ignore")  # progress bars and fallbacks of transformers' save
def test_the_readme_packs_the_demo_model_so_that_it_still_answers(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (format,) = re.findall(r"metalmm quantize some.gguf --format (\w+) --output folder", readme)
    out = tmp_path / "folder"
    assert main(["quantize", str(demo_model()), "--format", format, "--output", str(out)]) == 0
    assert "Paris" in answer_of(*load_packed(out))


def test_weights_are_views_of_the_file(smollm: tuple[Any, Any]) -> None:
    model, _ = smollm
    mapped_ones = [n for n, p in model.named_parameters() if mapped(demo_model(), p)]
    copied = {n for n, p in model.named_parameters() if p.dtype == torch.uint8} - set(mapped_ones)
    assert len(mapped_ones) == 30 * 5 + 1  # v, o, gate, up, down and the embedding
    assert all(name.endswith(("q_proj.weight", "k_proj.weight")) for name in copied)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_little_memory() -> None:
    """Memory of its own: pages of the mapped file, which check_finite reads, can be given back."""
    script = """
import torch, transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, modeling_gguf_pytorch_utils
from transformers.integrations.gguf import get_gguf_tokenizer
import gguf, torch_metalmm.files.gguf.load
from torch_metalmm.tools.generate import demo_model
print("imported", flush=True)
input()
model, tokenizer = torch_metalmm.load_gguf(demo_model())
"""
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdin is not None and run.stdout is not None
    with run:
        assert run.stdout.readline() == "imported\n"
        base = peak = _anonymous(run.pid)
        run.stdin.write("\n")
        run.stdin.flush()
        while run.poll() is None:
            peak = max(peak, _anonymous(run.pid))
            time.sleep(0.005)
    assert run.returncode == 0
    grown, size = peak - base, demo_model().stat().st_size
    print(f"anonymous memory over imports {grown / size:.2f} x the file")
    assert 0 < grown < 0.8 * size  # 0.51 on Linux; one more copy of the weights would be 1.5


def _anonymous(pid: int) -> int:
    """Bytes of the process that no file backs; 0 once it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)
