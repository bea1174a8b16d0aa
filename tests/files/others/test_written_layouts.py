"""Layouts without a package that decodes them on a CPU, by words and values written out here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_metalmm.files.methods import Method, method_of
from torch_metalmm.formats import get

N, K = 8, 32


def decoded(config: dict[str, object], tensors: dict[str, Tensor]) -> Tensor:
    method = method_of(config)
    assert isinstance(method, Method)
    rows = method.pack(tensors, N, K)
    return get(rows.format).dequantize(rows.weight, K)


@pytest.mark.parametrize(("layout", "stored_less"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_and_its_second_version(layout: str, stored_less: int) -> None:
    """Column n of qweight has codes k = 0, 1, 2, ... from the lowest bits on; a row of qzeros has
    those of n. w = scale (q - zero); version 1 stores zero - 1."""
    ascending = 0x76543210
    tensors = {
        "qweight": torch.full((K // 8, N), ascending, dtype=torch.int32),
        "qzeros": torch.tensor([[ascending]], dtype=torch.int32),
        "scales": torch.tensor([[0.5, 1, 2, 4, 0.5, 1, 2, 4]], dtype=torch.float16),
    }
    w = decoded(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": layout}, tensors
    )
    assert w[0, :9].tolist() == [0.5 * (q - stored_less) for q in (0, 1, 2, 3, 4, 5, 6, 7, 0)]
    assert w[3, :9].tolist() == [4.0 * (q - 3 - stored_less) for q in (0, 1, 2, 3, 4, 5, 6, 7, 0)]
    assert w[6, 31].item() == 2.0 * (7 - 6 - stored_less)


def test_int4_tensor_of_torchao() -> None:
    """A byte has two signed nibbles, the even column's low; w = scale q + zero_point."""
    qdata = torch.zeros(N, K // 2, dtype=torch.uint8)
    qdata[0, :4] = torch.tensor([0x21, 0x7F, 0xF8, 0x80])
    qdata[5, 15] = 0x9E
    tensors = {
        "_weight_qdata": qdata,
        "_weight_scale": torch.tensor([[2.0, 1, 1, 1, 1, 0.25, 1, 1]], dtype=torch.bfloat16),
        "_weight_zero_point": torch.tensor([[3.0, 0, 0, 0, 0, -1, 0, 7]], dtype=torch.bfloat16),
    }
    w = decoded({"quant_method": "torchao", "quant_type": {}}, tensors)
    assert w[0, :9].tolist() == [2 * q + 3 for q in (1, 2, -1, 7, -8, -1, 0, -8, 0)]
    assert w[5, 30:].tolist() == [0.25 * -2 - 1, 0.25 * -7 - 1]
    assert w[7].tolist() == [7.0] * K
