"""torch_metalmm itself, and the list of all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torch_metalmm import _C, formats
from torch_metalmm.formats.activations import BLOCK

from .devices import CPU, Device
from .peers.dense import DequantizeAndMm, TorchDense, TorchMv, int8_activations
from .peers.ggml import Ggml
from .peers.integers import TorchInt4, TorchInt8
from .peers.others import Mlx, OnnxRuntime
from .problem import LABELS, Engine, Problem, Rounding, Variant, rotated


class MetalMM:
    """torch.ops.metalmm.linear, x in the dtype of the setting; on the CPU also rounded to int8."""

    def missing(self, device: Device) -> str | None:
        return None

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        for name in names:
            spec = formats.get(name)
            if problem.shape.k % spec.block_values == 0:
                yield self._variant(problem, spec.name)
                on_cpu = problem.setting.device == CPU and problem.setting.dtype is torch.float32
                if on_cpu and _C.has_int8(spec.name):
                    yield self._variant(problem, spec.name, "int8")

    def _variant(self, problem: Problem, name: str, activations: str | None = None) -> Variant:
        op = torch.ops.metalmm.linear
        setting, packed = problem.setting, problem.packed(name)
        weights = rotated(packed.to(setting.device.type), setting.copies(packed.nbytes))

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            given = x.to(setting.device.type, setting.dtype)
            strategy = setting.strategy
            return lambda i: op(given, weights[i], None, name, strategy, activations=activations)

        def strategy(m: int) -> str | None:
            sizes = {"m": m, "n": problem.shape.n, "k": problem.shape.k}
            dtype = LABELS[setting.dtype]
            return setting.device.strategy(
                **sizes, format=name, dtype=dtype, strategy=setting.strategy
            )

        label = " ".join(filter(None, (name, activations, setting.strategy)))
        exact = setting.dtype is torch.float32
        rounding = Rounding() if exact else Rounding.to(setting.dtype)
        return Variant(
            engine="metalmm",
            name=f"metalmm {label}" + ("" if exact else f" {setting.dtype}".replace("torch.", "")),
            format=name,
            weight_bytes=packed.nbytes,
            copies=len(weights),
            device=setting.device,
            bind=bind,
            decoded=lambda: problem.decoded(packed, name),
            strategy=strategy,
            rounding=int8_activations(BLOCK, torch.float32) if activations else rounding,
        )


# By the name of --engines, torch_metalmm first.
ENGINES: dict[str, Engine] = {
    "metalmm": MetalMM(),
    "linear_f32": TorchDense(torch.float32),
    "linear_f16": TorchDense(torch.float16),
    "linear_bf16": TorchDense(torch.bfloat16),
    "mv_f32": TorchMv(torch.float32),
    "mv_f16": TorchMv(torch.float16),
    "mv_bf16": TorchMv(torch.bfloat16),
    "dequantize_mm": DequantizeAndMm(),
    "int4pack": TorchInt4(),
    "int8pack": TorchInt8(),
    "ggml": Ggml(),
    "onnxruntime": OnnxRuntime(),
    "mlx": Mlx(),
}
