"""save_gguf and tokenizers of many shapes: what is written of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf_files import ARCHITECTURES, fields_of, load_quietly, random_model
from tokenizers import Regex, normalizers, pre_tokenizers, processors

from torch_metalmm import save_gguf

KEY = "tokenizer.ggml."
SPACE = normalizers.Replace(" ", "\u2581")


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Any, Any]:
    """With byte-level tokens, and no name of the splitting."""
    model, tokenizer, _ = load_quietly(random_model(tmp_path / "tiny.gguf", "llama"))
    del tokenizer.init_kwargs["gguf_pre"]
    return model, tokenizer


@pytest.fixture
def spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """With byte_fallback."""
    wide = ARCHITECTURES["gemma2"] | {"attention.key_length": 256}
    monkeypatch.setitem(ARCHITECTURES, "gemma2", wide)
    return load_quietly(random_model(tmp_path / "tiny.gguf", "gemma2"))[:2]


def saved(given: tuple[Any, Any], folder: Path) -> dict[str, Any]:
    save_gguf(*given, folder / "saved.gguf", replace=True)
    return fields_of(folder / "saved.gguf")


def refuses(given: tuple[Any, Any], folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_gguf(*given, folder / "x.gguf")
    assert not (folder / "x.gguf").exists()


# Templates and ends


def test_several_templates(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    tiny[1].chat_template = {"default": "{{ a }}", "rag": "{{ b }}", "tool_use": "{{ c }}"}
    fields = saved(tiny, tmp_path)
    assert fields["tokenizer.chat_template"] == "{{ a }}"
    assert fields["tokenizer.chat_templates"] == ["rag", "tool_use"]
    assert fields["tokenizer.chat_template.rag"] == "{{ b }}"
    assert fields["tokenizer.chat_template.tool_use"] == "{{ c }}"
    assert load_quietly(tmp_path / "saved.gguf")[1].chat_template == "{{ a }}"
    tiny[1].chat_template = {"tool use": "{{ c }}"}
    refuses(tiny, tmp_path, "a chat template 'tool use'")


def test_the_end_of_generation_that_is_not_the_tokenizers(
    tmp_path: Path, tiny: tuple[Any, Any]
) -> None:
    model, tokenizer = tiny
    model.generation_config.eos_token_id = 7
    assert saved(tiny, tmp_path)[KEY + "eot_token_id"] == 7
    ends = load_quietly(tmp_path / "saved.gguf")[0].generation_config.eos_token_id
    assert set(ends) == {tokenizer.eos_token_id, 7}
    for too_many in ([7, 8, 9], [tokenizer.eos_token_id, 7, 8, 9]):
        model.generation_config.eos_token_id = too_many
        refuses(tiny, tmp_path, "generation_config has eos_token_id = .* at most 2 others")


@pytest.mark.parametrize(
    ("template", "begins", "ends"),
    [
        ("$A", False, False),
        ("$A <|end|>", False, True),
        ("<|start|> $A", True, False),
        ("<|start|> $A <|end|>", True, True),
    ],
)
def test_tokens_around_a_text(
    tmp_path: Path, tiny: tuple[Any, Any], template: str, begins: bool, ends: bool
) -> None:
    post = special(tiny[1], template)
    tiny[1].backend_tokenizer.post_processor = post
    fields = saved(tiny, tmp_path)
    assert (fields[KEY + "add_bos_token"], fields[KEY + "add_eos_token"]) == (begins, ends)


def special(tokenizer: Any, template: str) -> Any:
    known = ("<|start|>", "<|end|>", "<|extra265|>")
    tokenizer.bos_token, tokenizer.eos_token = known[:2]
    tokens = [(token, tokenizer.convert_tokens_to_ids(token)) for token in known]
    return processors.TemplateProcessing(single=template, special_tokens=tokens)


def test_other_tokens_around_a_text(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    post = special(tiny[1], "<|extra265|> $A")
    tiny[1].backend_tokenizer.post_processor = post
    refuses(tiny, tmp_path, "no key of GGUF says more than bos_token")


# Normalizers and splittings


def test_the_splitting_has_the_name_of_the_file(tmp_path: Path) -> None:
    """Also after transformers saved and read the tokenizer: it does not know all of them."""
    path = random_model(tmp_path / "a.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(b"qwen2", b"poro-"))
    model, tokenizer, _ = load_quietly(path)
    tokenizer.save_pretrained(tmp_path / "t")
    for given in (tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path / "t")):
        assert saved((model, given), tmp_path)["tokenizer.ggml.pre"] == "poro-"


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITTINGS = {
    "gpt-2": [GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2],
    "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES],
    "": [pre_tokenizers.Digits(individual_digits=False), GPT2],
    "-": [pre_tokenizers.Split(Regex(LLAMA3), "removed"), BYTES],
}


@pytest.mark.parametrize("name", SPLITTINGS)
def test_the_splitting_of_other_tokenizers_is_found(
    tmp_path: Path, tiny: tuple[Any, Any], name: str
) -> None:
    tokenizer = tiny[1]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITTINGS[name])
    tokenizer.backend_tokenizer.model.ignore_merges = name == "llama3"
    if len(name) > 1:
        assert saved(tiny, tmp_path)["tokenizer.ggml.pre"] == name
    else:
        with pytest.raises(ValueError, match=r"no name of llama.cpp is known.*'gguf_pre'"):
            save_gguf(*tiny, tmp_path / "b.gguf")


def test_added_tokens_ends_and_the_template(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    tokenizer.add_tokens(["<think>"])  # beyond the rows of the model
    tokenizer.add_tokens(["he"])  # one of the vocabulary
    tokenizer.chat_template = "{{ messages }}"
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 7, 9]
    fields = saved(tiny, tmp_path)
    types = dict(
        zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    )
    assert types["he"] == 4 and types["<|end|>"] == 3 and types["th"] == 1
    assert "<think>" not in types
    assert fields["tokenizer.chat_template"] == "{{ messages }}"
    assert fields["tokenizer.ggml.eot_token_id"] == 7 and fields["tokenizer.ggml.eom_token_id"] == 9
    assert not fields["tokenizer.ggml.add_bos_token"]
    again, tokens, _ = load_quietly(tmp_path / "saved.gguf")
    assert again.generation_config.eos_token_id == [tokenizer.eos_token_id, 7, 9]
    assert again.generation_config.bos_token_id == tokens.bos_token_id
    assert tokens.tokenize("the he") == tokenizer.tokenize("the he")


def test_scores_say_the_order_of_merges(tmp_path: Path, spaces: tuple[Any, Any]) -> None:
    """llama.cpp merges the neighbours of the highest score first."""
    fields = saved(spaces, tmp_path)
    scores = dict(
        zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], strict=True)
    )
    assert fields["tokenizer.ggml.model"] == "llama"
    merged = ["".join(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    assert {"he", "\u2581t", "\u2581the"} <= set(merged)
    first = dict.fromkeys(merged)
    assert sorted(first, key=lambda token: -scores[token]) == list(first)
    assert all(scores[token] < min(scores[m] for m in merged) for token in scores.keys() - first)


def test_a_space_before_the_text(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    backend = tiny[1].backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    refuses(tiny, tmp_path, r"ByteLevel\(add_prefix_space=True\)")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert saved(tiny, tmp_path)[KEY + "pre"] == "gpt-2"


def test_normalizers_of_bytes(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    backend = tiny[1].backend_tokenizer
    for known in (None, normalizers.NFC()):
        backend.normalizer = known
        assert saved(tiny, tmp_path)[KEY + "pre"] == "qwen2"
    for other in (normalizers.Lowercase(), normalizers.NFKC()):
        backend.normalizer = other
        refuses(tiny, tmp_path, "tokenizer changes text by")


def test_merges_that_are_ignored(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    """llama.cpp does so by the name, and for Qwen 2's it does not."""
    backend = tiny[1].backend_tokenizer
    backend.model.ignore_merges = True
    refuses(tiny, tmp_path, "with ignore_merges=True, for which no name")


def test_spaces_with_byte_fallback(tmp_path: Path, spaces: tuple[Any, Any]) -> None:
    backend = spaces[1].backend_tokenizer
    prepend = normalizers.Sequence([normalizers.Prepend("\u2581"), SPACE])
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    never = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    after = pre_tokenizers.Split(" ", "merged_with_previous")
    for normalizer, splitting, prefixed in (
        (SPACE, None, False),
        (SPACE, after, False),
        (normalizers.Sequence([SPACE]), None, False),
        (prepend, None, True),
        (None, first, True),
        (None, never, False),
    ):
        backend.normalizer, backend.pre_tokenizer = normalizer, splitting
        assert saved(spaces, tmp_path)[KEY + "add_space_prefix"] == prefixed
    for normalizer, splitting in (
        (normalizers.Sequence([normalizers.NFKC(), SPACE]), None),
        (None, None),
        (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=True)),
        (SPACE, pre_tokenizers.Split(Regex(r"\d"), "isolated")),
    ):
        backend.normalizer, backend.pre_tokenizer = normalizer, splitting
        refuses(spaces, tmp_path, "tokenizer changes or splits text by")
