"""The prediction of a token on several machines: its parts, and the committed tables."""

from __future__ import annotations

import pytest

from bench.__main__ import main
from bench.shaders import link_chips
from bench.tables import read_block
from torch_metalmm.tools.link_time import LINKS, part, rank_time
from torch_metalmm.tools.token_time import MODELS, WAIT_US, token_time

MODEL, FORMAT = "Llama 3.3 70B", "affine4_g64"


def test_a_part_of_a_model() -> None:
    """Parts have the whole's products, heads of keys included; a rank has one head at least."""
    whole = MODELS[MODEL]
    values = {r: sum(n * k * t for n, k, t in part(whole, r).products(True)) for r in (1, 2, 4)}
    assert values[1] == 2 * values[2] == 4 * values[4]
    assert part(MODELS[MODEL], 16).kv_heads == 1


def test_what_a_token_sends() -> None:
    """Two machines send half of each sum twice, of every branch and the embedding, and half of the
    logits."""
    t = rank_time(MODEL, FORMAT, "m4-pro", 2, "Thunderbolt, TCP")
    assert t.collectives == 2 * 80 + 2
    assert t.sent_bytes == (2 * 80 + 1) * 8192 * 2 + 128256
    assert t.waiting == t.collectives * WAIT_US
    assert t.latency == LINKS["Thunderbolt, TCP"].latency_us * ((2 * 80 + 1) * 2 + 1)
    four = rank_time(MODEL, FORMAT, "m4-pro", 4, "Thunderbolt, TCP")
    assert four.latency == LINKS["Thunderbolt, TCP"].latency_us * ((2 * 80 + 1) * 6 + 3)


def test_machines_share_the_products_alone() -> None:
    one = token_time(MODEL, FORMAT, "m4-pro")
    two = rank_time(MODEL, FORMAT, "m4-pro", 2, "Thunderbolt 5, RDMA")
    assert one.products / 2 < two.compute < one.products
    assert two.total == two.compute + two.waiting + two.latency + two.transfer


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks, link: 1"):
        rank_time(MODEL, FORMAT, "m4", 1, "Thunderbolt, TCP")
    with pytest.raises(ValueError, match="ranks, link: 2, 'USB'; from 2 on, of Thunderbolt, TCP"):
        rank_time(MODEL, FORMAT, "m4", 2, "USB")
    with pytest.raises(ValueError, match="model: unknown 'a'"):
        rank_time("a", FORMAT, "m4", 2, "Thunderbolt, TCP")


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips", "--links"]) == 0
    printed = capsys.readouterr().out
    assert printed == read_block(link_chips.PAGE, link_chips.COMMAND) + "\n"
