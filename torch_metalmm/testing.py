"""Runs Metal Shading Language on CPU tensors: the lockstep emulator of csrc/emulator.

    double = MetalSource(text).function("double_all")
    double(grid=4, group=64, buffers=[x, y])           # raises EmulatorFault, or y holds the result

Every thread of a threadgroup is a fiber; simd_* functions and barriers are rendezvous. What a GPU
would let pass is reported with kernel, threadgroup, lane and source line: a collective that not all
lanes reach, a missing barrier, an access outside a buffer, a misaligned one, a deadlock.

`emulated()` puts the shaders of metal/ behind torch.ops.metalmm. `python -m torch_metalmm.testing
build` compiles them; `check FILE.metal …` compiles files as Apple's compiler would read them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    from .msl.build import (
        ELEMENT_ALIGNED,
        JOBS,
        METAL_VERSION,
        BuildError,
        MetalSyntaxError,
        build_shader,
        build_text,
    )
    from .msl.kernels import Shader, alone
    from .msl.library import EmulatorFault, Function, Library
except ModuleNotFoundError as error:
    if error.name != "torch_metalmm.msl":
        raise
    raise ImportError(
        "torch_metalmm.testing: the emulator works in a checkout of the repository; this is an "
        "installed wheel, which has neither its sources nor the shaders"
    ) from None

__all__ = [
    "BuildError",
    "EmulatorFault",
    "Function",
    "Library",
    "MetalSource",
    "MetalSyntaxError",
    "absence",
    "emulated",
    "shader_library",
]


def absence() -> str:
    """Why there is no emulator here, "" if there is one."""
    return "" if sys.platform == "linux" else "its libraries are ELF, it runs on Linux"


class MetalSource:
    """A text of Metal Shading Language, by anyone.

    checked=False runs faster, without memory checks. name: what reports call the text. include:
    folders of its #include lines. version: of Metal, as __METAL_VERSION__ says it: 310 or more.
    element_aligned: a pointer in device memory may be cast to one of vectors where an element may
    lie, as the hardware reads them; Metal's specification asks for the vector's own alignment.
    MetalSyntaxError if it is not valid.
    """

    def __init__(
        self,
        text: str,
        *,
        name: str = "source.metal",
        include: Sequence[Path] = (),
        checked: bool = True,
        version: int = METAL_VERSION,
        element_aligned: bool = False,
    ) -> None:
        more = ELEMENT_ALIGNED if element_aligned else ()
        self.library = Library(build_text(text, name, include, checked, version, more))

    @property
    def kernels(self) -> list[str]:
        """The names that function() takes."""
        return list(self.library.kernels)

    def function(self, name: str, constants: Mapping[int | str, Any] | None = None) -> Function:
        """The kernel `name`, specialised with function constants {index or name: value}."""
        return self.library.function(name, constants)


@functools.cache
def _library(shader: Shader, checked: bool) -> Library:
    return Library(build_shader(shader, checked))


# Files whose kernels of a dtype take 5 to 7 s together and 0.8 each, of 35 formats.
_TOGETHER = ("dequantize", "embedding")


def shader_library(kernel: str, checked: bool = True) -> Library:
    """The library of a kernel of metal/library, built where it is not; those that only decode have
    all formats."""
    shader = alone(kernel)
    if shader.file.stem in _TOGETHER:
        shader = replace(shader, format="", struct="")
    return _library(shader, checked)


@contextlib.contextmanager
def emulated(
    checked: bool = True,
    descending: bool = False,
    chip: str = "m1",
    cores: int = 0,
    flush_subnormals: bool = False,
) -> Iterator[None]:
    """Inside, torch.ops.metalmm computes on CPU tensors by the shaders, planned for `chip`.

    A kernel is compiled when it is first launched. Raises RuntimeError where the emulator finds a
    fault. checked: with memory checks; without, kernels are other code, which is faster.
    descending: the last thread first. flush_subnormals: as Function.__call__.
    Autograd, autocast and the argument checks stay; quantize has no shader. Does not nest.
    """
    from . import _C

    _C.set_load_kernel(lambda kernel: _C.load_emulated(str(shader_library(kernel, checked).path)))
    _C.install_emulator(chip, descending, cores, flush_subnormals)
    try:
        yield
    finally:
        _C.remove_emulator()


def main(arguments: Sequence[str]) -> int:
    """The command line: build, or check FILE…"""
    if arguments[:1] == ["build"]:
        from . import _C

        names = _C.kernel_names()
        with ThreadPoolExecutor(JOBS) as pool:
            list(pool.map(shader_library, names))
        print(f"{len(names)} kernels")
        return 0
    if arguments[:1] == ["check"] and len(arguments) > 1:
        for file in arguments[1:]:
            path = Path(file)
            MetalSource(path.read_text(), name=path.name, include=[path.resolve().parent])
        return 0
    print("usage: python -m torch_metalmm.testing build | check FILE.metal …", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
