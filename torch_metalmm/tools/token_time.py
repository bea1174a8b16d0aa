"""How long a token takes on a chip, in transformers at batch 1: a prediction, as of cost_model.py.

    token   beside + wait + max(GPU, host); replayed: max(GPU, beside + host)
    GPU     products + attention + PASS_US for each of our passes + OTHER_US for each other kernel
    host    layers x Python of a layer + OP_US for each other kernel + ENCODE_US for each of ours

Products take the time that cost_model.py predicts without its launches, the context that of its
bytes: attention reads keys and values once, DynamicCache copies them in every token. The passes are
those that plan() makes. The host encodes while the
GPU computes, apart from what lies beside the layers: embedding, mask, positions, the choice of the
token; and the host waits for the GPU once a token. Where a token is read one step late, the next
step is queued by then: all of the host's time lies beside the GPU's.

Four forms: "unfused", a model after quantize_; "fused", after fuse_; "replayed", after
fuse_(cache=...), by hf/decoding.py; "gpu", the fused kernels without a host, the limit for software
that launches them. Nothing here was measured on a Mac.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .. import _C
from ..hf.caches import format_of, pair_of
from .cost_model import LAUNCH_US, REACHED, Chip, predict

FORMS = ("unfused", "fused", "replayed", "gpu")

PASS_US = LAUNCH_US
# A small kernel of torch: 2 to 3 on the GPU, 0.5 to encode where it is a plain one (pytorch 82707).
OTHER_US, ENCODE_US = 2.5, 0.5
# An op of torch on MPS on the host: that of a graph op (pytorch 82707). docs/chip-model.md compares
# the tokens that follow with published ones.
OP_US = 15.0
# Python of a layer and of a step beside the layers on a Zen 5 core, tiny weights, one thread:
# `python -m bench tokens --overhead --threads 1`, 2026-11-22.
# Replayed on a slower core, a Xeon of family 6, model 207: what Python takes more than the list of
# ops, by the loop of hf/decoding.py, 2026-11-26.
LAYER_US = {"unfused": 126.0, "fused": 41.0, "replayed": 3.4, "gpu": 0.0}
BESIDE_US = {"unfused": 147.0, "fused": 161.0, "replayed": 60.0, "gpu": 0.0}
HEAD_NORM_US = 15.0  # a norm of q or k, unfused: a Qwen3 of the same sizes, 31 more a layer
WAIT_US = 100.0  # a synchronize of the MPS stream
CONTEXT = 128  # tokens before
COPIED = 3  # DynamicCache: cat reads all entries and writes them, attention reads what was written

# Kernels of torch in a layer, as `bench tokens` counts them in f16: attention and two updates of
# the cache; unfused also 8 for each norm, 10 for the rotation, 2 for the gated MLP and 2 additions.
_SHARED, _NORM, _REST = 3, 8, 14
# Our passes in their place, with a PackedCache: attention takes two, and entries are appended by
# the rotation of a fused layer, else by one more.
_ATTENTION, _APPEND = 2, 1
_BESIDE = {"unfused": 22, "fused": 12}  # the last norm is in them, or a pass of ours
# Passes of a replayed step: token, position, slots and length, where the list reads them; the
# next position, logits as f32, the likeliest token and its copy for the host.
_REPLAYED = 8


@dataclass(frozen=True)
class Model:
    """The sizes of a pre-norm decoder with a gated MLP."""

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int = 128
    head_norms: bool = False

    def products(self, fused: bool) -> Iterator[tuple[int, int, int]]:
        """(N, K, how often) of a token."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        if fused:
            yield q + 2 * kv, self.hidden, self.layers
            yield 2 * self.intermediate, self.hidden, self.layers
        else:
            yield q, self.hidden, self.layers
            yield kv, self.hidden, 2 * self.layers
            yield self.intermediate, self.hidden, 2 * self.layers
        yield self.hidden, q, self.layers
        yield self.hidden, self.intermediate, self.layers
        yield self.vocabulary, self.hidden, 1

    def other_kernels(self, fused: bool, is_packed: bool = False) -> int:
        """Kernels of torch in a token. is_packed: with a PackedCache and our attention."""
        norms = 2 + 2 * self.head_norms
        in_layer = (0 if is_packed else _SHARED) + (0 if fused else _NORM * norms + _REST)
        return self.layers * in_layer + _BESIDE["fused" if fused else "unfused"]

    def cache_bytes(self, context: int, cache: str) -> int:
        """Keys and values of the context in the formats that the name stands for."""
        entry = sum(format_of(name)[0].row_bytes(self.head_size) for name in pair_of(cache))
        return self.layers * self.kv_heads * entry * context


MODELS = {
    "Llama 2 7B": Model(4096, 32, 11008, 32000, 32, 32),
    "Llama 3.3 70B": Model(8192, 80, 28672, 128256, 64, 8),
    "Llama 3.1 8B": Model(4096, 32, 14336, 128256, 32, 8),
    "Mistral 7B": Model(4096, 32, 14336, 32000, 32, 8),
    "Llama 3.2 3B": Model(3072, 28, 8192, 128256, 24, 8),
    "Qwen3 4B": Model(2560, 36, 9728, 151936, 32, 8, head_norms=True),
    "Qwen3 0.6B": Model(1024, 28, 3072, 151936, 16, 8, head_norms=True),
}


@dataclass(frozen=True)
class TokenTime:
    """Microseconds of a token, and what is launched for it."""

    products: float
    attention: float
    passes: int  # ours
    others: int  # kernels of torch
    host: float
    beside: float

    @property
    def gpu(self) -> float:
        launched = PASS_US * self.passes + OTHER_US * self.others
        return self.products + self.attention + launched

    @property
    def total(self) -> float:
        return self.beside + max(self.gpu, self.host)

    @property
    def bound(self) -> str:
        """The part that takes longer: GPU or host."""
        return "GPU" if self.gpu >= self.host else "host"


def passes_of(n: int, k: int, format: str, chip: Chip) -> int:
    """The passes that plan() makes of a product of one row."""
    plan = _C.plan(m=1, n=n, k=k, format=format, chip=chip.name, gpu={"cores": chip.cores})
    return len(plan["passes"])


def token_time(
    model: str | Model,
    format: str,
    chip: str | Chip,
    form: str = "fused",
    op_us: float = OP_US,
    context: int = CONTEXT,
    cache: str | None = None,
) -> TokenTime:
    """The prediction for a model of MODELS after `context` tokens, x f16.

    op_us: the host's time for an op of torch. cache: the formats of a PackedCache, which our
    attention reads; None: DynamicCache, f16, and torch's attention.

    ValueError: an unknown model, format, chip or form.
    """
    if form not in FORMS:
        raise ValueError(f"form: unknown {form!r}; allowed: {', '.join(FORMS)}")
    if isinstance(model, str) and model not in MODELS:
        raise ValueError(f"model: unknown {model!r}; allowed: {', '.join(MODELS)}")
    m = MODELS[model] if isinstance(model, str) else model
    machine = Chip.named(chip) if isinstance(chip, str) else chip
    fused = form != "unfused"
    if form == "replayed":
        cache = cache or "f16"
    products, passes = 0.0, 1 + fused * (m.layers + 1)  # the embedding; rope, the last norm
    for n, k, times in m.products(fused):
        p = predict(1, n, k, format, machine)
        products += times * max(p.memory, p.issue)
        passes += times * passes_of(n, k, format, machine)
    bandwidth = machine.bandwidth_gb_s * 1e3 * REACHED
    if cache is None:
        attention = COPIED * m.cache_bytes(context, "f16") / bandwidth
    else:
        attention = m.cache_bytes(context, cache) / bandwidth
        passes += m.layers * (_ATTENTION + (0 if fused else _APPEND))
    others = _REPLAYED if form == "replayed" else m.other_kernels(fused, cache is not None)
    passes += form == "replayed"  # the rotation's tables
    layer = LAYER_US[form] + 2 * HEAD_NORM_US * (m.head_norms and not fused)
    host = m.layers * layer + op_us * others + ENCODE_US * passes
    if form == "gpu":
        return TokenTime(products, attention, passes, others, 0.0, WAIT_US)
    if form == "replayed":
        return TokenTime(products, attention, passes, others, host + BESIDE_US[form], 0.0)
    return TokenTime(products, attention, passes, others, host, BESIDE_US[form] + WAIT_US)
