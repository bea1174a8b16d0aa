"""ggml's CPU kernels as llama.cpp uses them: int8 activations, weights repacked where ggml can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torch_metalmm import formats

from ..devices import CPU, Device
from ..problem import Problem, Variant
from . import ggml_library as ggml
from .dense import int8_activations

SUPER_BLOCK = 256


class Ggml:
    """One ggml_mul_mat per call, on the bytes torch_metalmm packs."""

    def missing(self, device: Device) -> str | None:
        if device != CPU:
            return "its CPU library"
        folder = ggml.library_folder()
        if folder is None:
            return "llama-cpp-python is not installed"
        return None if list(folder.glob("libggml-cpu*")) else f"no libggml-cpu in {folder}"

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        from gguf import GGMLQuantizationType as Types

        for name in names:
            spec = formats.get(name)
            blocks = spec.block_values in (32, SUPER_BLOCK)
            type = getattr(Types, spec.name.upper(), None)
            if blocks and type is not None and problem.shape.k % spec.block_values == 0:
                yield self._variant(problem, spec.name, int(type), spec.block_values)

    def _variant(self, problem: Problem, name: str, type: int, block: int) -> Variant:
        k, setting = problem.shape.k, problem.setting
        packed = torch.ops.metalmm.quantize(problem.w, name)
        weights = ggml.Weights(type, packed, k, problem.setting.copies(packed.nbytes))

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            return ggml.Product(weights, x, setting.threads)

        return Variant(
            engine="ggml",
            name=f"ggml {name}" + " repacked" * weights.repacked,
            format=name,
            weight_bytes=packed.nbytes,
            copies=len(weights.tensors),
            bind=bind,
            decoded=lambda: formats.get(name).dequantize(packed[problem.rows], k).double(),
            rounding=int8_activations(block),
        )
