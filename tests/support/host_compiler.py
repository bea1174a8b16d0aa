"""The C++ compiler that the tests compile programs of this machine with."""

from __future__ import annotations

import os
import shlex

COMPILER = shlex.split(os.environ.get("CXX", "c++"))  # may be several words: ccache g++
