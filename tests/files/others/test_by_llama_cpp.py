"""load_gguf: a file that llama.cpp quantized with an importance matrix, beside its own logits."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from expert_models import check_equals, logits
from gguf_files import load_quietly
from safetensors.torch import load_file

from torch_metalmm import QuantEmbedding, QuantLinear

FILE = Path(__file__).with_name("by_llama_cpp.gguf")  # record_llama_cpp.py makes it
# Every type for which llama.cpp asks for an importance, and others that take one.
KINDS = {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"}


def test_a_file_with_an_imatrix() -> None:
    """Beside transformers' f32 and f64; llama.cpp, too, errs as f32 does, so that it is the file's
    numbers that are equal."""
    recorded = load_file(FILE.with_suffix(".safetensors"))
    ids = recorded["ids"].unsqueeze(0)
    model, _, warned = load_quietly(FILE)
    assert warned == []
    packed = [m for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)]
    assert {m.format for m in packed} == KINDS
    kind = transformers.AutoModelForCausalLM
    reference = kind.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32)
    check_equals(model, reference, ids)
    y32 = logits(reference, ids)
    y64 = logits(reference.double(), ids)
    theirs = (recorded["logits"].double() - y64[0]).abs().max()
    spacing = torch.finfo(torch.float32).eps * y64.abs().max()
    assert theirs <= 6 * torch.maximum((y32 - y64).abs().max(), spacing)
    assert torch.equal(logits(model, ids)[0].argmax(-1), recorded["logits"].argmax(-1))
