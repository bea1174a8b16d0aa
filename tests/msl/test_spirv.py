"""The shaders as SPIR-V: every file makes a module that readers of SPIR-V take."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from torch_metalmm import _C
from torch_metalmm.msl import spirv

FILES = sorted(file.stem for file in (spirv.METAL / "library").rglob("*.metal"))
CONSTANTS = dict.fromkeys(_C.CONSTANTS, 0) | {"k": 4096, "batch": 4}


def of_file(stem: str) -> str:
    """A kernel of a file: of q4_k, of q8_0 where caches have no q4_k, or of no format."""
    names = [n for n in _C.kernel_names() if n.startswith(f"{stem}_") and n.endswith("_f16")]
    exact = [n for n in names if n in {f"{stem}{f}_f16" for f in ("_q4_k", "_q8_0", "")}]
    return (exact or names)[0]


@pytest.mark.parametrize("stem", FILES)
def test_a_kernel_of_every_file_is_a_module(stem: str, tmp_path: Path) -> None:
    module = spirv.build(of_file(stem), CONSTANTS, threadgroup_bytes=1024)
    assert spirv.kernels_of(module) == [spirv.ENTRY]
    if validator := shutil.which("spirv-val"):
        (tmp_path / "a.spv").write_bytes(module)
        subprocess.run([validator, str(tmp_path / "a.spv")], check=True)


def test_constants_and_memory_are_in_the_module() -> None:
    """Another value is another code; nothing is left of a constant by name."""
    one = spirv.build("gemv_q4_0_f16", CONSTANTS, 1024)
    assert b"mm_fc_" not in one and b"mm_memory" not in one  # it shares no memory without a norm
    assert one != spirv.build("gemv_q4_0_f16", CONSTANTS | {"k": 8192}, 1024)
    gemm = [spirv.build("gemm_q4_0_f16", CONSTANTS, size) for size in (16384, 18432)]
    assert b"mm_memory" in gemm[0] and gemm[0] != gemm[1]


@pytest.mark.parametrize(
    ("kernel", "constants", "message"),
    [
        ("gemv_q4_9_f16", CONSTANTS, "'gemv_q4_9_f16': its file has"),
        ("no_such_f16", CONSTANTS, "'no_such_f16': no file"),
        ("gemv_q4_0_f16", {"k": 4096}, "no value for group, scale_type"),
    ],
)
def test_what_is_no_kernel_is_refused(kernel: str, constants: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spirv.build(kernel, constants, 0)


@pytest.mark.parametrize("cut", [slice(0, 18), slice(4, None), slice(0, 24)])
def test_what_is_no_module_is_refused(cut: slice) -> None:
    module = spirv.build("dot_f16", CONSTANTS, 1024)
    with pytest.raises(ValueError, match="SPIR-V|an instruction of"):
        spirv.kernels_of(module[cut])
