"""Second names of modules: those that other code and pickles have for them.

Other code imports modules by these names, and a pickle of a whole module names the class by its
module. Such an import gives the module itself, not a copy, and imports the module only then.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib import import_module
from types import CodeType, ModuleType

_PACKAGE = __name__.rpartition(".")[0]

PLACES = {
    "adopt": "models.adopt",
    "blame": "files.blame",
    "checkpoint": "hf.packed",
    "chip_model": "tools.chips",
    "cli": "tools.cli",
    "diffusers_save": "hf.diffusers.save",
    "doctor": "tools.doctor.report",
    "doctor_checks": "tools.doctor.checks",
    "doctor_child": "tools.doctor.child",
    "doctor_large": "tools.doctor.large",
    "doctor_steps": "tools.doctor.steps",
    "explain": "tools.explain",
    "format_table": "tools.format_table",
    "fuse": "models.fuse.apply",
    "fuse_merge": "models.fuse.merge",
    "fuse_read": "models.fuse.read",
    "fuse_times": "models.fuse.times",
    "fused": "nn.fused",
    "generate": "tools.generate",
    "gguf": "files.gguf.load",
    "gguf_file": "files.gguf.file",
    "gguf_layout": "files.gguf.layout",
    "gguf_map": "files.gguf.map",
    "hf_config": "hf.config",
    "hf_files": "files.headers",
    "hf_methods": "hf.methods",
    "hf_save": "hf.save",
    "info": "tools.info",
    "limits": "files.limits",
    "linear": "nn",
    "lora": "models.lora.layers",
    "lora_others": "models.lora.others",
    "lora_report": "models.lora.report",
    "mlx": "files.mlx.load",
    "mlx_layout": "files.mlx.layout",
    "mlx_save": "files.mlx.save",
    "msl_build": "msl.build",
    "msl_excluded": "msl.excluded",
    "msl_library": "msl.library",
    "msl_lines": "msl.lines",
    "msl_repair": "msl.repair",
    "msl_rules": "msl.rules",
    "msl_source": "msl.source",
    "msl_tables": "msl.tables",
    "msl_translate": "msl.translate",
    "owned": "files.owned",
    "packed": "nn.packed",
    "ptx": "msl.ptx",
    "quantize": "models.quantize",
    "replace": "models.replace",
    "sentences": "hf.sentences",
    "skeleton": "models.skeleton",
    "staging": "files.staging",
    "untrusted": "files.untrusted",
}


class _Finder(importlib.abc.MetaPathFinder):
    """Goes before the finder of files, which would take a folder ptx/ of kernels for a package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, old = name.rpartition(".")
        if package != _PACKAGE or old not in PLACES:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(f"{_PACKAGE}.{PLACES[old]}"))


class _Loader(importlib.abc.InspectLoader):
    """Loads the module by its own name; the import system enters it under the old name, too."""

    def __init__(self, place: str) -> None:
        self._place = place

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = import_module(self._place)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import system has replaced by the old name's

    def get_source(self, fullname: str) -> None:
        return None

    def get_code(self, fullname: str) -> CodeType:
        """For `python -m`: the module itself is run."""
        run = f"runpy.run_module({self._place!r}, run_name='__main__', alter_sys=True)"
        return compile(f"import runpy; {run}", fullname, "exec")


def install() -> None:
    """Let the old names be imported."""
    sys.meta_path.insert(0, _Finder())
