"""Dense sources that cannot be packed, and configs that ask for what there is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from spoiled_folders import UP, small_llama, tensor

from torch_metalmm import MetalMMConfig

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
    for config, message in (
        (MetalMMConfig("q8_0", modules={"*.up": "q4_0"}), r"no layer is named '\*.up'"),
        (MetalMMConfig("q8_0", skip=["head"]), "skip: the model has no module named 'head'"),
    ):
        with pytest.raises(ValueError, match=message):
            transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
