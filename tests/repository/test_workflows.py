"""The workflow files: valid by GitHub's schema, and naming what exists in this repository."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import yaml
from places import ROOT

from torch_metalmm.tools import cli
from torch_metalmm.tools.doctor.report import LIMIT

sys.path.insert(0, str(ROOT / "cmake"))
from torch_version import MINORS  # noqa: E402

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(file: Any) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(file.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_schema() -> None:
    assert [f.name for f in FILES] == ["ci.yml", "hosted-mac.yml", "wheels.yml"]
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_what_they_run_exists(file: Any) -> None:
    """Targets of the Makefile, scripts, the options of CMake; actions of a fixed version."""
    makefile = (ROOT / "Makefile").read_text()
    cmake = "".join((ROOT / f).read_text() for f in ("CMakeLists.txt", "cmake/metallib.cmake"))
    for step in steps(file):
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step["uses"])
        for target in re.findall(r"^make (\w+)", step.get("run", ""), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), target
        scripts = r"^(?:python3? |\.venv/bin/python )?((?:\.ci|cmake)/[\w.]+)"
        for script in re.findall(scripts, step.get("run", ""), re.M):
            assert (ROOT / script).exists()
    for option in re.findall(r"-D(\w+)=", file.read_text()):
        assert option in cmake


def test_the_shards_for_hosted_macs() -> None:
    """They have every test that runs on mps, once, on each torch from 2.13 on; a doctor that hangs
    ends before the job does."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "hosted-mac.yml").read_text())["jobs"]
    mps = jobs["mps"]
    assert mps["timeout-minutes"] <= 60 and mps["runs-on"] == "macos-15"
    assert mps["env"]["METALMM_TEST_BACKENDS"] == "cpu,mps"
    assert mps["strategy"]["matrix"]["torch"] == [m for m in MINORS if m >= "2.13"]
    globs = " ".join(mps["strategy"]["matrix"]["tests"]).split()
    found = [f for g in globs for f in ROOT.glob(g)]
    assert all(any(ROOT.glob(g)) for g in globs)
    files = [f for one in found for f in (one.rglob("test_*.py") if one.is_dir() else [one])]
    assert len(files) == len(set(files))
    takes_engine = re.compile(r"^def test_\w+\([^)]*\bbackend: ", re.M)
    with_engine = {
        f for f in (ROOT / "tests").rglob("test_*.py") if takes_engine.search(f.read_text())
    }
    assert len(with_engine) > 20 and with_engine <= set(files)
    (doctor,) = (s for s in mps["steps"] if "metalmm doctor" in s.get("run", ""))
    _, *arguments = shlex.split(doctor["run"])
    assert doctor["timeout-minutes"] < 60 and cli._parser().parse_args(arguments).limit > LIMIT


def test_wheels_are_of_the_versions_that_are_supported() -> None:
    """The same Pythons everywhere, from the oldest on; tested are the ends of both ranges."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', pyproject)
    file = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    linux, mac = (
        next(s["run"] for s in file[job]["steps"] if "cmake/make_wheel.py" in s.get("run", ""))
        for job in ("linux", "macos")
    )
    (numbers,) = re.findall(r"for n in ([\d ]+);", linux)
    built = [f"3.{n}" for n in numbers.split()]
    assert oldest and built[0] == f"3.{oldest[1]}"
    assert re.findall(r"python(3\.\d+)", mac) == built
    (setup,) = (s["with"] for s in file["macos"]["steps"] if "setup-python" in s.get("uses", ""))
    assert sorted(setup["python-version"].split()) == sorted(built)
    tested = file["test"]["strategy"]["matrix"]["beside"]
    assert {b["torch"] for b in tested} == {MINORS[0], MINORS[-1]}
    pythons = [b["python"] for b in tested]
    assert {built[0], built[-1]} <= {*pythons} <= {*built}


def test_only_the_job_that_publishes_may_ask_for_a_token() -> None:
    """Of a tag, after the tests, in an environment of its own."""
    file = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    asking = {n: job for n, job in file["jobs"].items() if "permissions" in job}
    assert file["permissions"] == {"contents": "read"} and list(asking) == ["publish"]
    publish = asking["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "pypi"
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')" and "test" in publish["needs"]
    assert not [s for s in publish["steps"] if "run" in s or "password" in s.get("with", {})]
