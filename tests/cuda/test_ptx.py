"""The shaders as PTX, without a GPU: they compile, and are what the CUDA launcher expects.

A kernel of each file, of formats and dtypes in turn; all with METALMM_TEST_CASES=all.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from backends import CASES
from plan_cases import DTYPES

from torch_metalmm import _C
from torch_metalmm.msl import ptx
from torch_metalmm.msl.kernels import Shader, alone, shader_of

N_CONSTANTS = 7  # those of abi.h, and whether the grid is one row
NAMED = ("gemv_q4_0_f16", "gemv_affine4_f16", "gemv_batched_q4_0_f16", "dot_f32")
NAMED += ("gemm_small_q5_1_f16", "expert_gemm_q6_k_f16", "attention_tile_q8_0_f16")
NAMED += ("gemm_q4_k_f16", "gemv_large_k_iq4_xs_bf16")


def chosen() -> dict[Shader, list[str]]:
    """{shader: its kernels}."""
    every = _C.kernel_names()
    of_file = defaultdict(list)
    for kernel in every:
        of_file[shader_of(kernel).file].append(kernel)
    step = 2 * len(DTYPES) + 1  # to another dtype of the format after next
    some = {*NAMED} | {of[i * step % len(of)] for i, of in enumerate(of_file.values())}
    shaders = defaultdict(list)
    for kernel in every:
        whole = shader_of(kernel)
        if CASES == "all" or not whole.format:
            shaders[whole].append(kernel)
        elif kernel in some:
            shaders[alone(kernel)].append(kernel)
    return shaders


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    """{kernel: its PTX}."""
    names = ptx.build(shaders=chosen())
    return {name: (ptx.FOLDER / f"{name}.ptx").read_text() for name in names}


def with_values(text: str) -> str:
    """What the driver gets from the launcher: tokens replaced by numbers."""
    text = text.replace("MM_THREADS", "128").replace("MM_REGISTERS", "168")
    return re.sub(r"MM_CONSTANT_\d", "64", text)


def test_the_kernels_of_a_shader_are_those_of_the_table(kernels: dict[str, str]) -> None:
    assert sorted(kernels) == sorted(name for names in chosen().values() for name in names)


def test_a_kernel_is_a_module_of_its_own(kernels: dict[str, str]) -> None:
    """One entry of that name, no calls, nothing left for a linker; threads are a token."""
    for name, text in kernels.items():
        assert re.findall(r"\.entry (\w+)", text) == [name]
        assert text.count(".reqntid MM_THREADS, 1, 1\n.maxnreg MM_REGISTERS\n") == 1, name
        assert not re.search(r"\bcall\b|\.func\b|mm_fc_|mm_index_", text), name


def test_function_constants_are_tokens(kernels: dict[str, str]) -> None:
    """K and the epilogue of a gemv, the group of an affine format; none beyond the last."""
    used = {n: set(map(int, re.findall(r"MM_CONSTANT_(\d+)", t))) for n, t in kernels.items()}
    assert set.union(*used.values()) == set(range(N_CONSTANTS))
    assert {0, 3, 5} <= used["gemv_q4_0_f16"] and 1 not in used["gemv_q4_0_f16"]
    assert {0, 1, 2, 3, 5} <= used["gemv_affine4_f16"]
    assert 4 in used["gemv_batched_q4_0_f16"]


def test_registers_are_not_indexed_at_run_time(kernels: dict[str, str]) -> None:
    """No array of a thread is left in memory, where it costs a load and a store per access."""
    assert [n for n, t in kernels.items() if "__local_depot" in t] == []


def test_f16_tiles_use_the_tensor_cores(kernels: dict[str, str]) -> None:
    """f32 and bf16 multiply in f32, which tensor cores cannot."""
    tensor = {n for n, t in kernels.items() if "mma.sync" in t}
    halves = re.compile(r"((expert_)?gemm_(?!tiled|naive)|attention_tile_).*_f16")
    assert tensor == {n for n in kernels if halves.fullmatch(n)}


@pytest.mark.parametrize("kernel", NAMED[-3:])
def test_an_assembler_accepts_it(kernel: str, kernels: dict[str, str], tmp_path: Path) -> None:
    """ptxas where it is installed; else only that no token is left."""
    text = with_values(kernels[kernel])
    assert "MM_" not in text
    ptxas = shutil.which("ptxas")
    if ptxas:
        (tmp_path / "a.ptx").write_text(text)
        command = [ptxas, "-arch=sm_90", str(tmp_path / "a.ptx"), "-o", str(tmp_path / "a.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
