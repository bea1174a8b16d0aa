"""quantize_: what it replaces, in which format, and that a refused request changes nothing."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_metalmm import QuantEmbedding, QuantLinear, formats, quantize_
from torch_metalmm.models import quantize as quantize_module
from torch_metalmm.models.quantize import resolve_format

pytestmark = pytest.mark.filterwarnings("error")


class Net(nn.Module):
    """Embedding, two blocks and an output head, tied or not."""

    def __init__(self, tied: bool = False, k: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, k)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(k, 512), "down": nn.Linear(512, k)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(k)
        self.head = nn.Linear(k, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](x)))
        return self.head(self.norm(x))


def formats_of(model: nn.Module) -> dict[str, str]:
    """{name: format} of the packed layers."""
    return {n: m.format for n, m in model.named_modules() if hasattr(m, "format")}


LAYERS = ["embed", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]


@pytest.mark.parametrize(
    ("asked", "k", "got"),
    [
        ("q4_k", 512, "q4_k"),
        ("Q4_K", 96, "q5_0"),
        ("q5_k", 96, "q5_1"),
        ("q6_k", 96, "q8_0"),
        ("q2_k", 96, "iq4_nl"),
        ("q3_k", 96, "iq4_nl"),
        ("iq4_xs", 96, "iq4_nl"),
        ("q4_0", 96, "q4_0"),
        ("q4_k", 100, "f16"),
        ("q4_0", 100, "f16"),
        ("mxfp4", 16, "f16"),
        ("bf16", 7, "bf16"),
        ("affine4_g128", 192, "affine4_g64"),
        ("affine4_g128_bf16", 96, "affine4_g32_bf16"),
        ("affine3_g64", 40, "f16"),
    ],
)
def test_resolve_format(asked: str, k: int, got: str) -> None:
    assert resolve_format(asked, k) == got


def test_a_string_packs_every_layer_and_frees_the_dense_weights() -> None:
    model = Net()
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        before = model(ids)
    dense = [weakref.ref(p) for n, p in model.named_parameters() if p.dim() == 2]
    assert quantize_(model, "Q8_0", progress=False) is model
    assert formats_of(model) == dict.fromkeys(LAYERS, "q8_0")
    assert isinstance(model.embed, QuantEmbedding) and isinstance(model.head, QuantLinear)
    assert all(ref() is None for ref in dense)
    error = (model(ids) - before).abs().max() / before.abs().max()
    assert 0 < error < 0.02  # 8 bits: a relative step of 1/254 in each of five layers


def test_dense_weights_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    dense = [weakref.ref(p) for p in model.parameters() if p.dim() == 2]
    alive: list[int] = []

    def counting(weight: Tensor, format: str, *others: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in dense))
        return original(weight, format, *others)

    original = quantize_module.quantize_weight
    monkeypatch.setattr(quantize_module, "quantize_weight", counting)
    quantize_(model, "q4_0", progress=False)
    assert alive == [6, 5, 4, 3, 2, 1]


def test_patterns_first_match_counts() -> None:
    model = Net()
    spec = {"head": None, "blocks.1.*": "q6_k", r"re:blocks\.\d\.up": "q4_0", "embed": "bf16"}
    quantize_(model, spec, progress=False)
    assert formats_of(model) == {
        "embed": "bf16",
        "blocks.0.up": "q4_0",
        "blocks.1.up": "q6_k",
        "blocks.1.down": "q6_k",
    }
    assert type(model.head) is nn.Linear and type(model.blocks[0]["down"]) is nn.Linear


def test_callable_spec_and_filter() -> None:
    model = Net()
    quantize_(model, lambda n, m: "q4_0" if m.weight.shape[1] == 512 else None, progress=False)
    assert formats_of(model) == {"blocks.0.down": "q4_0", "blocks.1.down": "q4_0"}
    model = Net()
    quantize_(model, "q4_0", lambda n, m: not isinstance(m, nn.Embedding), progress=False)
    assert formats_of(model) == dict.fromkeys(LAYERS[1:], "q4_0")


@pytest.mark.parametrize(
    "spec", ["q5_0", {"head": "q5_0", "*": "q8_0"}, {"embed": "q5_0"}, {"*": "Q5_0", "head": None}]
)
def test_tied_weights_stay_one_tensor(spec: object) -> None:
    model = Net(tied=True)
    ids = torch.arange(10)
    quantize_(model, spec, progress=False)
    assert model.head.weight is model.embed.weight
    assert model.head.format == model.embed.format == "q5_0"
    assert model(ids).shape == (10, 50)


@pytest.mark.parametrize(
    ("spec", "filter_fn"),
    [({"head": None, "*": "q4_0"}, None), ("q4_0", lambda n, m: n != "head")],
)
def test_excluding_one_of_tied_layers_excludes_both(spec: object, filter_fn: object) -> None:
    model = Net(tied=True)
    quantize_(model, spec, filter_fn, progress=False)
    assert list(formats_of(model)) == LAYERS[1:-1]
    assert model.head.weight is model.embed.weight


def test_a_layer_used_twice_stays_one_layer() -> None:
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    quantize_(model, "q4_0", progress=False)
    assert isinstance(model[0], QuantLinear) and model[0] is model[2]


def test_fallback_is_reported_once_by_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(96, 4), "b": nn.Linear(256, 4), "c": nn.Linear(10, 4)})
    with pytest.warns(UserWarning) as caught:
        quantize_(model, "q4_k", progress=False)
    assert formats_of(model) == {"a": "q5_0", "b": "q4_k", "c": "f16"}
    assert [str(w.message) for w in caught] == [
        "K is not a multiple of the format's block; used instead: q4_k -> q5_0: a; q4_k -> f16: c"
    ]


def test_a_report_names_like_layers_once() -> None:
    model = nn.Sequential(*(nn.ModuleDict({"up": nn.Linear(96, 4)}) for _ in range(12)))
    with pytest.warns(UserWarning, match=r"q4_k -> q5_0: model\.\*\.up \(12\)$"):
        quantize_(nn.ModuleDict({"model": model}), "q4_k", progress=False)


def test_packing_again_changes_the_format_or_nothing() -> None:
    model = quantize_(Net(), "q8_0", progress=False)
    kept = dict(model.named_modules())
    quantize_(model, "q8_0", progress=False)
    assert dict(model.named_modules()) == kept
    decoded = model.head.dequantize()
    quantize_(model, {"head": "q4_0"}, progress=False)
    assert torch.equal(model.head.weight, formats.get("q4_0").quantize(decoded))
    assert model.embed.format == "q8_0"


def test_what_a_replacement_keeps() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 4), "e": nn.Embedding(9, 64, padding_idx=3)})
    model.to(torch.bfloat16).eval()
    bias = model["a"].bias.detach()
    quantize_(model, "q8_0", progress=False)
    assert torch.equal(model["a"].bias, bias) and not model["a"].training
    assert model["e"].padding_idx == 3 and model["e"].dtype == torch.bfloat16


def test_double_weights_are_packed_from_f32() -> None:
    model = nn.Sequential(nn.Linear(64, 4).double())
    expected = formats.get("q8_0").quantize(model[0].weight.float())
    quantize_(model, "q8_0", progress=False)
    assert torch.equal(model[0].weight, expected)


# Layers whose weight other code reads


def test_weights_that_other_code_reads_stay_dense() -> None:
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(64, 2), "layer": nn.TransformerEncoderLayer(64, 2, 64)}
    )
    with pytest.warns(UserWarning, match="left dense, because .*: layer.linear1, layer.linear2"):
        quantize_(model, "q4_0", progress=False)
    assert formats_of(model) == {}
    x = torch.randn(3, 1, 64)
    model.eval()["layer"](x)


def test_gpt2_conv1d_is_a_linear() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    dense = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    ids = torch.arange(8)[None]
    before = model(ids).logits
    quantize_(model, {"*.h.*": "f32", "*wte": "q8_0"}, progress=False)
    layer = model.transformer.h[0].mlp.c_fc
    assert isinstance(layer, QuantLinear) and torch.equal(layer.dequantize(), dense.T)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (model(ids).logits - before).abs().max() < 0.02


# Requests that are refused


def unchanged_after(error: type[Exception], message: str, spec: object, model: nn.Module) -> None:
    modules = list(model.named_modules())
    values = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(error, match=message):
        quantize_(model, spec, progress=False)
    assert list(model.named_modules()) == modules
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert parameter.is_meta or torch.equal(parameter.nan_to_num(), value.nan_to_num())


@pytest.mark.parametrize(
    ("error", "message", "spec"),
    [
        (ValueError, "unknown 'q9'; allowed: f32", "q9"),
        (ValueError, "unknown 'q9'", {"head": "q9"}),
        (ValueError, "unknown 'q9'", lambda n, m: "q9"),
        (ValueError, "no layer is named 'hed'; the layers are embed, blocks.0.up", {"hed": "q4_0"}),
        (ValueError, "no layer is named 'lm_*'", {"lm_*": "q4_0", "*": "q8_0"}),
        (ValueError, r"'re:\(' is not a regular expression", {"re:(": "q4_0"}),
        (TypeError, "spec must be a format name, a dict or a callable, got int", 4),
        (TypeError, "gives embed 4; it must be a format name or None", lambda n, m: 4),
    ],
)
def test_bad_spec_changes_nothing(error: type[Exception], message: str, spec: object) -> None:
    unchanged_after(error, message.replace("*", r"\*"), spec, Net())


def test_two_formats_for_a_tied_weight() -> None:
    message = "one weight is shared, but spec gives embed q4_0, head q8_0"
    spec = {"embed": "q4_0", "head": "q8_0"}.get
    unchanged_after(ValueError, message, lambda name, _: spec(name), Net(tied=True))


def set_value(model: nn.Module, value: float) -> None:
    model.head.weight.data[3, 4] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: set_value(m, torch.nan), "head.weight has NaN or Inf"),
        (lambda m: set_value(m, -torch.inf), "head.weight has NaN or Inf"),
        (lambda m: m.head.to("meta"), "head.weight is on the meta device"),
    ],
)
def test_bad_weight_changes_nothing(change: Callable[[nn.Module], None], message: str) -> None:
    model = Net()
    change(model)
    unchanged_after(ValueError, message, "q4_0", model)


@pytest.mark.parametrize(("k", "value", "format"), [(10, -1e5, "f16"), (32, 1e38, "q4_0")])
def test_weight_too_large_for_its_format_changes_nothing(k: int, value: float, format: str) -> None:
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(k, 4))
    model[1].weight.data[2, 0] = value
    message = f"1.weight: row 2 has {value:g}, too large for {format}"
    unchanged_after(ValueError, re.escape(message), "q4_0", model)


def test_the_model_itself_cannot_be_replaced() -> None:
    with pytest.raises(ValueError, match="model is itself a Linear.*from_linear"):
        quantize_(nn.Linear(64, 4), "q4_0")


def test_progress_goes_to_stderr_or_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    quantize_(Net(), "q4_0", progress=False)
    assert capsys.readouterr() == ("", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's own, about notebooks
        quantize_(Net(), "q4_0")
    out, err = capsys.readouterr()
    assert out == "" and "Quantizing" in err and "100%" in err


def test_a_format_of_large_blocks_names_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A K that 256 does not divide must not become f16 because nobody wrote a row."""
    everything = {name: formats.get(name) for name in formats.names()}
    formats._check_fallbacks(everything)
    monkeypatch.setattr(type(formats.get("q4_k")), "fallback", None)
    with pytest.raises(ValueError, match="^q4_k: blocks of 256 values and fallback None; must be"):
        formats._check_fallbacks(everything)
    monkeypatch.setattr(type(formats.get("q4_k")), "fallback", "q6_k")
    with pytest.raises(ValueError, match="^q4_k: .* fallback 'q6_k'; .* of smaller blocks"):
        formats._check_fallbacks(everything)


@pytest.mark.parametrize("large", [65504.0, -1e5, 2e7, -1e20, 3.4e38])
@pytest.mark.parametrize("format", ["f16", "bf16", "q4_0", "q4_1", "q6_k", "iq4_xs", "affine4_g32"])
def test_the_value_of_a_layer_is_kept_or_named_as_too_large(format: str, large: float) -> None:
    """Never stored as Inf or NaN, nor as a small number."""
    linear = nn.Linear(256, 8)
    linear.weight.data[3, 250] = large
    try:
        decoded = QuantLinear.from_linear(linear, format).dequantize()
    except ValueError as error:
        assert str(error) == f"w: row 3 has {large:g}, too large for {format}"
        assert abs(large) > 65504
    else:
        assert decoded.isfinite().all() and 0.5 <= decoded[3, 250] / large <= 1.5
