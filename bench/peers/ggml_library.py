"""The few functions of ggml's C interface that products and attention need, through ctypes.

From the shared libraries inside the package llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_P, _SIZE, _INT, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_FLOAT = ctypes.c_float
_F32 = 0
_BUFFER_OFFSET = 8  # of ggml_tensor.buffer, after the type and its padding
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


@ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _P)
def _QUIET(level: int, text: bytes, data: int) -> None:
    """A log callback that drops ggml's line about every repacked tensor."""


class _InitParams(ctypes.Structure):
    _fields_ = [("bytes", _SIZE), ("memory", _P), ("no_alloc", ctypes.c_bool)]


_BASE: dict[str, tuple[Any, ...]] = {
    "ggml_log_set": (None, _P, _P),
    "ggml_init": (_P, _InitParams),
    "ggml_free": (None, _P),
    "ggml_tensor_overhead": (_SIZE,),
    "ggml_graph_overhead": (_SIZE,),
    "ggml_new_tensor_2d": (_P, _P, _INT, _LONG, _LONG),
    "ggml_new_tensor_4d": (_P, _P, _INT, _LONG, _LONG, _LONG, _LONG),
    "ggml_mul_mat": (_P, _P, _P, _P),
    "ggml_flash_attn_ext": (_P, _P, _P, _P, _P, _P, _FLOAT, _FLOAT, _FLOAT),
    "ggml_new_graph": (_P, _P),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_get_data": (_P, _P),
    "ggml_quantize_chunk": (_SIZE, _INT, _P, _P, _LONG, _LONG, _LONG, _P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "ggml_backend_buft_alloc_buffer": (_P, _P, _SIZE),
    "ggml_backend_buffer_free": (None, _P),
    "ggml_backend_cpu_buffer_type": (_P,),
    "ggml_backend_cpu_buffer_from_ptr": (_P, _P, _SIZE),
    "ggml_backend_tensor_alloc": (_INT, _P, _P, _P),
    "ggml_backend_tensor_set": (None, _P, _P, _SIZE, _SIZE),
    "ggml_backend_graph_compute": (_INT, _P, _P),
    "ggml_backend_reg_dev_get": (_P, _P, _SIZE),
    "ggml_backend_reg_get_proc_address": (_P, _P, ctypes.c_char_p),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, _P, _P),
}
_CPU: dict[str, tuple[Any, ...]] = {
    "ggml_backend_cpu_reg": (_P,),
    "ggml_backend_cpu_init": (_P,),
    "ggml_backend_cpu_set_n_threads": (None, _P, _INT),
}


def library_folder() -> Path | None:
    """Where llama-cpp-python keeps its libraries; None if it is not installed."""
    spec = find_spec("llama_cpp")
    return Path(spec.origin).parent / "lib" if spec and spec.origin else None


@cache
def _functions() -> dict[str, Any]:
    folder = library_folder()
    assert folder is not None
    found = {}
    for stem, table in (("libggml-base", _BASE), ("libggml-cpu", _CPU)):
        lib = ctypes.CDLL(str(folder / (stem + _SUFFIX)))
        for name, (result, *arguments) in table.items():
            f = getattr(lib, name)
            f.restype, f.argtypes = result, arguments
            found[name.removeprefix("ggml_").removeprefix("backend_")] = f
    found["log_set"](_QUIET, None)
    return found


def call(name: str, *args: Any) -> Any:
    """ggml_<name> or ggml_backend_<name>."""
    return _functions()[name](*args)


@cache
def backend(threads: int) -> int:
    """The CPU backend with that many threads."""
    found: int = call("cpu_init")
    call("cpu_set_n_threads", found, threads)
    return found


@cache
def _extra_buffer_types() -> tuple[int, int | None]:
    """The CPU device, and its first extra buffer type (weights repacked for the machine)."""
    registry = call("cpu_reg")
    device = call("reg_dev_get", registry, 0)
    address = call("reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return device, None
    return device, ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(device)[0]


class Context:
    """A ggml context; allocate() puts its tensors into one buffer."""

    def __init__(self, tensors: int) -> None:
        bytes = tensors * (call("tensor_overhead") + 64) + tensors * call("graph_overhead")
        self.address: int = call("init", _InitParams(bytes, None, True))
        weakref.finalize(self, call, "free", self.address)

    def matrix(self, type: int, rows: int, columns: int) -> int:
        found: int = call("new_tensor_2d", self.address, type, columns, rows)
        return found

    def allocate(self, buffer_type: int) -> None:
        buffer = call("alloc_ctx_tensors_from_buft", self.address, buffer_type)
        if not buffer:
            raise MemoryError("ggml: no memory for a buffer")
        weakref.finalize(self, call, "buffer_free", buffer)


def repacked_type(type: int, n: int, k: int) -> int | None:
    """The buffer type in which ggml repacks W[n, k]; None: it multiplies the file's bytes."""
    device, extra = _extra_buffer_types()
    if extra is None:
        return None
    context = Context(4)
    w = context.matrix(type, n, k)
    y = call("mul_mat", context.address, w, context.matrix(_F32, 1, k))
    buffer = call("buft_alloc_buffer", extra, 0)
    field = _P.from_address(w + _BUFFER_OFFSET)
    field.value = buffer
    supported = call("dev_supports_op", device, y)
    field.value = None
    call("buffer_free", buffer)
    return extra if supported else None


class Weights:
    """Copies of one packed matrix."""

    def __init__(self, type: int, packed: Tensor, k: int, copies: int) -> None:
        n = packed.shape[0]
        extra = repacked_type(type, n, k)
        self.repacked = extra is not None
        self.n, self.k = n, k
        self.context = Context(copies)
        self.tensors = [self.context.matrix(type, n, k) for _ in range(copies)]
        self.context.allocate(extra or call("cpu_buffer_type"))
        for t in self.tensors:
            call("tensor_set", t, packed.data_ptr(), 0, packed.nbytes)


class Product:
    """y = x · Wᵀ for each copy of W: one graph each, x and y shared."""

    def __init__(self, weights: Weights, x: Tensor, threads: int) -> None:
        self.weights, self.backend = weights, backend(threads)
        m, copies = x.shape[0], len(weights.tensors)
        self.context = Context(2 * copies + 1)
        address = self.context.address
        given = self.context.matrix(_F32, m, weights.k)
        results = [call("mul_mat", address, w, given) for w in weights.tensors]
        self.graphs = []
        for y in results:
            graph = call("new_graph", address)
            call("build_forward_expand", graph, y)
            self.graphs.append(graph)
        self.context.allocate(call("cpu_buffer_type"))
        x = x.contiguous()
        call("tensor_set", given, x.data_ptr(), 0, x.nbytes)
        self.results = [self._view(y, m) for y in results]

    def _view(self, y: int, m: int) -> Tensor:
        size = m * self.weights.n
        memory = (ctypes.c_float * size).from_address(call("get_data", y))
        return torch.frombuffer(memory, dtype=torch.float32).view(m, self.weights.n)

    def __call__(self, i: int) -> Tensor:
        """y with copy i; valid until the next call with i."""
        if call("graph_compute", self.backend, self.graphs[i]) != 0:
            raise RuntimeError("ggml: graph_compute failed")
        return self.results[i]
