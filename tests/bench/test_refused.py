"""Arguments of `python -m bench` that are refused in a line, before anything is measured."""

from __future__ import annotations

import pytest

from bench.__main__ import main
from bench.problem import parse_ints


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("attention --heads 8x3x64", "HEADS must be a multiple of KV_HEADS"),
        ("attention --heads 8x64", "must be HEADSxKV_HEADSxSIZE"),
        ("attention --formats q4_k", "is not a multiple of its block, 256"),
        ("attention --context 8m", "'8m'; must be whole numbers"),
        ("attention --context 0", "'0'; must be whole numbers of at least 1"),
        ("attention --batch 1,8-4", "'8-4'; must be whole numbers"),
        ("chips --cache q8_0", "only with --tokens"),
        ("attention --heads 8x0x64", "must be HEADSxKV_HEADSxSIZE"),
        ("attention --heads axbxc", "must be HEADSxKV_HEADSxSIZE"),
        ("tokens --cache q9", "format"),
        ("tokens --cache f16 --context 0", "whole numbers of at least 1"),
        ("tokens --tp 1", "--tp"),
        ("tokens --tp 2 --models smollm2", "--tp"),
        ("tokens --write", "--ops"),
    ],
)
def test_what_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_a_list_of_numbers() -> None:
    assert parse_ints("0,128,8k,8192,2-4", least=0) == (0, 128, 8192, 2, 3, 4)
