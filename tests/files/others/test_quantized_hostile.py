"""load_quantized on folders that lie, lack something or are of another layout: a clear error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import Tensors, change_config, layouts, random_layer, write
from safetensors.torch import load_file, save_file
from spoiled_folders import Spoil, both, config, quant, raw, refused, up
from torch import Tensor

from torch_metalmm import load_quantized


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each method, 4 bits in groups of 64."""
    root = tmp_path_factory.mktemp("good")
    for name, layout in layouts(4, 64).items():
        write(root / name, layout, 4, 64, symmetric=name == "compressed-tensors")
    return root


def changed(change: Callable[[Tensors], Tensors]) -> Spoil:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({n: t.contiguous() for n, t in change(load_file(file)).items()}, file)

    return apply


def rename(old: str, new: str) -> Spoil:
    return changed(lambda tensors: {n.replace(old, new): t for n, t in tensors.items()})


def every(leaf: str, f: Callable[[Tensor], Tensor]) -> Spoil:
    """Replace this tensor of every layer."""
    return changed(lambda ts: {n: f(t) if n.endswith(leaf) else t for n, t in ts.items()})


def tied_head() -> Spoil:
    """A quantized head [320, 256] of a model whose head is its embedding."""
    head = layouts(4, 64)["gptq"].tensors(random_layer(320, 256, 4, 64))
    own = {f"lm_head.{leaf}": t for leaf, t in head.items()}
    return both(changed(lambda tensors: tensors | own), config(tie_word_embeddings=True))


def copied(*names: str) -> Spoil:
    """Other files of the same weights."""
    return lambda f: [shutil.copy(f / "model.safetensors", f / name) for name in names]


def grouped(**changes: Any) -> Spoil:
    return quant(config_groups={"group_0": {"weights": {"num_bits": 4}} | changes})


def weights(**changes: Any) -> Spoil:
    stated = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    return grouped(weights=stated | changes)


CASES: dict[str, tuple[str, Spoil, str]] = {
    "no config": ("gptq", lambda f: (f / "config.json").unlink(), "has no config.json"),
    "not quantized": ("gptq", config(quantization_config=...), "must have a quantization_config"),
    "a list": ("gptq", config(quantization_config=[1]), r"quantization_config, got \[1\]"),
    "of MLX": ("gptq", quant(quant_method=None), "quant_method None: use load_mlx"),
    "packed": ("gptq", quant(quant_method="metalmm"), "'metalmm': use load_packed"),
    "bitsandbytes": (
        "gptq",
        quant(quant_method="bitsandbytes"),
        "quantized by 'bitsandbytes', which has no format here.*dequantize it, and pack it",
    ),
    "method is a list": ("gptq", quant(quant_method=["gptq"]), "no format here"),
    "no weights": (
        "gptq",
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"has no \*.safetensors",
    ),
    "truncated": ("gptq", raw(lambda data: data[:-9]), "cannot read .*model.safetensors"),
    "unknown model": ("gptq", config(model_type="evil"), "no model_type 'evil'"),
    "dense": ("gptq", rename(".qweight", ".weight"), "has no tensor <layer>.qweight"),
    "marlin": ("gptq", quant(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; read"),
    "marlin as format": ("gptq", quant(format="marlin"), "format is 'marlin'; read"),
    "two layouts": (
        "gptq",
        quant(checkpoint_format="gptq", format="gptq_v2"),
        "checkpoint_format and format disagree: .*'gptq_v2'",
    ),
    "words of 64 bits": ("gptq", quant(pack_dtype="int64"), "pack_dtype is 'int64'; read here"),
    "is marlin": ("gptq", quant(is_marlin_format=True), "is_marlin_format is True"),
    "gemv": ("awq", quant(version="gemv"), "version is 'gemv'; read here: 'gemm'"),
    "llm-awq": ("awq", quant(backend="llm-awq"), "backend is 'llm-awq'"),
    "bits lie": ("gptq", quant(bits=3), "config says bits 3, its tensors have 4"),
    "bits are text": ("gptq", quant(bits="4"), "config says bits '4', its tensors have 4"),
    "group lies": ("awq", quant(group_size=128), "config says group_size 128, its .* have 64"),
    "no scales": ("gptq", up("scales", None), "up_proj: scales is missing"),
    "no zeros": ("gptq", up("qzeros", None), "up_proj: qzeros is missing"),
    "no codes": ("gptq", up("qweight", None), "tensors the model does not: .*up_proj.qzeros"),
    "codes are floats": ("gptq", up("qweight", torch.Tensor.float), "qweight must be torch.int32"),
    "5 bits": ("gptq", up("qweight", lambda t: t.repeat(2, 1)[:40]), "5 bits a code, GPTQ has"),
    "no whole bits": ("gptq", up("qweight", lambda t: t[:-1]), "bits must be a positive integer"),
    "empty codes": ("gptq", up("qweight", lambda t: t[:0]), "bits must be a positive integer"),
    "other rows": ("gptq", up("qweight", lambda t: t[:, 1:]), r"must be torch.int32 \[any, 512\]"),
    "zeros of others": ("gptq", up("qzeros", lambda t: t[1:]), r"qzeros must .*\[4, 64\], got"),
    "three groups": ("gptq", up("scales", lambda t: t[:3]), r"qzeros must be torch.int32 \[3, 64"),
    "groups of 16": (
        "gptq",
        both(
            up("scales", lambda t: t.repeat(4, 1)),
            up("qzeros", lambda t: t.repeat(4, 1)),
            up("g_idx", lambda t: torch.arange(256, dtype=torch.int32) // 16),
        ),
        "groups of 16 values have no affine format",
    ),
    "scales are integers": (
        "awq",
        up("scales", lambda t: t.int()),
        "scales must be torch.float16 or",
    ),
    "scales are float8": (
        "gptq",
        up("scales", lambda t: t.to(torch.float8_e4m3fn)),
        r"scales must be torch.float16 or .*, got torch.float8_e4m3fn \[4, 512\]",
    ),
    "zeros are float8": (
        "hqq",
        up("zero", lambda t: t.to(torch.float8_e5m2)),
        "zero must be torch.float16 or .*, got torch.float8_e5m2",
    ),
    "NaN": ("awq", up("scales", lambda t: t * torch.nan), "scales must be finite floats"),
    "infinite": ("hqq", up("scale", lambda t: t / 0), "scales must be finite floats"),
    "group is negative": ("gptq", up("g_idx", lambda t: t - 1), "g_idx does not give each of 4"),
    "group is too high": ("gptq", up("g_idx", lambda t: t + 2**30), "g_idx does not give each"),
    "uneven groups": ("gptq", up("g_idx", lambda t: t * 0), "does not give each of 4 groups 64"),
    "g_idx is short": ("gptq", up("g_idx", lambda t: t[1:]), r"g_idx must be .*\[256\]"),
    "awq rows": ("awq", up("qweight", lambda t: t[1:]), r"qweight must .*\[256, 64\]"),
    "awq zeros": ("awq", up("qzeros", lambda t: t[:, 1:]), r"qzeros must be .*\[4, 64\]"),
    "dense too": (
        "gptq",
        up("weight", lambda _: torch.zeros(512, 256)),
        "up_proj is quantized, and has a dense weight too: .*up_proj.weight",
    ),
    "a tied head": (
        "gptq",
        tied_head(),
        "lm_head is quantized, and has a dense weight too: model.embed_tokens.weight",
    ),
    "several files": (
        "gptq",
        copied("model-4bit.safetensors"),
        r"has 2 model\*.safetensors; no index names model-4bit.safetensors",
    ),
    "several of other names": (
        "gptq",
        both(
            copied("a.safetensors", "b.safetensors"),
            lambda f: (f / "model.safetensors").unlink(),
        ),
        r"has 2 \*.safetensors; no index names a.safetensors",
    ),
    "no layer": ("awq", rename("up_proj", "evil"), "the model has no layer .*mlp.evil"),
    "experts": (
        "awq",
        rename("mlp.up_proj", "mlp.experts.0.w1"),
        "no layer .*experts.0.w1; transformers stacks experts in one tensor",
    ),
    "a norm": ("awq", rename("mlp.up_proj", "input_layernorm"), "LlamaRMSNorm, which cannot be"),
    "extra tensor": ("awq", rename("norm.weight", "evil"), "does not: .*evil"),
    "naive": ("compressed-tensors", quant(format="naive-quantized"), "format is 'naive-quantized'"),
    "of a group": ("compressed-tensors", grouped(format="nvfp4-pack-quantized"), "is 'nvfp4-pack"),
    "no object": ("compressed-tensors", quant(config_groups=[1]), "must be an object of objects"),
    "activations": (
        "compressed-tensors",
        grouped(input_activations={"num_bits": 8}),
        "input_activations are quantized too",
    ),
    "no weights of a group": ("compressed-tensors", grouped(weights=None), "must be an object"),
    "floats": ("compressed-tensors", weights(type="float"), "the type of weights is 'float'"),
    "blocks": ("compressed-tensors", weights(strategy="block"), "strategy is 'block'; read here"),
    "9 bits said": (
        "compressed-tensors",
        weights(num_bits=9),
        "num_bits must be an integer",
    ),
    "no group": (
        "compressed-tensors",
        weights(group_size=None),
        "'group' takes a positive integer group_size, got None",
    ),
    "other bits": (
        "compressed-tensors",
        weights(num_bits=8),
        r"the config says num_bits 8, strategy group of 64; its tensors have 4 bits",
    ),
    "other groups": (
        "compressed-tensors",
        weights(group_size=32),
        r"strategy group of 32; its tensors have 4 bits, scales \[256, 8\]",
    ),
    "channels": ("compressed-tensors", weights(strategy="channel"), "strategy channel; its"),
    "a tensor": ("compressed-tensors", weights(strategy="tensor"), "strategy tensor; its"),
    "group size alone": (
        "compressed-tensors",
        weights(strategy=None, group_size=-1),
        "strategy channel; its",
    ),
    "7 bits padded to 8": (
        "compressed-tensors",
        both(weights(num_bits=7), every("weight_packed", lambda t: t.repeat(1, 2))),
        "has padded words, as older releases",
    ),
    "rotations": (
        "compressed-tensors",
        quant(transform_config={"config_groups": {"u": {}}}),
        "transform_config rotates activations",
    ),
    "sparse": (
        "compressed-tensors",
        quant(sparsity_config={"format": "sparse-24-bitmask"}),
        "the format of sparsity_config is 'sparse-24-bitmask'",
    ),
    "sparse by a list": (
        "compressed-tensors",
        quant(sparsity_config=[1]),
        "its quantization: .*list",
    ),
    "shape lies": ("compressed-tensors", up("weight_shape", lambda t: t * 2), "weight_shape is"),
    "9 bits": (
        "compressed-tensors",
        up("weight_packed", lambda t: t.repeat(1, 3)[:, :72]),
        "9 bits a code, at most 8",
    ),
    "no scale": ("compressed-tensors", up("weight_scale", None), "weight_scale is missing"),
    "points": (
        "compressed-tensors",
        up("weight_zero_point", lambda _: torch.zeros(3, 4, dtype=torch.int32)),
        r"weight_zero_point must be torch.int32 \[64, 4\]",
    ),
    "axis": (
        "hqq",
        up("axis", lambda t: t * 0),
        r"axis must be 1, got \[0\]: groups of other axes run",
    ),
    "no axis": ("hqq", up("axis", None), "axis must be 1, got None"),
    "packing": ("hqq", up("packing", lambda t: t + 1), "packing is '5cju`v9', known are"),
    "no packing": (
        "hqq",
        up("packing", None),
        "packing must be a name as uint8 characters, got None",
    ),
    "zeros are codes": ("hqq", up("quant_zero", lambda t: t + 1), "quant_zero is set: scales"),
    "hqq shape": ("hqq", up("shape", lambda t: t.flip(0)), r"shape is \[256, 512\], the layer"),
    "W_q is cut": ("hqq", up("W_q", lambda t: t[1:]), r"W_q must be torch.uint8 \[1024, 64\]"),
    "W_q is of bits": (
        "hqq",
        both(
            up("W_q", lambda t: t[:, :63]),
            up("packing", lambda t: torch.tensor([ord(c) for c in "3bit_32"], dtype=torch.uint8)),
        ),
        "up_proj: .*size",
    ),
    "W_q is odd": (
        "hqq",
        up("packing", lambda t: torch.tensor([ord(c) for c in "3bit_32"], dtype=torch.uint8)),
        r"W_q must be torch.int32 \[205, 64\]",
    ),
    "qdata": ("torchao", up("_weight_qdata", lambda t: t[:, 1:]), r"must be .*\[512, 128\]"),
    "tiles": (
        "torchao",
        up("_weight_qdata", lambda t: torch.zeros(64, 2, 32, 4, dtype=torch.int32)),
        r"qdata must be torch.uint8 or torch.int8 \[512, 128\], got torch.int32 \[64, 2, 32, 4\]",
    ),
    "factors": (
        "torchao",
        up("_weight_act_pre_scale", lambda _: torch.ones(256)),
        "act_pre_scale multiplies activations, which is not done here",
    ),
    "activations of 8": (
        "torchao",
        quant(quant_type={"default": {"_type": "Float8DynamicActivationInt4WeightConfig"}}),
        "which quantizes activations too",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_folders(good: Path, tmp_path: Path, case: str) -> None:
    name, spoil, message = CASES[case]
    folder = Path(shutil.copytree(good / name, tmp_path / "spoiled"))
    refused(load_quantized, folder, spoil, message)


def test_code_beside_the_weights_is_not_run(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    shutil.copytree(good / "awq", folder)
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    change_config(folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    load_quantized(folder)
    assert not (folder / "ran").exists()
