"""128 registers a lane: the committed figures are those of the shaders, and no kernel that a plan
of an Apple chip chooses spills."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from places import TESTS

from bench.shaders import registers
from bench.tables import replace_block
from torch_metalmm import _C
from torch_metalmm.msl import ptx
from torch_metalmm.msl.build import digest

# Bytes. gemm_small with 32 rows of f16 x: 16 sums and 32 values of x take 48 registers beside the
# weights of a step. H200, 14336 x 4096, M = 32: affine4, which spills, takes 57 us, as two tiles of
# 16 rows 50; q4_k, which does not, 47 and 64.
# gemm, 64 rows of x, a product of floats being 16 multiply-adds and exchanges there; an Apple GPU's
# is one instruction.
# attention_split: sums and scores of 4 rows of q take 72 registers, beside two decoded slots.
SPILLS = {"gemm_small_f32_f16": 68, "gemm_small_f16_f16": 60, "attention_split": 204}
SPILLS |= {
    f"gemm_small_{name}_f16": 48 for name in ("q3_k", "iq4_nl", "iq4_xs", "mxfp4", "affine4")
}
SPILLS |= {f"gemm_small_{name}_f16": 28 for name in ("bf16", "tq1_0", "iq2_xs", "mxfp8", "iq2_s")}
SPILLS |= {f"gemm_small_{name}_f16": 8 for name in ("q2_k", "q6_k", "nvfp4", "affine6")}
SPILLS |= dict.fromkeys(("gemm_q5_0_f32", "gemm_q5_0_bf16"), 4)
SPILLS |= dict.fromkeys(("gemm_iq4_xs_f16", "gemm_mxfp4_f16"), 12)
# expert_gemm: its base of W takes a register more.
SPILLS |= dict.fromkeys(("expert_gemm_q5_0_f32", "expert_gemm_q5_0_bf16"), 4)
SPILLS |= dict.fromkeys(("expert_gemm_iq4_xs_f16", "expert_gemm_nvfp4_f16"), 4)
SPILLS |= {"expert_gemm_iq4_nl_f16": 8, "expert_gemm_mxfp4_f16": 16, "expert_gemm_iq3_s_f16": 4}


def test_no_chosen_kernel_spills() -> None:
    """Only the kernels of SPILLS do."""
    found = registers.recorded()
    assert sum(one.is_chosen for one in found.values()) > 500
    spilled = {k: one.spilled for k, one in found.items() if one.is_chosen and one.spilled}
    most = {k: SPILLS.get(k, SPILLS.get(registers.split(k)[0], 0)) for k in spilled}
    assert all(size <= most[kernel] for kernel, size in spilled.items()), spilled


def test_the_figures_are_those_of_the_shaders() -> None:
    """The digests of the assembled texts say so, also without ptxas; the stars follow the plans."""
    found = registers.recorded()
    planned = registers.passes()
    assert {k: one.is_chosen for k, one in found.items()} == {k: c for k, (_, c) in planned.items()}
    ptx.build()
    stale = [
        kernel
        for kernel, (one, _) in planned.items()
        if digest(registers.text_of(one, (ptx.FOLDER / f"{kernel}.ptx").read_text()))
        != found[kernel].text
    ]
    assert stale == [], "run python -m bench registers --write, with ptxas"


def test_the_page_has_the_figures(tmp_path: Path) -> None:
    page = Path(shutil.copy(registers.RESULTS, tmp_path))
    tables = registers.tables(registers.recorded().values())
    replace_block(page, "registers", "\n\n".join(map(registers.to_markdown, tables)))
    assert page.read_text() == registers.RESULTS.read_text()


# A loop-free kernel that keeps `count` values until all are loaded, and adds them in reverse.
def kernel(count: int) -> str:
    loads = "".join(f"  ld.volatile.global.u32 %r{i}, [%p+{4 * i}];\n" for i in range(count))
    adds = "".join(f"  mad.lo.u32 %s, %s, 3, %r{i};\n" for i in reversed(range(count)))
    return (
        ".version 7.0\n.target sm_80\n.address_size 64\n"
        ".visible .entry f(.param .u64 a)\n.reqntid MM_THREADS, 1, 1\n.maxnreg MM_REGISTERS\n"
        f"{{\n  .reg .u32 %r<{count}>, %s;\n  .reg .u64 %p;\n  ld.param.u64 %p, [a];\n{loads}"
        f"  mov.u32 %s, MM_CONSTANT_0;\n{adds}  st.global.u32 [%p], %s;\n  ret;\n}}\n"
    )


@pytest.mark.skipif(not shutil.which("ptxas"), reason="no ptxas; the figures are committed")
@pytest.mark.parametrize(("values", "spills"), [(90, False), (200, True)])
def test_a_kernel_of_known_need(values: int, spills: bool) -> None:
    """90 values at once fit in 128 registers, 200 do not."""
    one = _C.plan(m=1, n=8, k=32, format="q4_0", chip="m1")["passes"][0]
    found = registers.measure("f", one, True, kernel(values))
    assert found.registers > values and (found.spilled > 0) == spills


def test_every_plan_is_looked_at() -> None:
    """Kernels that golden plans name are among the chosen."""
    golden = (TESTS / "plan" / "plans.txt").read_text()
    named = set(re.findall(r": (\w+) \d+x", golden)) & set(_C.kernel_names())
    chosen = {k for k, (_, is_chosen) in registers.passes().items() if is_chosen}
    strategies = {registers.split(k)[0] for k in chosen}  # the others are baselines
    formatless = {k for k in named if not registers.split(k)[1]}
    forced = {k for k in named if registers.split(k)[0] not in strategies}
    assert named and named - formatless - forced <= chosen
