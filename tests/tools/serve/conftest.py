"""The servers that requests are sent to: their start takes longer than all answers of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from answered import endless
from gguf_files import random_model
from serving import CONTEXT, DESCRIPTORS, KEY, ORIGIN, Served, descriptors, serving

from torch_metalmm import load_gguf
from torch_metalmm.tools.chat.session import Session
from torch_metalmm.tools.generate import demo_model
from torch_metalmm.tools.serve.batch import Batch
from torch_metalmm.tools.serve.engine import Runner
from torch_metalmm.tools.serve.single import Single


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model without a chat template, of low limits, at another address than usual."""
    pytest.importorskip("uvicorn")
    folder = tmp_path_factory.mktemp("serve")
    file = random_model(folder / "tiny.gguf", "llama", context=2 * CONTEXT)
    flags = ["--name", "tiny", "--host", "127.0.0.2", "--origin", ORIGIN, "--share-prefixes"]
    flags += ["--ctx", str(CONTEXT), "--max-body", "2000", "--max-messages", "2"]
    flags += ["--cache", "q8_0/q4_0_rotated", "--draft", "lookup"]
    with descriptors(DESCRIPTORS), serving(str(file), *flags) as found:
        yield found


@pytest.fixture(scope="session")
def smol() -> Iterator[Served]:
    """SmolLM2, of which 4 are answered and 2 wait."""
    pytest.importorskip("uvicorn")
    with serving("--name", "smol", "--parallel", "4", "--queue", "2") as found:
        yield found


@pytest.fixture(scope="session")
def client(smol: Served) -> Iterator[Any]:
    """OpenAI's package, which asks SmolLM2."""
    module = pytest.importorskip("openai")
    with module.OpenAI(base_url=f"{smol.url}/v1", api_key=KEY, max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A random model, whose answers no token ends, and its tokenizer; of a file of tests."""
    return endless("llama", tmp_path_factory.mktemp("m"))


@pytest.fixture(params=("together", "one by one"))
def runner(request: pytest.FixtureRequest, loaded: tuple[Any, Any]) -> Runner:
    """Of answers that share steps, four at a time, and of answers that do not."""
    return Batch(*loaded, 4) if request.param == "together" else Single(Session(*loaded))


@pytest.fixture(scope="session")
def demo() -> tuple[Any, Any]:
    """SmolLM2 and its tokenizer, in this process."""
    return load_gguf(demo_model())
