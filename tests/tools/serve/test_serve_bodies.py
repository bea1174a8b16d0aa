"""Bodies of requests to `metalmm serve`: what is made of them before the model has to do with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import random_model

from torch_metalmm import load_gguf
from torch_metalmm.tools.chat.template import Template
from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.prompts import Prompts
from torch_metalmm.tools.serve.schema import Chat, Completion

pytest.importorskip("pydantic")


def test_a_text_with_a_token_beyond_the_models(tmp_path: Path) -> None:
    """Tokenizers may have more tokens than the model has rows."""
    model, tokenizer = load_gguf(random_model(tmp_path / "m.gguf", "llama"))
    tokenizer.add_tokens(["<beyond>"])
    assert len(tokenizer) > model.config.vocab_size
    tokenizer.chat_template = "{{ messages[0].content }}"
    template = Template()
    try:
        prompts = Prompts(model, tokenizer, template, None, None)
        messages = [{"role": "user", "content": "a<beyond>"}]
        for name, tokens in (
            ("prompt", lambda: prompts.of_completion(Completion(model="m", prompt="a<beyond>"))),
            ("messages", lambda: prompts.of_chat(Chat(model="m", messages=messages))),
        ):
            with pytest.raises(ApiError, match=f"{name}: token .* must be from 0") as error:
                tokens()
            assert (error.value.status, error.value.param) == (400, name)
    finally:
        template.close()
