"""The emulator's own code and its launcher, built with AddressSanitizer and UBSan, run clean."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from torch_metalmm.msl.build import ROOT, compile_text, runtime_objects

EMULATOR = ROOT / "csrc" / "emulator"
# Undefined behaviour traps: the emulator has functions named as those of UBSan's own library.
SANITIZE = ["-fsanitize=address,undefined", "-fsanitize-undefined-trap-on-error"]
SANITIZE += [f"-I{ROOT / 'csrc'}", f"-I{ROOT}"]
SANITIZE += ["-fno-omit-frame-pointer", "-std=c++17", "-g1", "-O1", "-Wno-unknown-pragmas"]
ARGUMENTS = (
    "device const float* x [[buffer(0)]], device const float* x2 [[buffer(6)]], "
    "device float* y [[buffer(2)]], threadgroup float* t [[threadgroup(0)]], "
    "uint i [[thread_position_in_grid]], uint n [[thread_index_in_threadgroup]], "
    "uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]"
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SUM = sum(k % 7 for k in range(210))
KERNELS = {  # body, what is printed
    "copy": ("y[i] = x[i];", f"{SUM}"),
    "through_memory": (f"t[n] = x[i]; {BARRIER} y[i] = t[69 - n];", f"{SUM}"),
    "collectives": (
        "float a = simd_sum(x[i] - x2[i]) + simd_shuffle_xor(1.0f, 1) + quad_max(0.0f);"
        "simdgroup_barrier(mem_flags::mem_none); y[i] = simd_broadcast_first(a * 0 + 2);",
        "420",
    ),
    "matrices": (
        "y[i] = 1; if (sg == 0) { simdgroup_float8x8 a(1), b;"
        "t[lane] = lane; t[lane + 32] = lane; simdgroup_barrier(mem_flags::mem_threadgroup);"
        "simdgroup_load(b, t, 8);"
        "simdgroup_multiply_accumulate(b, a, b, b); simdgroup_store(b, t + 64, 8); }",
        "210",
    ),
    "atomics": (
        "threadgroup atomic_uint c;"
        "if (n == 0) atomic_store_explicit(&c, 0u, memory_order_relaxed);"
        f"{BARRIER} atomic_fetch_add_explicit(&c, 1u, memory_order_relaxed); {BARRIER}"
        "y[i] = atomic_load_explicit(&c, memory_order_relaxed);",
        "14700",
    ),
    "bounds": ("y[i + 1000000] = 1;", "out of bounds"),
    "misaligned": ("y[i] = *(device const float*)((device const char*)x + 1);", "misaligned"),
    "race": ("t[n] = x[i]; y[i] = t[69 - n];", "missing barrier|uninitialized"),
    "divergent": ("y[i] = n < 5 ? simd_sum(x[i]) : 0;", "divergent collective"),
    "deadlock": (f"if (sg == 1) {{ {BARRIER} }} y[i] = 0;", "deadlock"),
    "index": (
        "float a[4] = {}; for (uint k = 0; k <= n; ++k) a[k] = x[k]; y[i] = a[0];",
        "index 4",
    ),
    "division": ("y[i] = int(n) / int(x[i] - x2[i]);", "division"),
    "endless": ("while (x[0] == 0) {} y[i] = 0;", "timeout"),
}
CHECKED_ONLY = {"bounds", "misaligned", "race", "index", "division"}


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    assert "Sanitizer" not in done.stderr, done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitizers")
    launcher = [Path(__file__).with_name("emulator_check.cpp"), EMULATOR / "launch.cpp"]
    out = folder / "emulator_check"
    run("g++", *SANITIZE, *launcher, "-o", out, "-ldl", "-lpthread")
    return out


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The emulator's objects; rounding.cpp has a type that old versions of g++ lack."""
    folder, objects = tmp_path_factory.mktemp("runtime"), []
    for path in map(Path, runtime_objects()):
        objects.append(path)
        if path.stem != "rounding":
            objects[-1] = folder / path.name
            source = EMULATOR / "runtime" / f"{path.stem}.cpp"
            run("g++", *SANITIZE, "-fPIC", "-fvisibility=hidden", "-c", source, "-o", objects[-1])
    return objects


@pytest.mark.skipif(shutil.which("g++") is None, reason="the sanitizers are g++'s")
@pytest.mark.parametrize("checked", [True, False])
def test_the_emulator_under_sanitizers(
    program: Path, runtime: list[Path], tmp_path: Path, checked: bool
) -> None:
    kernels = {k: v for k, v in KERNELS.items() if checked or k not in CHECKED_ONLY}
    text = "#include <metal_stdlib>\nusing namespace metal;\n" + "\n".join(
        f"kernel void {name}({ARGUMENTS}) {{ {body} }}" for name, (body, _) in kernels.items()
    )
    shader = compile_text(tmp_path, text, "sanitized.metal", checked)
    library = tmp_path / "library.so"
    run("g++", *SANITIZE, "-shared", "-o", library, shader, *runtime)
    lines = run(program, library, *kernels).splitlines()
    assert len(lines) == 2 * len(kernels)
    for n, (name, (_, want)) in enumerate(kernels.items()):
        for line in lines[2 * n : 2 * n + 2]:
            assert line.startswith(f"{name}: ")
            if want.isdigit():
                assert line == f"{name}: {want}"
            else:
                assert any(w in line for w in want.split("|")), line
