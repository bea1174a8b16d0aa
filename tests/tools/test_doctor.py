"""metalmm doctor: what it reports of engines that work, and of checks that fail, hang or die."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import partial

import pytest
import torch
from backends import CPU, Backend, absences
from failing import failure

from torch_metalmm.tools.cli import main
from torch_metalmm.tools.doctor import child as doctor_child
from torch_metalmm.tools.doctor import large as doctor_large
from torch_metalmm.tools.doctor import report as doctor
from torch_metalmm.tools.doctor.checks import checks
from torch_metalmm.tools.doctor.compare import Check, Found, Prepared

# A child of the doctor whose steps are given as Python text: their names and what each does.
CHILD = """
import os, signal, sys, threading, time
from torch_metalmm.tools.doctor.steps import Outcome, serve
{before}
def step(action):
    exec("def run():\\n " + action, globals())
    inner = run
    return lambda: inner() or Outcome("ok    done")
serve([(name, step(action)) for name, action in {steps}.items()], int(sys.argv[-1]))
"""


def report(steps: dict[str, str], limit: float = 60, before: str = "") -> list[tuple[str, bool]]:
    """(step and verdict, whether all is well) of each line that the doctor makes of these steps."""
    script = CHILD.format(steps=steps, before=before)
    found = doctor.supervise([sys.executable, "-c", script], limit)
    lines, text = [], ""
    for result, _ in found:
        text += result.text
        if result.end:
            lines.append((text, result.ok))
            text = ""
    assert not text
    return lines


def test_an_engine_that_works(backend: Backend) -> None:
    """Every check passes, with its times and the share of the bound that was used."""
    every = [c for c in checks(backend.device) if not c.heavy or backend.device != "cpu"]
    for check in every[::8] if backend is CPU else every:  # the command's report has the CPU's
        outcome = doctor_child.perform(check, backend.device)
        assert outcome.ok and outcome.then == "go on", (check.name, outcome.text)
        assert re.match(r"ok +first +[\d.]+ ms  then +[\d.]+ ms  error ", outcome.text)


def test_the_report_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A line per check, of processes of their own; the exit status says that all is well."""
    assert main(["doctor", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert f"torch {torch.__version__}" in out and err == ""
    for name, why in absences().items():
        if name not in ("cpu", "emulator"):
            assert f"{name:5} {why or 'available'}\n" in out
    verdicts = dict(re.findall(r"^(\S.*?) +(ok|FAIL|skip|HANGS|DIES)  ", out, re.M))
    assert set(verdicts) == {"device", *(check.name for check in checks("cpu"))}
    assert set(verdicts.values()) <= {"ok", "skip"}
    speed = re.search(r"^speed of q4_k.*; ([\d.]+) GB/s of weights, (\d+)% of a copy's", out, re.M)
    assert speed and float(speed[1]) > 0
    loaded = re.search(
        r"^loading a mapped file .*; ([\d.]+) GB/s, ([\d.]+) of the bytes", out, re.M
    )
    assert loaded and float(loaded[1]) > 0 and 0.9 < float(loaded[2]) < 2.5
    for words in ("N=97", "f16 float16 M=65 N=97 K=1061", "rows beyond 4 GiB", "20 tokens"):
        assert words in out


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that computes nothing fails where it is compared; the first failing check's own
    command finds it again."""
    script = (
        "import sys, torch; from torch_metalmm import _C;"
        "from torch_metalmm.tools.doctor.child import *;"
        "torch.full((1 << 20,), 1e30); _C.install_recorder();"  # what empty() may find again
        "large = ('GiB', 'loading', 'speed', 'tokens');"
        "serve([s for s in steps('cpu') if not any(word in s[0] for word in large)],"
        "int(sys.argv[-1]))"
    )
    results = list(doctor.examine("cpu", child=[sys.executable, "-c", script]))
    failed = [r for r in results if r.text.startswith("FAIL")]
    assert len(failed) > 15
    assert re.search(r"values, the worst at \[0, \d+\]: \S+, not \S+$", failed[0].text)
    again = [r for r in results if "reproduce: " in r.text]
    assert len(again) == 1 and results.index(again[0]) == results.index(failed[0]) + 1
    command = shlex.split(again[0].text.partition("reproduce: ")[2])
    name = results[results.index(failed[0]) - 1].text.strip()
    assert command[:4] == [sys.executable, "-m", "torch_metalmm", "doctor"]
    assert command[4:] == ["--device", "cpu", "--check", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.match(rf"{name} +ok +first", done.stdout)  # here the engine is not the recorder


def test_a_check_that_hangs() -> None:
    """Its name is printed before it runs; it is killed, its stack shown, and the next ones run."""
    steps = {"one": "pass", "stuck": "threading.Event().wait()", "two": "pass", "three": "pass"}
    lines = report(steps, limit=5)
    assert [line.split()[:2] for line, _ in lines] == [
        ["one", "ok"],
        ["stuck", "HANGS"],
        ["two", "ok"],
        ["three", "ok"],
    ]
    assert [ok for _, ok in lines] == [True, False, True, True]
    assert "no end after 5 s; killed" in lines[1][0] and "in wait" in lines[1][0]


@pytest.mark.parametrize(
    ("death", "verdict", "python"),
    [
        ("os.abort()", "by signal 6, SIGABRT", "Fatal Python error: Aborted"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "by signal 9, SIGKILL", ""),
        ("os._exit(3)", "with exit status 3", ""),
    ],
)
def test_a_check_that_takes_its_process_down(death: str, verdict: str, python: str) -> None:
    """The report has what the process said, and Python of a crash; the checks after it run."""
    say = "print('an assertion of Metal', file=sys.stderr, flush=True); "
    (one, _), (dies, ok), (two, _) = report({"one": "pass", "bad": say + death, "two": "pass"})
    assert re.match("one +ok ", one) and re.match("two +ok ", two) and not ok
    assert re.match(f"bad +DIES +{verdict}\n", dies) and "\n      an assertion of Metal" in dies
    assert python in dies


def test_a_process_that_does_not_start() -> None:
    """One line says why, without endless repetition."""
    ((text, ok),) = report({"one": "pass"}, before="raise OSError('libc10 is gone')")
    assert text.startswith("the process of the checks: DIES  with exit status 1") and not ok
    assert "OSError: libc10 is gone" in text


def test_what_a_check_prints_is_not_the_report() -> None:
    ((text, ok),) = report({"loud": "print('{}'); os.system('echo no JSON')"})
    assert ok and re.match(r"loud +ok ", text)


def test_an_exception_is_a_failed_check() -> None:
    """Its message is in the report, as long as a compiler's may be; the next has a new process."""

    def prepare() -> Prepared:
        raise RuntimeError("metalmm: Metal cannot compile gemv:\n" + "metal/a.h:1: no\n" * 99)

    outcome = doctor_child.perform(Check("gemv", prepare), "cpu")
    assert not outcome.ok and outcome.then == "anew"
    lines = outcome.text.splitlines()
    assert lines[0] == "FAIL  RuntimeError: metalmm: Metal cannot compile gemv:"
    assert len(lines) == 60 and set(lines[1:]) == {"      metal/a.h:1: no"}
    steps = {
        "raises": "global spoiled; spoiled = 1; return Outcome('FAIL  no', False, 'anew')",
        "other": "assert 'spoiled' not in globals()",
    }
    (raises, _), (_, ok) = report(steps)
    assert raises.split(maxsplit=1)[1] == "FAIL  no" and ok


def test_what_a_machine_cannot_run_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory, no transformers: the report says so."""
    monkeypatch.setattr(doctor_large, "memory_of", lambda _: 4e9)
    monkeypatch.setattr(doctor_large, "find_spec", lambda _: None)
    far, model = (
        doctor_child.perform(Check("", partial(prepare, "cpu")), "cpu")
        for prepare in (doctor_large.beyond_4_gib, doctor_large.generation)
    )
    assert far.ok and far.text == "skip  needs 8 GB of memory, here 4.0"
    assert model.ok and model.text.startswith("skip  needs transformers: pip install")


@pytest.mark.parametrize(
    ("found", "ok", "words"),
    [
        (Found(0.5, 1.0), True, "error 0.50 of its bound"),
        (Found(2.0, 1.0, "all wrong"), False, "error 2.00 of its bound; all wrong"),
        (Found(0.0, 0.0), True, "error 0"),
        (Found(3.0, 0.0), False, "error 3, must be 0"),
        (Found(float("nan"), 1.0), False, "error nan of its bound"),
    ],
)
def test_the_verdict(found: Found, ok: bool, words: str) -> None:
    check = Check("", lambda: (lambda: torch.ones(1), lambda y: found))
    outcome = doctor_child.perform(check, "cpu")
    assert outcome.ok is ok and outcome.text.startswith("ok " if ok else "FAIL ")
    assert outcome.text.endswith(words)


def test_the_tokens_are_not_a_matter_of_rounding() -> None:
    """The reference's tokens: no rounding chooses another one; a wrong layer does."""
    packed, dense = doctor_large._llama()
    prompt = torch.arange(1, 9)[None]
    tokens = torch.cat([prompt, doctor_large._generated(dense, prompt)[None]], dim=1)
    best, second = dense(tokens).logits[0, 7:-1].topk(2).values.unbind(-1)
    assert (best - second).min() > 2e-3
    layer = packed.model.layers[1].mlp.down_proj
    layer.weight.copy_(layer.weight.flip(0))
    assert not torch.equal(doctor_large._generated(packed, prompt), tokens[0, 8:])


def test_a_device_without_engine(capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("tpu", *(d for d in ("mps", "cuda") if absences()[d])):
        with pytest.raises(ValueError, match=f"device: {device}: "):
            list(doctor.examine(device))


def test_an_unknown_check_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    told = failure(capsys, "doctor", "--check", "gemv")
    assert "check: unknown 'gemv'; allowed on cpu: 'device', 'linear f16 float16 M=1', " in told
