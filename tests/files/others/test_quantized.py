"""load_quantized: folders of GPTQ, AWQ, compressed-tensors, HQQ and torchao; exact weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import transformers
from hf_models import logits, packed_bytes, same_bytes, tokens
from inputs import activations
from oracle import check
from quantized_files import Layer, change_config, layouts, random_layer, write
from safetensors.torch import load_file, save_file
from torch import Tensor

from torch_metalmm import load_quantized
from torch_metalmm.files.methods import method_of
from torch_metalmm.formats import get
from torch_metalmm.models.integers.affine import Rows
from torch_metalmm.tools.cli import main

pytestmark = pytest.mark.covering

N, K = 96, 256
F16, BF16 = torch.float16, torch.bfloat16
BITS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "awq": (4,), "torchao": (4,)}
BITS |= {"compressed-tensors": tuple(range(1, 9)), "hqq": (2, 3, 4, 8)}
CASES = [
    (name, bits, group)
    for name, all_bits in BITS.items()
    for bits in all_bits
    for group in (32, 128)
]
CASES += [(name, 4, group) for name in BITS for group in (64, 256)]


def decoded(rows: Rows, k: int = K) -> Tensor:
    """W in the order of the layer's inputs, by the specification."""
    w = get(rows.format).dequantize(rows.weight, k)
    return w if rows.input_order is None else w[:, rows.input_order.argsort()]


def pack(name: str, bits: int, group: int, layer: Layer) -> Rows:
    layout = layouts(bits, group)[name]
    return method_of(layout.config).pack(layout.tensors(layer), N, K)


def with_float_zeros(layer: Layer, dtype: torch.dtype = torch.float32) -> Tensor:
    """torchao's w = scale (code - 8) + zero_point."""
    q = (layer.codes - 8).to(dtype) * layer.scales.to(dtype)[:, layer.groups]
    return q + layer.zeros.to(dtype)[:, layer.groups]


@pytest.mark.parametrize(("name", "bits", "group"), CASES)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_no_weight_is_rounded(name: str, bits: int, group: int, dtype: torch.dtype) -> None:
    """In f32 arithmetic the very bits; the library's own f16 or bf16 is these, rounded."""
    layer = random_layer(N, K, bits, group, dtype=dtype)
    w = decoded(pack(name, bits, group, layer))
    if name == "torchao":
        assert torch.equal(w, with_float_zeros(layer))
    else:
        assert torch.equal(w, layer.weight())
        assert torch.equal(w.to(dtype), layer.weight(dtype))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_one_word(bits: int) -> None:
    """N codes fill one int32: the tensor has one row, and its transpose one column."""
    n = 32 // bits
    layer, layout = random_layer(n, K, bits, 64), layouts(bits, 64)["compressed-tensors"]
    tensors = layout.tensors(layer)
    tensors["weight_zero_point"] = tensors["weight_zero_point"].view(-1).view(1, K // 64)
    assert tensors["weight_zero_point"].stride() == (K // 64, 1)  # as read from a file
    assert torch.equal(decoded(method_of(layout.config).pack(tensors, n, K)), layer.weight())


@pytest.mark.parametrize("bits", BITS["gptq"])
@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "compressed-tensors"])
def test_act_order(name: str, bits: int) -> None:
    layer = random_layer(N, K, bits, 64, shuffled=True)
    rows = pack(name, bits, 64, layer)
    assert rows.input_order is not None and not torch.equal(rows.input_order, torch.arange(K))
    assert torch.equal(decoded(rows), layer.weight())
    in_order = pack(name, bits, 64, random_layer(N, K, bits, 64))
    assert in_order.input_order is None


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors", "hqq"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_scales_of_symmetric_codes_stay_small(name: str, dtype: torch.dtype) -> None:
    """A zero of 8 times a scale is a number of the dtype of the scale: no f32 is needed."""
    suffix = {F16: "", BF16: "_bf16"}[dtype]
    layer = random_layer(N, K, 4, 128, dtype=dtype, symmetric=True)
    rows = pack(name, 4, 128, layer)
    assert rows.format == f"affine4_g128{suffix}" and torch.equal(decoded(rows), layer.weight())
    assert pack(name, 4, 128, random_layer(N, K, 4, 128, dtype=dtype)).format == "affine4_g128_f32"


def test_a_scale_whose_bias_overflows_f16() -> None:
    layer = random_layer(N, K, 4, 128, symmetric=True)
    layer.scales[3, 1] = 2.0**14
    rows = pack("gptq", 4, 128, layer)
    assert rows.format == "affine4_g128_f32" and torch.equal(decoded(rows), layer.weight())


@pytest.mark.parametrize("name", ["gptq", "compressed-tensors"])
def test_scales_of_f32_are_rounded_three_times(name: str) -> None:
    """Both products and their sum: one more product of two roundings at most."""
    layer = random_layer(N, K, 4, 64, dtype=torch.float32)
    layer.scales *= 0.9  # more bits than f16 has
    scales, u = layer.scales.double()[:, layer.groups], 2.0**-24
    codes, zeros = layer.codes.double(), layer.zeros.double()[:, layer.groups]
    exact = scales * (codes - zeros)
    parts = scales * (codes + zeros)
    w = decoded(pack(name, 4, 64, layer)).double()
    assert ((w - exact).abs() <= u * (1 + u) * (parts + exact.abs())).all()
    assert not torch.equal(w, exact)


@pytest.mark.parametrize("bits", BITS["hqq"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_zeros_of_hqq_that_are_fractions(bits: int, dtype: torch.dtype) -> None:
    """f32 arithmetic to the bit; HQQ rounds twice in its dtype, each time by u relative at most."""
    layer = random_layer(N, K, bits, 64, dtype=dtype, fractions=True)
    w, own = decoded(pack("hqq", bits, 64, layer)).double(), layer.weight(dtype).double()
    assert torch.equal(w.float(), layer.weight())
    u = torch.finfo(dtype).eps / 2
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    f32 = torch.finfo(torch.float32).eps / 2 * w.abs()
    assert ((w - own).abs() <= (2 * u + u * u) * w.abs() + least + f32).all()
    assert not torch.equal(w, own)


@pytest.mark.parametrize("bits", BITS["gptq"])
def test_zeros_of_0_in_version_1_of_gptq(bits: int) -> None:
    """A zero of 0 borrows from the next code of its word, which is then stored as zero - 2."""
    layer = random_layer(N, K, bits, 64)
    layer.zeros[::5], layer.zeros[-1] = 0, 0
    for name in ("gptq", "gptq_v2"):
        assert torch.equal(decoded(pack(name, bits, 64, layer)), layer.weight())


FOLDERS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "gptq": ("gptq", 4, 128, {}),
    "gptq act-order": ("gptq", 4, 64, {"shuffled": True}),
    "gptq symmetric": ("gptq", 4, 128, {"symmetric": True}),
    "gptq one group": ("gptq", 8, -1, {}),
    "gptq 3 bits": ("gptq_v2", 3, 32, {}),
    "awq": ("awq", 4, 128, {}),
    "compressed-tensors": ("compressed-tensors", 4, 32, {"symmetric": True, "dtype": BF16}),
    "compressed-tensors 8": ("compressed-tensors", 8, 64, {"dtype": BF16}),
    "hqq": ("hqq", 4, 64, {}),
    "hqq 3 bits": ("hqq", 3, 64, {"fractions": True}),
    "torchao": ("torchao", 4, 128, {"dtype": BF16, "weight": with_float_zeros}),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders(tmp_path: Path, case: str) -> None:
    """Weights bit for bit, layers but for the order of sums, the same greedy tokens; a save."""
    name, bits, group, options = FOLDERS[case]
    dense = write(tmp_path / "theirs", layouts(bits, group)[name], bits, group, **options)
    dense.requires_grad_(False)
    model, tokenizer = load_quantized(tmp_path / "theirs")
    assert tokenizer is None and not any(p.requires_grad for p in model.parameters())
    assert len(packed_bytes(model)) == 7
    for layer in packed_bytes(model):
        ours, theirs = model.get_submodule(layer), dense.get_submodule(layer)
        assert torch.equal(ours.dequantize(), theirs.weight)
        x = activations(3, theirs.in_features)
        check(ours(x), oracle.linear(x, theirs.weight, theirs.bias), layer)
    assert torch.equal(tokens(model), tokens(dense))
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert same_bytes(model, again) and torch.equal(logits(model), logits(again))


def test_a_bias_of_zeros_that_the_model_has_not(tmp_path: Path) -> None:
    """AutoGPTQ gave every layer a bias."""
    write(tmp_path, layouts(4, 128)["gptq"], 4, 128)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.bias"
    save_file(tensors | {name: torch.zeros(256)}, tmp_path / "gptq_model-4bit-128g.safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert load_quantized(tmp_path)[0].model.layers[0].mlp.down_proj.bias is None
    save_file(tensors | {name: torch.ones(256)}, tmp_path / "gptq_model-4bit-128g.safetensors")
    with pytest.raises(ValueError, match="down_proj: it has a bias, the model's layer has none"):
        load_quantized(tmp_path)


def test_shards_that_an_index_names(tmp_path: Path) -> None:
    write(tmp_path, layouts(4, 128)["gptq"], 4, 128)
    tensors = load_file(tmp_path / "model.safetensors")
    whole = packed_bytes(load_quantized(tmp_path)[0])
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"gptq-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, tmp_path / file)
    index = tmp_path / "gptq.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    again = packed_bytes(load_quantized(tmp_path)[0])
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name][1], whole[name][1]) for name in whole)


def test_layers_of_their_own_sizes(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: the config's bits are not those of every layer."""
    write(tmp_path, layouts(4, 128)["gptq"], 4, 128)
    write(tmp_path / "8", layouts(8, 32)["gptq"], 8, 32)
    mixed, up = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj"
    eight = load_file(tmp_path / "8" / "model.safetensors")
    mixed |= {name: t for name, t in eight.items() if name.startswith(up)}
    save_file(mixed, tmp_path / "model.safetensors")
    config = layouts(4, 128)["gptq"].config | {"dynamic": {f"+:{up}": {"bits": 8}}}
    change_config(tmp_path, quantization_config=config)
    model, _ = load_quantized(tmp_path)
    formats = {format for format, _ in packed_bytes(model).values()}
    assert formats == {"affine4_g128_f32", "affine8_g32_f32"}


def test_groups_of_several_sizes(tmp_path: Path) -> None:
    """compressed-tensors: each layer has the sizes of one of the config_groups."""
    layout = layouts(4, 64)["compressed-tensors"]
    write(tmp_path, layout, 4, 64)
    groups = layout.config["config_groups"]
    others = {"group_1": {"weights": {"num_bits": 8, "strategy": "channel"}}}
    both = layout.config | {"config_groups": others | groups}
    change_config(tmp_path, quantization_config=both)
    formats = {format for format, _ in packed_bytes(load_quantized(tmp_path)[0]).values()}
    assert formats == {"affine4_g64_f32"}


@pytest.mark.parametrize("name", ["gptq", "gptq_v2"])
def test_the_layout_may_be_under_format(name: str) -> None:
    """Newer configs of GPTQModel have `format` alone, or both keys."""
    layer, layout = random_layer(N, K, 4, 64), layouts(4, 64)[name]
    given = {k: v for k, v in layout.config.items() if k != "checkpoint_format"}
    for keys in ({"format": name}, {"format": name, "checkpoint_format": name}):
        rows = method_of(given | keys | {"pack_dtype": "int32"}).pack(layout.tensors(layer), N, K)
        assert torch.equal(decoded(rows), layer.weight())


def test_dtype(tmp_path: Path) -> None:
    write(tmp_path, layouts(4, 128)["awq"], 4, 128)
    model, _ = load_quantized(tmp_path, dtype=BF16)
    assert logits(model).dtype == BF16 and model.lm_head.weight.dtype == BF16


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`metalmm quantize` packs such a folder without --format."""
    write(tmp_path / "theirs", layouts(4, 64)["awq"], 4, 64)
    command = ["quantize", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")]
    assert main(command) == 0, capsys.readouterr().err
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert same_bytes(again, load_quantized(tmp_path / "theirs")[0])


RECORDED = load_file(Path(__file__).with_name("decoded_by_packages.safetensors"))


@pytest.mark.parametrize("case", sorted({name.partition("/")[0] for name in RECORDED}))
def test_what_the_packages_decode(case: str) -> None:
    """record_packages.py: the dtype of W is that in which the library computes it."""
    tensors = {n.partition("/")[2]: t for n, t in RECORDED.items() if n.startswith(f"{case}/")}
    want = tensors.pop("W")
    name, bits = case.split()[:2]
    method = method_of(layouts(int(bits), 32)[name].config)
    w = decoded(method.pack(tensors, *want.shape), want.shape[1])
    assert torch.equal(w.to(want.dtype), want)
