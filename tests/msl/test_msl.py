"""The stand-in for Metal's standard library and language, piece by piece, against Python."""

from __future__ import annotations

import pytest
import torch
from msl_kernels import HEAD, LANES, kernel, run, same

from torch_metalmm.testing import MetalSource

HALF_INPUTS = torch.arange(65536, dtype=torch.int32).to(torch.uint16)


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

    assert same(wide, values.float())
    assert same(back, values)
    x, z = values.double(), other.double()
    assert same(total, (x + z).to(dtype) if name == "half" else (x.float() + z.float()).to(dtype))
    assert same(product, (values.float() * other.float()).to(dtype))
    assert same(ratio, (values.float() / other.float()).to(dtype))
    assert same(middle, m.to(dtype))


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


def test_many_function_constants() -> None:
    """Beyond 64, each with a value or without one."""
    n = 130
    constants = "".join(f"constant int c{i} [[function_constant({2 * i})]];\n" for i in range(n))
    reads = "".join(f"y[{i}] = is_function_constant_defined(c{i}) ? c{i} : -1;\n" for i in range(n))
    given = {i: 7 * i for i in range(n) if i % 3 == 0 or i > 126}
    y = torch.zeros(n)
    source = MetalSource(f"{HEAD}{constants}kernel void k(device float* y) {{\n{reads}}}")
    source.function("k", {2 * i: v for i, v in given.items()})(1, 1, [y])
    assert y.tolist() == [given.get(i, -1) for i in range(n)]


def test_function_constants_that_are_vectors() -> None:
    text = f"""{HEAD}
constant float4 f [[function_constant(1)]];
constant half3 h [[function_constant(3)]];
constant long4 l [[function_constant(5)]];
kernel void k(device float* y) {{ y[0] = f.x; y[1] = f.w; y[2] = h.z; y[3] = l.w; }}"""
    y, source = torch.zeros(4), MetalSource(text)
    source.function("k", {"f": [1, 2, 3, 4], "h": (1, 2, 0.5), 5: (0, 0, 0, -9)})(1, 1, [y])
    assert y.tolist() == [1, 4, 0.5, -9]
    with pytest.raises(ValueError, match="function constant 'f': 3; it has 4 values"):
        source.function("k", {"f": 3})


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


ATOMICS = {"add": 22, "sub": 2, "min": 10, "max": 12, "and": 8, "or": 14, "xor": 6}  # 12 with 10


def test_atomic_operations() -> None:
    """What each leaves, and what was there; an exchange where the expected value is not there."""
    calls = "".join(
        f"y[{i}] = atomic_fetch_{name}_explicit(x + {i}, 10, memory_order_relaxed); "
        for i, name in enumerate(ATOMICS)
    )
    orders = "memory_order_relaxed, memory_order_relaxed"
    for i, expected in ((7, 12), (8, 11)):
        calls += f"""int e{i} = {expected};
            bool done{i} = atomic_compare_exchange_weak_explicit(x + {i}, &e{i}, 10, {orders});
            y[{i}] = 100 * done{i} + e{i}; """
    text = f"{HEAD}kernel void k(device atomic_int* x, device int* y) {{ {calls} }}"
    x, y = torch.full((9,), 12, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    MetalSource(text).function("k")(1, 1, [x, y])
    assert x.tolist() == [*ATOMICS.values(), 10, 12] and y.tolist() == [12] * 7 + [112, 12]


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
