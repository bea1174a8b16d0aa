"""Packed folders that lie or lack something; dense ones that cannot be packed, and configs that
ask for what there is not."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import spoiled_folders
import torch
import transformers
from safetensors.torch import load_file
from spoiled_folders import UP, Spoil, both, config, modules, quant, raw, small_llama, tensor

from torch_metalmm import MetalMMConfig, load_packed

good, folder = spoiled_folders.good, spoiled_folders.folder  # fixtures

ORDER = f"{UP}.input_order"
CASES: dict[str, tuple[Spoil, str]] = {
    "unknown format": (modules(lm_head="q9_9"), r"modules\['lm_head'\]: format: unknown 'q9_9'"),
    "huge group": (modules(lm_head="affine4_g1099511627776"), "unknown 'affine4_g1099511627776'"),
    "format is a number": (
        modules(lm_head=4),
        r"modules\['lm_head'\] must be the name of a format",
    ),
    "modules is a list": (quant(modules=["q8_0"]), "modules must be {pattern: format}, got list"),
    "skip has a number": (quant(skip=[4]), "skip must be names of layers, got 4"),
    "skip is a number": (quant(skip=4), "skip must be names of layers, got 4"),
    "unknown key": (quant(group=4), r"unknown keys \['group'\]; there are format, modules"),
    "no format at all": (quant(modules={}), "names no format"),
    "layers of another model": (
        quant(modules={"encoder.up": "q8_0"}),
        "has none of the layers encoder.up",
    ),
    "a norm is packed": (
        modules(model__norm="q8_0"),
        "model.norm, a LlamaRMSNorm, cannot be packed",
    ),
    "K is no multiple": (
        both(config(hidden_size=96, num_attention_heads=2), modules(model__embed_tokens="q4_k")),
        "model.embed_tokens has K = 96, no q4_k row",
    ),
    "another format": (
        modules(model__layers__0__mlp__up_proj="q4_0"),
        r"up_proj.weight must be U8 \[512, 144\] \(q4_0\), got U8 \[512, 272\]",
    ),
    "a dense layer that is packed": (
        modules(lm_head="q8_0"),
        r"lm_head.weight must be U8 \[320, 272\] \(q8_0\), got F32 \[320, 256\]",
    ),
    "floats of the packed shape": (tensor(f"{UP}.weight", torch.Tensor.float), "got F32 .512, 272"),
    "signed bytes": (tensor(f"{UP}.weight", lambda t: t.view(torch.int8)), "got I8"),
    "short rows": (tensor(f"{UP}.weight", lambda t: t[:, :-1]), r"got U8 \[512, 271\]"),
    "other rows": (tensor(f"{UP}.weight", lambda t: t[:-1]), r"got U8 \[511, 272\]"),
    "packed bytes missing": (tensor(f"{UP}.weight", None), f"no tensor for the packed {UP}.weight"),
    "order of unpacked": (quant(input_order=["lm_head"]), "lm_head in input_order is not packed"),
    "order missing": (quant(input_order=[UP]), f"no {ORDER} I64"),
    "order of floats": (
        both(quant(input_order=[UP]), tensor(ORDER, lambda t: torch.zeros(256))),
        f"no {ORDER} I64",
    ),
    "order out of range": (
        both(quant(input_order=[UP]), tensor(ORDER, lambda t: torch.arange(256) * 2**40)),
        f"{ORDER} is no order of its 256 inputs",
    ),
    "order twice": (
        both(quant(input_order=[UP]), tensor(ORDER, lambda t: torch.zeros(256).long())),
        f"{ORDER} is no order of its 256 inputs",
    ),
    "truncated": (raw(lambda b: b[:-10]), "cannot read .*model.safetensors"),
    "long header": (
        raw(lambda b: (2**62).to_bytes(8, "little") + b[8:]),
        "cannot read .*model.safetensors",
    ),
    "a pickle named safetensors": (
        raw(lambda b: pickle.dumps([1])),
        "cannot read .*model.safetensors",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_folders(folder: Path, case: str) -> None:
    spoil, message = CASES[case]
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        load_packed(folder)


def test_what_load_packed_refuses_and_transformers_only_reports(folder: Path) -> None:
    tensor("evil.weight", lambda t: t)(folder)
    with pytest.raises(ValueError, match="has tensors the model does not: evil.weight"):
        load_packed(folder)
    both(tensor("evil.weight", None), tensor("model.norm.weight", None))(folder)
    with pytest.raises(ValueError, match="has no tensor for model.norm.weight"):
        load_packed(folder)
    tensor("model.norm.weight", lambda t: torch.zeros(255))(folder)
    with pytest.raises(ValueError, match="ignore_mismatched_sizes"):
        load_packed(folder)


@pytest.mark.parametrize("name", ["pipeline", "Trainer", "BertModel", "os", "AutoModel"])
def test_architectures_name_a_model_of_the_config(folder: Path, name: str) -> None:
    config(architectures=[name])(folder)
    with pytest.raises(ValueError, match=rf"no class \['{name}'\] of its config"):
        load_packed(folder)


def test_states_without_files_are_checked_too(good: Path) -> None:
    kind, config = transformers.LlamaForCausalLM, transformers.AutoConfig.from_pretrained(good)
    state = load_file(good / "model.safetensors")
    kind.from_pretrained(None, config=config, state_dict=dict(state))
    state[f"{UP}.weight"] = state[f"{UP}.weight"].float()
    with pytest.raises(ValueError, match=f"{UP}.weight must be packed bytes, uint8"):
        kind.from_pretrained(None, config=config, state_dict=state)


SOURCES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "integers": (lambda t: t.to(torch.int8), "up_proj.weight is I8, only floats are packed"),
    "float8": (lambda t: t.to(torch.float8_e4m3fn), "is F8_E4M3, only floats are packed"),
    "other shape": (lambda t: t[:, :-1], r"up_proj.weight is \[512, 255\] in the checkpoint"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_sources_that_cannot_be_packed(tmp_path: Path, case: str) -> None:
    spoil, message = SOURCES[case]
    small_llama().save_pretrained(tmp_path)
    tensor(f"{UP}.weight", spoil)(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.usefixtures("quiet_transformers")  # which puts the verbosity back
@pytest.mark.parametrize("verbosity", [logging.WARNING, logging.CRITICAL])
@pytest.mark.parametrize(
    ("value", "format", "message"),
    [
        (float("nan"), "q8_0", "has NaN or Inf"),
        (1e30, "f16", "row 3 has 1e+30, too large for f16"),
        (1e30, "q8_0", "row 3 has 1e+30, too large for q8_0"),
    ],
)
def test_sources_with_bad_numbers(
    tmp_path: Path,
    value: float,
    format: str,
    message: str,
    verbosity: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers raises its own error and logs ours in its report, whatever its verbosity."""
    small_llama().save_pretrained(tmp_path)
    tensor(f"{UP}.weight", lambda t: t.index_fill(0, torch.tensor(3), value))(tmp_path)
    transformers.utils.logging.set_verbosity(verbosity)
    # The logger that reports has a level and a handler of its own here: the level of the package
    # and whether it propagates are the process's, and whoever ran before may have changed them.
    log = logging.getLogger("transformers.modeling_utils")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    caplog.set_level(logging.WARNING, log.name)
    with pytest.raises(RuntimeError, match="conversion of the w"):
        load(tmp_path, format)
    assert UP in caplog.text and message in caplog.text


def load(folder: Path, format: str = "q8_0") -> Any:
    config = MetalMMConfig(format)
    return transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "names no format"),
        ({"format": "q9"}, "format: format: unknown 'q9'"),
        ({"format": 4}, "format must be the name of a format, got 4"),
        ({"format": "q8_0", "modules": "q8_0"}, "modules must be"),
        ({"modules": {"*": None}}, "names no format"),
        ({"format": "q8_0", "bits": 4}, r"unknown keys \['bits'\]"),
        ({"format": "q8_0", "quant_method": "gptq"}, "quant_method must be 'metalmm', got 'gptq'"),
    ],
)
def test_configs_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MetalMMConfig(**arguments)


def test_names_that_no_layer_has(tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    for asked, message in (
        (MetalMMConfig("q8_0", modules={"*.up": "q4_0"}), r"no layer is named '\*.up'"),
        (MetalMMConfig("q8_0", skip=["head"]), "skip: the model has no module named 'head'"),
    ):
        with pytest.raises(ValueError, match=message):
            transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=asked)
