"""No reserved word of Metal is a name in a text that compiles here."""

from __future__ import annotations

import re

import pytest

from torch_metalmm.msl.rules import violations
from torch_metalmm.msl.words import KEYWORDS, LIBRARY, MACROS
from torch_metalmm.testing import MetalSource, MetalSyntaxError

# N4431, 2.5 and 2.11: what C++14 itself reserves, and Metal with it.
_CXX = (
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t"
    " class compl const const_cast constexpr continue decltype default delete do double"
    " dynamic_cast else enum explicit export extern false float for friend goto if inline int long"
    " mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public"
    " register reinterpret_cast return short signed sizeof static static_assert static_cast struct"
    " switch template this thread_local throw true try typedef typeid typename union unsigned using"
    " virtual void volatile wchar_t while xor xor_eq"
)

# Every way to give a name, one a line; {} is the word.
DECLARATIONS = """
inline float f() { float {} = 1; return 2; }
inline float g() { float a = 1, {} = 2; return a; }
inline float h(float {}) { return 1; }
inline float i(device float* {}, uint n) { return 1; }
inline float {}(float x) { return x; }
inline vec<float, 2> {}(float x) { return x; }
template <class T> T* {}(T x) { return x; }
struct A { float {}; };
struct B { ushort {} : 3; float {}[2]; };
struct {} { float a; };
namespace {} { }
typedef float {};
using {} = float;
enum Mode { {} = 1 };
template <class {}> void k() { }
inline void j() { for (uint {} : words) { } }
inline uint l(uint {} [[thread_position_in_grid]]) { return 1; }
""".strip().splitlines()


def lines_refused(text: str, ours: bool) -> set[int]:
    found = violations(text, ours=ours)
    return {text[: t.at].count("\n") for t, message in found if "cannot be a name" in message}


@pytest.mark.parametrize("word", sorted(KEYWORDS | MACROS | LIBRARY))
def test_a_reserved_word_is_no_name(word: str) -> None:
    """In every way to declare one; names of the library in the text of metal/ alone."""
    # `x * NAN;` and `a > INFINITY)` are expressions: of a macro, pointers are not looked at.
    skipped = ("* {}", ", 2> {}", "T* {}") if word in MACROS else ()
    cases = [d for d in DECLARATIONS if not any(s in d for s in skipped)]
    text = "\n".join(cases).replace("{}", word)
    assert lines_refused(text, ours=True) == {*range(len(cases))}
    assert bool(lines_refused(text, ours=False)) == (word not in LIBRARY)


def test_keywords_of_cxx() -> None:
    """A line each: the reader refuses some, clang the rest, and it goes on behind an error."""
    lines = {w: f"inline int f_{w}() {{ int {w} = 1; return 1; }}" for w in _CXX.split()}
    left = [w for w, line in lines.items() if not violations(line)]
    assert len(left) > 50
    with pytest.raises(MetalSyntaxError) as caught:
        MetalSource("\n".join(lines[w] for w in left) + "\nkernel void k() {}\n", name="cxx.metal")
    refused = re.findall(r"^cxx\.metal:(\d+):\d+: error", str(caught.value), re.M)
    assert {left[int(n) - 1] for n in refused} == {*left}


def test_the_error_names_the_line() -> None:
    text = "#include <metal_stdlib>\ninline float fragment(float x) { return x; }\n"
    with pytest.raises(MetalSyntaxError, match=r"w\.metal:2:14: error: 'fragment' is a reserved"):
        MetalSource(text + "kernel void k() {}\n", name="w.metal")


# Where Metal takes each word for what it is, and where a name of the library is free.
ALLOWED = """
kernel void a(device float* y [[buffer(0)]], constant uint& n, threadgroup half* t) {}
[[kernel, max_total_threads_per_threadgroup(64)]] void b(coherent(device) device int* y) {}
vertex float4 v(const device float4* p [[buffer(0)]]) { return p[0]; }
[[object]] void o() {} [[mesh]] void m() {} [[visible]] float w(float x) { return x; }
template <class T> kernel void c(device T* y) {} kernel [[host_name("d")]] void d() {}
struct S { int f() const thread { return 1; } int g() device; int h() const constant = delete; };
struct U { operator half() const { return half(1); } half x; operator bfloat() device const; };
inline half e(float thread (&a)[2], T device* p, half) { return half(a[0]) * half(p[0]); }
inline float g(float x) { return x > half(3) ? INFINITY : -INFINITY * NAN; }
inline bool i(float x) { return x > INFINITY or x == NAN and not isnan(x) and x < FLT_MAX; }
inline uint j(int x) { switch (x) { case INT_MAX: return UINT_MAX; } return x & INT_MAX; }
template <typename T> using P = vec<half, 4>; using Q = array<half, 3>; using namespace metal;
inline float k(float bias, uint level, uint index, float position) { return bias; }
""".strip().splitlines()


@pytest.mark.parametrize("text", ALLOWED)
def test_what_metal_takes(text: str) -> None:
    assert lines_refused(text, ours=True) == set()


def test_a_text_of_others_may_hide_the_library() -> None:
    text = """#include <metal_stdlib>
kernel void k(device float* buffer [[buffer(0)]], uint size_t [[thread_position_in_grid]]) {
  float object = 1, mesh = 2, quad = 3, matrix = 4; buffer[size_t] = object + mesh + quad + matrix;
}"""
    MetalSource(text)
