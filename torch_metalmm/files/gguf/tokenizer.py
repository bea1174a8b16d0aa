"""The tokenizer of a GGUF file, by transformers' builders, of the metadata that is read already."""

from __future__ import annotations

from typing import Any

from .file import GgufFile
from .vocabulary import PRE

_GGML = "tokenizer.ggml."
_TOKENS = f"{_GGML}tokens"
# Arrays that make a tokenizer, with the most elements that they may have for each token. Llama 3
# has 2.2 merges for each; T5's character map is one array of bytes.
_ARRAYS = {
    _TOKENS: 1,
    f"{_GGML}scores": 1,
    f"{_GGML}token_type": 1,
    f"{_GGML}merges": 8,
    f"{_GGML}precompiled_charsmap": 64,
}
_LONGEST_TOKEN = 1 << 13  # bytes, merges have two; transformers' time goes with the square
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer(file: GgufFile, config: Any) -> Any:
    """The tokenizer AutoTokenizer would build from the file. ValueError if the file has none."""
    from transformers import TOKENIZER_MAPPING, PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    if _TOKENS not in file.arrays:
        raise ValueError(f"{file.path} has no tokenizer")
    _check(file)
    kind: Any = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)
    if not isinstance(kind, type) or not issubclass(kind, PreTrainedTokenizerFast):
        kind = PreTrainedTokenizerFast  # Mistral's own tokenizer package reads no GGUF
    parts, given = (
        {
            name: value
            for key, name in theirs.GGUF_TOKENIZER_MAPPING[part].items()
            if (value := file.value(f"tokenizer.{key}")) is not None
        }
        for part in ("tokenizer", "tokenizer_config")
    )
    model = parts.get("tokenizer_type")
    if model == "llama":  # as llama.cpp, where an old file does not say
        given.setdefault("add_bos_token", True)
    elif model == "gemma4":  # Gemma 4's chat template has the token
        given["add_bos_token"] = False
    for name, key in _SPECIAL.items():
        number = file.metadata.get(f"{_GGML}{key}_token_id")
        given[f"{name}_token"] = None if number is None else parts["tokens"][number]
    backend, _ = theirs.convert_gguf_tokenizer(file.architecture, parts)
    made = kind(tokenizer_object=_Uncopied(backend), name_or_path=file.path, **given)
    made.init_kwargs[PRE] = parts.get("pre_tokenizer_type")
    return made


class _Uncopied:
    """A tokenizer that copy.deepcopy, which takes 0.1 s for 49 k tokens, gives as it is."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._backend


def _check(file: GgufFile) -> None:
    """ValueError: the tokenizer's arrays are too long for the model.

    So a small file cannot make transformers work for minutes.
    """
    embedding = file.tensors.get("token_embd.weight")
    vocabulary = file.arrays[_TOKENS].count if embedding is None else embedding.shape[0]
    for key, array in file.arrays.items():
        if array.count > _ARRAYS.get(key, array.count) * vocabulary:
            raise ValueError(
                f"{file.path}: {key} has {array.count} elements, but token_embd.weight has "
                f"{vocabulary} rows"
            )
        if key in _ARRAYS and array.longest > _LONGEST_TOKEN:
            raise ValueError(
                f"{file.path}: {key} has an element of {array.longest} bytes; at most "
                f"{_LONGEST_TOKEN} are read"
            )
