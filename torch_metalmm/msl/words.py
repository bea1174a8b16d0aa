"""The reserved words of Metal, and where a text makes a name of one.

From the Metal Shading Language Specification (2 types, 4 address spaces, 5 functions, attributes)
and the lists that SPIRV-Cross and naga rename by. Keywords of C++ are clang's to refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .source import VECTORS, Token, matching

_SPACES = "device constant thread threadgroup threadgroup_imageblock ray_data object_data"
# Apple's front end refuses these as names, in any text.
KEYWORDS = frozenset(f"kernel vertex fragment half bfloat as_type {_SPACES}".split())

# The headers of Metal define these.
_CONSTANTS = "E LOG2E LOG10E LN2 LN10 PI PI_2 PI_4 1_PI 2_PI 2_SQRTPI SQRT2 SQRT1_2"
_LIMITS = "DIG MANT_DIG MAX_10_EXP MAX_EXP MIN_10_EXP MIN_EXP RADIX MAX MIN EPSILON DECIMAL_DIG"
_SIGNED, _UNSIGNED = "CHAR SCHAR SHRT INT LONG LLONG", "UCHAR USHRT UINT ULONG ULLONG"
_OTHERS = (
    "assert INFINITY NAN MAXFLOAT MAXHALF HUGE_VALF HUGE_VALH CHAR_BIT FP_ILOGB0 FP_ILOGBNAN"
    " METAL_FUNC METAL_CONST METAL_ASM METAL_ALIGN"
)
MACROS = frozenset(
    {
        *_OTHERS.split(),
        *(f"M_{name}_{kind}" for name in _CONSTANTS.split() for kind in "FH"),
        *(f"{kind}_{name}" for kind in ("FLT", "HALF") for name in _LIMITS.split()),
        *(f"{kind}_{end}" for kind in _SIGNED.split() for end in ("MAX", "MIN")),
        *(f"{kind}_MAX" for kind in _UNSIGNED.split()),
    }
)

# Types of the library and attributes of functions: a text of others may hide some of them and still
# compile; a text of metal/ may not. (Attributes of members, `index` or `position`, are plain names,
# and so are the options of texture reads, `bias` or `level`.)
_TEXTURES = "1d 1d_array 2d 2d_array 2d_ms 2d_ms_array 3d cube cube_array _buffer"
_DEPTHS = "2d 2d_array 2d_ms 2d_ms_array cube cube_array"
_TYPES = (
    "uchar ushort uint ulong llong ullong size_t ptrdiff_t restrict quad complex imaginary vec"
    " packed_vec matrix array atomic tensor metal sampler imageblock render_grid command_buffer"
    " intersector intersection_query intersection_function_table visible_function_table"
    " simdgroup_matrix"
)
_ATTRIBUTES = (
    "object mesh intersection visible stitchable function_constant host_name stage_in payload patch"
    " max_total_threads_per_threadgroup early_fragment_tests"
)
LIBRARY = frozenset(
    {
        *_TYPES.split(),
        *_ATTRIBUTES.split(),
        *VECTORS,
        *(f"packed_{name}" for name in VECTORS),
        *(f"{t}{m}x{n}" for t in ("half", "float") for m in (2, 3, 4) for n in (2, 3, 4)),
        *(f"simdgroup_{t}8x8" for t in ("half", "bfloat", "float")),
        *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *(f"atomic_{t}" for t in ("int", "uint", "bool", "ulong", "float")),
        *(f"texture{kind}" for kind in _TEXTURES.split()),
        *(f"depth{kind}" for kind in _DEPTHS.split()),
    }
)

# A type may follow these words; a name follows any other.
_SPECIFIERS = frozenset(
    f"{_SPACES} const constexpr static inline extern mutable friend explicit volatile typedef"
    " return else case sizeof alignof operator noexcept signed unsigned and or not".split()
)
_NAMED = frozenset({"struct", "class", "union", "enum", "namespace", "using", "typename"})
_AFTER_NAME = frozenset({"=", ";", ",", ")", "[", "(", "{", ":"})


def _is_declared(tokens: list[Token], i: int) -> bool:
    """Whether tokens[i] is the name that a declaration gives."""
    before = tokens[i - 1] if i else Token("punct", ";", 0)
    after = [t.text for t in tokens[i + 1 : i + 3]] + ["", ""]
    if before.text in _NAMED:  # but not: using namespace metal
        return i < 2 or tokens[i - 2].text != "using"
    if after[0] not in _AFTER_NAME:
        return False
    if after[0] == "(" and after[1] in ("&", "*"):  # float thread (&a)[4]
        return False
    if before.text in (",", "{"):
        return after[0] == "="
    if before.kind == "word":
        return before.text not in _SPECIFIERS
    if before.text not in ("*", "&", ">") or tokens[i].text in MACROS:  # x * NAN
        return False
    if after[0] == "(":  # a function; else x > half(3)
        end = matching(tokens, i + 1) + 1
        return end < len(tokens) and tokens[end].text in ("{", "const")
    return after[0] not in ("{", ":")


def misused(tokens: Sequence[Token], ours: bool) -> Iterator[tuple[Token, str]]:
    """(word, message) of each reserved word that `tokens` declare as a name.

    ours: the text is one of metal/, which leaves the names of Metal's library alone too.
    """
    tokens = list(tokens)
    kinds = {"reserved word": KEYWORDS, "macro": MACROS} | (
        {"library name": LIBRARY} if ours else {}
    )
    for i, token in enumerate(tokens):
        for kind, words in kinds.items():
            if token.text in words and _is_declared(tokens, i):
                yield token, f"'{token.text}' is a {kind} of Metal and cannot be a name"
