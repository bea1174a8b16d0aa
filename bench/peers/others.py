"""Optional peers: ONNX Runtime's MatMulNBits and MLX's quantized_matmul."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..devices import CPU, Device
from ..problem import Problem, Rounding, Variant
from .dense import GROUP, int8_activations

PROTOBUF_LIMIT = 1 << 31
MLX_LARGEST = 4096 * 4096


def _absent(*modules: str) -> str | None:
    absent = [m for m in modules if find_spec(m) is None]
    return f"{', '.join(absent)} not installed" if absent else None


def quantize_symmetric(w: Tensor) -> tuple[Tensor, Tensor]:
    """W[N, K] -> codes uint8 0..15 [N, K], scales f32 [N, K / 64]; w = (code - 8) scale."""
    groups = w.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7.5).clamp_min_(1e-8)
    codes = (groups / scales.unsqueeze(-1)).round_().clamp_(-8, 7).add_(8)
    return codes.to(torch.uint8).flatten(1), scales


class OnnxRuntime:
    """com.microsoft.MatMulNBits, 4 bits, groups of 64; activations in int8, and in f32."""

    def missing(self, device: Device) -> str | None:
        return _absent("onnx", "onnxruntime") if device == CPU else "its CPU engine"

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        n, k = problem.shape.n, problem.shape.k
        bytes = n * k // 2 + n * k // GROUP * 4
        copies = problem.setting.copies(bytes)
        if k % GROUP or bytes >= PROTOBUF_LIMIT:
            return
        codes, scales = quantize_symmetric(problem.w)

        rows = problem.rows
        steps = (codes[rows].double() - 8).unflatten(1, (-1, GROUP))
        decoded = (steps * scales[rows].double().unsqueeze(-1)).flatten(1)

        roundings = {"int8": (4, int8_activations(GROUP)), "f32": (1, Rounding())}
        for activations, (level, rounding) in roundings.items():
            model = _model(codes, scales, level)
            sessions = [_session(model, problem.setting.threads) for _ in range(copies)]
            yield Variant(
                engine="onnxruntime",
                name=f"ONNX Runtime int4 g{GROUP} {activations}",
                weight_bytes=bytes,
                copies=copies,
                bind=_binder(sessions),
                decoded=lambda: decoded,
                rounding=rounding,
            )


def _model(codes: Tensor, scales: Tensor, level: int) -> bytes:
    """The ONNX model y[M, N] = MatMulNBits(x[M, K])."""
    from onnx import TensorProto, helper, numpy_helper

    (n, k), groups = codes.shape, scales.shape[1]
    pairs = codes.unflatten(1, (groups, GROUP // 2, 2))
    packed = (pairs[..., 0] | pairs[..., 1] << 4).numpy()
    weights = [
        numpy_helper.from_array(packed, "w"),
        numpy_helper.from_array(scales.flatten().numpy(), "s"),
    ]
    attributes = {"K": k, "N": n, "bits": 4, "block_size": GROUP, "accuracy_level": level}
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes
    )
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", k])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", n])
    graph = helper.make_graph([node], "linear", [x], [y], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return model


def _session(model: bytes, threads: int) -> Any:
    """A session of its own for each copy: its idle threads must not spin beside the next one's."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _binder(sessions: list[Any]) -> Callable[[Tensor], Callable[[int], Tensor]]:
    def bind(x: Tensor) -> Callable[[int], Tensor]:
        feed = {"x": x.numpy()}
        return lambda i: torch.from_numpy(sessions[i].run(["y"], feed)[0])

    return bind


class Mlx:
    """mlx.core.quantized_matmul on its CPU device, f32; M = 1 and small W: it is slow there."""

    def missing(self, device: Device) -> str | None:
        return _absent("mlx") if device == CPU else "its CPU engine"

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        import mlx.core as mx

        n, k = problem.shape.n, problem.shape.k
        if k % GROUP or n * k > MLX_LARGEST:
            return
        mx.set_default_device(mx.cpu)
        planes = mx.quantize(mx.array(problem.w.numpy()), GROUP, 4)
        mx.eval(*planes)
        bytes = sum(p.nbytes for p in planes)
        copies = [
            [p + mx.zeros_like(p) for p in planes] for _ in range(problem.setting.copies(bytes))
        ]
        mx.eval(copies)

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            given = mx.array(x.numpy())

            def call(i: int) -> Tensor:
                y = mx.quantized_matmul(given, *copies[i], group_size=GROUP, bits=4)
                mx.eval(y)
                return torch.from_numpy(np.array(y))

            return call

        def decoded() -> Tensor:
            picked = [p[mx.array(problem.rows.numpy())] for p in planes]
            return torch.from_numpy(
                np.array(mx.dequantize(*picked, group_size=GROUP, bits=4))
            ).double()

        yield Variant(
            engine="mlx",
            name=f"MLX 4-bit g{GROUP} f32",
            weight_bytes=bytes,
            copies=len(copies),
            bind=bind,
            decoded=decoded,
            max_m=1,
        )
