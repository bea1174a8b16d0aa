"""Random small models of the classes that transformers and llama.cpp's converter share.

    PYTHONPATH=CONVERTER/gguf-py python tests/support/converted_models.py CONVERTER [CASE ...]

records what the converter makes of them, and of every class that both know its architecture, which
the converter has by its own gguf alone;
prints what docs/guide/gguf.md says of the classes. CONVERTER is a folder with
convert_hf_to_gguf.py, vendor/llama.cpp of llama-cpp-python's source distribution. Weights are two
levels for each tensor, chosen by bits that the names of case and tensor seed; a record has bits.
Sizes, windows and scalars are none of a class's defaults.
"""

from __future__ import annotations

import base64
import copy
import json
import lzma
import random
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from zlib import compress, decompress

import numpy as np
import torch
import transformers
from converted_cases import CASES, OTHERS, REFUSED, UNSAID, VOCABULARY, WITHIN, H
from gguf_files import write_gguf
from torch import Tensor, nn

Tensors = dict[str, tuple[np.ndarray, str]]
RECORDS = Path(__file__).with_name("converted.json.xz")


def bits(seed: str, count: int) -> np.ndarray:
    """That many random bits, the same in every version of Python and numpy."""
    data = np.frombuffer(random.Random(seed).randbytes(-(-count // 8)), np.uint8)
    return np.unpackbits(data, count=count)


def random_model(case: str, **others: Any) -> Any:
    """The case's model in f32; matrices of +-1/16, vectors of +-1/8, norms of 1 +- 1/8.

    others: values of its config.
    """
    name, values = CASES[case]
    values = values | others
    made = class_of(case)
    parts = ("Config",) if "text_config" in values else ("TextConfig", "Config")
    kinds = [getattr(transformers, name + part, None) for part in parts]
    config = next((k for k in kinds if k), made.config_class)(**copy.deepcopy(values))
    config._experts_implementation = "eager"
    model = made._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor, value in model.state_dict().items():
            if value.is_floating_point():
                level = 1 / 16 if value.dim() > 1 else 1 / 8
                sign = bits(f"{case}/{tensor}", value.numel()).astype(np.float32) * 2 - 1
                drawn = torch.from_numpy(sign).view(value.shape) * level
                if ".act_fn." in tensor:
                    drawn = drawn.abs() + drawn / 4
                norm = (
                    tensor.endswith("norm.weight")
                    or "layernorm" in tensor
                    or "layer_norm" in tensor
                )
                value.copy_(drawn + 1 if norm and tensor.endswith("weight") else drawn)
    model.tie_weights()
    if case == "t5-untied":
        head = bits(f"{case}/lm_head", VOCABULARY * H).astype(np.float32) / 8 - 1 / 16
        model.lm_head.weight = nn.Parameter(torch.from_numpy(head).view(VOCABULARY, H))
    return model.eval()


def logits(model: Any) -> Tensor:
    """Of 2 x 19 tokens; of an encoder alone its last hidden states."""
    ids = torch.from_numpy(
        bits("tokens", 2 * 19 * 6).reshape(2, 19, 6) @ (1 << np.arange(6, dtype=np.int64))
    )
    more = {"decoder_input_ids": ids.flip(0)} if hasattr(model, "decoder") else {}
    if not type(model).__name__.endswith("EncoderModel"):
        more["use_cache"] = False
    with torch.inference_mode():
        made = model(input_ids=ids, **more)
    found: Tensor = made.logits if "logits" in made else made.last_hidden_state
    return found


@cache
def read_record(case: str) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """(architecture, metadata by full keys, tensors by name) of the recorded file."""
    record = records()[case]
    sources = _parts(random_model(case))
    tensors = {}
    for name, (shape, source, levels) in record["tensors"].items():
        if source in sources:
            values = sources[source]
        elif levels:
            packed = np.frombuffer(decompress(base64.b85decode(source)), np.uint8)
            values = np.float32(levels)[np.unpackbits(packed, count=int(np.prod(shape)))]
        else:
            values = np.frombuffer(decompress(base64.b85decode(source)), np.float32)
        tensors[name] = values.reshape(shape)
    return record["architecture"], record["metadata"], tensors


def write_record(
    path: Path, case: str, change: Callable[[Tensors], object] = len, **others: Any
) -> Path:
    """The recorded file, with a tokenizer.

    change(tensors) may change what write_gguf takes as tensors. others: values by their keys
    without the architecture's prefix; None leaves the key out.
    """
    architecture, values, found = read_record(case)
    tensors = {name: (value, "f32") for name, value in found.items()}
    change(tensors)
    prefix = f"{architecture}."
    stated = {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
    stated = {key: value for key, value in (stated | others).items() if value is not None}
    words = {key: v for key, v in values.items() if not key.startswith(prefix)} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*(chr(33 + i) for i in range(VOCABULARY - 1)), "!#"],
        "tokenizer.ggml.merges": ["! #"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    return write_gguf(path, architecture, tensors, stated, words, tokenizer=False)


@cache
def records() -> dict[str, Any]:
    """{case: its record}, and `classes`."""
    found: dict[str, Any] = json.loads(lzma.decompress(RECORDS.read_bytes()))
    return found


def class_of(case: str) -> Any:
    """The case's class of transformers; of two, text alone if the values are a text's."""
    name, values = CASES[case]
    ends = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model", "")
    ends = ends[2:] if "text_config" in values else ends
    return next(c for c in (getattr(transformers, name + end, None) for end in ends) if c)


def outcomes() -> str:
    """What becomes of the files of each class that transformers and the converter share, whose
    models save_gguf writes, and what the converter does not say."""
    from torch_metalmm.files.gguf.architectures import supported_architectures
    from torch_metalmm.files.gguf.rows import all_rows

    tried = {class_of(case).__name__ for case in CASES}
    shared, known = records()["classes"], supported_architectures()
    lists: dict[str, list[str]] = {WITHIN: [], REFUSED: []}
    for name, architecture in sorted(shared.items()):
        why = WITHIN if name in tried else OTHERS.get(name, REFUSED)
        if architecture and (why == REFUSED) == (architecture in known):
            raise ValueError(f"{name}: {why}, and the architecture is {architecture}")
        short = name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        lists.setdefault(why, []).append(short)
    written = {row.model_type for _, row in all_rows() if row.writes} | {"mistral"}  # as Llama
    lists["written by `save_gguf`, by their `model_type`"] = sorted(written)
    unsaid: dict[str, list[str]] = {}
    for case, values in UNSAID.items():
        for name, value in values.items():
            unsaid.setdefault(f"`{name}` = {value} ({{}})", []).append(CASES[case][0])
    read = [text.format(", ".join(names)) for text, names in sorted(unsaid.items())]
    lists["not written by the converter, and read as"] = read
    return "\n".join(
        textwrap.fill(f"* {why}: {', '.join(dict.fromkeys(names))}", 140, subsequent_indent="  ")
        for why, names in lists.items()
    )


def _parts(model: Any) -> dict[str, np.ndarray]:
    """The tensors of the model, and halves of their rows, which files of experts have."""
    found = {}
    for name, value in model.state_dict().items():
        found[name] = value.numpy()
        if value.dim() == 3 and value.shape[1] % 2 == 0:
            for number, half in enumerate(value.chunk(2, 1)):
                found[f"{name}/{number}"] = half.contiguous().numpy()
    return found


def _record(path: Path, model: Any) -> dict[str, Any]:
    """What is in the converter's file, and of its tokenizer nothing.

    Each tensor: [shape, part of the model that has these values, or bits or numbers, levels].
    """
    import gguf

    reader = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    metadata = {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in values.items()
        if not key.startswith(("GGUF.", "general.", "tokenizer."))
    }
    sources = {value.tobytes(): name for name, value in _parts(model).items()}
    tensors: dict[str, Any] = {}
    for tensor in reader.tensors:
        data = np.asarray(tensor.data, np.float32)
        levels, chosen = np.unique(data, return_inverse=True)
        two = len(levels) == 2
        stored = np.packbits(chosen.astype(bool).ravel()) if two else data
        text = base64.b85encode(compress(stored.tobytes(), 9)).decode()
        source = sources.get(data.tobytes())
        known = source is not None
        tensors[tensor.name] = [
            list(data.shape),
            source if known else text,
            levels.tolist() if two and not known else [],
        ]
    architecture = values["general.architecture"]
    return {"architecture": architecture, "metadata": metadata, "tensors": tensors}


def _convert(folder: Path, path: Path) -> None:
    """Run the converter of the modules `conversion` on a saved model, without its tokenizer."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    kind = get_model_class(
        get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    )
    kind.no_mtp = True
    for name in ("_set_vocab_gpt2", "_set_vocab_mpt", "_set_vocab_sentencepiece"):
        setattr(kind, name, lambda self, *given, **named: None)
    model = kind(folder, gguf.LlamaFileType.ALL_F32, path, eager=True)
    text = getattr(model, "impl", model)  # of a class that only chooses another
    text.set_vocab = text._set_vocab_none
    model.write()


def _architectures() -> dict[str, str | None]:
    """{class of transformers that the converter lists: the architecture of its files}."""
    import gguf
    from conversion import TEXT_MODEL_MAP, ModelBase, ModelType, load_all_models

    load_all_models()
    kinds = ModelBase._model_classes[ModelType.TEXT]
    names = [name for name in TEXT_MODEL_MAP if hasattr(transformers, name)]
    found = {name: getattr(kinds.get(name), "model_arch", None) for name in names}
    return {name: gguf.MODEL_ARCH_NAMES.get(arch) for name, arch in found.items()}


def _main(converter: str, cases: list[str]) -> None:
    sys.path[:0] = [converter, f"{converter}/gguf-py"]
    made = records() if cases else {}
    for case in cases or CASES:
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            try:
                model = random_model(case)
                model.save_pretrained(folder)
                saved = Path(folder, "config.json")  # Granite's own has the older name
                if case.startswith("granitehybrid"):
                    saved.write_text(saved.read_text().replace("full_attention", "attention"))
                words = {"model": {"vocab": {str(i): i for i in range(VOCABULARY)}}}
                Path(folder, "tokenizer.json").write_text(json.dumps(words | {"added_tokens": []}))
                _convert(Path(folder), Path(folder, "model.gguf"))
                made[case] = _record(Path(folder, "model.gguf"), model)
                print(case, len(json.dumps(made[case])), flush=True)
            except Exception as error:
                print(f"{case}: {type(error).__name__}: {error}")
    made["classes"] = _architectures()
    RECORDS.write_bytes(lzma.compress(json.dumps(made).encode()))
    records.cache_clear()
    print(outcomes())


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
