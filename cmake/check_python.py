"""Whether a Python can build and run torch_metalmm: the first step of the Makefile.

    python3 cmake/check_python.py

Says in one line why not, and fails. It runs on every Python there is, the 3.9 of Apple's command
line tools and 2.7 included: no annotations, no f-strings.
"""

import platform
import re
import sys
from os.path import abspath, dirname, join

PYPROJECT = join(dirname(dirname(abspath(__file__))), "pyproject.toml")


def oldest():
    """(3, 10): of requires-python."""
    with open(PYPROJECT) as file:
        found = re.search(r'^requires-python = ">=(\d+)\.(\d+)"$', file.read(), re.M)
    return int(found.group(1)), int(found.group(2))


def refusal(version, system, machine, path):
    """The refusal of Python, or "". Arguments: sys.version_info, platform.system(), .machine()."""
    need = "Python " + ".".join(map(str, oldest())) + " or newer"
    if system == "Darwin":
        need += " for arm64"
    this = path + " is Python " + ".".join(map(str, version[:3]))
    other = "; take another one: make PYTHON=/path/to/python3"
    if tuple(version[:2]) < oldest():
        return "torch_metalmm needs " + need + ", " + this + other
    if system == "Darwin" and machine != "arm64":
        # Also a Python under Rosetta on an Apple chip. torch has had no wheel for it since 2.3.
        return "torch_metalmm needs " + need + ", " + this + " for " + machine + other
    return ""


if __name__ == "__main__":
    # "" would be printed, as a failure.
    sys.exit(refusal(sys.version_info, platform.system(), platform.machine(), sys.executable) or 0)
