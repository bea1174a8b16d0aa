"""Kernels of other projects, from the text of their files, to be counted like ours (agx.py).

The text is translated as for the emulator (torch_metalmm/msl). What makes no difference to the
loops that are counted is taken away or made easy for them: function constants have the values of
the way without checks, constant loops unroll whatever their size, and structs move in words as long
as their size allows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch_metalmm.msl.build import translate
from torch_metalmm.msl.source import Kernel

HEAD = f'#include <metal_stdlib>\n#include "{Path(__file__).with_name("foreign.h")}"\n'

_CONSTANT = re.compile(
    r'constant\s+(\w+)\s+(\w+)\s+\[\[clang::loader_uninitialized, gnu::alias\("mm_fc_\d+"\)\]\];'
)
_INSTANCE = re.compile(r"^\s*template\s+(\[\[kernel\]\]|kernel) [^;{]*;", re.M)
_MARKER = re.compile(r'# \d+ "(.*)"')
# MLX's math of bfloat by functions of Apple's compiler. The products need none of it.
_LEFT_OUT = "bf16_math.h"
UNROLL = ["-mllvm", "-unroll-threshold=100000", "-mllvm", "-unroll-full-max-count=1024"]


def _without(text: str, file: str) -> str:
    """A text with line markers, without the lines of a file."""
    lines, is_left_out = [], False
    for line in text.split("\n"):
        if marker := _MARKER.match(line):
            is_left_out = marker[1].endswith(file)
        lines += [] if is_left_out else [line]
    return "\n".join(lines)


def text_of(translated: str) -> str:
    """A translated text for a target of the stand-in, without its instances."""
    body = translated[translated.index('}\n# 1 "') + 2 :]  # behind the storage of constants
    # A bool says that a size is to be checked, a number how many of something: none, and one.
    body = _CONSTANT.sub(
        lambda m: f"constexpr constant {m[1]} {m[2]} = {'false' if m[1] == 'bool' else 1};", body
    )
    body = _without(_INSTANCE.sub("", body), _LEFT_OUT)
    body = body.replace("static thread_local threadgroup", "static threadgroup")
    return f"#define MM_TRANSLATED 1\n{HEAD}{body}"


class Text(NamedTuple):
    """A text of another project, in Metal Shading Language."""

    text: str
    name: str
    include: list[Path]

    def translated(self, kernels: Sequence[str]) -> tuple[str, list[Kernel]]:
        """The text in C++, and the kernels of these names. ValueError: the text has no such kernel,
        or is not Metal."""
        translated, source = translate(*self)
        wanted = [k for k in source.kernels if k.name in kernels]
        if missing := sorted(set(kernels) - {k.name for k in wanted}):
            raise ValueError(f"{self.name}: has no kernel {', '.join(missing)}")
        return translated, wanted


# ---- the two projects


def ggml(file: Path) -> Text:
    """ggml's mul_mv.metal, or the ggml-metal.metal that older versions have."""
    return Text(file.read_text(), file.name, [*file.resolve().parents][:3])


_MLX = "mlx/backend/metal/kernels"
_MLX_PRODUCTS = ("utils", "steel/gemm/gemm", "quantized_utils", "quantized")


def mlx(folder: Path, instances: Sequence[str], headers: Sequence[str] = _MLX_PRODUCTS) -> Text:
    """Instances of kernels of MLX's headers, as affine_qmm_t<...>: kernels mlx_0, mlx_1, ...;
    `folder`: its include folder. ValueError: another folder."""
    if not (folder / _MLX).is_dir():
        raise ValueError(f"{folder}: has no {_MLX}")
    text = "".join(f'#include "{_MLX}/{header}.h"\n' for header in headers) + "".join(
        f'template [[host_name("mlx_{i}")]] [[kernel]] decltype({name}) {name};\n'
        for i, name in enumerate(instances)
    )
    return Text(text, "mlx.metal", [folder])
