"""The engines of this machine: which of them run, and why the others do not.

Every text about an absent device comes from here; the command line, the doctor, the tests and the
benchmark print it. An op's own error about a tensor's device is in csrc/ops/checks.cpp. Importing
this module does not import torch.
"""

from __future__ import annotations

_KEYS = {"cpu": "CPU", "mps": "MPS", "cuda": "CUDA"}
DEVICES = tuple(_KEYS)


def engines() -> dict[str, str]:
    """{device: why the ops do not run on it}, "" where they do."""
    return {device: absence(device) for device in DEVICES}


def absence(device: str, ask_metal: bool = True) -> str:
    """Why the ops do not run on a device of DEVICES; "" where they do.

    ask_metal=False asks torch alone and not our engine: a Mac whose GPU the engine refuses (a
    virtual machine's) then counts as present.
    """
    import torch

    from . import _C

    if not torch._C._dispatch_has_kernel_for_dispatch_key("metalmm::linear", _KEYS[device]):
        return "not in this build"
    backend = {"mps": torch.backends.mps, "cuda": torch.cuda}.get(device)
    if backend is not None and not backend.is_available():
        return "built, but torch finds no such device"
    if device == "mps" and ask_metal:
        try:
            _C.mps_facts()
        except RuntimeError as error:
            return str(error)
    return ""


def check_device(device: str) -> None:
    """ValueError that says why: the device is none of DEVICES, or the ops do not run on it."""
    if device not in DEVICES:
        raise ValueError(f"device: {device}: no engine of this name; allowed: {', '.join(DEVICES)}")
    why = absence(device)
    if why:
        raise ValueError(f"device: {device}: {why}")
