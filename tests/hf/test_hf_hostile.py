"""Packed folders, sources and adapters that lie, lack something or want code to run."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import random_model
from safetensors.torch import load_file, save_file

from torch_metalmm import MetalMMConfig, load_packed, quantize_

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("one_thread")

UP = "model.layers.0.mlp.up_proj"
Spoil = Callable[[Path], object]


def small_llama() -> Any:
    return random_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    model = quantize_(small_llama(), {"lm_head": None, "*": "q8_0"}, progress=False)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A good packed model: q8_0, a dense head."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; ... removes one."""
    values = json.loads((folder / "config.json").read_text()) | changes
    kept = {k: v for k, v in values.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def quant(**changes: Any) -> Spoil:
    """Change entries of quantization_config."""

    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
        config(folder, quantization_config={k: v for k, v in old.items() if v is not ...})

    return change


def modules(**changes: Any) -> Spoil:
    """Change entries of quantization_config's modules; __ in a name is a dot."""

    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())["quantization_config"]["modules"]
        new = old | {k.replace("__", "."): v for k, v in changes.items()}
        quant(modules={k: v for k, v in new.items() if v is not ...})(folder)

    return change


def tensor(name: str, f: Callable[[torch.Tensor], torch.Tensor] | None) -> Spoil:
    """Replace a tensor of the file by f(tensor), or remove it."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = {n: t.clone() for n, t in load_file(file).items()}
        old = tensors.pop(name, torch.zeros(3))
        if f is not None:
            tensors[name] = f(old).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def raw(f: Callable[[bytes], bytes]) -> Spoil:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(f(file.read_bytes()))

    return change


def both(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]


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
        both(
            lambda f: config(f, hidden_size=96, num_attention_heads=2),
            modules(model__embed_tokens="q4_k"),
        ),
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
    config(folder, architectures=[name])
    with pytest.raises(ValueError, match=rf"no class \['{name}'\] of its config"):
        load_packed(folder)


def test_states_without_files_are_checked_too(good: Path) -> None:
    kind, config = transformers.LlamaForCausalLM, transformers.AutoConfig.from_pretrained(good)
    state = load_file(good / "model.safetensors")
    kind.from_pretrained(None, config=config, state_dict=dict(state))
    state[f"{UP}.weight"] = state[f"{UP}.weight"].float()
    with pytest.raises(ValueError, match=f"{UP}.weight must be packed bytes, uint8"):
        kind.from_pretrained(None, config=config, state_dict=state)


# Dense sources


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


@contextmanager
def load_report() -> Iterator[list[str]]:
    """What transformers reports of loading.

    The logger that reports has a level and a handler of its own here: the level of the package and
    whether it propagates are the process's, and whoever ran before may have changed them.
    """
    log, messages = logging.getLogger("transformers.modeling_utils"), []
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    try:
        yield messages
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


@pytest.mark.parametrize("verbosity", [logging.WARNING, logging.CRITICAL])
@pytest.mark.parametrize(
    ("value", "format", "message"),
    [(float("nan"), "q8_0", "has NaN or Inf"), (1e30, "f16", "has 1e+30, too large for f16")],
)
def test_sources_with_bad_numbers(
    tmp_path: Path, value: float, format: str, message: str, verbosity: int
) -> None:
    """transformers raises its own error and logs ours in its report, whatever its verbosity."""
    small_llama().save_pretrained(tmp_path)
    tensor(f"{UP}.weight", lambda t: t.index_fill(0, torch.tensor(3), value))(tmp_path)
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(verbosity)
    try:
        with load_report() as messages, pytest.raises(RuntimeError, match="conversion of the w"):
            load(tmp_path, format)
    finally:
        transformers.utils.logging.set_verbosity(before)
    assert UP in "".join(messages) and message in "".join(messages)


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


# Code


class _Runs:
    """Unpickling this creates the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": _Runs(folder / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors only, not from .*pytorch_model.bin"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(OSError, match="no file named model.safetensors"):
        load_packed(folder)
    assert not (folder / "ran").exists()


def test_code_beside_the_weights_is_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    config(folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    load_packed(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"})
    )
    config(folder, model_type="evil", architectures=["M"])
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_packed(folder)
    assert not (folder / "ran").exists()


def test_adapters_are_not_unpickled(folder: Path, tmp_path: Path) -> None:
    def model() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)

    adapted = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["up_proj"], r=4))
    adapted.save_pretrained(tmp_path / "adapter")
    assert isinstance(peft.PeftModel.from_pretrained(model(), tmp_path / "adapter"), peft.PeftModel)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    with pytest.raises(Exception, match="(?i)header|metadata|incomplete|deserial"):
        peft.PeftModel.from_pretrained(model(), tmp_path / "adapter")
    tensors = {n: t[:-1].contiguous() for n, t in load_bytes(content).items()}
    save_file(tensors, weights)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(model(), tmp_path / "adapter")
    weights.unlink()
    torch.save({"x": _Runs(tmp_path / "ran")}, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        peft.PeftModel.from_pretrained(model(), tmp_path / "adapter")
    assert not (tmp_path / "ran").exists()


def load_bytes(content: bytes) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load(content)
