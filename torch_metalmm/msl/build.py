"""Compiles Metal Shading Language for the emulator: clang of the ziglang package, cached.

A library is one shader file, its table of kernels and the emulator (csrc/emulator/runtime).
Building needs a source checkout.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .kernels import METAL, Shader
from .markers import mark, unmark
from .repair import edits_of_errors
from .rules import check_rules
from .source import Constant, Kernel, MetalSyntaxError, Reader, Source
from .tables import headers, prefix, tables
from .translate import apply, visible_edits

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
INCLUDE = CSRC / "msl"
CACHE = ROOT / "build" / "msl"
JOBS = min(os.cpu_count() or 1, 8)  # shaders compiled at once; containers see all CPUs of the host
_ROOMS = ("language", "library", "host")  # rooms of INCLUDE for the emulator; others are for GPUs
_RUNTIME = ("emulator", "report", "api", "buffers", "memory", "rounding", "watchdog")
_MAX_ROUNDS = 12

METAL_VERSION = 310  # the version that metal/ is written in, and the default of __METAL_VERSION__
_PREPROCESS = ["-E", "-DMM_PREPROCESS", "-D__METAL__=1"]
_PREPROCESS += ["-D__METAL_MACOS__=1", "-D__HAVE_BFLOAT__=1", "-D__HAVE_SIMDGROUP_MATRIX__=1"]
_PREPROCESS += ["-D__HAVE_SIMDGROUP_REDUCTION__=1", "-U__x86_64__", "-U__linux__"]
LANGUAGE = ["-x", "c++", "-std=c++17", "-nostdinc", "-fsigned-char"]
LANGUAGE += [f"-I{INCLUDE}", "-ivfsoverlay", f"{INCLUDE / 'headers.yaml'}"]
LANGUAGE += ["-Xclang", "-cl-single-precision-constant", "-fno-exceptions", "-fno-rtti"]
_CODE = ["-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
_CODE += ["-Xclang", "-ffloat16-excess-precision=none"]
_CODE += ["-Xclang", "-fbfloat16-excess-precision=none"]
_CODE += ["-fno-finite-loops"]  # clang keeps an endless loop, for the time limit to find
_CODE += ["-fno-threadsafe-statics", "-fno-stack-protector", "-gline-tables-only"]
# A call at the start of each function finds a stack that is too small; this option finds a frame
# that is larger than the memory below the stacks (worker.h).
_CODE += ["-finstrument-function-entry-bare", "-Wno-everything"]
_CODE += [f"-Wframe-larger-than={1 << 20}", "-Werror=frame-larger-than"]
# The search for the places of variables, a tenth of a compilation, of which no debugger asks.
_CODE += ["-mllvm", "-experimental-debug-variable-locations=false"]
# Loops that metal/ unrolls stay loops, which halves a compilation; no result depends on it.
_CODE += ["-mllvm", "-pragma-unroll-threshold=1", "-mllvm", "-pragma-unroll-full-max-iterations=1"]
_CODE += ["-fno-plt"]  # a stub of the linker has no line, and belongs to no section of ours
# Options by which a checked library calls us before each access, and at a wrong alignment or index.
_CHECKS = ["-DMM_CHECKED", "-fsanitize=kernel-address"]
_CHECKS += ["-fsanitize=alignment,array-bounds,integer-divide-by-zero"]
# No alignment that a pointer's type implies is relied on: cast_pointer() of host/runtime.h checks.
ELEMENT_ALIGNED = ("-fmax-type-align=1", "-DMM_ELEMENT_ALIGNED")
for _option in (
    "instrumentation-with-call-threshold=0",
    "kernel-mem-intrinsic-prefix=1",
    "instrument-atomics=0",
    "opt-same-temp=0",
    "globals=0",
    "stack=0",
):
    _CHECKS += ["-mllvm", f"-asan-{_option}"]
_HOST = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fno-sanitize=all", "-fno-exceptions"]
_HOST += [f"-I{CSRC}", "-fno-rtti", "-fvisibility=hidden", "-fno-plt", "-c"]


class BuildError(RuntimeError):
    """The emulator itself could not be built; the message is the compiler's."""


def zig(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command of the ziglang package. BuildError if it is not installed."""
    command = [_zig(), *arguments]
    # zig's default cache is in the home folder, which a container may not have.
    env = {"ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build" / "zig")} | os.environ
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=env)


def compiled(*arguments: str | Path) -> str:
    """What a command of the ziglang package prints. BuildError: its message, or it is not there."""
    done = zig(*map(str, arguments))
    if done.returncode:
        raise BuildError(done.stderr)
    return done.stdout


@functools.cache
def _zig() -> str:
    """The program itself: `python -m ziglang` would run a ziglang.py of the current folder."""
    try:
        path = importlib.metadata.distribution("ziglang").locate_file("ziglang/zig")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError("the ziglang package, which has the compiler, is not installed") from None
    return str(path)


@functools.cache
def _machine() -> list[str]:
    """AVX2, FMA and binary16 conversions where the processor has them.

    No bf16 instructions: they drop subnormal numbers.
    """
    if platform.machine() != "x86_64":
        return []
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return ["-march=x86-64-v3"] if " avx2 " in flags and " f16c" in flags else []


def digest(*parts: str | bytes | Path) -> str:
    """A name for what `parts` say; a path stands for the bytes of its file."""
    h = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part
        data = data.encode() if isinstance(data, str) else data
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()[:20]


@functools.cache
def _tool_digest() -> str:
    folders = (INCLUDE, *(INCLUDE / room for room in _ROOMS), CSRC / "emulator" / "runtime")
    files = [p for folder in folders for p in sorted(folder.iterdir()) if p.is_file()]
    return digest(zig("version").stdout, *_machine(), *LANGUAGE, *_CODE, *_CHECKS, *files)


@functools.cache
def runtime_objects() -> list[str]:
    """The emulator's own object files."""
    folder = CACHE / f"runtime-{_tool_digest()}"
    objects = [folder / f"{name}.o" for name in _RUNTIME]
    for out in objects:
        with _missing(out) as missing:
            if missing:
                temporary = out.with_suffix(".part")
                source = CSRC / "emulator" / "runtime" / f"{out.stem}.cpp"
                compiled("c++", *_HOST, source, "-o", temporary)
                os.replace(temporary, out)
    return [str(out) for out in objects]


def preprocess(text: str, name: str, include: Sequence[Path], version: int = METAL_VERSION) -> str:
    """`text` with its macros and includes expanded and the words of Metal left alone."""
    options = [f"-D__METAL_VERSION__={version}", *(f"-I{p}" for p in include)]
    marked = f'# 1 "{name}"\n{text}'
    done = zig("clang", *_PREPROCESS, *LANGUAGE, *options, "-", text=marked)
    if done.returncode:
        raise MetalSyntaxError(done.stderr.strip())
    return done.stdout


def translate(
    text: str, name: str, include: Sequence[Path], version: int = METAL_VERSION
) -> tuple[str, Source]:
    """Text for plain clang, with line markers, and what it declares. Raises MetalSyntaxError."""
    return _translate(preprocess(text, name, include, version), name, version)


def _translate(expanded: str, name: str, version: int) -> tuple[str, Source]:
    plain, places = unmark(expanded, name)
    source = Reader(plain).read()
    check_rules(plain, places, _standard(), version)
    plain = apply(plain, visible_edits(plain, source))
    for i, constant in enumerate(source.constants):
        constant.symbol = f"mm_fc_{i}"
    head = prefix(source.constants, translated=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shader.cpp"
        (Path(folder) / "prefix.h").write_text(head)
        for _ in range(_MAX_ROUNDS):
            file.write_text(plain + "\n" + tables(source, checked=False))
            errors = _syntax_errors(file)
            if not errors:
                break
            edits = edits_of_errors(plain, str(file), errors)
            if not edits:
                raise MetalSyntaxError(_readable(errors, str(file), places))
            plain = apply(plain, edits)
        else:
            raise MetalSyntaxError(_readable(errors, str(file), places))
    return head + mark(plain, places), source


@functools.cache
def _standard() -> frozenset[str]:
    """Functions of Metal's standard library."""
    headers = (f for room in _ROOMS for f in sorted((INCLUDE / room).glob("*.h")))
    text = "".join(f.read_text() for f in headers)
    names = re.findall(r"METAL_FUNC[^;{}()]*?(\w+)\(|MM_\w+\((\w+)", text)
    return frozenset(name for pair in names for name in pair)


_CAST = "a cast may not change the address space of a pointer"


def _syntax_errors(file: Path) -> str:
    options = ["-fdiagnostics-print-source-range-info", "-fno-caret-diagnostics"]
    options += [
        "-ferror-limit=0",
        "-fno-diagnostics-show-option",
        "-fsyntax-only",
        "-Wno-everything",
    ]
    options += ["-Werror=vla-cxx-extension"]
    parsed = _parsed(headers(translated=True), *LANGUAGE, *_machine())
    constants = ["-include", str(file.parent / "prefix.h")]
    done = zig("clang", *LANGUAGE, *_machine(), *parsed, *options, *constants, str(file))
    return done.stderr if done.returncode else ""


def _readable(errors: str, file: str, places: list[tuple[str, int]]) -> str:
    """clang's messages with the places of the original text."""
    lines = []
    for line in errors.splitlines():
        m = re.match(re.escape(file) + r":(\d+):(\d+):(?:\{[^ ]*\}:)? (.*)", line)
        if m and "cast_pointer" in m[3]:
            m = re.match(r"(\d+):(\d+): (.*)", f"{m[1]}:{m[2]}: error: {_CAST}")
        if m:
            place = places[min(int(m[1]), len(places)) - 1]
            lines.append(f"{place[0]}:{place[1]}:{m[2]}: {m[3]}")
        else:
            lines.append(line)
    return "\n".join(lines)


# Files behind parsed headers are known by their bytes: a new environment has other times.
_BY_CONTENT = ["-Xclang", "-fvalidate-ast-input-files-content"]
_FRAME = re.compile(r"^(.*): error: stack frame size \((\d+)\) exceeds", re.MULTILINE)


@functools.cache
def _parsed(opening: str, *options: str) -> list[str]:
    """Options of clang by which it has read an opening, which was parsed once: the stand-in's
    headers are 0.2 s of a compilation, those of metal/ 0.05 of the 0.2 that are left."""
    # Whether clang has read a header that says `#pragma once` it knows by the header's time.
    files = sorted(p for folder in (INCLUDE, METAL) for p in folder.rglob("*") if p.is_file())
    times = [str(p.stat().st_mtime_ns) for p in files]
    key = digest(str(ROOT), _tree_digest(), opening, *options, *times)
    file = CACHE / f"headers-{key}" / "headers.pch"
    with _missing(file) as missing:
        if missing:
            text, part = file.with_suffix(".h"), file.with_suffix(".part")
            text.write_text(opening)
            compiled("clang", *options, *_BY_CONTENT, "-x", "c++-header", text, "-o", part)
            os.replace(part, file)
    return ["-include-pch", str(file), *_BY_CONTENT]


def _compile(
    folder: Path,
    text: str,
    checked: bool,
    more: Sequence[str] = (),
    opening: str = headers(translated=True),
) -> Path:
    """Compiles translated `text`, behind an opening, into folder/shader.o."""
    file, obj = folder / "shader.cpp", folder / "shader.o"
    file.write_text(text)
    options = [*LANGUAGE, *_CODE, *_machine(), *(_CHECKS if checked else []), *more]
    parsed = _parsed(opening, *options)
    places = [f"-ffile-prefix-map={ROOT}/="]  # a library serves every checkout
    done = zig("clang", *options, *parsed, *places, "-c", str(file), "-o", str(obj))
    if done.returncode:
        if frame := _FRAME.search(done.stderr):
            raise MetalSyntaxError(f"{frame[1]}: {frame[2]} bytes of private memory in a thread")
        raise BuildError(done.stderr)
    return obj


@functools.cache
def _host_libraries() -> list[str]:
    """The C library of this process, which is that of all that load what is linked.

    Empty where no /proc tells of it, as on macOS.
    """
    if not (maps_file := Path("/proc/self/maps")).exists():
        return []
    maps = maps_file.read_text()
    columns = r"^(?:\S+ +){5}"  # addresses, rights, offset, device, inode
    found = re.findall(columns + r"(/.*/(?:libc|libm|ld-linux[\w-]*)\.so\.\d)$", maps, re.M)
    return sorted(set(found))


def _link(library: Path, *given: Any) -> None:
    """Compiles a text, given as to _compile(), and links it with the emulator."""
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        linked = Path(temporary) / library.name
        objects = [str(_compile(Path(temporary), *given)), *runtime_objects()]
        to = ("-shared", "-o", str(linked), *objects)
        libraries = _host_libraries()
        done = zig("ld.lld", "-z", "defs", *to, *libraries) if libraries else None
        if done is None or done.returncode:
            # With clang's own library, which zig compiles in 20 s. Without -fno-sanitize=all, zig
            # first builds a library for sanitizers.
            compiled("cc", "-g1", "-fno-sanitize=all", *to, "-lm", "-lpthread")
        os.replace(linked, library)


def compile_text(folder: Path, text: str, name: str, checked: bool) -> Path:
    """The object file of a text by somebody else, in `folder`, to link with another emulator."""
    translated, source = translate(text, name, ())
    return _compile(folder, translated + "\n" + tables(source, checked), checked)


@contextlib.contextmanager
def _missing(file: Path) -> Iterator[bool]:
    """Whether `file` is to be built; others that want the file, threads or processes, wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        yield False
        return
    with (file.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not file.exists()


def build_text(
    text: str,
    name: str,
    include: Sequence[Path],
    checked: bool,
    version: int = METAL_VERSION,
    more: Sequence[str] = (),
) -> Path:
    """The library of a text by somebody else. more: options of clang."""
    expanded = preprocess(text, name, include, version)  # with what its #include lines give
    key = digest(_tool_digest(), expanded, name, str(checked), str(version), *more, _scripts())
    library = CACHE / key / "library.so"
    with _missing(library) as missing:
        if missing:
            translated, source = _translate(expanded, name, version)
            _link(library, translated + "\n" + tables(source, checked), checked, more)
    return library


def build_shader(shader: Shader, checked: bool) -> Path:
    """The library of a shader of metal/, which keeps the rules and is compiled as it is."""
    name, text = shader.file.name, shader.text
    moved = text.replace(f"{ROOT}/", "")  # a library serves every checkout
    known = CACHE / "known" / digest(_tree_digest(), moved, str(checked))
    library = CACHE / (known.read_text() if known.exists() else "none") / "library.so"
    if library.exists():
        return library
    _keeps_rules(shader.file)
    opening, constants = _opening(shader.opening, name)
    expanded = preprocess(shader.opening + text, name, [])
    kernels = Reader(unmark(expanded.removeprefix(opening), name)[0]).read().kernels
    before = prefix(constants, translated=False) + shader.opening
    behind = tables(Source(kernels, constants), checked)
    key = digest(_tool_digest(), *(t.replace(f"{ROOT}/", "") for t in (expanded, before)), behind)
    library = CACHE / key / "library.so"
    with _missing(library) as missing:
        if missing:
            _link(library, text + behind, checked, (), before)
    known.parent.mkdir(exist_ok=True)
    known.write_text(key)
    return library


@functools.cache
def _opening(text: str, name: str) -> tuple[str, list[Constant]]:
    """Shader.opening expanded, and the function constants, which its headers have: to read their
    words takes 0.05 s, too."""
    expanded = preprocess(text, name, [])
    return expanded, Reader(unmark(expanded, name)[0]).read().constants


@functools.cache
def _tree_digest() -> str:
    """A digest of all files that make shaders; if none has changed, nothing is preprocessed."""
    files = sorted(p for p in METAL.rglob("*") if p.is_file())
    return digest(_tool_digest(), _scripts(), *(str(f.relative_to(METAL)) for f in files), *files)


@functools.cache
def _keeps_rules(file: Path) -> None:
    """MetalSyntaxError where a file of metal/library does not, with all its kernels."""
    expanded = preprocess(Shader(file).text, file.name, [])
    key = digest(_tool_digest(), expanded, _scripts())
    with _missing(CACHE / f"rules-{key}" / "kept") as missing:
        if missing:
            plain, places = unmark(expanded, file.name)
            check_rules(plain, places, _standard(), METAL_VERSION, ours=True)
            (CACHE / f"rules-{key}" / "kept").touch()


@functools.cache
def _scripts() -> str:
    folder = Path(__file__).parent
    names = ["source", "excluded", "words", "rules", "translate", "repair", "tables", "markers"]
    names.append("build")
    return digest(*(folder / f"{name}.py" for name in names))


__all__ = ["BuildError", "Kernel", "MetalSyntaxError", "build_shader", "build_text"]
