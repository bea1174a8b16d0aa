"""The stand-in for Metal's standard library, function by function, against Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_metalmm.testing import EmulatorFault, MetalSource, MetalSyntaxError

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
HALF_INPUTS = torch.arange(65536, dtype=torch.int32).to(torch.uint16)


def kernel(body: str, types: str = "device float* x, device float* y") -> MetalSource:
    text = (
        f"{HEAD}kernel void k({types}, uint i [[thread_position_in_grid]], "
        f"uint lane [[thread_index_in_simdgroup]]) {{\n{body}\n}}\n"
    )
    return MetalSource(text)


def run(source: MetalSource, n: int, buffers: list[Tensor | int | float], group: int = 64) -> None:
    source.function("k")((n + group - 1) // group, group, buffers, threads=n)


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("bfloat", torch.bfloat16)])
def test_all_65536_values_and_their_rounding(name: str, dtype: torch.dtype) -> None:
    """Each value widens exactly; sums, products, quotients and midpoints round to nearest even."""
    values = HALF_INPUTS.view(dtype)
    other = values.flip(0).contiguous()
    wide = torch.empty(65536)
    back, total, product, ratio = (torch.empty(65536, dtype=dtype) for _ in range(4))
    middle = torch.empty(65536, dtype=dtype)
    source = kernel(
        "wide[i] = float(a[i]);\nback[i] = T(wide[i]);\ntotal[i] = a[i] + b[i];\n"
        "product[i] = a[i] * b[i];\nratio[i] = a[i] / b[i];\nmiddle[i] = T(m[i]);".replace(
            "T(", f"{name}("
        ),
        f"device {name}* a, device {name}* b, device float* wide, device {name}* back, "
        f"device {name}* total, device {name}* product, device {name}* ratio, device float* m, "
        f"device {name}* middle",
    )
    up = (HALF_INPUTS.to(torch.int32) + 1).to(torch.uint16).view(dtype)
    m = ((values.double() + up.double()) / 2).float()  # exact; half way between neighbours
    m = torch.where(values.isfinite() & up.isfinite(), m, torch.zeros(()))
    run(source, 65536, [values, other, wide, back, total, product, ratio, m, middle])

    def same(a: Tensor, b: Tensor) -> bool:
        return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())

    assert same(wide, values.float())
    assert same(back, values)
    x, z = values.double(), other.double()
    assert same(total, (x + z).to(dtype) if name == "half" else (x.float() + z.float()).to(dtype))
    assert same(product, (values.float() * other.float()).to(dtype))
    assert same(ratio, (values.float() / other.float()).to(dtype))
    assert same(middle, m.to(dtype))


LANES = list(range(32))
FLOATS = [float((i * 7 + 3) % 11 - 5) for i in LANES]
INTS = [(i * 37 + 11) % 64 for i in LANES]


def product(v: list[float]) -> float:
    p = 1.0
    for a in v:
        p *= a
    return p


def fold(op: Callable[[int, int], int]) -> Callable[[list[int]], int]:
    def f(v: list[int]) -> int:
        r = v[0]
        for a in v[1:]:
            r = op(r, a)
        return r

    return f


REDUCTIONS: dict[str, tuple[str, Callable[[list], float]]] = {
    "sum": ("float", sum),
    "product": ("float", product),
    "min": ("float", min),
    "max": ("float", max),
    "and": ("int", fold(lambda a, b: a & b)),
    "or": ("int", fold(lambda a, b: a | b)),
    "xor": ("int", fold(lambda a, b: a ^ b)),
}


def groups(width: int) -> list[list[int]]:
    return [LANES[i : i + width] for i in range(0, 32, width)]


def on_lanes(expression: str, type_: str, values: list[float]) -> list[float]:
    """expression of v, i and lane on 32 lanes that hold `values`."""
    dtype = torch.float32 if type_ == "float" else torch.int32
    x, y = torch.tensor(values, dtype=dtype), torch.zeros(32, dtype=dtype)
    text = f"{type_} v = x[i];\ny[i] = {type_}({expression});"
    run(kernel(text, f"device {type_}* x, device {type_}* y"), 32, [x, y], group=32)
    return y.tolist()


@pytest.mark.parametrize(("group", "width"), [("simd", 32), ("quad", 4)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(group: str, width: int, name: str) -> None:
    type_, f = REDUCTIONS[name]
    values = [float((i * 5) % 3 + 1) for i in LANES] if name == "product" else FLOATS
    values = INTS if type_ == "int" else values
    want = [f([values[j] for j in g]) for g in groups(width) for _ in g]
    assert on_lanes(f"{group}_{name}(v)", type_, values) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(("group", "width"), [("simd", 32), ("quad", 4)])
@pytest.mark.parametrize("kind", ["inclusive", "exclusive"])
@pytest.mark.parametrize("name", ["sum", "product"])
def test_prefixes(group: str, width: int, kind: str, name: str) -> None:
    values = [float(i % 2 + 1) for i in LANES]
    f = sum if name == "sum" else product
    last = 1 if kind == "inclusive" else 0
    want = [f(values[j] for j in g[: n + last]) for g in groups(width) for n in range(width)]
    assert on_lanes(f"{group}_prefix_{kind}_{name}(v)", "float", values) == want


SHUFFLES: dict[str, Callable[[int, int], int]] = {
    "shuffle(v, ushort((lane * 3 + 1) % W))": lambda i, w: i // w * w + (i * 3 + 1) % w,
    "broadcast(v, 2)": lambda i, w: i // w * w + 2,
    "broadcast_first(v)": lambda i, w: i // w * w,
    "shuffle_xor(v, 3)": lambda i, w: i ^ 3,
    "shuffle_up(v, 1)": lambda i, w: i - 1 if i % w else i,
    "shuffle_down(v, 2)": lambda i, w: i + 2 if i % w + 2 < w else i,
    "shuffle_rotate_up(v, 1)": lambda i, w: i // w * w + (i - 1) % w,
    "shuffle_rotate_down(v, 3)": lambda i, w: i // w * w + (i + 3) % w,
}


@pytest.mark.parametrize(("group", "width"), [("simd", 32), ("quad", 4)])
@pytest.mark.parametrize("call", SHUFFLES)
def test_shuffles(group: str, width: int, call: str) -> None:
    want = [FLOATS[SHUFFLES[call](i, width)] for i in LANES]
    assert on_lanes(f"{group}_{call.replace('W', str(width))}", "float", FLOATS) == want


@pytest.mark.parametrize(("group", "width"), [("simd", 32), ("quad", 4)])
def test_shuffle_and_fill(group: str, width: int) -> None:
    fill = [v + 100 for v in FLOATS]
    for direction, step in (("up", -1), ("down", 1)):
        want = []
        for i in LANES:
            at = i % width + step
            source = FLOATS if 0 <= at < width else fill
            want.append(source[i // width * width + at % width])
        call = f"{group}_shuffle_and_fill_{direction}(v, v + 100, 1)"
        assert on_lanes(call, "float", FLOATS) == want


@pytest.mark.parametrize(("group", "width"), [("simd", 32), ("quad", 4)])
def test_votes(group: str, width: int) -> None:
    odd = sum(1 << j for j in range(1, width, 2))
    mask = odd if odd < 1 << 31 else odd - (1 << 32)
    want = {
        f"ulong({group}_ballot(lane % 2 == 1))": [mask] * 32,
        f"{group}_any(lane == 5)": [int(width == 32 or i // 4 == 1) for i in LANES],
        f"{group}_all(lane >= 4)": [int(width == 4 and i >= 4) for i in LANES],
        f"{group}_is_first()": [int(i % width == 0) for i in LANES],
        f"ulong({group}_active_threads_mask())": [-1 if width == 32 else 15] * 32,
    }
    for call, values in want.items():
        assert on_lanes(call, "int", INTS) == values, call


def test_ctz_clz_bits() -> None:
    values = [(1 << (i % 31)) * 5 & 0x7FFFFFFF for i in LANES]
    assert on_lanes("ctz(v)", "int", values) == [(v & -v).bit_length() - 1 for v in values]
    assert on_lanes("clz(v)", "int", values) == [32 - v.bit_length() for v in values]
    assert on_lanes("popcount(v)", "int", values) == [bin(v).count("1") for v in values]
    assert on_lanes("extract_bits(uint(v), 3, 7)", "int", values) == [v >> 3 & 127 for v in values]
    assert on_lanes("insert_bits(v, 5, 4, 3)", "int", values) == [v & ~0x70 | 0x50 for v in values]
    assert on_lanes("mulhi(uint(v), 77u)", "int", values) == [v * 77 >> 32 for v in values]


@pytest.mark.parametrize(
    ("name", "f"),
    [
        (n, getattr(torch, n))
        for n in (
            "exp",
            "exp2",
            "log",
            "log2",
            "log10",
            "sin",
            "cos",
            "tan",
            "tanh",
            "sqrt",
            "rsqrt",
        )
    ]
    + [
        (n, getattr(torch, n))
        for n in ("floor", "ceil", "trunc", "abs", "sinh", "cosh", "asin", "acos", "atan")
    ]
    + [("rint", torch.round), ("saturate", lambda x: x.clamp(0, 1)), ("sign", torch.sign)],
)
def test_math(name: str, f: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(0.01, 0.99, 64) if name in ("asin", "acos") else torch.linspace(0.1, 6.5, 64)
    x[0], y, v = 0.5, torch.empty(64), torch.empty(64)
    body = f"y[i] = {name}(x[i]);\nv[i] = {name}(float4(x[i])).w;"
    run(kernel(body, "device float* x, device float* y, device float* v"), 64, [x, y, v])
    assert torch.allclose(y, f(x.double()).float(), rtol=1e-6, atol=1e-7)
    assert torch.equal(y, v)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float", torch.float32), ("half", torch.float16), ("bfloat", torch.bfloat16)],
)
def test_simdgroup_matrix(name: str, dtype: torch.dtype) -> None:
    """The lane map, load and store with stride, origin and transpose, D = A B + C."""
    x = torch.arange(8 * 20 * 2, dtype=torch.float32).remainder(13).to(dtype)
    y = torch.full((5, 8, 16), -1, dtype=dtype)
    body = """simdgroup_matrix<T, 8, 8> a, b, c, d;
simdgroup_load(a, x, 20);
simdgroup_load(b, x, 20, ulong2(3, 1));
simdgroup_load(c, x, 20, ulong2(5, 2), true);
simdgroup_multiply_accumulate(d, a, b, c);
simdgroup_store(a, y, 16);
simdgroup_store(b, y, 16, ulong2(4, 8));
simdgroup_store(c, y + 256, 16, 0, true);
simdgroup_store(d, y + 384, 16);
for (int e = 0; e < 2; ++e) d.thread_elements()[e] = T(lane * 2 + e);
simdgroup_store(d, y + 512, 16);"""
    source = kernel(
        body.replace("T,", f"{name},").replace("T(", f"{name}("),
        f"device {name}* x, device {name}* y",
    )
    run(source, 32, [x, y], group=32)
    m = x.view(16, 20)
    a, b, c = m[:8, :8], m[1:9, 3:11], m[2:10, 5:13].T
    assert torch.equal(y[0, :, :8], a) and torch.equal(y[1, :, 4:12], b)
    assert torch.equal(y[2, :, :8], c.T)
    assert torch.equal(y[3, :, :8], (a.float() @ b.float() + c.float()).to(dtype))
    lanes = torch.empty(8, 8)
    for lane in LANES:
        for e in range(2):
            row, col = lane // 2 % 4 + lane // 16 * 4, e + lane % 2 * 2 + lane // 8 % 2 * 4
            lanes[row, col] = lane * 2 + e
    assert torch.equal(y[4, :, :8].float(), lanes)


def test_vectors_and_as_type() -> None:
    y = torch.empty(12)
    body = """float4 a = float4(1, 2, 3, 4);
half4 h = half4(a * 0.5f);
a.xz = a.zx;
y[0] = a.x; y[1] = a.z; y[2] = float4(h).w; y[3] = dot(a, float4(1));
y[4] = as_type<float>(0x3F800000u + uint(x[0])); y[5] = float2(as_type<half2>(0x3C004000u)).x;
y[6] = float4(float2(5, 6), 7, 8).z; y[7] = max(a, 2.5f).y; y[8] = select(1.0f, 2.0f, a.x > 2);
float4x4 m = float4x4(1); m[1][2] = 9; y[9] = (m * a).z; y[10] = float(ushort4(uchar4(200))[3]);
y[11] = float(int3(float3(-1.7f))[1]);"""
    run(kernel(body), 1, [torch.zeros(1), y], group=1)
    assert y.tolist() == [3, 1, 2, 10, 1, 2, 7, 2.5, 2, 19, 200, -1]


def test_function_constants() -> None:
    text = f"""{HEAD}
constant uint n [[function_constant(0)]];
constant bool flag [[function_constant(3)]];
constant half scale [[function_constant(4)]];
constant uint twice = n * 2;
constant bool flag_or = is_function_constant_defined(flag) ? flag : true;
kernel void k(device float* y) {{ y[0] = n; y[1] = twice; y[2] = flag_or; y[3] = scale; }}"""
    y, source = torch.empty(4), MetalSource(text)
    source.function("k", {0: 21, "flag": False, 4: 0.5})(1, 1, [y])
    assert y.tolist() == [21, 42, 0, 0.5]
    source.function("k", {0: 4})(1, 1, [y])
    assert y.tolist() == [4, 8, 1, 0]


def test_atomics_add_up() -> None:
    text = f"""{HEAD}
kernel void k(device atomic_uint* total, device atomic_float* f,
              uint i [[thread_position_in_grid]]) {{
  threadgroup atomic_int local;
  atomic_store_explicit(&local, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&local, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(total, i, memory_order_relaxed);
  atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i % 64 == 0) {{
    uint n = uint(atomic_load_explicit(&local, memory_order_relaxed));
    atomic_fetch_max_explicit(total + 1, n, memory_order_relaxed);
  }}
}}"""
    total, f = torch.zeros(2, dtype=torch.int32), torch.zeros(1)
    MetalSource(text).function("k")(16, 64, [total, f])
    assert total.tolist() == [1024 * 1023 // 2, 64] and f.item() == 512


REJECTED = {
    "device to thread": "float* p = x; y[0] = *p;",
    "device to threadgroup": "threadgroup float* p = x;",
    "constant to device": "device const float* p = c;",
    "device reference": "thread float& r = x[0]; r = 1;",
    "write to constant": "c[0] = 1;",
    "cast between address spaces": "y[0] = *reinterpret_cast<threadgroup float*>(x);",
    "address of a local as device": "float a; device float* p = &a;",
    "double": "double a = 1; y[0] = a;",
    "goto": "goto end; end: y[0] = 0;",
    "new": "float* p = new float; y[0] = *p;",
    "exceptions": "try { y[0] = 0; } catch (...) {}",
    "implicit vector conversion": "float4 a = half4(1.0h);",
    "too few components": "float4 a = float4(1, 2);",
    "as_type of another size": "y[0] = as_type<float>(half(1));",
    "unknown function": "y[0] = printf(1);",
    "standard library": "y[0] = std::max(1.0f, 2.0f);",
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_metal_forbids_is_rejected(what: str) -> None:
    with pytest.raises(MetalSyntaxError, match=r"source\.metal:\d+"):
        kernel(REJECTED[what], "device float* x, device float* y, constant float* c")


def test_virtual_functions_are_rejected() -> None:
    with pytest.raises(MetalSyntaxError):
        MetalSource(f"{HEAD}struct S {{ virtual float f(); }};")


def test_thread_positions() -> None:
    text = f"""{HEAD}
kernel void k(device uint* y, uint3 at [[thread_position_in_grid]], uint3 n [[threads_per_grid]],
              ushort2 tg [[threadgroup_position_in_grid]],
              uint3 in [[thread_position_in_threadgroup]],
              uint i [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]],
              ushort lane [[thread_index_in_simdgroup]], uint sgs [[simdgroups_per_threadgroup]],
              uint width [[threads_per_simdgroup]], uint2 group [[threads_per_threadgroup]]) {{
  device uint* row = y + 8 * (at.y * n.x + at.x);
  row[0] = tg.x * group.x + in.x; row[1] = tg.y * group.y + in.y; row[2] = i; row[3] = sg;
  row[4] = lane; row[5] = sgs; row[6] = width; row[7] = at.z;
}}"""
    y = torch.zeros(5, 20, 8, dtype=torch.int32)
    MetalSource(text).function("k")((2, 2), (16, 4), [y], threads=(20, 5))
    for row in range(5):
        for col in range(20):
            group = min(16, 20 - col // 16 * 16) * min(4, 5 - row // 4 * 4)
            i = col % 16 + row % 4 * min(16, 20 - col // 16 * 16)
            want = [col, row, i, i // 32, i % 32, (group + 31) // 32, 32, 0]
            assert y[row, col].tolist() == want


def test_a_fault_is_an_exception() -> None:
    with pytest.raises(
        EmulatorFault, match="source.metal:4: out of bounds: reads 4 bytes at byte 4"
    ):
        run(kernel("y[i] = x[i + 1];"), 1, [torch.zeros(1), torch.zeros(1)], group=1)
