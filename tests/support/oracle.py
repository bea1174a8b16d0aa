"""What the ops must return: float64 values from the Python specification, each with an error bound.

An engine computes in f32 and rounds once, to the dtype of the result. With u = 2^-24, every f32
operation gives fl(a op b) = (a op b)(1 + d), |d| <= u, plus at most 2^-126 where it underflows:
Apple's GPUs make a zero of a subnormal number.
n such factors multiply to 1 + d, |d| <= gamma(n) = n u / (1 - n u).

Dot product of K terms, in any order, fused or not: a term is multiplied once and then takes part in
at most K - 1 additions, K roundings at most (adding a zero is exact, so padding costs nothing):
    |y - sum x w| <= gamma(K) sum |x| |w|
Decoding adds no error: the engines' f32 weights are the specification's, bit for bit (test_exact),
and f16 and bf16 activations convert to f32 exactly.

Vector shaders, and the CPU's kernels of steps, do not decode the weights of a format with an
offset, w = d q + m: they add up q x and x, and multiply the sums by d and m. Roundings of d q x and
of m x are then in proportion to each, not to w x, which may be far smaller: both are nearly equal
where w is near 0, and an x of 1e5 there leaves its roundings in y. A term of either sum takes K
roundings at most in the sums, and those of the scale, of the minimum, of d or m, and of what joins
the two: 8 more:
    |y - sum x w| <= gamma(K + 8) sum |x| (|d q| + |m|)
In shaders q4_k's codes of every other 32 values carry a bias of 64 until the sum of x takes it
away: their |d q| is |d| (q + 64) (`addends`). Shaders that read codes as subnormal halves
do so with the bias of codes of a format without an offset (SUBNORMALS), w = d (c - b) = d c - d b;
and their products are 2^-24 of theirs, so that what underflows is 2^24 |d| times as much:
    |y - sum x w| <= gamma(K + 8) sum |x| (|d c| + |d b|) + 2^-102 sum |d c_max|
Steps add up q x of formats without an offset, too. There w = d q is exact in f32, and a term takes
fewer than K roundings, one of them for d: the bound is that of decoded weights.

Tiles of half operands, those of the matrix unit for f16 x, hold each w rounded to f16: u_T |w| +
s_T more for each w, with T = f16 as below (`halved`). Whether they run is for the plan to say.
affine4 with f16 scales rounds the exact s q + b there, the specification its f32 value: u |w| more,
for which there is room, since a product of two halves is exact in f32.

Torch's matmul (`dense`) multiplies in the dtype of x, T: x, where it is a result of f32, each w and
the product are rounded to T, u_T and s_T of each, and the sums are f32.

Store, for a result y with u_T = 2^-11 (f16) or 2^-8 (bf16), and s_T half the spacing of subnormals
(f16) or what is above all of them (bf16, where they may be dropped):
    |fl_T(y) - y| <= u_T |y| + s_T
f32 stores without rounding, and rounding what has been rounded changes nothing. float64 adds
K 2^-53 sum |x| |w| of its own.

Products of rounded activations compute with what the specification rounds x to (formats/
activations.py), exactly as long as numbers are integers: within a block of 16 or 32. A block's
sum is then multiplied by the scale of x and the scale of W, one rounding with the addition, and
where W has minima m sum q is added: for a block two additions, for the products, the joining of
at most 16 lanes and the rounding of the specification's own w = d q + m 10 roundings more:
    |y - sum x w| <= gamma(K / 8 + 10) sum |x| (|d q| + |m|)
x of int16 is two parts, whose products are added.

`Value` carries the exact value and the bound through a chain of such operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_metalmm import formats
from torch_metalmm.formats import activations as rounded

DTYPES = tuple(formats.DTYPES.values())
FORMATS = tuple(formats.names())

# One format of each kind of row: dense, lookup, offset, blocks of 256, planes.
KINDS = ("f32", "bf16", "q4_0", "q5_1", "q3_k", "q6_k", "iq4_xs", "affine3_g64")

U = 2.0**-24
TINY = 2.0**-126  # the smallest normal f32, and bf16
U64 = 2.0**-53
STORE = {
    torch.float32: (0.0, 0.0),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, TINY),
}

# f32 roundings in silu(x) = x / (1 + exp(-x)): exp is within 1 ulp (2 u), then + and /, and one
# more where it is x times a sigmoid.
SILU_ROUNDINGS = 5
SILU_SLOPE = 1.1  # the largest |silu'| is 1.0998
CAP_ROUNDINGS = 8  # in c tanh(x / c), where tanh is within 2 ulp
SLOPE_SLOPE = 0.5  # the largest |silu''|, at 0


# What a product rounds beside its sums. True: each w to f16. A dtype: torch's matmul of that dtype.
Halved = bool | torch.dtype


def gamma(n: float | Tensor) -> float | Tensor:
    """n u / (1 - n u)."""
    return n * U / (1 - n * U)


@dataclass
class Value:
    """An f32 computation: its exact value and a bound of |computed - exact|, both float64."""

    exact: Tensor
    error: Tensor
    dtype: torch.dtype | None = None  # that it has been rounded to

    @staticmethod
    def of(t: Tensor) -> Value:
        """An input: t itself, without error."""
        return Value(t.double(), torch.zeros_like(t, dtype=torch.float64), t.dtype)

    def size(self) -> Tensor:
        """A bound of |computed|."""
        return self.exact.abs() + self.error

    def dot(
        self,
        w: Tensor,
        chain: int | None = None,
        halved: Halved = False,
        size: Tensor | None = None,
    ) -> Value:
        """self [..., K] times w [N, K] transposed; a term takes `chain` roundings, or K.

        halved: what is rounded beside the sums. size [N, K]: what the roundings of a term are in
        proportion to, with x; |w|.
        """
        if isinstance(halved, torch.dtype):
            return self.store(halved)._dot(w, chain, halved, size).store(halved)
        return self._dot(w, chain, torch.float16 if halved else torch.float32, size)

    def _dot(
        self, w: Tensor, chain: int | None, w_dtype: torch.dtype, size: Tensor | None
    ) -> Value:
        w64, k = w.double(), w.shape[1]
        u, spacing = STORE[w_dtype]
        w_error = u * w64.abs() + spacing * (w64 != 0)
        terms = self.size() @ ((w64.abs() if size is None else size) + w_error).T
        rounding = (gamma(k if chain is None else chain) + k * U64) * terms + k * TINY
        of_inputs = self.error @ w64.abs().T + self.size() @ w_error.T
        return Value(self.exact @ w64.T, of_inputs + rounding)

    def matmul(self, other: Value) -> Value:
        """self [M, K] times other [K, N], both with errors."""
        k = self.exact.shape[-1]
        terms = self.size() @ other.size()
        error = self.error @ other.size() + self.size() @ other.error
        rounding = (gamma(k) + k * U64) * terms + k * TINY
        return Value(self.exact @ other.exact, error + rounding)

    @property
    def T(self) -> Value:
        return Value(self.exact.T, self.error.T)

    def rounded(self, count: float | Tensor = 1) -> Value:
        """This after `count` more roundings."""
        return Value(self.exact, self.error + gamma(count) * self.size() + TINY)

    def __add__(self, other: Value) -> Value:
        return Value(self.exact + other.exact, self.error + other.error).rounded()

    def __mul__(self, other: Value | float) -> Value:
        if not isinstance(other, Value):
            return Value(self.exact * other, self.error * abs(other)).rounded()
        error = self.error * other.size() + self.size() * other.error
        return Value(self.exact * other.exact, error).rounded()

    def silu(self) -> Value:
        """x sigmoid(x)."""
        exact = torch.nn.functional.silu(self.exact)
        return Value(exact, SILU_SLOPE * self.error).rounded(SILU_ROUNDINGS)

    def soft_cap(self, cap: float) -> Value:
        """cap tanh(x / cap), whose slope is at most 1."""
        exact = torch.tanh(self.exact / cap) * cap
        return Value(exact, self.error).rounded(CAP_ROUNDINGS)

    def silu_slope(self) -> Value:
        """s (1 + x (1 - s)), s = sigmoid(x).

        s has 4 roundings, so 1 - s errs by 5 u, x (1 - s) by 6 u |x|, 1 + x (1 - s) by
        u (1 + 7 |x|), the product by u (6 + 12 |x|).
        """
        s = self.exact.sigmoid()
        exact = s * (1 + self.exact * (1 - s))
        return Value(exact, SLOPE_SLOPE * self.error + gamma(6 + 12 * self.size()))

    def store(self, dtype: torch.dtype) -> Value:
        """Rounded to dtype."""
        u, spacing = (0.0, 0.0) if self.dtype == dtype else STORE[dtype]
        return Value(self.exact, self.error + u * self.size() + spacing, dtype)


def y64(x: Tensor, w: Tensor) -> Tensor:
    """x [..., K] times w f32 [N, K] (of the specification) transposed, in float64."""
    return x.double() @ w.double().T


def bound(x: Tensor, w: Tensor, k: int, dtype: torch.dtype, chain: int | None = None) -> Tensor:
    """gamma(chain or k) |x| |w|T, then the store to dtype: the largest |y - y64|, elementwise."""
    if w.shape[1] != k or x.shape[-1] != k:
        raise ValueError(f"k = {k}, but x is {list(x.shape)} and w {list(w.shape)}")
    return Value.of(x).dot(w, chain).store(dtype).error


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, halved: Halved = False) -> Value:
    """x wT + bias in the dtype of x."""
    y = Value.of(x).dot(w, halved=halved)
    return (y if bias is None else y + Value.of(bias)).store(x.dtype)


def check(actual: Tensor, expected: Value, what: str = "") -> float:
    """Prints and returns the largest error / bound; AssertionError where it exceeds 1.

    A NaN or an infinity in `actual` is beyond any bound.
    """
    assert actual.shape == expected.exact.shape, (what, actual.shape, expected.exact.shape)
    if actual.numel() == 0:
        return 0.0
    error = (actual.detach().cpu().double() - expected.exact).abs()
    ratio = (error / expected.error).nan_to_num(nan=torch.inf)
    ratio = torch.where(error == 0, 0.0, ratio)
    worst = float(ratio.max())
    print(f"{what}: error / bound = {worst:.3g}")
    if worst > 1:
        at = [int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape)]
        got, want, limit = (float(t[tuple(at)]) for t in (actual, expected.exact, expected.error))
        count = int((ratio > 1).sum())
        raise AssertionError(
            f"{what}: at {at} got {got!r}, exact {want!r}, error {abs(got - want):.3g} > bound "
            f"{limit:.3g}; {count} of {ratio.numel()} elements are out of bounds"
        )
    return worst


# {format: (first byte of the codes of a block, the byte behind them)}: of formats without an offset
# that shaders read as subnormal halves, and of those with one; of an affine format the codes are
# the first plane of a row.
SUBNORMALS = {"q4_0": (2, 18), "q5_0": (2, 22), "q8_0": (2, 34), "q3_k": (0, 96), "q6_k": (0, 192)}
CODES = {"q4_1": (4, 20), "q5_1": (4, 24), "q2_k": (16, 80), "q4_k": (16, 144), "q5_k": (16, 176)}
OFFSETS = [n for n in FORMATS if n in CODES or n.startswith("affine")]
APART = [*OFFSETS, *SUBNORMALS]  # whose codes and offset, or bias, vector shaders sum apart
# {what vector shaders leave on top of codes: (their ones, values of a run, the bias of each run)}
BIASES = {"q4_k": (0x11, 32, (0, 64)), "q2_k": (0x55, 32, (0, 64, 16, 4))}
BIASES |= {n: (0x55, 1, (0, 64, 16, 4)) for n in OFFSETS if n.startswith("affine2_")}


def _with_codes(name: str, packed: Tensor, k: int, byte: int) -> Tensor:
    """W f64 [N, k] by the specification, every byte of its codes replaced."""
    f, out = formats.get(name), packed.cpu().clone()
    byte ^= 0x80 if name == "q8_0" else 0  # its codes are signed: -128 is the least
    if isinstance(f, formats.Affine):
        out[:, : k * f.bits // 8] = byte
    else:
        first, end = (CODES | SUBNORMALS)[name]
        out.view(len(packed), -1, f.block_bytes)[..., first:end] = byte
    return f.dequantize(out, k).double()


def addends(name: str, packed: Tensor, k: int, biased: bool = True) -> Tensor:
    """|d q| + |m| of each weight of APART, float64 [N, k].

    biased: with the bias that the vector shaders give to codes of some formats.
    """
    offset = _with_codes(name, packed, k, 0)
    out = (spec(name, packed, k).double() - offset).abs() + offset.abs()
    if name in BIASES and biased:
        ones, run, biases = BIASES[name]
        steps = (_with_codes(name, packed, k, ones) - offset).abs()
        out += steps * torch.tensor(biases)[torch.arange(k) // run % len(biases)]
    return out


def linear_apart(x: Tensor, name: str, packed: Tensor) -> Value:
    """x wT in the dtype of x, W of a format of APART, by a vector shader."""
    k = x.shape[-1]
    y = Value.of(x).dot(spec(name, packed, k), k + 8, size=addends(name, packed, k))
    most = _with_codes(name, packed, k, 0xFF) - _with_codes(name, packed, k, 0)
    y.error += 2**24 * TINY * most.abs().sum(1)
    return y.store(x.dtype)


def rounded_parts(x: Tensor, kind: str) -> tuple[Tensor, ...]:
    """What products with activations=kind add up x from, float64: of int16 255 high and low."""
    codes, scales = rounded.quantize(x, kind)
    if kind == "int8":
        return (rounded.dequantize(codes, scales),)
    high = 255 * (codes.double() / 255).round()
    return rounded.dequantize(high, scales), rounded.dequantize(codes - high, scales)


def rounded_activations(x: Tensor, kind: str) -> Tensor:
    """x as activations=kind takes it, float64."""
    return rounded.dequantize(*rounded.quantize(x, kind))


def linear_of_rounded(x: Tensor, name: str, packed: Tensor, kind: str = "int8") -> Value:
    """x wT in f32, W packed and with integer codes, x rounded in blocks."""
    k = x.shape[-1]
    size = addends(name, packed, k, biased=False) if name in OFFSETS else None
    w, chain = spec(name, packed, k), k // 8 + 10
    first, *rest = (Value.of(p).dot(w, chain, size=size) for p in rounded_parts(x, kind))
    return first + rest[0] if rest else first


def spec(name: str, packed: Tensor, k: int) -> Tensor:
    """W f32 [N, k] by the Python specification."""
    return formats.get(name).dequantize(packed.cpu(), k)


def flushed(t: Tensor) -> Tensor:
    """t (f32 or bf16) with zeros of their signs in the place of subnormal numbers."""
    return torch.where(t.abs() < TINY, t * 0, t)


def flushed_spec(name: str, packed: Tensor, k: int) -> Tensor:
    """spec() where f32 and bf16 have no subnormals: neither W has, nor what it is computed from.

    Those are the scales and biases of affine formats and the powers of two of mxfp4 and mxfp8. f16
    keeps its subnormals, which are normal numbers of f32.
    """
    f, packed = formats.get(name), packed.cpu()
    w = spec(name, packed, k)
    if isinstance(f, formats.Affine) and f.dtype != torch.float16:
        codes, scales, biases = f.unpack(packed, k)
        w = spec(name, f.pack(codes, flushed(scales), flushed(biases)), k)
    elif name == "mxfp4":
        exponents = packed.view(len(packed), -1, f.block_bytes)[:, :, 0]  # 2^(e - 128)
        w = torch.where(exponents.repeat_interleave(32, 1) < 2, w * 0, w)
    elif name == "mxfp8":
        exponents = packed.view(len(packed), -1, f.block_bytes)[:, :, :2]  # 2^(e - 127)
        w = torch.where(exponents.flatten(1).repeat_interleave(32, 1) == 0, w * 0, w)
    return flushed(w)
