"""The `metalmm` command: generate text, quantize a model, show what this machine can run.

Commands that only print (--version, --help, info) import no torch; each imports what it uses.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from .. import __version__
from ..engines import check_device
from . import info
from .arguments import OF_DEVICE, add_common, dtype_of, positive_int, start
from .bench import add_bench
from .chat.once import add_generate
from .chat.screen import harmless, one_line
from .chat.talk import add_chat
from .doctor.report import LIMIT, examine
from .imatrix import add_imatrix
from .serve.command import add_serve


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 for an error, 2 for wrong usage."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.exit(2, parser.format_help())
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: (
        f"metalmm: warning: {harmless(str(message))}\n"
    )
    try:
        args.run(args)
    except BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # RuntimeError, MemoryError: torch's and Python's words for a model that is too large.
    except (ValueError, OSError, ImportError, TypeError, RuntimeError, MemoryError) as error:
        print(f"metalmm: error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = usual
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metalmm", description="Run and make models whose weights stay packed."
    )
    parser.add_argument("--version", action="version", version=f"metalmm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    add_generate(commands.add_parser("generate", help="answer a prompt"))
    add_chat(commands.add_parser("chat", help="talk with a model"))
    add_serve(commands.add_parser("serve", help="answer over HTTP, as OpenAI's API does"))
    _add_quantize(commands.add_parser("quantize", help="pack a model's weights into a folder"))
    _add_explain(commands.add_parser("explain", help="what the Metal engine would run, and why"))
    _add_doctor(commands.add_parser("doctor", help="check every engine that runs here"))
    add_bench(commands.add_parser("bench", help="measure this machine, for a record to send"))
    measure = commands.add_parser("imatrix", help="measure which columns of weights matter")
    add_imatrix(measure)
    add_common(measure)
    measure.set_defaults(run=_imatrix)
    about = commands.add_parser("info", help="formats and versions")
    about.set_defaults(run=_info)
    return parser


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Pack the weights of a Hugging Face model folder, or of a GGUF file, and write them as a "
        "GGUF file, or as safetensors that `metalmm generate --model FOLDER` and load_packed read."
    )
    parser.add_argument(
        "source", help="a model folder, a .gguf file or part, or a model's name on the hub"
    )
    parser.add_argument(
        "--format",
        help="or a mixture, as Q4_K_M: for every layer no pattern names; a GGUF, GPTQ, AWQ, ... "
        "keeps its own by default",
    )
    parser.add_argument(
        "--pattern",
        action="append",
        default=[],
        metavar="NAME=FORMAT",
        help="a layer name, a glob (*.mlp.*) or re:REGEX, and its format; none leaves it dense. "
        "May be repeated; the first that matches counts",
    )
    parser.add_argument(
        "--imatrix",
        type=Path,
        metavar="FILE",
        help="of `metalmm imatrix` or llama-imatrix: how much errors in each column cost",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="PATH", help="a folder, or a name.gguf"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the packed model, or the file, that is there"
    )
    add_common(parser)
    parser.set_defaults(run=_quantize)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the plan of a matrix product on a chip, in words and bytes."
    sizes = "of y[M, N] = x[M, K] W[N, K]^T, for instance 1x4096x4096"
    parser.add_argument("--shape", required=True, metavar="MxNxK", help=sizes)
    parser.add_argument("--format", required=True, help="of W; see `metalmm info`")
    parser.add_argument("--chip", required=True, help="for instance m1, m3-pro, m4-max")
    parser.add_argument("--dtype", default="f16", help="of x and y: f16 (default), bf16 or f32")
    parser.add_argument("--strategy", help="force it instead of choosing")
    parser.add_argument("--norm", action="store_true", help="x is normalised: norm_linear")
    parser.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> None:
    from .explain import explain

    print(explain(args.shape, args.format, args.chip, args.dtype, args.strategy, args.norm))


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print versions and devices, then compare what each engine computes with the specification:"
        " the text to send with a report. Exit status 1 if a check fails."
    )
    parser.add_argument("--device", help=f"{OF_DEVICE}; default: all that run here")
    parser.add_argument("--check", metavar="NAME", help="this one alone, in this process")
    limit = f"that a check may take; default {LIMIT:g}"
    parser.add_argument("--limit", type=positive_int, metavar="SECONDS", help=limit)
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    if args.check is not None:
        from .doctor.child import run_alone

        check_device(args.device or "cpu")
        outcome = run_alone(args.device or "cpu", args.check)
        print(f"{args.check:36} {outcome.text}")
        failed = int(not outcome.ok)
    else:
        failed = 0
        for result in examine(args.device, args.limit or LIMIT):
            print(result.text, end=result.end, flush=True)
            failed += not result.ok
    if failed:
        raise ValueError(f"{failed} checks failed" if failed > 1 else "1 check failed")


def _quantize(args: argparse.Namespace) -> None:
    from ..files.gguf.split import is_gguf
    from ..files.hub import fetch
    from ..files.mlx.load import is_mlx
    from ..files.quantized import is_quantized
    from ..models.quantize import quantize_
    from .generate import load_model
    from .packing import importance_of, load_dense, to_file, to_folder

    spec = _spec(args.format, args.pattern)

    def is_packed_already(source: Path) -> bool:
        """ValueError: it is not, and no format is given."""
        is_packed = is_gguf(source) or is_quantized(source)
        if not spec and not is_packed:
            raise ValueError("give --format, --pattern or both")
        return is_packed

    if not spec and args.imatrix is not None:
        raise ValueError("--imatrix: give --format, --pattern or both beside it")
    start(args)  # an error of the machine comes before weights are fetched
    args.source = fetch(args.source, is_packed_already)
    keeps_formats = is_packed_already(args.source)
    if args.output.exists() and args.source.exists() and args.output.samefile(args.source):
        raise ValueError(f"--output is the source {args.source}")

    def load() -> tuple[Any, Any]:
        of_kind = load_model if keeps_formats or is_mlx(args.source) else load_dense
        return of_kind(args.source, args.device, dtype_of(args.dtype))

    def pack(model: Any) -> Any:
        importance = importance_of(args.imatrix, model, args.source)
        return quantize_(model, spec, importance=importance) if spec else model

    if args.output.suffix == ".gguf":
        to_file(args.source, args.output, args.force, spec, load, pack, args.imatrix)
        size = args.output.stat().st_size
    else:
        to_folder(args.source, args.output, args.force, load, pack)
        size = sum(f.stat().st_size for f in args.output.glob("*.safetensors"))
    print(f"{args.output}: {size / 1e6:.1f} MB", file=sys.stderr)


def _imatrix(args: argparse.Namespace) -> None:
    start(args)
    from .imatrix import run

    run(args, dtype_of(args.dtype))


def _spec(format: str | None, patterns: list[str]) -> dict[str, str | None]:
    """{pattern: format} of the two options, checked. ValueError: malformed or unknown."""
    from ..models.mixtures import resolve

    spec: dict[str, str | None] = {}
    for item in patterns:
        pattern, equals, name = item.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"--pattern {item!r} is not NAME=FORMAT")
        spec[pattern] = None if name.lower() == "none" else resolve(name)
    if format is not None:
        spec["*"] = resolve(format)
    return spec


def _info(args: argparse.Namespace) -> None:
    for line in info.lines():  # the first do not need the core, which may not load
        print(line)


if __name__ == "__main__":
    sys.exit(main())
