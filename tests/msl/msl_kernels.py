"""Small Metal kernels for the tests of the stand-in."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_metalmm.testing import MetalSource

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
LANES = list(range(32))
DTYPES = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat": torch.bfloat16,
    "int": torch.int32,
    "short": torch.int16,
    "char": torch.int8,
    "long": torch.int64,
    "uchar": torch.uint8,
}


def kernel(body: str, types: str = "device float* x, device float* y") -> MetalSource:
    text = (
        f"{HEAD}kernel void k({types}, uint i [[thread_position_in_grid]], "
        f"uint lane [[thread_index_in_simdgroup]]) {{\n{body}\n}}\n"
    )
    return MetalSource(text)


def run(source: MetalSource, n: int, buffers: list[Tensor | int | float], group: int = 64) -> None:
    source.function("k")((n + group - 1) // group, group, buffers, threads=n)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, with equal signs of zeros; any NaN equals any."""
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


class Batch:
    """Expressions of v = x[i] (and i, lane), each a kernel of one library."""

    def __init__(self, expressions: list[tuple[str, str]]) -> None:
        self.names = {e: f"k{n}" for n, e in enumerate(expressions)}
        self._source: MetalSource | None = None

    def __call__(self, expression: str, type_: str, values: list[float]) -> list[float]:
        """The expression, whose type is type_, in the lanes of one simdgroup that hold `values`."""
        if self._source is None:
            self._source = MetalSource(
                HEAD
                + "\n".join(
                    f"kernel void {name}(device {t}* x, device {t}* y, uint i "
                    "[[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) "
                    f"{{ {t} v = x[i]; y[i] = {t}({e}); }}"
                    for (e, t), name in self.names.items()
                )
            )
        dtype = DTYPES[type_]
        x, y = torch.tensor(values, dtype=dtype), torch.zeros(len(values), dtype=dtype)
        self._source.function(self.names[expression, type_])(1, len(values), [x, y])
        return y.tolist()
