"""The command line of the benchmark: its commands, their options and defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from torch_metalmm.engines import DEVICES
from torch_metalmm.nn.activations import KINDS

from . import shapes
from .devices import Device
from .engines import ENGINES
from .machine import PROGRAM
from .models import cache_cost, llamas, quality
from .ops import matrix_ops
from .problem import DTYPES

Record = dict[str, Any]
# {command: its module}; the first are those that measure.
MEASURES = {
    "matmul": "ops.matmul",
    "matrix-ops": "ops.matrix_ops",
    "op-overhead": "ops.overhead",
    "norm": "ops.norm",
    "experts": "ops.experts",
    "attention": "ops.attention",
    "tokens": "models.tokens",
    "quality": "models.quality",
    "cache": "models.cache_cost",
    "serve": "models.served",
    "roof": "roofs.roof",
}
PLACES = MEASURES | {
    "report": "report.report",
    "plot": "report.plots",
    "plot-formats": "report.format_plots",
    "cells": "shaders.cells",
    "chips": "shaders.token_chips",
    "registers": "shaders.registers",
    "agx": "agx.kernels",
    "tiles": "shaders.tiles",
}
# Of commands with one of these options.
OTHER_PLACES = {
    ("tokens", "overhead"): "models.overhead",
    ("tokens", "ops"): "models.families",
    ("tokens", "tp"): "models.ranks",
    ("tokens", "cache"): "models.contexts",
    ("quality", "imatrix"): "models.weighed",
}
COMMANDS = (*PLACES,)
# What reads or writes pages, shaders and tests beside the package.
OF_A_CLONE = ("agx", "cells", "chips", "registers", "tiles", "plot-formats")
QUICK: Record = {
    "shapes": "tiny",
    "m": "1,8,64",
    "formats": "q4_0,q4_k",
    "engines": "metalmm,linear_f32,linear_bf16,int4pack",
    "repetitions": 5,
    "seconds": 0.0,
    "prompt": 48,
    "new_tokens": 4,
    "context": "32",
    "models": "tiny",
}
NORMAL: Record = {
    "shapes": ",".join(shapes.DEFAULT_SHAPES),
    "m": ",".join(map(str, shapes.DEFAULT_M)),
    "formats": ",".join(shapes.DEFAULT_FORMATS),
    "engines": "auto",
    "repetitions": 20,
    "seconds": 1.0,
    "prompt": 512,
    "new_tokens": 8,
    "heads": "32x8x128",
    "batch": "1,8",
    "prefill": 512,
    "filled": "0,8k",
    "context": "32",
    "experts": "128x8x768x2048",
    "tokens": "1,4,512",
}
GPU_FORMATS = "q4_0,q4_k,affine4_g64"
NORM_SHAPES = "kv,attn,up-8b,down-8b,head-8b"
ATTENTION = {"context": "1k,8k,32k,128k", "formats": "f16,q8_0,q4_0"}
QUICK_ATTENTION = {"context": "70,300", "formats": "f32,q8_0", "heads": "8x2x64", "prefill": 24}
QUICK_ATTENTION |= {"filled": "0,100", "batch": "1,2"}
QUICK_CACHE = {"context": "24,40"}
QUICK_EXPERTS = {"experts": "8x2x64x256", "tokens": "1,16"}
CACHE = {"context": "128,2k,8k", "formats": "q4_0", "repetitions": 10}
OWN: dict[str, dict[str, Record]] = {  # of a command, on a device
    "attention": {
        "cpu": ATTENTION | {"formats": "f32,f16,q8_0,q4_0", "repetitions": 10},
        "cuda": ATTENTION,
        "mps": ATTENTION,
    },
    "tokens": {
        "cpu": {"formats": "q4_0,q4_k,q6_k,q8_0", "models": "168m,smollm2"},
        "cuda": {"formats": GPU_FORMATS, "models": "8b,1b", "context": "128"},
        "mps": {"formats": GPU_FORMATS, "models": "1b,smollm2", "context": "128"},
    },
    "quality": {"cpu": {"formats": quality.FORMATS}},
    "cache": dict.fromkeys(DEVICES, {"formats": cache_cost.FORMATS}),
    "norm": dict.fromkeys(DEVICES, {"m": "1", "shapes": NORM_SHAPES, "formats": "one"}),
}


def common_options() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--repetitions", type=int, help="at least this many timed calls (20)")
    p.add_argument("--formats", help="comma-separated, of torch_metalmm.formats.names(); norm: all")
    p.add_argument("--json", type=Path, help="also write the records here, as JSON lines")
    p.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    p.add_argument("--quick", action="store_true", help="small and short: does it run at all?")
    return p


def device_option() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument("--device", help=f"{', '.join(DEVICES)}; default: mps on a Mac, else cpu")
    return p


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=PROGRAM, description="What torch_metalmm costs.")
    sub = p.add_subparsers(dest="command", required=True)
    common = [common_options()]
    on_device = [*common, device_option()]
    mm = sub.add_parser("matmul", parents=on_device, help="cold matmul against peers and roofs")
    mm.add_argument("--shapes", help=f"NxK or of {', '.join(shapes.NAMED)}")
    mm.add_argument("--m", help="rows of x, as 1,4,8-16")
    mm.add_argument("--engines", help=f"auto = all installed; or of {', '.join(ENGINES)}")
    mm.add_argument("--dtype", choices=DTYPES, help="of x, for torch_metalmm (cpu f32, else f16)")
    mm.add_argument("--strategy", help="force one of torch_metalmm's: gemv, gemv_batched, gemm")
    mm.add_argument("--seconds", type=float, help="time budget of a cell, beyond repetitions (1)")
    mm.add_argument(
        "--sweep-m",
        action="store_true",
        help="time against M of the first shape, by metalmm unless --engines",
    )
    one = sub.add_parser("matrix-ops", parents=on_device, help="one operation: result, check, time")
    one.add_argument("operation", choices=matrix_ops.OPERATIONS)
    one.add_argument("sizes", type=int, nargs="+", help="N; gemv: N K; gemm: M N K")
    one.add_argument("--format", default="q4_0", help="of W, for gemv and gemm (q4_0)")
    one.add_argument("--dtype", choices=DTYPES, help="of x (cpu f32, else f16)")
    sub.add_parser("serve", parents=common, help="HTTP beside generate(), and four clients at once")
    sub.add_parser("op-overhead", parents=common, help="microseconds a call costs by itself")
    norm = sub.add_parser(
        "norm", parents=on_device, help="norm_linear, a residual: against two ops"
    )
    norm.add_argument("--shapes", help=f"NxK or of {', '.join(shapes.NAMED)}")
    norm.add_argument("--m", help="rows of x, as 1,4,8-16 (1)")
    norm.add_argument("--dtype", choices=DTYPES, help="of x (cpu f32, else f16)")
    moe = sub.add_parser(
        "experts", parents=on_device, help="products of experts that tokens choose"
    )
    moe.add_argument("--experts", help="EXPERTSxCHOSENxNxK, gate and up N by K (128x8x768x2048)")
    moe.add_argument("--tokens", help="rows of x, as 1,4,512")
    moe.add_argument("--dtype", choices=DTYPES, help="of x (cpu f32, else f16)")
    attention_options(
        sub.add_parser("attention", parents=on_device, help="the op on caches, beside torch's SDPA")
    )
    tokens_options(sub.add_parser("tokens", parents=on_device, help="what a token costs, by part"))
    quality_of = sub.add_parser(
        "quality", parents=common, help="what packing costs and saves, on real models"
    )
    quality_of.add_argument(
        "--activations", choices=KINDS, help="beside each format: with rounded activations, too"
    )
    quality_of.add_argument(
        "--imatrix", action="store_true", help="instead: with an importance matrix and without"
    )
    kept = sub.add_parser("cache", parents=on_device, help="bytes and quality of caches by format")
    kept.add_argument("--parts", default="bytes,quality", help=",".join(cache_cost.PARTS))
    sub.add_parser("roof", parents=on_device, help="DRAM read and f32 multiply-add, all candidates")
    cell = sub.add_parser("cells", help="kernels, lines of Metal, issue cycles per weight of gemv")
    cell.add_argument("--write", action="store_true", help="bring the committed figures up to date")
    sub.add_parser("registers", help="registers and spills of every kernel, by ptxas")
    agx = sub.add_parser("agx", help="kernels as code of M1 and M2, by Mesa's compiler (make agx)")
    agx.add_argument("kernels", nargs="*", help="names or patterns, as 'gemv_*_f16'")
    agx.add_argument("--metal", type=Path, help="another folder with the files of metal/")
    agx.add_argument("--write", action="store_true", help="the table of results.md")
    tile = sub.add_parser("tiles", help="issue cycles per product of matrices, ours and peers'")
    tile.add_argument("--ggml", type=Path, help="mul_mm.metal of ggml, in its own folders")
    tile.add_argument("--mlx", type=Path, help="include folder of the wheel of MLX for macOS")
    tile.add_argument("--write", action="store_true", help="into results.md, with both peers")
    chip = sub.add_parser("chips", help="what the chip model predicts, beside what others measured")
    chip.add_argument("--tokens", action="store_true", help="of whole tokens, not of products")
    chip.add_argument("--context", help="with --tokens: by context alone, as 128,8k")
    chip.add_argument("--cache", help="with --tokens: by cache alone, formats as f16,q8_0")
    rep = sub.add_parser("report", help="print the tables of a JSON file")
    rep.add_argument("file", type=Path)
    rep.add_argument("--markdown", action="store_true")
    rep.add_argument("--baseline", type=Path, help="JSON of another run to compare with")
    plot = sub.add_parser("plot", help="draw the PNG plots of JSON files")
    plot.add_argument("file", type=Path, nargs="+", help="of one machine; the later ones win")
    plot.add_argument("--output", type=Path, default=Path("."), help="folder")
    plot.add_argument("--prefix", default="", help="of the file names, as h200-")
    sub.add_parser("plot-formats", help="table and plots of docs/guide/formats.md, from results.md")
    return p


def attention_options(att: argparse.ArgumentParser) -> None:
    att.add_argument("--heads", help="HEADSxKV_HEADSxSIZE (32x8x128)")
    att.add_argument("--batch", help="sequences, as 1,8 (1,8)")
    att.add_argument("--context", help="slots that one query sees (1k,8k,32k,128k)")
    att.add_argument("--prefill", type=int, help="queries of a prefill (512); 0: none")
    att.add_argument("--filled", help="slots before a prefill (0,8k)")
    att.add_argument("--dtype", choices=DTYPES, help="of q (cpu f32, else f16)")
    att.add_argument("--strategy", help="force one of the op's, where it has several")
    att.add_argument("--compile", action="store_true", help="flex attention, too")
    att.add_argument("--seconds", type=float, help="time budget of a cell, beyond repetitions (1)")


def tokens_options(tok: argparse.ArgumentParser) -> None:
    tok.add_argument("--models", help=f"of {', '.join(llamas.NAMES)}")
    tok.add_argument("--compile", action="store_true", help="the compiled models, too")
    tok.add_argument("--no-graph", action="store_true", help="cuda: leave captured graphs out")
    tok.add_argument("--no-fuse", action="store_true", help="leave the models after fuse_ out")
    tok.add_argument("--no-peers", action="store_true", help="leave llama.cpp and MLX out")
    tok.add_argument("--prompt", type=int, help="tokens of the prefill (512)")
    tok.add_argument(
        "--context",
        help="tokens before the decoded ones (cpu 32, else 128); with --cache several (128,2k,8k)",
    )
    tok.add_argument(
        "--cache",
        help="formats of a PackedCache, as f16,q8_0: what a token costs by context and by cache",
    )
    tok.add_argument(
        "--activations", choices=KINDS, help="cpu: fused models that round their activations, too"
    )
    tok.add_argument(
        "--tp", type=int, help="over so many processes with a device each, beside one (cuda: NCCL)"
    )
    tok.add_argument(
        "--one-device",
        action="store_true",
        help="--tp where there is one GPU: logits of processes that share it, times of one's part",
    )
    tok.add_argument("--new-tokens", type=int, help="tokens decoded in a round (8)")
    tok.add_argument("--budget", type=float, default=3600, help="compile for so many seconds")
    tok.add_argument("--chip", default="m4-max", help="whose passes are counted on a CPU (m4-max)")
    tok.add_argument(
        "--overhead",
        action="store_true",
        help="layers of tiny weights, on the CPU: microseconds a layer, and beside the layers",
    )
    tok.add_argument(
        "--ops",
        action="store_true",
        help="of families of models: calls of ops, before and after fuse_",
    )
    tok.add_argument("--write", action="store_true", help="with --ops: into docs/guide/fuse.md")


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments, defaults filled in by --quick."""
    named = argv and (argv[0] in COMMANDS or argv[0] in ("-h", "--help"))
    args = parser().parse_args(argv if named else ["matmul", *argv])
    if getattr(args, "sweep_m", False):
        args.engines = args.engines or "metalmm"
        args.m = args.m or ",".join(map(str, shapes.SWEEP_M))
    if args.command not in MEASURES:
        return args
    quick = args.quick
    if getattr(args, "device", None) is None:
        # The other commands take no --device: they measure the CPU.
        args.device = Device.default() if "device" in vars(args) else "cpu"
    own = {} if quick else OWN.get(args.command, {}).get(getattr(args, "device", ""), {})
    if quick and args.command == "attention":
        own = QUICK_ATTENTION
    if quick and args.command == "experts":
        own = QUICK_EXPERTS
    if getattr(args, "cache", None):
        own = own | (QUICK_CACHE if quick else CACHE)
    for name, value in {**(QUICK if quick else NORMAL), **own}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.threads < 1 or args.repetitions < 1:
        raise ValueError("--threads and --repetitions must be positive")
    if args.command == "tokens":
        if args.tp is not None and (args.tp < 2 or args.cache or args.overhead):
            raise ValueError(f"--tp {args.tp}: at least 2, and not with --cache or --overhead")
        if args.one_device and args.tp is None:
            raise ValueError("--one-device goes with --tp")
        if args.write and not args.ops:
            raise ValueError("--write goes with --ops")
        of_contexts(args)
    return args


def place_of(args: argparse.Namespace) -> str:
    """The module that does what the arguments ask for."""
    for (command, option), place in OTHER_PLACES.items():
        if args.command == command and getattr(args, option):
            return place
    return PLACES[args.command]


def of_contexts(args: argparse.Namespace) -> None:
    """--context as numbers: one, or with --cache several in `contexts`."""
    found = shapes.parse_ints(",".join(map(str, shapes.parse_counts(args.context))))
    if args.cache:
        args.cache, args.contexts = cache_cost.named(args.cache), found
    elif len(found) != 1:
        raise ValueError(f"--context {args.context}: several only with --cache")
    args.context = found[0]
