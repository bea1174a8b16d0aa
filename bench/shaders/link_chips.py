"""`python -m bench chips --links`: tokens of models over several Macs, predicted.

No figure here was measured: the predictions are torch_metalmm.tools.link_time's.
"""

from __future__ import annotations

from torch_metalmm import formats
from torch_metalmm.msl.build import ROOT
from torch_metalmm.tools.link_time import LINKS, rank_time
from torch_metalmm.tools.token_time import MODELS, token_time

from ..tables import Table, digits, to_markdown

PAGE = ROOT / "docs" / "parallel.md"
COMMAND = "chips --links"
FORMAT = "affine4_g64"
SHOWN = ("Llama 3.3 70B", "Llama 3.1 8B")
CHIPS = ("m4", "m4-pro", "m4-max", "m3-ultra")
RANKS = (2, 4)


def weights_gb(model: str) -> float:
    """All products' weights, each once."""
    row = formats.get(FORMAT).row_bytes
    return sum(n * row(k) * times for n, k, times in MODELS[model].products(True)) / 1e9


def rates_table() -> Table:
    ways = [f"{ranks} machines, {link}" for ranks in RANKS for link in LINKS]
    table = Table(f"Predicted tokens/s, fused, {FORMAT}, x f16", ["model, chip", "one", *ways])
    for model in SHOWN:
        for chip in CHIPS:
            times = [token_time(model, FORMAT, chip).total]
            times += [
                rank_time(model, FORMAT, chip, ranks, link).total
                for ranks in RANKS
                for link in LINKS
            ]
            table.rows.append([f"{model}, {chip}", *(digits(1e6 / us) for us in times)])
    return table


def apart_table() -> Table:
    """Where the milliseconds of two machines go, and what each sends."""
    columns = ["model, link", "GB each", "host and GPU", "waits for the GPU", "latency", "bytes"]
    columns += ["ms", "collectives", "MB sent"]
    table = Table(f"A token on two m4-pro, {FORMAT}: ms", columns)
    for model in SHOWN:
        for link in LINKS:
            t = rank_time(model, FORMAT, "m4-pro", 2, link)
            parts = (t.compute, t.waiting, t.latency, t.transfer, t.total)
            row = [f"{model}, {link}", digits(weights_gb(model) / 2)]
            row += [digits(us / 1e3) for us in parts]
            table.rows.append([*row, str(t.collectives), digits(t.sent_bytes / 1e6)])
    return table


def markdown() -> str:
    """Both tables, as the block of docs/parallel.md."""
    return "\n\n".join(to_markdown(t) for t in (rates_table(), apart_table()))
