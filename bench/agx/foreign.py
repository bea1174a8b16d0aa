"""Vector kernels of ggml and MLX as code of M1 and M2, from the text of their files.

Translated as for the emulator, made SPIR-V as ours are and counted by the same compiler, with the
values of the way without checks for their function constants. Loops of a constant length unroll
whatever their size. A product and a sum are one instruction, which their fast math allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch_metalmm.msl import spirv
from torch_metalmm.msl.source import Kernel

from ..shaders import foreign
from . import kernels
from .code import Code

# Weights that a lane takes in a turn of its loop. ggml, x f32: rows of W (N_R0 of
# ggml-metal-impl.h) times values. MLX, x f16: 4 rows times values.
GGML = {
    "q4_0": 4 * 16, "q4_1": 4 * 16, "q5_0": 4 * 16, "q5_1": 4 * 16, "q8_0": 2 * 8, "q2_K": 4 * 32,
    "q3_K": 2 * 32, "q4_K": 2 * 32, "q5_K": 32, "q6_K": 2 * 16,
}  # fmt: skip
MLX = {"half, 64, 2": 4 * 16, "half, 64, 4": 4 * 16, "half, 64, 8": 4 * 8}
_THREADS, _THREADGROUP_BYTES = 64, 8192
_OPTIONS = ["-ffp-contract=fast", *foreign.UNROLL]


def codes(text: foreign.Text, names: list[str]) -> Iterator[tuple[str, Code | str]]:
    """Kernels by name. ValueError: the text has no such kernel, or is not Metal."""
    translated, wanted = text.translated(names)
    body = foreign.text_of(translated)

    def job(kernel: Kernel) -> Code:
        module = spirv.compile_kernel(body, kernel, {}, _THREADGROUP_BYTES, _OPTIONS)
        return kernels.compile_module(kernel.name, module, _THREADS, fuse=True)

    return zip([k.name for k in wanted], kernels.each(job, wanted), strict=True)


def ggml(file: Path) -> Iterator[kernels.Found]:
    """kernel_mul_mv of mul_mv.metal. ValueError: another file. OSError: no such file."""
    names = {f"kernel_mul_mv_{f}_f32": n for f, n in GGML.items()}
    for name, code in codes(foreign.ggml(file), list(names)):
        yield kernels.Found(f"ggml {name}", names[name], code)


def mlx(folder: Path) -> Iterator[kernels.Found]:
    """affine_qmv_fast of MLX's include folder. ValueError: another folder."""
    text = foreign.mlx(folder, [f"affine_qmv_fast<{a}, false>" for a in MLX])
    names = {f"mlx_{i}": a for i, a in enumerate(MLX)}
    for name, code in codes(text, list(names)):
        yield kernels.Found(f"MLX qmv_fast {names[name]}", MLX[names[name]], code)
