"""What Metal forbids is an error that names its line."""

from __future__ import annotations

import re
from functools import cache

import pytest
from places import ROOT

from torch_metalmm.msl.build import METAL_VERSION, preprocess
from torch_metalmm.msl.markers import unmark
from torch_metalmm.msl.rules import violations
from torch_metalmm.testing import MetalSource, MetalSyntaxError

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
ARGUMENTS = (
    "device float* x [[buffer(0)]], constant float* c [[buffer(1)]], "
    "threadgroup float* t [[threadgroup(0)]], uint i [[thread_position_in_grid]]"
)

# In a kernel, on line 4.
STATEMENTS = {
    "double": ("double d = 1; x[i] = float(d);", "'double' is not supported"),
    "long long": ("long long a = 1; x[i] = a;", "'long long' is not supported"),
    "long double": ("long double a = 1; x[i] = a;", "'long double' is not supported"),
    "128 bits": ("__int128 a = 1; x[i] = float(a);", "'__int128' is not supported"),
    "goto": ("goto end; end: x[i] = 1;", "'goto' is not supported"),
    "new": ("thread int* p = new int(1); x[i] = *p;", "'new' is not supported"),
    "delete": ("thread float* p = nullptr; delete p;", "'delete' is not supported"),
    "throw": ("throw 1;", "'throw' is not supported"),
    "try": ("try { x[i] = 1; } catch (...) {}", "'try' is not supported"),
    "catch": ("catch (...) {}", "'catch' is not supported"),
    "dynamic_cast": ("x[i] = *dynamic_cast<thread float*>(&x[i]);", "'dynamic_cast' is not supp"),
    "register": ("register int a = 1; x[i] = a;", "'register' is not supported"),
    "noexcept operator": ("x[i] = noexcept(x[i] + 1);", "the noexcept operator is not supported"),
    "lambda": ("auto f = [](float a) { return a; }; x[i] = f(1);", "lambda expressions are not"),
    "lambda with captures": ("x[i] = [&, i]() { return x[i]; }();", "lambda expressions are not"),
    "lambda as argument": (
        "x[i] = max([=] { return 1.0f; }(), 2.0f);",
        "lambda expressions are no",
    ),
    "lambda in return": ("return [] {}();", "lambda expressions are not"),
    "derived struct": ("struct A {}; struct B : A {}; x[i] = 1;", "derived classes are not"),
    "typeid": ("x[i] = typeid(int).hash_code();", "'typeid' is not supported"),
    "asm": ('asm("nop");', "'asm' is not supported"),
    "thread_local": ("thread_local float a = 1; x[i] = a;", "'thread_local' is not supported"),
    "std": ("x[i] = std::min(1.0f, 2.0f);", r"C\+\+ standard library"),
    "static local": ("static int n = 0; x[i] = ++n;", "a static variable must reside in constant"),
    "static constexpr local": (
        "static constexpr int n = 3; x[i] = n;",
        "a static variable must re",
    ),
    "dynamic array": ("int n = int(x[i]); float a[n]; x[i] = a[0];", "variable length array"),
    "function pointer": ("float (*f)(float) = exp; x[i] = f(1.0f);", "function pointers"),
    "implicit device to threadgroup": ("threadgroup float* p = x;", "cannot initialize"),
    "implicit constant to device": ("device float* p = c;", "cannot initialize"),
    "implicit device to thread": ("thread float* p = x;", "cannot initialize"),
    "implicit thread to device": ("float a = 1; device float* p = &a;", "cannot initialize"),
    "cast device to threadgroup": ("t = (threadgroup float*)x;", "may not change the address"),
    "cast threadgroup to device": ("x = (device float*)(t + 1);", "may not change the address"),
    "cast device to thread": ("thread int* p = (thread int*)x;", "may not change the address"),
    "cast thread to device": ("float a[2]; x = (device float*)a;", "may not change the address"),
    "cast constant to device": ("x = (device float*)c;", "may not change the address"),
    "reinterpret": ("t = reinterpret_cast<threadgroup float*>(x);", "may not change the address"),
    "pointer without a space": ("float a = 1; float* p = &a; x[i] = *p;", "explicit address space"),
    "reference without a space": ("float a = 1; float& p = a; x[i] = p;", "explicit address space"),
    "cast without a space": ("float a[2]; x[i] = *(int*)a;", "explicit address space"),
    "two spaces": ("device threadgroup float* p = x;", "multiple address spaces"),
    "write to constant": ("((constant float*)c)[0] = 1;", "read-only|const"),
    "unknown function": ("x[i] = erf(x[i]);", "undeclared identifier 'erf'"),
    "ambiguous": ("x[i] = max(1, x[i]);", "ambiguous"),
    "frexp of a pointer": ("int e; x[i] = frexp(x[i], &e);", "no matching function"),
    "async copies": ("simdgroup_event e;", "no simdgroup_event"),
    "half to bfloat": ("half h = 1; bfloat b = h; x[i] = b;", "cannot initialize|not allowed"),
    "matrix of another size": ("simdgroup_matrix<float, 4, 4> m; x[i] = 1;", "8 x 8"),
    "matrix of integers": ("simdgroup_matrix<int, 8, 8> m; x[i] = 1;", "half, bfloat or float"),
    "short vector": ("float4 v = float4(1, 2, 3); x[i] = v.x;", "too few or too many"),
    "unequal as_type": ("x[i] = as_type<float>(ushort(1));", "differ in size"),
}

# Outside, from line 3.
DECLARATIONS = {
    "mutable global": ("int counter = 0;", "program scope variable"),
    "constexpr global": ("constexpr int kWidth = 4;", "program scope variable"),
    "threadgroup global": ("threadgroup float tile[32];", "program scope variable"),
    "global array": ("static float table[2] = {1, 2};", "program scope variable"),
    "static global": ("static int counter = 0;", "program scope variable"),
    "extern global": ("extern int counter;", "program scope variable"),
    "global without a value": ("constant float kScale;", "constant address space must be init"),
    "static member": ("struct A { static int n; };", "a static member must reside in constant"),
    "constexpr member": (
        "template <int n> struct A { static constexpr int kN = n; };",
        "a static member must reside in constant",
    ),
    "derived": ("struct A {}; struct B : A {};", "derived classes are not supported"),
    "derived template": (
        "template <int n> struct A {}; template <int n> struct B final : public A<n - 1> {};",
        "derived classes are not supported",
    ),
    "derived class": ("class A {}; class [[a]] B : virtual A {};", "derived classes are not supp"),
    "derived member": (
        "struct A { struct B {}; struct C : B {}; };",
        "derived classes are not sup",
    ),
    "main": (
        "kernel void main(device int* p [[buffer(0)]]) { p[0] = 0; }",
        "may not be called main",
    ),
    "virtual": ("struct A { virtual void f() {} };", "'virtual' is not supported"),
    "recursion": ("int f(int n) { return n ? n * f(n - 1) : 1; }", "recursion is not supported"),
    "mutual recursion": (
        "int g(int n);\nint f(int n) { return g(n); } int g(int n) { return f(n); }",
        "recursion is not supported",
    ),
    "recursion of a member": (
        "struct A { static int f(int n) { return n ? n * f(n - 1) : 1; } };",
        "recursion is not supported: f",
    ),
    "recursion by this": (
        "struct A { int n; int f() thread { return n ? this->f() : 1; } };",
        "recursion is not supported: f",
    ),
    "variadic": ("int f(int n, ...) { return n; }", "variadic functions"),
    "parameter without a space": ("float f(float* p) { return *p; }", "explicit address space"),
    "kernel result": ("kernel int f(device int* p [[buffer(0)]]) { return 1; }", "return void"),
    "kernel pointer": ("kernel void f(float* p [[buffer(0)]]) {}", "explicit address space"),
    "thread buffer": ("kernel void f(thread int* p [[buffer(0)]]) {}", "device or constant"),
    "float position": (
        "kernel void f(float i [[thread_position_in_grid]]) {}",
        "type 'float' is not valid for attribute 'thread_position_in_grid'",
    ),
    "vector index": ("kernel void f(uint2 i [[thread_index_in_simdgroup]]) {}", "'uint2' is not"),
    "texture": ("kernel void f(texture2d<float> t [[texture(0)]]) {}", "has no texture2d"),
}


Found = list[tuple[int, str]]  # lines and messages


def read(text: str) -> Found:
    """What the reader finds, which compiles nothing."""
    return [(text[: t.at].count("\n") + 1, message) for t, message in violations(text)]


def in_kernel(statement: str) -> str:
    return f"{HEAD}kernel void k({ARGUMENTS}) {{\n{statement}\n}}\n"


def beside_kernel(declaration: str) -> str:
    return f"{HEAD}{declaration}\nkernel void k({ARGUMENTS}) {{ x[i] = 0; }}\n"


LEFT = [case for case, (statement, _) in STATEMENTS.items() if not read(in_kernel(statement))]


@cache
def compiled() -> Found:
    """What the compiler finds in the statements that the reader lets pass, a block and a line each:
    it goes on behind an error, so one compilation finds all."""
    blocks = "\n".join(f"{{ {STATEMENTS[case][0]} }}" for case in LEFT)
    with pytest.raises(MetalSyntaxError) as caught:
        MetalSource(in_kernel(blocks), name="bad.metal")
    # An error with its notes: one in a header has a note of the line that leads there.
    errors = re.split(r"\n(?=.*: error: )", str(caught.value))
    lines = [re.search(r"^bad\.metal:(\d+):", e, re.M) for e in errors]
    return [(int(at[1]) if at else 0, e) for at, e in zip(lines, errors, strict=True)]


def has(found: Found, line: int, message: str) -> bool:
    return any(line == at and re.search(message, text) for at, text in found)


@pytest.mark.parametrize("case", STATEMENTS)
def test_statement(case: str) -> None:
    statement, message = STATEMENTS[case]
    if case in LEFT:
        assert has(compiled(), 4 + LEFT.index(case), message), compiled()
    else:
        assert has(read(in_kernel(statement)), 4, message)


@pytest.mark.parametrize("case", DECLARATIONS)
def test_declaration(case: str) -> None:
    declaration, message = DECLARATIONS[case]
    found = read(beside_kernel(declaration))
    assert has(found, 4 if case == "mutual recursion" else 3, message), found


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (beside_kernel("#include <vector>"), 3, "file not found"),
        (in_kernel("x[i] = 1;\ngoto end; end: x[i] = 1;"), 5, "'goto' is not supported"),
        (beside_kernel('# 7 "other.metal"\nint counter = 0;'), 7, "program scope variable"),
    ],
)
def test_the_place_of_an_error(text: str, line: int, message: str) -> None:
    """The file and the line that the text itself gives: of an include, of what the reader finds."""
    with pytest.raises(MetalSyntaxError, match=message) as caught:
        MetalSource(text, name="bad.metal")
    file = "other" if "other" in text else "bad"
    assert f"{file}.metal:{line}:" in str(caught.value)


# What a rule above could take for what it forbids: one line each, so that each is a case.
ALLOWED = {
    "delete": "struct A { A(const thread A&) = delete; int n; };",
    "noexcept": "inline int f() noexcept { return 1; } inline int g() noexcept(true) { return 1; }",
    "long": "inline long f(unsigned long n) { return long(n); }",
    "name with a word": "inline int newest(int goto_, int standard) { return goto_ + standard; }",
    "index": "inline int f(thread int (&a)[2], int i) { return (a)[i] + a[0] [(i)]; }",
    "attributes": "struct A { [[maybe_unused]] int n; }; [[a]] inline int f() { return 1; }",
    "array of a type": "template <class T> struct A {}; using B = A<int[2]>; using C = int[2];",
    "binding": "struct P { int a, b; }; inline int f(P p) { auto [a, b] = p; return a + b; }",
    "enum with a base": "enum A : uint { kA }; enum class B : ushort { kB };",
    "ternary": "struct A { int n; }; inline int f(struct A x, A y) { return x.n ? x.n : y.n; }",
    "access": "struct A { private: int m; public: int n; };",
    "label": "inline int f(int n) { switch (n) { case 1: return 1; default: return 2; } }",
    "template parameter": "template <class T, class = T> struct A {}; template <class> struct B;",
    "member named as a base": "struct A { int A_; struct B { int n; } b; };",
    "static members": (
        "struct A { static constant constexpr int kN = 2; static int f(int n); "
        "static constexpr int g(int n = 1) { return n; } };"
    ),
    "constants": (
        "static constant constexpr const int kN[2] = {1, 2}; constant int kM{3}; "
        "extern constant int kO; constant bool fc [[function_constant(0)]];"
    ),
    "local constant": "inline int f() { constexpr static constant int n = 3; return n; }",
    "recursion of templates": (
        "template <int n> int f() { if constexpr (n > 0) { return f<n - 1>(); } return 0; } "
        "template <int n> struct A { static int g() { return A<n - 1>::g(); } };"
    ),
    "overloads": "int f(int n) { return n; } int f(float n) { return f(int(n)); }",
    "constructors": "struct A { A() = default; explicit A(int n) { *this = A(); } int n; };",
    "conversions": "struct A { int n; operator bool() const { return bool(n); } };",
    "same name in a member": "struct B { int f(); }; int f(thread B& b) { return b.f(); }",
    "not main": "struct main_t {}; inline int main_part(int n) { return n; }",
    "products and masks": "inline int f(int n, int k) { int p = n * k, q = p & n; return q; }",
    "spaces behind const": "inline float f(const device float* p, const thread float& r);",
    "internals": (
        "struct A {};\n#pragma METAL internals : enable\nstruct B : A {};\n"
        "#pragma METAL internals : disable\nstruct C {};"
    ),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_near_miss(case: str) -> None:
    assert violations(ALLOWED[case]) == []


def test_derivation_ends_with_the_internals() -> None:
    text = ALLOWED["internals"] + " struct D : A {};"
    ((token, message),) = violations(text)
    assert text[token.at :] == "struct D : A {};"
    assert message == "derived classes are not supported in Metal"


def test_lambdas_came_with_a_version() -> None:
    text = f"{HEAD}kernel void k({ARGUMENTS}) {{ auto f = [&] {{ return c[i]; }}; x[i] = f(); }}"
    MetalSource(text, version=320)
    with pytest.raises(MetalSyntaxError, match="lambda expressions are not supported"):
        MetalSource(text, version=310)


def test_the_shaders_keep_the_rules() -> None:
    """All kernels of metal/, as their libraries are built; and constants have internal linkage.

    Metal takes a constant without `static`; but one in a header that several shaders include would
    be a symbol of each of their objects, and those are one library.
    """
    files = sorted((ROOT / "metal" / "library").rglob("*.metal"))
    text = "".join(f'#include "{file}"\n' for file in files)
    plain, places = unmark(preprocess(text, "all.metal", []), "all.metal")
    constants = re.findall(r"^(?!.*function_constant)((?:\w+ )*)constant\b[^(\n]*[=[]", plain, re.M)
    assert len(constants) > 20
    assert all(before.startswith("static ") for before in constants)
    found = violations(plain, frozenset(), METAL_VERSION, ours=True)
    assert [(places[plain[: t.at].count("\n")], message) for t, message in found] == []
