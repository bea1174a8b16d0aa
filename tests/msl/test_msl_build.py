"""How texts become libraries: what the cache tells apart, which compiler is called."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msl_kernels import HEAD

from torch_metalmm.msl import build as msl_build
from torch_metalmm.testing import BuildError, MetalSource

TEXT = f'{HEAD}#include "value.h"\nkernel void k(device float* y) {{ y[0] = VALUE; }}\n'


def value(folder: Path) -> float:
    y = torch.zeros(1)
    MetalSource(TEXT, include=[folder]).function("k")(1, 1, [y])
    return y.item()


def test_a_changed_include_is_compiled_anew(tmp_path: Path) -> None:
    """Also a file that an included file includes; a text that is put back is found again."""
    header, inner = tmp_path / "value.h", tmp_path / "inner.h"
    header.write_text("#define VALUE 1\n")
    assert value(tmp_path) == 1
    header.write_text("#define VALUE 2\n")
    assert value(tmp_path) == 2
    header.write_text('#include "inner.h"\n')
    for n in (3, 4):
        inner.write_text(f"#define VALUE {n}\n")
        assert value(tmp_path) == n
    header.write_text("#define VALUE 1\n")
    assert value(tmp_path) == 1


def test_headers_that_a_checkout_writes_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is kept, as CI keeps it; the headers' bytes are the same, their times are not."""
    include = tmp_path / "csrc" / "msl"
    shutil.copytree(msl_build.INCLUDE, include)
    moved = [o.replace(str(msl_build.INCLUDE), str(include)) for o in msl_build.LANGUAGE]
    monkeypatch.setattr(msl_build, "LANGUAGE", moved)
    monkeypatch.setattr(msl_build, "INCLUDE", include)
    monkeypatch.setattr(msl_build, "CACHE", tmp_path / "build")
    for n in (1, 2):
        monkeypatch.setattr(msl_build, "_parsed", functools.cache(msl_build._parsed.__wrapped__))
        (tmp_path / "value.h").write_text(f"#define VALUE {n}\n")
        assert value(tmp_path) == n
        for header in include.rglob("*"):
            os.utime(header, (n, n))


@pytest.mark.parametrize("name", ["ziglang.py", "ziglang/__main__.py"])
def test_no_module_of_the_current_folder_is_the_compiler(tmp_path: Path, name: str) -> None:
    """With the current folder first in the path, as `python -c` and `python -m` have it."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_text("print('a module of the current folder')\n")
    done = subprocess.run(
        [sys.executable, "-c", "from torch_metalmm.msl import build as b; print(b.zig('version'))"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(msl_build.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert repr(msl_build.zig("version").stdout) in done.stdout, done.stdout + done.stderr


def test_the_compiler_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise msl_build.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(msl_build.importlib.metadata, "distribution", missing)
    monkeypatch.setattr(msl_build, "_zig", msl_build._zig.__wrapped__)
    with pytest.raises(BuildError, match="the ziglang package, which has the compiler, is not"):
        msl_build.zig("version")
