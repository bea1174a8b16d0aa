"""bench agx: the reader of Mesa's code, on a text whose counts are known, and what is compiled."""

from __future__ import annotations

import pytest
from places import TESTS, mlx_include

from bench.shaders import agx, foreign
from bench.shaders.agx_code import read
from bench.shaders.build_mesa import PROGRAM
from torch_metalmm.msl import spirv

# Printed after each of three steps: a preamble, and a kernel with an outer loop of one inside.
PREAMBLE = "block0 {\n   u0 = mov_imm #0\n   stop \n}\n"
LOOP = """block0 {
   r0 = mov_imm #0
} -> block1 \nblock1 {
   r1 = mov_imm #0
} -> block2  from block0 block3
block2 {
   r20...r21 = device_load r2:r3, #1, xy, #0, slot 0
   wait #0, slot 0
   r4 = and r20, u25
   r4 = bfeil r4, #4, #0
   r5 = rcp r4
   r7 = ffma.sat r4, u19l, r7
   r7 = simd_reduce r7, #1
   r2:r3 = iadd r2:r3, r12:r13, #0
   r10 = iadd r10, #16, #0
   while_icmp r10, u30, #0, n=1
} -> block2 block3  from block1 block2
block3 {
   jmp_exec_any #55ba
} -> block1 block4  from block2
block4 {
   device_store r7, r2:r3, #0, x, #0, slot 0
   stop \n} from block3
"""
RESULT = """SHADER-DB:  - MESA_SHADER_COMPUTE shader: 18 inst, 1 loops, 3:4 spills:fills
RESULT bytes=180 main=160 regs=112 preamble_regs=0 uniforms=64 scratch=0 local=512 threads=896
"""


def test_the_inner_loop_is_counted_by_pipe() -> None:
    code = read(PREAMBLE * 3 + "shader: \n\n" + LOOP * 3 + RESULT)
    assert dict(code.counts) == {
        "load": 1, "wait": 1, "bitwise": 1, "shift": 1, "function": 1, "fma": 1, "exchange": 1,
        "integer": 2, "control": 1,
    }  # fmt: skip
    assert (len(code.loop), code.wide) == (10, 1)
    assert code.slots == 9  # neither the load nor the wait, the exchange as 2
    assert code.other_pipe == 4 + 6  # a shift, a reciprocal
    assert code.cycles == 9 + 3
    assert (code.half_registers, code.threads, code.threadgroup_bytes) == (112, 896, 512)
    assert code.spills == 7


def test_a_kernel_without_a_loop_and_no_kernel() -> None:
    assert read(PREAMBLE * 3 + RESULT).cycles == 0
    with pytest.raises(ValueError, match="no result"):
        read(LOOP)


def test_weights_of_a_turn() -> None:
    """Rows of W times values of a piece, by formats.def and geometry.h."""
    found = agx.weights()
    assert [found[f"gemv_{f}"] for f in ("f32", "q4_0", "q4_k")] == [4 * 4, 4 * 16, 4 * 32]
    assert found["gemv_wide_n_q4_0"] == 2 * found["gemv_q4_0"] == found["swiglu_up_q4_0"] * 2


def test_patterns_name_kernels() -> None:
    all_gemv = agx.named(["gemv_*_f16"])
    assert "gemv_q4_0_f16" in all_gemv and "gemv_batched_q4_0_f16" not in all_gemv
    assert agx.named(["gemm_q4_0_f16", "gemm_q4_0_f16"]) == ["gemm_q4_0_f16"]
    with pytest.raises(ValueError, match="no_such"):
        agx.named(["no_such_*"])
    passes = [agx.pass_of(kernel) for kernel in agx.named(agx.SHOWN)]
    assert all(one["threadgroup_bytes"] >= 16 and one["group"][0] >= 32 for one in passes)


def test_a_threshold_costs_least_in_all() -> None:
    assert agx.threshold([1, 2, 3, 9], [4, 4, 4, 4]) == 3
    assert agx.threshold([1, 5, 3, 9], [4, 4, 4, 4]) == 3
    assert agx.threshold([5, 5], [4, 4]) == 0
    assert agx.planned("q4_0") == 2 * agx.planned("q4_k")  # a pass has half as many rows


OTHER = TESTS / "msl" / "packed.metal"


def test_the_text_of_another_project_becomes_spirv() -> None:
    translated, (kernel,) = foreign.ggml(OTHER).translated(["kernel_mul_mv_q4_0_f32"])
    module = spirv.compile_kernel(foreign.text_of(translated), kernel, {}, 8192)
    assert spirv.kernels_of(module) == [spirv.ENTRY]
    with pytest.raises(ValueError, match="kernel_mul_mv_q5_K_f32"):
        list(agx.of_ggml(OTHER))
    with pytest.raises(ValueError, match="has no mlx/backend/metal/kernels"):
        list(agx.of_mlx(TESTS))


needs_mesa = pytest.mark.skipif(not PROGRAM.exists(), reason="mmagx is not built: make agx")


@needs_mesa
def test_the_code_of_other_projects() -> None:
    """An fma for each weight of a turn: 2 rows of a block here; of MLX's, each 4 begin with a
    product."""
    ((_, code),) = agx.codes(foreign.ggml(OTHER), ["kernel_mul_mv_q4_0_f32"])
    assert not isinstance(code, str)
    assert code.counts["fma"] >= 2 * 32
    for found in agx.of_mlx(mlx_include()):
        assert not isinstance(found.code, str)
        assert found.code.counts["fma"] >= found.weights, found.kernel


@needs_mesa
def test_a_tile_decodes_once_for_8_rows() -> None:
    """And the vector kernel in each pass over 8 rows of x (q4_0)."""
    vectors = [agx.vector("q4_0", m).cycles for m in (1, 8, 16)]
    tiles = [agx.tile("q4_0", m).cycles for m in (1, 8, 16)]
    assert tiles[0] == tiles[1] < tiles[2] < 2 * tiles[1]
    assert vectors[0] < vectors[1] < 8 * vectors[0] and vectors[2] == 2 * vectors[1]


@needs_mesa
def test_what_the_compiler_says() -> None:
    """A kernel, one that would spill if all that is constant left its loops, one that spills."""
    plain, kept, spilling = map(
        agx.compile_kernel,
        ("gemv_q8_0_f16", "gemv_batched_q5_0_f16", "gemv_batched_q5_0_f32"),
    )
    assert (plain.spills, kept.spills, spilling.spills) == (0, 0, 15)
    assert f"{len(plain.loop) / agx.weights()['gemv_q8_0']:.2f}" == "2.75"


@needs_mesa
@pytest.mark.parametrize(
    ("kernel", "most"),
    [
        ("gemv_iq3_s_f16", 128),
        ("gemv_batched_iq3_s_f16", 208),
        ("gemm_q6_k_f16", 208),  # addresses in threadgroup memory take no register each
        ("gemm_small_q4_k_f16", 208),
        ("attention_split_f16_f16", 208),
        ("attention_tile_q8_0_f16", 208),
    ],
)
def test_half_registers(kernel: str, most: int) -> None:
    """Beyond 128 a core holds fewer than 832 threads, beyond 208 fewer than 512."""
    code = agx.compile_kernel(kernel)
    assert code.half_registers <= most and not code.spills
