"""`python -m bench agx`: a row for each kernel, ours and other projects', or what several rows of x
cost."""

from __future__ import annotations

import argparse

from torch_metalmm.msl import spirv

from ..tables import to_markdown
from . import foreign, kernels, rows


def print_(args: argparse.Namespace) -> None:
    if args.rows:
        print(to_markdown(rows.table()))
        return
    names = kernels.named(args.kernels or kernels.SHOWN)
    found = kernels.measure(names, args.metal or spirv.METAL)
    found += [*(foreign.ggml(args.ggml) if args.ggml else ())]
    found += [*(foreign.mlx(args.mlx) if args.mlx else ())]
    print(to_markdown(kernels.table(found)))
