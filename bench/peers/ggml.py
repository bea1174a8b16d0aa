"""ggml on the CPU through ctypes, as llama.cpp uses it: products and flash attention.

From the shared libraries inside the package llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..devices import CPU, Device

_P, _SIZE, _INT, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_FLOAT = ctypes.c_float
_BUFFER_OFFSET = 8  # offset of ggml_tensor.buffer, after the type and its padding
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

BLOCKS = (32, 256)  # values of a block of W
# Formats of keys and values, by the numbers that ggml has for them.
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20}
_F32, _F16 = TYPES["f32"], TYPES["f16"]
MASK_ROWS = 64  # a mask's rows are a multiple


@ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _P)
def QUIET(level: int, text: bytes, data: int) -> None:
    """A log callback that drops everything, as the line about every repacked tensor."""


class _InitParams(ctypes.Structure):
    _fields_ = [("bytes", _SIZE), ("memory", _P), ("no_alloc", ctypes.c_bool)]


# {function: its result, its arguments}, by library.
_INTERFACE: dict[str, dict[str, tuple[Any, ...]]] = {
    "libggml-base": {
        "ggml_log_set": (None, _P, _P),
        "ggml_init": (_P, _InitParams),
        "ggml_free": (None, _P),
        "ggml_tensor_overhead": (_SIZE,),
        "ggml_graph_overhead": (_SIZE,),
        "ggml_new_tensor_4d": (_P, _P, _INT, _LONG, _LONG, _LONG, _LONG),
        "ggml_mul_mat": (_P, _P, _P, _P),
        "ggml_flash_attn_ext": (_P, _P, _P, _P, _P, _P, _FLOAT, _FLOAT, _FLOAT),
        "ggml_new_graph": (_P, _P),
        "ggml_build_forward_expand": (None, _P, _P),
        "ggml_get_data": (_P, _P),
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
    },
    "libggml-cpu": {
        "ggml_backend_cpu_reg": (_P,),
        "ggml_backend_cpu_init": (_P,),
        "ggml_backend_cpu_set_n_threads": (None, _P, _INT),
    },
}


def library_folder() -> Path | None:
    """Where llama-cpp-python keeps its libraries; None if it is not installed."""
    spec = find_spec("llama_cpp")
    return Path(spec.origin).parent / "lib" if spec and spec.origin else None


def missing(device: Device) -> str | None:
    """Why it cannot run there; None if it can."""
    folder = library_folder()
    if device != CPU:
        return "its CPU library"
    if folder is None:
        return "llama-cpp-python is not installed"
    return None if list(folder.glob("libggml-cpu*")) else f"no libggml-cpu in {folder}"


@cache
def _functions() -> dict[str, Any]:
    found = {}
    for stem, table in _INTERFACE.items():
        lib = ctypes.CDLL(str(library_folder() / (stem + _SUFFIX)))
        for name, (result, *arguments) in table.items():
            f = getattr(lib, name)
            f.restype, f.argtypes = result, arguments
            found[name.removeprefix("ggml_").removeprefix("backend_")] = f
    found["log_set"](QUIET, None)
    return found


def call(name: str, *args: Any) -> Any:
    """ggml_<name> or ggml_backend_<name>."""
    return _functions()[name](*args)


@cache
def _backend(threads: int) -> int:
    """The CPU backend with that many threads."""
    found: int = call("cpu_init")
    call("cpu_set_n_threads", found, threads)
    return found


class Context:
    """A ggml context; allocate() puts its tensors into one buffer."""

    def __init__(self, tensors: int) -> None:
        bytes = tensors * (call("tensor_overhead") + 64) + tensors * call("graph_overhead")
        self.address: int = call("init", _InitParams(bytes, None, True))
        weakref.finalize(self, call, "free", self.address)

    def tensor(self, type: int, *sizes: int) -> int:
        """A new tensor of up to four sizes, in ggml's order: columns first."""
        found: int = call("new_tensor_4d", self.address, type, *sizes, *[1] * (4 - len(sizes)))
        return found

    def placed(self, t: Tensor, type: int, *sizes: int) -> int:
        """A tensor of ggml in the memory of t."""
        found = self.tensor(type, *sizes)
        buffer = call("cpu_buffer_from_ptr", t.data_ptr(), t.nbytes)
        weakref.finalize(self, call, "buffer_free", buffer)
        if call("tensor_alloc", buffer, found, t.data_ptr()) != 0:
            raise MemoryError("ggml: no place for a tensor")
        return found

    def allocate(self, buffer_type: int) -> None:
        buffer = call("alloc_ctx_tensors_from_buft", self.address, buffer_type)
        if not buffer:
            raise MemoryError("ggml: no memory for a buffer")
        weakref.finalize(self, call, "buffer_free", buffer)


class Graphs:
    """A graph for each result of a context, all of one shape [...] in f32."""

    def __init__(
        self, context: Context, results: Sequence[int], shape: Sequence[int], threads: int
    ) -> None:
        self.context, self.backend, self.graphs = context, _backend(threads), []
        for y in results:
            self.graphs.append(call("new_graph", context.address))
            call("build_forward_expand", self.graphs[-1], y)
        context.allocate(call("cpu_buffer_type"))
        kind = ctypes.c_float * torch.Size(shape).numel()
        memory = (kind.from_address(call("get_data", y)) for y in results)
        self.results = [torch.frombuffer(m, dtype=torch.float32).view(*shape) for m in memory]

    def __call__(self, i: int) -> Tensor:
        """The result of graph i; valid until its next call."""
        if call("graph_compute", self.backend, self.graphs[i]) != 0:
            raise RuntimeError("ggml: graph_compute failed")
        return self.results[i]


@cache
def _extra_buffer_types() -> tuple[int, int | None]:
    """The CPU device, and its first extra buffer type (weights repacked for the machine)."""
    registry = call("cpu_reg")
    device = call("reg_dev_get", registry, 0)
    address = call("reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return device, None
    return device, ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(device)[0]


def repacked_type(type: int, n: int, k: int) -> int | None:
    """The buffer type in which ggml repacks W[n, k]; None: it multiplies the file's bytes."""
    device, extra = _extra_buffer_types()
    if extra is None:
        return None
    context = Context(4)
    w = context.tensor(type, k, n)
    y = call("mul_mat", context.address, w, context.tensor(_F32, k, 1))
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
        self.n, self.k = len(packed), k
        extra = repacked_type(type, self.n, k)
        self.repacked = extra is not None
        self.context = Context(copies)
        self.tensors = [self.context.tensor(type, k, self.n) for _ in range(copies)]
        self.context.allocate(extra or call("cpu_buffer_type"))
        for t in self.tensors:
            call("tensor_set", t, packed.data_ptr(), 0, packed.nbytes)


class Products(Graphs):
    """y = x · Wᵀ for each copy of W; x and y are shared."""

    def __init__(self, weights: Weights, x: Tensor, threads: int) -> None:
        context, self.weights = Context(2 * len(weights.tensors) + 1), weights
        given, x = context.tensor(_F32, weights.k, len(x)), x.contiguous()
        results = [call("mul_mat", context.address, w, given) for w in weights.tensors]
        super().__init__(context, results, (len(x), weights.n), threads)
        call("tensor_set", given, x.data_ptr(), 0, x.nbytes)


class Attention(Graphs):
    """softmax(q k / sqrt(D)) v of q f32 [B, heads, S, D], causal, with each of the caches: [B, S,
    heads, D]."""

    def __init__(
        self, q: Tensor, caches: Sequence[tuple[Tensor, Tensor]], format: str, threads: int
    ) -> None:
        """caches: keys and values [B, kv_heads, T, row], which stay where they are."""
        self.q, self.caches, context = q.contiguous(), caches, Context(4 * len(caches) + 2)
        batch, heads, queries, size = q.shape
        kv_heads, slots = caches[0][0].shape[1:3]
        given, mask = context.placed(self.q, _F32, size, queries, heads, batch), None
        if queries > 1:
            self.mask = causal_mask(queries, slots)
            mask = context.placed(self.mask, _F16, *reversed(self.mask.shape))
        results, sizes = [], (TYPES[format], size, slots, kv_heads, batch)
        for pair in caches:
            k, v = (context.placed(t, *sizes) for t in pair)
            scales = (size**-0.5, 0.0, 0.0)
            results.append(call("flash_attn_ext", context.address, given, k, v, mask, *scales))
        super().__init__(context, results, (batch, queries, heads, size), threads)


def causal_mask(queries: int, slots: int) -> Tensor:
    """The mask added to the scores of the last `queries` positions, f16 [rows, slots]."""
    rows = -(-queries // MASK_ROWS) * MASK_ROWS
    own = torch.arange(slots - queries, slots - queries + rows)[:, None]
    hidden = torch.arange(slots)[None] > own
    return torch.zeros(rows, slots, dtype=torch.float16).masked_fill_(hidden, -torch.inf)
