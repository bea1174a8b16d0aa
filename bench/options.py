"""The command line: its commands, a row each, and their options, each declared once."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_metalmm.engines import DEVICES
from torch_metalmm.nn.activations import KINDS

from .devices import PROGRAM, Device
from .models import llamas, quality
from .peers.products import ENGINES
from .problem import DTYPES, NAMED
from .tables import Record


class Option(NamedTuple):
    """The arguments of argparse for an option, and its value where the command line has none."""

    help: str | None = None
    kind: Any = str  # the value's type; bool: a flag
    normal: Any = None
    quick: Any = None  # with --quick, where that is another
    choices: Any = None
    nargs: str | None = None
    positional: bool = False


# By name; "command.name" is one that means something else in that command.
OPTIONS = {
    "threads": Option(None, int, torch.get_num_threads()),
    "repetitions": Option("at least this many timed calls (20)", int, 20, 5),
    "formats": Option(
        "comma-separated, of torch_metalmm.formats.names(); all",
        normal="q4_0,q8_0,q4_k,q6_k,affine4_g64",
        quick="q4_0,q4_k",
    ),
    "json": Option("also write the records here, as JSON lines", Path),
    "markdown": Option("print tables in Markdown", bool),
    "quick": Option("small and short: does it run at all?", bool),
    "device": Option(f"{', '.join(DEVICES)}; default: mps on a Mac, else cpu"),
    "shapes": Option(f"NxK or of {', '.join(NAMED)}", normal="attn,up,down,head", quick="tiny"),
    "m": Option("rows of x, as 1,4,8-16", normal="1,4,8,16,128,512", quick="1,8,64"),
    "engines": Option(
        f"auto = all installed; or of {', '.join(ENGINES)}",
        normal="auto",
        quick="metalmm,linear_f32,linear_bf16,int4pack",
    ),
    "dtype": Option("of x, for torch_metalmm (cpu f32, else f16)", choices=DTYPES),
    "strategy": Option("force one of torch_metalmm's, as gemv, gemm, attention_tile"),
    "seconds": Option("time budget of a cell, beyond repetitions (1)", float, 1.0, 0.0),
    "heads": Option("HEADSxKV_HEADSxSIZE (32x8x128)", normal="32x8x128", quick="8x2x64"),
    "batch": Option("sequences, as 1,8 (1,8)", normal="1,8", quick="1,2"),
    "context": Option(
        "tokens before: slots that one query sees, as 1k,8k; of `tokens` 32 on a CPU, else 128",
        normal="32",
    ),
    "prefill": Option("queries of a prefill (512); 0: none", int, 512, 24),
    "filled": Option("slots before a prefill (0,8k)", normal="0,8k", quick="0,100"),
    "pages": Option("caches in pages, too", bool),
    "compile": Option("compiled flex attention, too", bool),
    "models": Option(f"of {', '.join(llamas.NAMES)}", quick="tiny"),
    "no-graph": Option("cuda: leave captured graphs out", bool),
    "no-fuse": Option("leave the models after fuse_ out", bool),
    "no-peers": Option("leave llama.cpp and MLX out", bool),
    "prompt": Option("tokens of the prefill (512)", int, 512, 48),
    "cache": Option("formats of a PackedCache, as f16,q8_0: models with such caches, too"),
    "activations": Option(
        "models that round their activations so, too", normal=(), choices=KINDS, nargs="+"
    ),
    "tp": Option("over so many processes with a device each, beside one (cuda: NCCL)", int),
    "new-tokens": Option("tokens decoded in a round (8)", int, 8, 4),
    "chip": Option("whose passes are counted on a CPU (m4-max)", normal="m4-max"),
    "overhead": Option("layers of tiny weights, on the CPU: microseconds a layer", bool),
    "families": Option("what a token costs in families that are more than a Llama", bool),
    "draft": Option("prompt lookup on tasks, beside decoding without", bool),
    "mtp": Option("drafts of models' own heads, small models that are trained first", bool),
    "train": Option("--mtp: each model for so many seconds (150)", float, 150.0, 2.0),
    "hidden": Option("--mtp: hidden size of the models that are trained (512)", int, 512, 256),
    "told": Option(
        "--mtp: random models of 4 B parameters instead, whose drafts are right by this share",
        float,
    ),
    "folder": Option("--mtp: where the trained models are kept", Path),
    "exact": Option("several rows beside one, fastest and with the bits of single rows", bool),
    "ops": Option("of families of models: calls of ops, before and after fuse_", bool),
    "imatrix": Option("packed by the importance of columns", bool),
    "turns": Option("instead: conversations of four clients, of so many turns", int),
    "model": Option("--turns: a file or folder; else SmolLM2", Path),
    "peer": Option("--turns: the port of another server of the model on this machine", int),
    "write": Option("bring the committed tables up to date", bool),
    "kernels": Option("names or patterns, as 'gemv_*_f16'", nargs="*", positional=True),
    "metal": Option("another folder with the files of metal/", Path),
    "rows": Option("what several rows of x cost vector kernels and tiles instead", bool),
    "ggml": Option("mul_mv.metal of ggml, in its own folders", Path),
    "mlx": Option("include folder of the wheel of MLX for macOS", Path),
    "neon.ggml": Option("beside ggml: its folder, of llama.cpp's sources", Path),
    "chips.tokens": Option("of whole tokens, not of products", bool),
    "chips.context": Option("with --tokens: by context alone, as 128,8k"),
    "chips.cache": Option("with --tokens: by cache alone, formats as f16,q8_0"),
    "file": Option("JSON lines of a run", Path, positional=True),
    "plot.file": Option("of one machine; the later ones win", Path, nargs="+", positional=True),
    "output": Option("the PNG", Path, Path("bandwidth.png")),
}
RUN = "threads repetitions formats json markdown quick "
ON_DEVICE = RUN + "device "


class Command(NamedTuple):
    """A row: where the command is, and the options. A command that measures is run(Run) of a
    module, others are print_(args), or the function that is named behind the module.

    own: values that the options have here, in place of Option.normal: on every device under "", on
    one under its name; with --quick under "quick". modes: {an option: (where what it asks for is,
    values of options there, values there with --quick)}.
    """

    place: str
    help: str
    options: str
    own: dict[str, Record] = {}
    modes: dict[str, tuple[str, Record, Record]] = {}


ON_GPU = {"formats": "q4_0,q4_k,affine4_g64", "context": "128"}
EXACT = {"formats": "q4_0,q4_k,q6_k,q8_0,affine4_g64", "m": "1-8"}
MEASURES = {
    "matmul": Command(
        "matmul",
        "cold matmul against peers and roofs",
        ON_DEVICE + "shapes m engines dtype strategy seconds exact",
        modes={
            "exact": ("matmul", EXACT | {"shapes": "14336x4096"}, EXACT | {"m": "1,2"}),
        },
    ),
    "attention": Command(
        "attention",
        "the op on caches, beside torch's SDPA",
        ON_DEVICE + "heads batch context prefill filled pages dtype strategy compile seconds",
        {
            "": {"context": "1k,8k,32k,128k", "formats": "f16,q8_0,q4_0"},
            "cpu": {"formats": "f32,f16,q8_0,q4_0", "repetitions": 10},
            "quick": {"context": "70,300", "formats": "f32,q8_0"},
        },
    ),
    "tokens": Command(
        "models.tokens",
        "what a token costs, by part",
        ON_DEVICE + "models no-graph no-fuse no-peers prompt context cache activations tp "
        "new-tokens chip overhead families draft ops write mtp "
        "train folder told hidden",
        {
            "cpu": {"formats": "q4_0,q4_k,q6_k,q8_0", "models": "168m,smollm2"},
            "cuda": ON_GPU | {"models": "8b,1b"},
            "mps": ON_GPU | {"models": "1b,smollm2"},
        },
        {
            "overhead": ("models.overhead", {}, {}),
            "families": (
                "models.family_times",
                {"formats": "q4_0", "repetitions": 3, "models": ""},
                {},
            ),
            "draft": (
                "models.drafts",
                {"repetitions": 3, "new_tokens": 400},
                {"repetitions": 1, "new_tokens": 24},
            ),
            "mtp": (
                "models.drafts:run_heads",
                {"formats": "q4_0,q8_0", "repetitions": 1, "new_tokens": 300},
                {"new_tokens": 24},
            ),
            "ops": ("models.families", {}, {}),
            "tp": ("models.ranks", {}, {}),
        },
    ),
    "quality": Command(
        "models.quality",
        "what packing costs and saves, on real models",
        RUN + "activations imatrix",
        {"": {"formats": quality.FORMATS}},
    ),
    "cache": Command(
        "models.quality:run_caches",
        "quality of caches by format",
        RUN,
        {"": {"formats": quality.CACHES}},
    ),
    "serve": Command(
        "models.served",
        "HTTP beside generate(), and four clients at once",
        RUN + "turns model peer",
        modes={"turns": ("models.served:run_turns", {"repetitions": 5}, {"repetitions": 1})},
    ),
    "roof": Command("roofs", "DRAM read and f32 multiply-add, all candidates", ON_DEVICE),
}
PRINTS = {
    "report": Command("report", "print the tables of a JSON file", "file markdown"),
    "plot": Command("plots", "draw GB/s by shape of JSON files", "file output"),
    "plot-formats": Command(
        "plots:print_formats", "table and plots of docs/guide/formats.md, from results.md", ""
    ),
    "cells": Command("shaders.cells", "issue cycles per weight of gemv", "write"),
    "chips": Command(
        "shaders.chips",
        "what the chip model predicts, beside what others measured",
        "tokens context cache",
    ),
    "agx": Command(
        "shaders.agx",
        "kernels as code of M1 and M2, by Mesa's compiler (make agx), ours and peers'",
        "kernels metal rows ggml mlx",
    ),
    "neon": Command(
        "shaders.neon", "instructions of products with one row of x on a Mac's CPU, by qemu", "ggml"
    ),
}
COMMANDS = MEASURES | PRINTS
# Commands that read or write pages, shaders and tests beside the package.
OF_A_CLONE = ("agx", "cache", "cells", "chips", "neon", "plot-formats")


def options_of(command: str) -> dict[str, Option]:
    names = COMMANDS[command].options.split()
    return {name: OPTIONS.get(f"{command}.{name}", OPTIONS.get(name)) for name in names}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=PROGRAM, description="What torch_metalmm costs.")
    sub = p.add_subparsers(dest="command", required=True)
    for command, row in COMMANDS.items():
        one = sub.add_parser(command, help=row.help)
        for name, option in options_of(command).items():
            told: Record = {"help": option.help}
            if option.kind is bool:
                told["action"] = "store_true"
            else:
                told |= {"type": option.kind, "choices": option.choices, "nargs": option.nargs}
            one.add_argument(name if option.positional else f"--{name}", **told)
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments, with values for all options. ValueError: threads or repetitions below 1."""
    named = argv and (argv[0] in COMMANDS or argv[0] in ("-h", "--help"))
    args = parser().parse_args(argv if named else ["matmul", *argv])
    row, options, quick = COMMANDS[args.command], options_of(args.command), False
    if args.command in MEASURES:
        quick = args.quick
        if getattr(args, "device", None) is None:
            # The other commands take no --device: they measure the CPU.
            args.device = Device.default() if "device" in options else "cpu"
    values: Record = {}
    for name, option in options.items():
        values[name] = option.quick if quick and option.quick is not None else option.normal
    for key in ("quick",) if quick else ("", getattr(args, "device", "")):
        values |= row.own.get(key, {})
    for option, (_, own, own_quick) in row.modes.items():
        if getattr(args, option):
            values |= own_quick if quick else own
    # Options of rows and modes are named as attributes, and come last.
    for name, value in {n.replace("-", "_"): v for n, v in values.items()}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.command in MEASURES and min(args.threads, args.repetitions) < 1:
        raise ValueError("--threads and --repetitions must be positive")
    return args


def work_of(args: argparse.Namespace) -> Any:
    """The function that does what the arguments ask for."""
    row = COMMANDS[args.command]
    place = next((m[0] for option, m in row.modes.items() if getattr(args, option)), row.place)
    module, _, name = place.partition(":")
    name = name or ("run" if args.command in MEASURES else "print_")
    return getattr(import_module(f".{module}", __package__), name)
