"""What the build asks for, and what goes into a wheel and a source distribution."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch
from places import ROOT

CMAKE = ROOT / "cmake"
sys.path.insert(0, str(CMAKE))
import check_python  # noqa: E402
import torch_version  # noqa: E402


def with_torch(folder: Path, version: str) -> Path:
    """A folder in which that torch is installed, as far as metadata say."""
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return folder


# ---- the interpreter


@pytest.mark.parametrize(
    ("version", "system", "machine", "is_taken"),
    [
        ((3, 9, 6), "Darwin", "arm64", False),
        ((3, 9, 6), "Linux", "x86_64", False),
        ((2, 7, 18), "Darwin", "x86_64", False),
        ((3, 12, 1), "Darwin", "x86_64", False),
        ((3, 10, 0), "Darwin", "arm64", True),
        ((3, 14, 2), "Darwin", "arm64", True),
        ((3, 10, 0), "Linux", "x86_64", True),
        ((4, 0, 0), "Linux", "aarch64", True),
    ],
)
def test_pythons(version: tuple[int, ...], system: str, machine: str, is_taken: bool) -> None:
    """One that is refused is told in one line what is needed, what this is, what to do."""
    line = check_python.refusal(version, system, machine, "/usr/bin/python3")
    if is_taken:
        assert line == ""
        return
    arm = " for arm64" if system == "Darwin" else ""
    this = f"/usr/bin/python3 is Python {'.'.join(map(str, version))}"
    assert f"needs Python 3.10 or newer{arm}, {this}" in line
    assert "make PYTHON=" in line and "\n" not in line


def test_make_stops_before_it_does_anything(tmp_path: Path) -> None:
    """With the Python of Apple's command line tools: the line, and no environment."""
    fake = tmp_path / "python3"
    fake.write_text(
        f"""#!/bin/sh
exec {sys.executable} -c '
import runpy, sys
sys.argv, sys.version_info = sys.argv[1:], (3, 9, 6, "final", 0)
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""
    )
    fake.chmod(0o755)
    command = ["make", "-C", str(ROOT), "demo", f"VENV={tmp_path / 'venv'}", f"PYTHON={fake}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and not (tmp_path / "venv").exists()
    assert len(lines) == 1 and "needs Python 3.10" in lines[0] and "3.9.6" in lines[0]


def test_the_check_is_for_every_python() -> None:
    """The check holds nothing that 2.7 and 3.9 do not parse: they must get as far as the line."""
    text = (CMAKE / "check_python.py").read_text()
    assert not re.search(
        r"""\bf["']|->|:=|\bmatch |^from __future__|def \w+\(.*:.*\):""", text, re.M
    )


# ---- torch


@pytest.mark.parametrize("version", ["2.10.0", "2.12.1+cpu", "2.15.0"])
def test_the_installed_torch_is_used(version: str, tmp_path: Path) -> None:
    folder = with_torch(tmp_path, version)
    assert torch_version.to_build_with([str(folder)]) == f"torch=={version.split('+')[0]}"


def test_without_a_torch_the_tested_one_is_used(tmp_path: Path) -> None:
    assert torch_version.to_build_with([str(tmp_path)]) == f"torch=={torch_version.DEFAULT}"
    assert torch_version.minor_of(torch_version.DEFAULT) in torch_version.MINORS


@pytest.mark.parametrize("version", ["2.9.1", "2.16.0", "3.0.0", "1.13.1", "2.1.5"])
def test_other_torches_are_refused(version: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"torch {version} is installed; .* 2.10 to 2.15"):
        torch_version.to_build_with([str(with_torch(tmp_path, version))])


def test_what_is_built_requires_the_minor_it_was_built_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(with_torch(tmp_path, "2.14.1+cu130"))])
    assert torch_version.to_run_with() == "torch==2.14.*"
    monkeypatch.setattr(sys, "path", [])
    assert torch_version.to_run_with() == "torch>=2.10,<2.16"


def test_an_isolated_build_takes_the_torch_of_its_interpreter(tmp_path: Path) -> None:
    """pip hides the folders of the environment that it installs into; the hooks find them."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with_torch(site, "2.14.1")
    setuptools = importlib.util.find_spec("setuptools")
    assert setuptools and setuptools.origin
    hidden = [str(CMAKE), str(Path(setuptools.origin).parent.parent)]
    code = f"""
import sys
sys.path = {hidden} + [p for p in sys.path if "site-packages" not in p]
import backend
backend.build_meta.get_requires_for_build_wheel = lambda _: ["wheel's own"]
backend.build_meta.get_requires_for_build_editable = lambda _: []
print(backend.get_requires_for_build_wheel(), backend.get_requires_for_build_editable())
"""
    python = str(tmp_path / "venv" / "bin" / "python")
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == """["wheel's own", 'torch==2.14.1'] ['torch==2.14.1']""", (
        done.stderr
    )


# ---- wheels and source distributions


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of a build and the tests, without what builds and tests leave.

    Links stay links: the package has some to files, and one to the benchmark.
    """
    folder = tmp_path_factory.mktemp("clone")
    leftovers = shutil.ignore_patterns("*.so", "*.dylib", "ptx", "*.metallib", "__pycache__")
    for name in ("torch_metalmm", "bench", "cmake", "csrc", "metal", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=leftovers, symlinks=True)
    for name in (
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "CMakeLists.txt",
        "README.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / name, folder)
    return folder


def setup(clone: Path, *arguments: str, ptx: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", *arguments]
    environment = os.environ | {"METALMM_PTX": ptx}
    return subprocess.run(
        command, cwd=clone, env=environment, capture_output=True, text=True, check=False
    )


def wheel_files(clone: Path, ptx: str = "") -> set[str]:
    """What a wheel has beside the module: the folder that it is made from is used again."""
    folder = clone / "build" / "lib"
    done = setup(clone, "build_py", "--build-lib", str(folder), ptx=ptx)
    assert done.returncode == 0, done.stderr
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}


def sdist_files(clone: Path) -> set[str]:
    done = setup(clone, "sdist", "-d", "dist")
    assert done.returncode == 0, done.stderr
    (archive,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


@pytest.fixture(scope="module")
def sdist(clone: Path) -> set[str]:
    return sdist_files(clone)


def test_a_wheel_and_an_sdist_do_not_depend_on_what_was_run(clone: Path, sdist: set[str]) -> None:
    """PTX, a module, a library of shaders and the files of an earlier build."""
    wheel = wheel_files(clone)
    package = clone / "torch_metalmm"
    (package / "ptx").mkdir()
    compiled = ("_C.cpython-310-darwin.so", "_ops_t2_10.so", "libmetalmm_core.dylib")
    for name in ("ptx/gemv.ptx", *compiled, "metalmm.metallib", "old.py"):
        (package / name).write_text("left")
    assert wheel_files(clone, ptx="1") == wheel | {
        "torch_metalmm/ptx/gemv.ptx",
        "torch_metalmm/old.py",
    }
    (package / "old.py").unlink()
    assert wheel_files(clone) == wheel and sdist_files(clone) == sdist
    assert {"torch_metalmm/__init__.py", "torch_metalmm/py.typed"} <= wheel
    data = {"torch_metalmm/tools/issue_cycles.json"}
    data |= {str(f.relative_to(clone)) for f in package.glob("formats/tables/*.h")}
    data |= {f"torch_metalmm/bench/{name}" for name in ("models/loomings.txt", "roof.cpp")}
    python = {str(f.relative_to(clone)) for f in package.rglob("*.py")}
    bench = {f"torch_metalmm/{f.relative_to(clone)}" for f in (clone / "bench").rglob("*.py")}
    assert "torch_metalmm/bench/standard/run.py" in bench
    left_out = re.compile("torch_metalmm/(msl|bench/shaders)/")  # compile a clone
    packed = {f for f in python | bench if not left_out.match(f)}
    assert wheel == data | {"torch_metalmm/py.typed"} | packed
    assert packed | python <= sdist
    assert not [name for name in wheel if name.endswith((".ptx", ".so", ".dylib", ".metallib"))]
    shutil.rmtree(package / "ptx")


INSTALLED = """
import sys
sys.modules |= dict.fromkeys(["transformers", "safetensors", "gguf", "rich", "matplotlib"])
from torch_metalmm.tools.cli import main
assert main(["bench", "--quick", "--formats", "q4_0", "--output", sys.argv[1]]) == 0
assert "bench" not in sys.modules
for name in ("cells", "chips", "agx", "neon", "cache", "plot-formats"):
    try:
        main(["bench", name])
    except SystemExit as end:
        print(name, end.code)
"""


def test_an_installation_measures_without_a_clone(clone: Path, tmp_path: Path) -> None:
    """The folder of a wheel, and nothing of the clone on the path but what it is made of."""
    folder = tmp_path / "installed"
    done = setup(clone, "build_py", "--build-lib", str(folder))
    assert done.returncode == 0, done.stderr
    for kind in ("*.so", "*.dylib"):
        for file in (ROOT / "torch_metalmm").glob(kind):
            shutil.copy(file, folder / "torch_metalmm")
    command = [sys.executable, "-c", INSTALLED, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("metalmm-bench-*.json")
    written = json.loads(record.read_text())
    assert {c["format"] for c in written["products"]} == {"q4_0", ""} and not written["tokens"]
    skipped = {"kind": "skipped", "what": "tokens", "why": "transformers is not installed"}
    assert "**What the machine reached**" in done.stdout  # rich would frame it
    assert "a picture needs matplotlib: pip install matplotlib" in done.stdout
    assert written["skipped"] == [skipped] and written["roofs"]["read_gb_s"] > 0
    refused = ("cells", "chips", "agx", "neon", "cache", "plot-formats")
    assert done.stdout.splitlines()[-len(refused) :] == [f"{name} 2" for name in refused]
    said = [line for line in done.stderr.splitlines() if line.startswith("bench: ")]
    why = "works in a clone of the repository, not in an installation"
    assert said == [f"bench: {name}: {why}" for name in refused]


def test_an_editable_build_keeps_nothing_of_before(clone: Path, tmp_path: Path) -> None:
    """Compiled files lie in the package of the clone: those of this build, or none."""
    made = tmp_path / "torch_metalmm"
    made.mkdir()
    names = ("metalmm.metallib", "_ops_t2_10.so", "libmetalmm_core.dylib")
    files = [clone / "torch_metalmm" / name for name in names]
    code = f"""
import runpy, setuptools
kept = {{}}
setuptools.setup = lambda **arguments: kept.update(arguments)
runpy.run_path("setup.py")
command = kept["cmdclass"]["build_ext"](setuptools.Distribution())
command.extensions, command.build_lib = [], {str(tmp_path)!r}
command.copy_extensions_to_source()
"""
    for text in ("new", None):
        for file in files:
            file.write_text("old")
            (made / file.name).unlink(missing_ok=True)
            if text:
                (made / file.name).write_text(text)
        subprocess.run([sys.executable, "-c", code], cwd=clone, check=True)
        assert [file.read_text() if file.exists() else None for file in files] == [text] * 3


def test_ptx_that_is_asked_for_must_be_there(clone: Path) -> None:
    done = setup(clone, "build_py", "--build-lib", "build/ptx", ptx="1")
    assert done.returncode != 0 and "run python -m torch_metalmm.msl.ptx first" in done.stderr


def test_an_sdist_has_what_a_build_needs_and_no_part_of_the_tests(
    clone: Path, sdist: set[str]
) -> None:
    for name in ("CMakeLists.txt", "cmake", "csrc", "metal", "setup.py", "pyproject.toml"):
        sources = [clone / name] if (clone / name).is_file() else (clone / name).rglob("*")
        needed = {str(f.relative_to(clone)) for f in sources if f.is_file() and f.suffix != ".pyc"}
        assert needed and needed <= sdist
    assert not [name for name in sdist if name.startswith("tests")]


def test_metadata_name_the_minor(clone: Path) -> None:
    done = setup(clone, "egg_info", "-e", str(clone / "build"))
    assert done.returncode == 0, done.stderr
    minor = ".".join(torch.__version__.split(".")[:2])
    (requires,) = (clone / "build").glob("*.egg-info/requires.txt")
    assert requires.read_text().splitlines()[:2] == [f"torch=={minor}.*", "numpy"]
