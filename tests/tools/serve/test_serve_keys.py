"""Several keys of `metalmm serve`: what was read for one is not there for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from answered import run
from gguf_files import random_model
from serving import KEY, OTHER_KEY, Served

from torch_metalmm import load_gguf
from torch_metalmm.tools.chat.session import Options, Session
from torch_metalmm.tools.serve.batch import Batch
from torch_metalmm.tools.serve.engine import Finish, Job
from torch_metalmm.tools.serve.single import Single

IDS = [3 + i % 60 for i in range(200)]


@pytest.mark.parametrize(("server", "wanted"), (("smol", [0, 0, 128]), ("tiny", [0, 128, 128])))
def test_keys(server: str, wanted: list[int], request: pytest.FixtureRequest) -> None:
    """The prompts of each are its own, but with --share-prefixes."""
    served: Served = request.getfixturevalue(server)
    found = list[int]()
    for key in (KEY, OTHER_KEY, KEY):
        status, _, told = served.ask("/v1/completions", {"prompt": IDS, "max_tokens": 2}, key)
        assert status == 200
        found.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == wanted


@pytest.mark.parametrize("kind", ("batch", "single"))
def test_owners(tmp_path: Path, kind: str) -> None:
    """Each runner keeps an owner's prompts for it alone."""
    model, tokenizer = load_gguf(random_model(tmp_path / "m.gguf", "llama"))
    model.config.max_position_embeddings = 256
    runner: Any = Batch(model, tokenizer, 1)
    if kind == "single":
        runner = Single(Session(model, tokenizer, Options()))
    kept = list[int]()
    for owner in (b"a", b"a", b"ab", b"", b""):
        told = list[Any]()
        run(runner, Job("", IDS, Options(max_new_tokens=2), None, told.append, owner))
        assert isinstance(told[-1], Finish)
        kept.append(told[-1].kept_tokens)
    most = 128 if kind == "batch" else len(IDS) - 1
    assert kept == [0, most, 0, 0, most]
