"""Arguments that several commands take, and what is done with them."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from ..engines import DEVICES, check_device
from ..extras import HF, require, uncollected

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "float16", "bfloat16")
OF_DEVICE = ", ".join(DEVICES)


def add_common(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of activations and unpacked weights; default the model's, on mps 16 bits",
    )
    parser.add_argument("--device", default="cpu", help=f"{OF_DEVICE}; default: cpu")
    parser.add_argument("-t", "--threads", type=positive_int, metavar="N", help="CPU threads")


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def not_negative(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not from 0 to 1")
    return value


def start(args: argparse.Namespace, *packages: str) -> None:
    """The settings of add_common, and the device and the libraries that the command needs."""
    check_device(args.device)
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    require("this command", "gguf", *HF, *packages)
    # transformers imports an installed torchao, which warns of its CUDA libraries and enums.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with uncollected():
        import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def dtype_of(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, name)
