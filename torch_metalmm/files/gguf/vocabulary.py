"""A fast tokenizer of transformers as the metadata of a GGUF file."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

# llama.cpp's names for ways to split text before merging, by the parts and ignore_merges. More are
# transformers', by their regular expressions; for these names llama.cpp sets ignore_merges.
_BYTES, _DIGITS = "ByteLevel", "Digits"
_SPLITS = {((_BYTES,), False): "gpt-2", ((_DIGITS, _BYTES), False): "smollm"}
_IGNORING = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
)
# Normalizers with byte-level tokens. llama.cpp has none, and its converter takes Qwen's NFC, too: a
# text that is composed already, as nearly all are, gets the same tokens.
_NORMALIZERS: tuple[Any, ...] = (None, {"type": "NFC"})
# Normalizers and pre-tokenizers of SentencePiece's tokenizers, by which a space becomes "\u2581".
_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, _SPACE]}
_AFTER: dict[str, Any] = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
}
_AFTER |= {"invert": False}
_META = {"type": "Metaspace", "replacement": "\u2581", "split": False, "prepend_scheme": "first"}
_SPACES: tuple[Any, ...] = (
    *((_SPACE, None), (_SPACE, _AFTER), (_PREPEND, None)),
    ({"type": "Sequence", "normalizers": [_SPACE]}, None),
    *((None, _META | {"prepend_scheme": when}) for when in ("first", "always", "never")),
)
_NAME = re.compile(r"\w+", re.ASCII)  # the name of a template, in a key
# Token types of ggml.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# The name that a file gave to the splitting, in init_kwargs: transformers does not know all.
PRE = "gguf_pre"
_LEAST = -1e9  # a score that no merge has
_IDS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def vocabulary(tokenizer: Any, model: Any) -> dict[str, Any]:
    """{key: value} of the tokenizer, for as many tokens as the model's embedding has rows.

    ValueError: it is no fast BPE tokenizer, has more tokens than the model, changes or splits text
    in a way that llama.cpp has no name for, or adds tokens that no key says; a template's name that
    is not one; more tokens at which generation stops than a file has places for.
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
        _check_spaces(made)
        values["tokenizer.ggml.add_space_prefix"] = tokenizer.tokenize("a")[:1] != ["a"]
    else:
        values["tokenizer.ggml.model"] = "gpt2"
        values["tokenizer.ggml.pre"] = _pre(tokenizer, made)
    values["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    for key, name in _IDS.items():
        token = getattr(tokenizer, f"{name}_token_id")
        if token is not None and 0 <= token < rows:
            values[f"tokenizer.ggml.{key}_token_id"] = token
    return values | _ends(tokenizer, model) | _around(tokenizer) | _templates(tokenizer)


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
    if made["normalizer"] not in _NORMALIZERS:
        raise ValueError(f"tokenizer changes text by {made['normalizer']}; llama.cpp cannot")
    step = made.get("pre_tokenizer") or {}
    parts = []
    for part in step.get("pretokenizers", [step]):
        kind = part.get("type")
        if kind == _BYTES and part["add_prefix_space"]:
            raise ValueError("tokenizer has ByteLevel(add_prefix_space=True); llama.cpp has False")
        if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            parts.append(part["pattern"].get("Regex", kind))
        elif kind != _BYTES or part["use_regex"]:
            parts.append(kind if kind != _DIGITS or part["individual_digits"] else "numbers")
    names: dict[tuple[tuple[str, ...], bool], str] = dict(_SPLITS)
    for name, regex in GGUF_PRE_TOKENIZER_SPLITS.items():
        names.setdefault(((regex,), name in _IGNORING), name)
    key = tuple(parts), bool(made["model"].get("ignore_merges"))
    if key not in names:
        raise ValueError(
            f"tokenizer splits text by {parts} with ignore_merges={key[1]}, for which no name of "
            f"llama.cpp is known: put one into tokenizer.init_kwargs[{PRE!r}], or give None as the "
            "tokenizer"
        )
    return names[key]


def _check_spaces(made: dict[str, Any]) -> None:
    """ValueError: more, or less, becomes of text than that its spaces become "\u2581"."""
    found = made["normalizer"], made["pre_tokenizer"]
    if found not in _SPACES:
        raise ValueError(f"tokenizer changes or splits text by {found}; llama.cpp cannot")


def _ends(tokenizer: Any, model: Any) -> dict[str, int]:
    """Keys of the other tokens at which generation stops; a file has places for two."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = known if isinstance(known, list) else [] if known is None else [known]
    others = [end for end in dict.fromkeys(ends) if end != tokenizer.eos_token_id]
    keys = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    if len(others) > len(keys) or any(end < 0 for end in others):
        raise ValueError(
            f"model: its generation_config has eos_token_id = {known}; a GGUF file has the "
            f"tokenizer's {tokenizer.eos_token_id} and at most {len(keys)} others"
        )
    return dict(zip(keys, others, strict=False))


def _around(tokenizer: Any) -> dict[str, bool]:
    """Whether a text's tokens are put between those of begin and end."""
    bare, full = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    begin, end = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    for bos, eos in product((False, True), repeat=2):
        if begin * bos + bare + end * eos == full:
            keys = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
            return dict(zip(keys, (bos, eos), strict=True))
    raise ValueError(
        f"tokenizer makes {full} of {bare}; no key of GGUF says more than bos_token at the begin "
        "and eos_token at the end"
    )


def _templates(tokenizer: Any) -> dict[str, Any]:
    """The chat template, or several by their names."""
    given, key = tokenizer.chat_template, "tokenizer.chat_template"
    if not isinstance(given, dict):
        return {key: given} if isinstance(given, str) else {}
    named = {name: text for name, text in given.items() if name != "default"}
    if wrong := [name for name in named if not _NAME.fullmatch(name)]:
        raise ValueError(f"tokenizer has a chat template {wrong[0]!r}; names are of [A-Za-z0-9_]")
    values: dict[str, Any] = {f"{key}.{name}": text for name, text in named.items()}
    if named:
        values["tokenizer.chat_templates"] = list(named)
    return values | ({key: given["default"]} if "default" in given else {})
