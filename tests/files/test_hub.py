"""Names on the hub, against one on loopback: what is fetched, kept, and said when it is not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub
from forked import forked
from places import ROOT

from torch_metalmm.files.hub import Named, hub_name

PARTS = [f"Q4_K_M/big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
REPOSITORIES = {
    "org/one-GGUF": {
        "README.md": b"-",
        "config.json": b'{"model_type": "qwen2"}',  # some have one
        "one-Q5_0.gguf": b"one",
        "mmproj-one-f16.gguf": b"eyes",
    },
    "org/big-GGUF": {
        **{name: name.encode() for name in PARTS},
        "big-IQ4_K_M.gguf": b"i",
        "big-Q8_0.gguf": b"q8",
        "big.imatrix.gguf": b"im",
    },
    "org/unusual-GGUF": {"u-Q2_K.gguf": b"2", "u-Q3_K_S.gguf": b"3", "u-BF16.gguf": b"16"},
    "org/torn-GGUF": {"t-00001-of-00002.gguf": b"1"},
    "mlx-community/m": {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors": b"weights",
        "consolidated.safetensors": b"the same weights",
        "tokenizer.model": b"words",
        "pytorch_model.bin": b"code",
        "original/params.json": b"other",
        "run.py": b"code",
    },
    "org/shards": {
        "config.json": b"{   }",
        "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors", '
        b'"b": "model-2.safetensors"}}',
        "model-1.safetensors": b"first",
        "model-2.safetensors": b"second",
    },
    "org/embedder": {
        "config.json": b"{    }",
        "model.safetensors": b"weights",
        "modules.json": b"[]",
        "1_Pooling/config.json": b"cls",
        "2_Dense/model.safetensors": b"a layer",
        "2_Dense/pytorch_model.bin": b"code",
        "onnx/config.json": b"other",
    },
    "org/pickles": {"config.json": b"{ }", "pytorch_model.bin": b"code"},
    "org/adapter": {"adapter_config.json": b"{  }", "adapter_model.safetensors": b"lora"},
}
# huggingface_hub reads the environment when it is imported: here, once for each line.
SCRIPT = """
import json, os, sys
from pathlib import Path
from torch_metalmm.files.hub import fetch
assert "huggingface_hub" not in sys.modules
def check(folder):
    print(json.dumps(["checked", sorted(f.name for f in folder.iterdir())]))
def run(folder, variables, names):
    os.chdir(folder)
    os.environ.update(variables)
    for name in names:
        try:
            path = fetch(name, check)
            files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
            print(json.dumps(["path", str(path), [f.read_bytes().decode() for f in files]]))
        except (OSError, ValueError) as error:
            print(json.dumps([type(error).__name__, str(error)]))
"""
Ask = Callable[..., list[list[object]]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """ask(cache, url, names): what fetch() gives for each in a process with this hub and cache."""
    of_hub = dict.fromkeys(("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"), "")
    folder, count = tmp_path_factory.mktemp("said"), itertools.count()
    with forked(SCRIPT, of_hub | {"PYTHONPATH": str(ROOT)}) as calls:

        def asked(cache: Path, url: str, *names: str, **env: str) -> list[list[object]]:
            said = folder / str(next(count))
            given = str(cache), {"HF_ENDPOINT": url, "HF_HOME": str(cache), **env}, names
            assert calls(said, *given) == 0, said.read_text()
            lines = said.read_text().splitlines()
            return [json.loads(line) for line in lines if line.startswith("[")]

        yield asked


def paths(lines: list[list[object]]) -> list[list[object]]:
    """What was found, with what is in its files."""
    return [line for line in lines if line[0] == "path"]


def test_what_is_a_name_on_the_hub() -> None:
    assert hub_name("a/b") == Named("a/b")
    assert hub_name("a/b-GGUF:Q4_K_M") == Named("a/b-GGUF", tag="Q4_K_M")
    assert hub_name("a/b/c/d.gguf") == Named("a/b", file="c/d.gguf")
    for prefix in ("hf.co/", "https://huggingface.co/", "hf://"):
        assert hub_name(prefix + "a/b:q8_0") == Named("a/b", tag="q8_0")
    assert hub_name("https://huggingface.co/a/b/blob/main/c.gguf") == Named("a/b", file="c.gguf")
    for path in ("a", "a/b.gguf", "./a/b", "../a/b", "/a/b", "~/a", "a/b/", "a/b/c", "C:\\\\a", ""):
        assert hub_name(path) is None
    for other in ("my-hf.co/a/b", "my-hf.co/a", "xhf://a/b", "a/hf.co/b", "mirror/hf.co/a/b"):
        assert hub_name(other) in (None, Named(other))


def test_models_are_fetched_once(tmp_path: Path, ask: Ask) -> None:
    """The one model, that of a tag in any case, all parts of a split one, a folder's weights."""
    names = ["org/one-GGUF", "org/big-GGUF", "org/big-GGUF:q8_0", f"org/big-GGUF/{PARTS[1]}"]
    names += ["mlx-community/m", "org/adapter", "org/embedder"]
    with FakeHub(REPOSITORIES) as hub:
        found = ask(tmp_path, hub.url, *names)
        assert [files for _, _, files in paths(found)] == [
            ["one"],
            [PARTS[0]],
            ["q8"],
            [PARTS[0]],
            ['{"model_type": "llama"}', "weights", "words"],
            ["{  }", "lora"],
            # Modules lie below the folder, where twins of the weights do, too.
            ["cls", "a layer", "{    }", "weights", "[]"],
        ]
        assert ["checked", ["config.json"]] in found
        first = Path(str(found[1][1]))
        assert [(first.parent / Path(part).name).read_text() for part in PARTS] == PARTS
        wanted = ["one-Q5_0.gguf", *PARTS, "big-Q8_0.gguf", "config.json", "model.safetensors"]
        wanted += ["tokenizer.model", "adapter_config.json", "adapter_model.safetensors"]
        wanted += ["config.json", "model.safetensors", "modules.json"]
        wanted += ["1_Pooling/config.json", "2_Dense/model.safetensors"]
        assert sorted(hub.fetched()) == sorted(wanted)
        hub.requests.clear()
        again = ask(tmp_path, hub.url, *names)
        assert paths(again) == paths(found) and hub.fetched() == []
    offline = ask(tmp_path, hub.url, *names, HF_HUB_OFFLINE="1")
    gone = ask(tmp_path, hub.url, *names)  # nobody listens there any more
    assert paths(offline) == paths(found) and gone == offline


def test_what_is_not_there_is_said(tmp_path: Path, ask: Ask) -> None:
    """In one line each, and nothing is fetched for it."""
    with FakeHub(REPOSITORIES) as hub:
        hub.gated.add("org/adapter")
        errors = {
            "org/none": "FileNotFoundError: org/none: no such file or folder here, and http:",
            "org/unusual-GGUF": "ValueError: org/unusual-GGUF: name one of its GGUF models, as "
            "org/unusual-GGUF:TAG; it has BF16, Q2_K, Q3_K_S",
            "org/unusual-GGUF:Q3_K": "FileNotFoundError: org/unusual-GGUF:Q3_K: the repository has "
            "no such GGUF model; it has BF16, Q2_K, Q3_K_S",
            "org/unusual-GGUF/v.gguf": "FileNotFoundError: org/unusual-GGUF/v.gguf: the repository",
            "org/torn-GGUF": "FileNotFoundError: org/torn-GGUF: t-00002-of-00002.gguf, one of 2",
            "org/pickles": "FileNotFoundError: org/pickles: the repository has no weights as",
            "org/pickles:Q4_0": "FileNotFoundError: org/pickles:Q4_0: the repository has no weigh",
            "org/adapter": "PermissionError: org/adapter is gated: accept its terms at http:",
        }
        found = [f for f in ask(tmp_path, hub.url, *errors) if f[0] != "checked"]
        assert not {f for f in hub.fetched() if not f.endswith("config.json")}
        for said, wanted in zip(found, errors.values(), strict=True):
            assert f"{said[0]}: {said[1]}".startswith(wanted) and "\n" not in str(said[1])
        # Where the file's folder is here, a path is meant: the loader says what is wrong.
        (tmp_path / "here" / "sub").mkdir(parents=True)
        hub.requests.clear()
        assert ask(tmp_path, hub.url, "here/sub/x.gguf") == [["path", "here/sub/x.gguf", []]]
        assert hub.requests == []


def test_a_hub_that_does_not_answer(tmp_path: Path, ask: Ask) -> None:
    """The cache is enough where it has all; else it is said what it lacks, and why."""
    with FakeHub(REPOSITORIES) as hub:
        found = ask(tmp_path, hub.url, "org/big-GGUF", "org/shards")
        hub.broken = True
        again = ask(tmp_path, hub.url, "org/big-GGUF", "org/big-GGUF:Q8_0", "org/one-GGUF")
    assert again[0] == found[0]
    assert again[1][0] == again[2][0] == "ConnectionError"
    assert "it has Q4_K_M in the cache, and asking http://127.0.0.1:" in str(again[1][1])
    assert str(again[2][1]).startswith(
        "org/one-GGUF: no such file or folder here, nor in the hub's"
    )
    assert "503" in str(again[2][1])
    Path(str(found[0][1])).with_name(Path(PARTS[2]).name).unlink()
    (Path(str(found[2][1])) / "model-2.safetensors").unlink()
    both = ask(tmp_path, hub.url, "org/big-GGUF", "org/shards", HF_HUB_OFFLINE="1")
    lacks = [said for said in both if said[0] != "checked"]
    for (kind, said), file in zip(lacks, (PARTS[2], "model-2.safetensors"), strict=True):
        assert kind == "ConnectionError" and file in str(said) and "HF_HUB_OFFLINE" in str(said)
