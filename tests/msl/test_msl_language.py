"""Constructs of Metal that kernels by others use, each with a numeric check."""

from __future__ import annotations

import re
import struct

import pytest
import torch
from msl_kernels import HEAD
from places import ROOT

from torch_metalmm import _C
from torch_metalmm.msl.build import zig
from torch_metalmm.testing import EmulatorFault, MetalSource


def results(text: str, n: int, buffers: list | None = None, **launch: object) -> list[float]:
    """y of kernel k(device float* y [[buffer(0)]], …) with one threadgroup of 32."""
    y = torch.full((n,), torch.nan)
    constants = launch.pop("constants", None)
    MetalSource(HEAD + text).function("k", constants)(1, 32, [y, *(buffers or [])], **launch)
    return y.tolist()


def test_packed_vectors_and_swizzles() -> None:
    text = """struct P { packed_float3 a; packed_uchar4 b; packed_half2 h; };
kernel void k(device float* y [[buffer(0)]], device const P* p [[buffer(1)]]) {
  y[0] = sizeof(P); y[1] = p[1].a.y; y[2] = float3(p[1].a).z; y[3] = p[1].b.w; y[4] = p[1].h.y;
  float4 v(1, 2, 3, 4); v.wx = v.yz; y[5] = v.w * 10 + v.x; y[6] = v.rgba.b; y[7] = v.yyy[2];
  float2 lo = v.lo, hi = v.hi; y[8] = lo.y + hi.y; y[9] = v[2]; y[10] = sizeof(float3);
}"""
    rows = [struct.pack("<3f4B2e", 1 + r, 2 + r, 3 + r, 4, 5, 6, 7 + r, 8, 9) for r in range(2)]
    want = [20, 3, 4, 8, 9, 23, 3, 2, 4, 3, 16]
    assert results(text, 11, [b"".join(rows)]) == want


def test_matrices() -> None:
    text = """kernel void k(device float* y [[buffer(0)]], device const float4x4* d [[buffer(1)]],
                            constant half2x3& c [[buffer(2)]], threadgroup float2x2* t,
                            uint i [[thread_index_in_threadgroup]]) {
  float4x4 m = d[0]; y[0] = m[1][2]; y[1] = (m * float4(1, 0, 0, 1)).y; y[2] = d[0][3][0];
  y[3] = transpose(m)[2][1]; y[4] = (float4(1, 2, 0, 0) * m).x; y[5] = float(c[1][2]);
  float2x2 a(1, 2, 3, 4), b(float2(0, 1), float2(1, 0)); t[i] = a * b; float2x2 r = t[i];
  y[6] = r[0][1]; y[7] = (a + b)[0][1]; y[8] = (2.0f * a - b)[1][0]; y[9] = determinant(a);
  y[10] = determinant(float4x4(2));
}"""
    m, c = torch.arange(16.0), struct.pack("<3eH3eH", 1, 2, 3, 0, 4, 5, 6, 0)
    want = [6, 14, 12, 6, 2, 6, 4, 3, 5, -2, 16]
    assert results(text, 11, [m, c], threadgroup_bytes=[512]) == want


def test_matrices_in_registers_of_the_text() -> None:
    """By the compiler's own function, on vectors of which a lane fills the two values it has."""
    text = """#pragma METAL internals : enable
namespace metal { template <typename T> struct Held {
  vec<T, 64> all;
  METAL_FUNC thread vec<T, 2>& own() thread { return *reinterpret_cast<thread vec<T, 2>*>(&all); }
}; }
kernel void k(device float* y [[buffer(0)]], device const half2* a [[buffer(1)]],
              device const float* b [[buffer(2)]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float turned[8][9];
  const ushort row = lane / 16 * 4 + lane / 2 % 4, column = lane / 8 % 2 * 4 + lane % 2 * 2;
  for (ushort i = 0; i < 2; ++i) turned[column + i][row] = b[8 * row + column + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Held<half> left; Held<float> right, sum;
  left.own() = a[(8 * row + column) / 2]; sum.own() = 1;
  right.own() = float2(turned[row][column], turned[row][column + 1]);
  sum.all = __metal_simdgroup_matrix_8x8_multiply_accumulate(left.all, right.all, sum.all,
                                                             vec<float, 64>());
  *(device float2*)(y + 8 * row + column) = sum.own();
}"""
    a, b = torch.arange(64.0).reshape(8, 8), torch.arange(64.0).reshape(8, 8) % 5
    assert results(text, 64, [a.half(), b]) == (a @ b.T + 1).flatten().tolist()


def test_constants_of_the_program() -> None:
    text = """constant float kTable[4] = {1, 2, 4, 8};
constant constexpr uint kN = 3;
struct Pair { float a; int b; };
constant Pair kPairs[2] = {{0.5f, 3}, {1.5f, 4}};
namespace outer { namespace inner { constant float kDeep = 7; } }
enum Mode : uint { kFirst = 5, kSecond };
enum class Other : ushort { kOne = 1 };
template <typename T> constexpr constant T kZero = T(0);
kernel void k(device float* y [[buffer(0)]]) {
  static constant constexpr float kLocal[2] = {9, 10};
  float sum = 0; for (uint i = 0; i < kN; ++i) sum += kTable[i];
  y[0] = sum; y[1] = kPairs[1].a * kPairs[1].b; y[2] = outer::inner::kDeep; y[3] = kSecond;
  y[4] = uint(Other::kOne); y[5] = kLocal[1]; y[7] = 1.0 / 3.0;
  const int two = 2; float zeros[two] = {}; y[6] = kZero<float> + zeros[1];
}"""
    want = [7, 6, 7, 6, 1, 10, 0]
    y = results(text, 8)
    assert y[:7] == want and y[7] == torch.tensor(1 / 3).item()


def test_literals_without_a_suffix_are_float_in_templates() -> None:
    text = """template <class T> struct Wide { static constant constexpr int value = sizeof(T); };
template <typename T> float bytes(T x) { return Wide<decltype(x * 0.1)>::value; }
template <typename T> T third(T x) { return x / 3.0; }
kernel void k(device float* y [[buffer(0)]]) {
  y[0] = bytes(1.0f); y[1] = third(1.0f); y[2] = 1e-3; y[3] = float(0x1p-3); y[4] = .5 + 1.;
  y[5] = float(0.1h); y[6] = float(0.1bf); y[7] = float(0.1H) - float(1.0e-1h);
}"""
    half, bfloat = torch.tensor(0.1).half().item(), torch.tensor(0.1).bfloat16().item()
    want = [4, torch.tensor(1 / 3).item(), torch.tensor(1e-3).item(), 0.125, 1.5, half, bfloat, 0]
    assert results(text, 8) == want


def test_templates_over_spaces_functions_and_packs() -> None:
    text = """template <typename P> float first(P p) { return p[0]; }
template <typename T, void (*store)(device T*, T)> void put(device T* p, T v) { store(p, v); }
template <typename T> void plain(device T* p, T v) { *p = v; }
template <typename... A> float total(A... a) { return (float(a) + ...); }
template <int N> float power(float x) { if constexpr (N == 0) { return 1; } else {
  return x * power<N - 1>(x); } }
template <bool kOn> struct Choice { static float run(float x) { return kOn ? x : -x; } };
template <typename T, enable_if_t<is_integral_v<T>, int> = 0> float kind(T) { return 1; }
template <typename T, enable_if_t<is_floating_point_v<T>, int> = 0> float kind(T) { return 2; }
template <typename T, short kLanes> struct Tile { T values[kLanes];
  thread T& operator[](short i) { return values[i]; }
  T sum() const thread { T s = 0; for (short i = 0; i < kLanes; ++i) s += values[i]; return s; } };
kernel void k(device float* y [[buffer(0)]], constant float* c [[buffer(1)]],
              threadgroup float* t [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 0) t[0] = 3; threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i != 0) return;
  y[0] = first(c) + first(t); put<float, plain<float>>(y + 1, 5); y[2] = total(1, 2.5f, 3h);
  y[3] = power<5>(2); y[4] = Choice<false>::run(4); y[5] = kind(1) + 10 * kind(1.0h);
  Tile<float, 4> tile; for (short n = 0; n < 4; ++n) tile[n] = n; y[6] = tile.sum();
}"""
    text = text.replace("3h)", "3.0h)")
    want = [5, 5, 6.5, 32, -4, 21, 6]
    assert results(text, 7, [torch.tensor([2.0])], threadgroup_bytes=[16]) == want


def test_named_instances() -> None:
    text = f"""{HEAD}#define INSTANCE(T, N) \\
  template [[host_name("fill_" #T "_" #N)]] [[kernel]] decltype(fill<T, N>) fill<T, N>;
template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(64)]] void fill(
    device T* y [[buffer(0)]], constant const int& n [[buffer(1)]],
    uint2 at [[thread_position_in_grid]], uint2 grid [[threads_per_grid]]) {{
  if (int(at.x) < n) y[at.x] = T(N + at.x + grid.x);
}}
INSTANCE(float, 3) INSTANCE(half, 5)
kernel void plain(device float* y, uint i [[thread_position_in_grid]]) {{ y[i] = i; }}"""
    source = MetalSource(text)
    assert sorted(source.kernels) == ["fill_float_3", "fill_half_5", "plain"]
    y = torch.zeros(40, dtype=torch.half)
    source.function("fill_half_5")(2, 32, [y, 39])
    assert y.tolist() == [5.0 + i + 64 for i in range(39)] + [0]


def test_arguments_that_a_function_constant_takes_away() -> None:
    text = """constant bool has_bias [[function_constant(0)]];
constant int rows [[function_constant(1)]];
constant int rows_or = is_function_constant_defined(rows) ? rows : 7;
kernel void k(device float* y [[buffer(0)]],
              constant float* bias [[buffer(1), function_constant(has_bias)]]) {
  const float b = bias[0]; y[0] = has_bias ? b : -1; y[1] = rows_or;
}"""
    assert results(text, 2, [torch.tensor([4.0])], constants={0: True, 1: 3}) == [4, 3]
    assert results(text, 2, constants={0: False}) == [-1, 7]


def test_structs_of_pointers_arrays_and_vectors_of_templates() -> None:
    text = """struct Buffers { device const float* a; device const float* b; uint n; };
template <typename T> using V4 = vec<T, 4>;
template <typename T> V4<float> widen(V4<T> v) { return V4<float>(v); }
kernel void k(device float* y [[buffer(0)]], constant Buffers& in [[buffer(1)]],
              device const half4* h [[buffer(2)]]) {
  float sum = 0; for (uint i = 0; i < in.n; ++i) sum += in.a[i] * in.b[i];
  y[0] = sum; array<float, 3> a = {1, 2, 3}; y[1] = a[2] + a.size();
  y[2] = dot(widen<half>(h[1]), float4(1)); float4 v = (float4)h[0]; y[3] = v.w;
  const float4 w = (float4){1, 2, 3, 4}; y[4] = w.z; bfloat4 b = bfloat4(h[0]); y[5] = float(b.y);
  ushort2 origin(3, 4); y[6] = origin.x * origin.y; uniform<int> u = make_uniform(6); y[7] = u;
}"""
    a, b, h = torch.arange(4.0), torch.full((4,), 2.0), torch.arange(8.0).half()
    pointers = struct.pack("<QQI4x", a.data_ptr(), b.data_ptr(), 4)
    with pytest.raises(EmulatorFault, match="far from every buffer|out of bounds"):
        results(text, 8, [pointers, h])  # memory that is not bound to the launch
    y = torch.full((8,), torch.nan)
    MetalSource(HEAD + text).function("k")(
        1, 1, {0: y, 1: pointers, 2: h, 3: a, 4: b}, schedule="ascending"
    )
    assert y.tolist() == [12, 6, 22, 3, 3, 1, 12, 6]


def test_casts_of_template_types_and_array_parameters() -> None:
    text = """template <typename U, typename T> U to(T v) { return (U)v; }
float last(thread float a[2][3]) { return a[1][2]; }
kernel void k(device float* y [[buffer(0)]], device const half4* h [[buffer(1)]]) {
  float b[2][3]; b[1][2] = 7; y[0] = last(b); y[1] = to<float4>(h[0]).y; y[2] = (bfloat)h[0].z;
}"""
    assert results(text, 3, [torch.arange(4.0).half()]) == [7, 1, 2]


def test_members_may_be_read_as_wider_words() -> None:
    """At the alignment that the member is declared with, as blocks of 22 bytes are."""
    text = """struct Block { half d; uchar qh[4]; uchar qs[16]; };
kernel void k(device float* y [[buffer(0)]], device const Block* b [[buffer(1)]]) {
  y[0] = *((device const uint*)b[1].qh) >> 8; y[1] = ((device const ushort*)b[1].qs)[1];
}"""
    block = struct.pack("<e20B", 1, *range(20))
    assert results(text, 2, [block + block]) == [0x030201, 0x0706]


def test_grids_in_every_type() -> None:
    text = f"""{HEAD}kernel void k(device uint* y [[buffer(0)]],
    ushort3 tg [[threadgroup_position_in_grid]], ushort3 tgs [[threadgroups_per_grid]],
    uint2 at [[thread_position_in_threadgroup]], ushort quad [[quadgroup_index_in_threadgroup]],
    ushort in_quad [[thread_index_in_quadgroup]], uint quads [[quadgroups_per_threadgroup]],
    uint i [[thread_index_in_threadgroup]], uint2 all [[dispatch_threads_per_threadgroup]],
    uint width [[thread_execution_width]], uint3 n [[grid_size]]) {{
  device uint* row = y + 8 * (i + 12 * (tg.x + tgs.x * tg.y));
  row[0] = tgs.y; row[1] = at.x + 10 * at.y; row[2] = quad; row[3] = in_quad; row[4] = quads;
  row[5] = all.x * all.y; row[6] = width; row[7] = n.x;
}}"""
    y = torch.zeros(6, 12, 8, dtype=torch.int32)
    MetalSource(text).function("k")((3, 2), (4, 3), [y])
    for i in range(12):
        want = [2, i % 4 + 10 * (i // 4), i // 4, i % 4, 3, 12, 32, 12]
        assert y[:, i].tolist() == [want] * 6


def test_pragmas_attributes_and_unions() -> None:
    text = """#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#define N 4
union Bits { float f; uint u; };
struct alignas(16) Aligned { float a; };
[[clang::always_inline]] inline float twice(float x) { return 2 * x; }
kernel void k(device float* y [[buffer(0)]]) {
  float s = 0;
  #pragma unroll (N/2)
  for (int i = 0; i < N; ++i) s += i;
  _Pragma("clang loop unroll(full)") for (int i = 0; i < N; ++i) s += twice(i);
  [[maybe_unused]] int unused = 0;
  Bits b; b.u = 0x40000000u; y[0] = s; y[1] = b.f; y[2] = sizeof(Aligned);
  device atomic_float* total = (device atomic_float*)(y + 3);
  atomic_store_explicit(total, 1.5f, memory_order_relaxed);
  atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
  y[4] = atomic_exchange_explicit((device atomic_uint*)total, 0u, memory_order_relaxed) >> 20;
}"""
    assert results(text, 5, schedule="ascending") == [18, 2, 16, 0, 0x3FC]


def test_fused_multiply_adds_are_not_made() -> None:
    """a * b + c rounds twice unless fma is written."""
    text = """kernel void k(device float* y [[buffer(0)]], constant float* c [[buffer(1)]]) {
  y[0] = c[0] * c[0] - c[1]; y[1] = fma(c[0], c[0], -c[1]); }"""
    a = torch.tensor(1 + 2**-12)
    exact = 1 + 2**-11 + 2**-24
    assert results(text, 2, [torch.stack([a, a * a])]) == [0, exact - (a * a).item()]


def test_messages_are_lines_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    text = """#include <metal_logging>
constant metal::os_log mine("org.example", "rows");
kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 33) { os_log_default.log("%d of %u", -1, i); mine.log_error("%.2f %s", 1.5h, "no"); }
  y[i] = i;
}"""
    k = MetalSource(HEAD + text, version=320).function("k")
    k(2, 32, [torch.empty(64)], schedule="ascending")
    place = "k: threadgroup (1, 0, 0), thread 1: "
    assert capfd.readouterr().err == f"{place}log: -1 of 33\n{place}error: 1.50 no\n"


@pytest.mark.parametrize("checked", [True, False])
def test_vectors_at_the_alignment_of_their_elements(checked: bool) -> None:
    """Where it is asked for, and in device memory; an element keeps its own."""
    text = """kernel void k(device float* y [[buffer(0)]], device const uchar* x [[buffer(1)]],
  constant uint& n [[buffer(2)]], threadgroup float* t [[threadgroup(0)]]) {
  t[0] = t[1] = t[2] = t[3] = 1;
  if (n < 16) { float2 v = ((device const float2*)(x + n))[2]; y[0] = v.y; }
  else { float2 v = *(threadgroup float2*)(t + n - 16); y[0] = v.x; }
}"""
    x = torch.arange(32.0)

    def run(n: int, aligned: bool) -> float:
        source = MetalSource(HEAD + text, checked=checked, element_aligned=aligned)
        y = torch.zeros(1)
        source.function("k")(1, 1, [y, x, struct.pack("I", n)], [64], schedule="ascending")
        return y.item()

    assert [run(n, True) for n in (0, 4, 8)] == [5, 6, 7] and run(16, True) == 1
    refused = [(2, True), (17, True)] + ([(4, False), (17, False)] if checked else [])
    for n, aligned in refused:
        with pytest.raises(EmulatorFault, match="is not a multiple of (4|8|16) bytes"):
            run(n, aligned)


def test_the_text_itself_forbids_contraction() -> None:
    """By a pragma that any clang knows: the compiler of a driver is given no option for it."""
    pragmas = re.findall(r"^#pragma .*$", (ROOT / "metal" / "entry.h").read_text(), re.M)
    function = "float f(float a, float b, float c) { return a * b + c; }"
    command = ["clang", "-x", "c++", "-S", "-emit-llvm", "-O1", "-ffp-contract=on", "-", "-o", "-"]
    for lines, is_contracted in (([], True), (pragmas, False)):
        done = zig(*command, text="\n".join([*lines, function]))
        assert done.returncode == 0 and ("fmuladd" in done.stdout) == is_contracted
    for kernel in ("gemv_q4_0_f16", "rms_norm_f32"):  # what the driver compiles
        source = _C.metal_source(kernel)
        assert 0 < source.index(pragmas[-1]) < source.index("kernel void")
