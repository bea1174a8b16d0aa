"""A fast tokenizer of transformers as the metadata of a GGUF file."""

from __future__ import annotations

import json
from typing import Any

# llama.cpp's names for ways to split text before merging. More are transformers', by their
# regular expressions.
_BYTES, _DIGITS = "ByteLevel", "Digits"
_SPLITS = {(_BYTES,): "gpt-2", (_DIGITS, _BYTES): "smollm"}
# Token types of ggml.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# The name that a file gave to the splitting, in init_kwargs: transformers does not know all.
PRE = "gguf_pre"
_LEAST = -1e9  # a score that no merge has
_IDS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def vocabulary(tokenizer: Any, model: Any) -> dict[str, Any]:
    """{key: value} of the tokenizer, for as many tokens as the model's embedding has rows.

    ValueError: it is no fast BPE tokenizer, has more tokens than the model, or splits text in a way
    that llama.cpp has no name for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer must be a fast one, got {type(tokenizer).__name__}")
    made: dict[str, Any] = json.loads(backend.to_str())
    if made["model"]["type"] != "BPE":
        raise ValueError(f"tokenizer must be BPE, and is {made['model']['type']}")
    rows = model.get_input_embeddings().weight.shape[0]
    tokens, types = _tokens(made, rows)
    values: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [
        pair.split(" ") if isinstance(pair, str) else pair for pair in made["model"]["merges"]
    ]
    if made["model"].get("byte_fallback"):
        values["tokenizer.ggml.model"] = "llama"
        values["tokenizer.ggml.scores"] = _scores(tokens, merges)
        values["tokenizer.ggml.add_space_prefix"] = tokenizer.tokenize("a")[:1] != ["a"]
    else:
        values["tokenizer.ggml.model"] = "gpt2"
        values["tokenizer.ggml.pre"] = _pre(tokenizer, made)
    values["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    for key, name in _IDS.items():
        token = getattr(tokenizer, f"{name}_token_id")
        if token is not None and token < rows:
            values[f"tokenizer.ggml.{key}_token_id"] = token
    values |= _ends(tokenizer, model)
    around = tokenizer("").input_ids
    values["tokenizer.ggml.add_bos_token"] = around[:1] == [tokenizer.bos_token_id]
    values["tokenizer.ggml.add_eos_token"] = around[1:] == [tokenizer.eos_token_id]
    if isinstance(tokenizer.chat_template, str):
        values["tokenizer.chat_template"] = tokenizer.chat_template
    return values


def _tokens(made: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The tokens and their types by id; a row of the embedding without a token is an unused one.

    Added tokens beyond the rows are left out: the model cannot take them, and transformers adds
    <|endoftext|> to every tokenizer that it makes of a GGUF file with byte-level BPE.
    """
    table: dict[str, int] = dict(made["model"]["vocab"])
    if beyond := [token for token, number in table.items() if number >= rows]:
        raise ValueError(f"tokenizer has the token {beyond[0]!r} beyond the model's {rows} rows")
    inside = [added for added in made["added_tokens"] if added["id"] < rows]
    table |= {added["content"]: added["id"] for added in inside}
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [_UNUSED] * rows
    unknown = made["model"].get("unk_token")
    for token, number in table.items():
        is_byte = made["model"].get("byte_fallback") and len(token) == 6 and token[:3] == "<0x"
        types[number] = _UNKNOWN if token == unknown else _BYTE if is_byte else _NORMAL
        tokens[number] = token
    for added in inside:
        if types[added["id"]] != _UNKNOWN:
            types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    return tokens, types


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Scores by which llama.cpp, which takes the highest first, merges in the order of `merges`."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks[token]) if token in ranks else _LEAST for token in tokens]


def _pre(tokenizer: Any, made: dict[str, Any]) -> str:
    """llama.cpp's name for how the tokenizer splits text: its file's, or found by its parts."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    given = tokenizer.init_kwargs.get(PRE)
    if isinstance(given, str):
        return given
    step = made.get("pre_tokenizer") or {}
    parts = []
    for part in step.get("pretokenizers", [step]):
        kind = part.get("type")
        if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            parts.append(part["pattern"].get("Regex", kind))
        elif kind != _BYTES or part["use_regex"]:
            parts.append(kind if kind != _DIGITS or part["individual_digits"] else "numbers")
    names: dict[tuple[str, ...], str] = dict(_SPLITS)
    for name, regex in GGUF_PRE_TOKENIZER_SPLITS.items():
        names.setdefault((regex,), name)
    if tuple(parts) not in names:
        raise ValueError(
            f"tokenizer splits text by {parts}, for which no name of llama.cpp is known: put one "
            f"into tokenizer.init_kwargs[{PRE!r}], or give None as the tokenizer"
        )
    return names[tuple(parts)]


def _ends(tokenizer: Any, model: Any) -> dict[str, int]:
    """Keys of the other tokens at which generation stops; a file has places for two."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = known if isinstance(known, list) else []
    others = [end for end in ends if end != tokenizer.eos_token_id]
    keys = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return dict(zip(keys, others, strict=False))
