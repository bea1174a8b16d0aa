"""The build backend of pyproject.toml: setuptools, and for an isolated build the torch beside which
the result will be installed.

pip builds in an environment of its own, into which it installs what the hooks below ask for. It
runs them with the interpreter that the package is installed for, whose folders are not in sys.path
then, but known. Other front ends (build, uv) make another interpreter, where no torch is found.
"""

from __future__ import annotations

import sysconfig
from typing import Any

import torch_version
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def _torch() -> str:
    return torch_version.to_build_with(sysconfig.get_path(p) for p in ("purelib", "platlib"))


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), _torch()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), _torch()]
