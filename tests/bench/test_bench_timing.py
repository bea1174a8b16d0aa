"""What the benchmark measures on each device, how long it samples, and the digits it prints."""

from __future__ import annotations

import math

import pytest
import torch

import bench.devices as devices
from bench import options
from bench.devices import ROW_SECONDS, Device
from bench.report import cell_tables
from bench.tables import digits, percent
from bench.timing import interleave
from torch_metalmm import engines


class QueuedGpu:
    """A GPU behind a queue, on a clock of its own: a call costs the host `encode` seconds and the
    GPU `run`, which starts when the call before has ended. Only synchronize waits."""

    def __init__(self, encode: float, run: float) -> None:
        self.encode, self.run = encode, run
        self.now = self.end = 0.0
        self.calls: list[int] = []
        self.rows: list[int] = []  # calls before each synchronize

    def call(self, i: int) -> None:
        self.now += self.encode
        self.end = max(self.end, self.now) + self.run
        self.calls.append(i)

    def synchronize(self) -> None:
        self.now = max(self.now, self.end) + 1e-4
        self.rows.append(len(self.calls))


@pytest.fixture
def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(**_: object) -> None:
        raise AssertionError("an event on mps may never be reached")

    monkeypatch.setattr(torch.mps, "Event", event)


@pytest.mark.parametrize(("encode", "run"), [(2e-6, 9e-6), (2e-6, 4e-4), (5e-6, 0.2), (2e-5, 1e-6)])
@pytest.mark.usefixtures("no_events")
def test_a_sample_on_mps(monkeypatch: pytest.MonkeyPatch, encode: float, run: float) -> None:
    """Calls over all copies and one synchronize, at least 30 ms of them and not many times that."""
    gpu = QueuedGpu(encode, run)
    monkeypatch.setattr("time.perf_counter", lambda: gpu.now)
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(torch.mps, "synchronize", gpu.synchronize)
    copies = 5
    timing = interleave({"": Device("mps").timed(gpu.call, copies)}, 12)[""]
    per_call = max(encode, run)
    assert timing.median == pytest.approx(per_call, rel=0.02)
    sizes = [b - a for a, b in zip(gpu.rows, gpu.rows[1:], strict=False)]
    row, least = sizes[-1], 20  # copies times enough to be MIN_CALLS
    assert timing.count >= 12 and set(sizes[-12:]) == {row}
    assert row * per_call >= ROW_SECONDS * 0.98
    assert row == least or row * per_call < 2.1 * ROW_SECONDS
    assert gpu.calls[-row:] == [i % copies for i in range(row)]


def test_a_mac_is_measured_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, where the doctor finds the engine; commands without --device take the CPU."""
    for why, default in (("", "mps"), ("not in this build", "cpu")):
        monkeypatch.setattr(devices, "absence", lambda _, why=why: why)
        for command in ([], ["--quick"], ["roof"], ["tokens"]):
            assert options.parse(command).device == default
            if command[:1] != ["--quick"]:
                assert options.parse([*command, "--device", "cpu"]).device == "cpu"
        assert options.parse(["quality"]).device == "cpu"
    with pytest.raises(SystemExit):
        options.parse(["quality", "--device", "mps"])


def test_an_absent_device_is_named_as_by_the_doctor() -> None:
    for device in (*(d for d, why in engines.engines().items() if why), "tpu"):
        with pytest.raises(ValueError, match=f"device: {device}: ") as ours:
            engines.check_device(device)
        with pytest.raises(ValueError) as caught:
            Device.named(device)
        assert str(caught.value) == str(ours.value)


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0145, "0.0145"),
        (0.014449, "0.0144"),
        (0.00099951, "0.00100"),
        (0.5, "0.500"),
        (1.2345, "1.23"),
        (9.996, "10.0"),
        (99.96, "100"),
        (12345.0, "12345"),
    ],
)
def test_digits_are_significant(sign: str, value: float, text: str) -> None:
    assert digits(math.copysign(value, -1 if sign else 1)) == sign + text


def test_small_numbers_of_a_table_are_not_zero() -> None:
    """14.5 µs in a column of ms; a peer 70 times slower; 0.3 % of a roof."""
    cell = {
        "kind": "matmul",
        "title": "t",
        "variant": "v",
        "n": 8,
        "k": 8,
        "m": 1,
        "ok": True,
        "error": 1e-7,
    }
    cell |= {"us": 14.5, "us_q1": 14.5, "us_q3": 14.5, "speedup": 0.0145}
    cell |= {"gbs": 0.0456, "percent_read": 0.31, "gflops": 0.02, "percent_peak": 4.4}
    (summary,), (full,) = cell_tables([cell], pivoted=True), cell_tables([cell])
    assert summary.rows[0][1:6] == ["14.5", "0.0456", "0.3 %", "0.0200", "4 %"]
    assert "0.0145×" in full.rows[0] and percent(0.0) == "0 %" and percent(99.6) == "100 %"
