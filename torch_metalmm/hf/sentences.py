"""sentence-transformers casts modules to the dtype of a model's first parameter.

With packed embeddings the first dtype would be uint8, which nn.Module.to refuses. So the models of
sentence-transformers give their float parameters first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sentence_transformers
from torch import nn

try:
    from sentence_transformers.sentence_transformer import modules as models
except ImportError:  # before version 6
    from sentence_transformers import models


def _floats_first(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    return iter(
        sorted(nn.Module.parameters(self, recurse), key=lambda p: not p.is_floating_point())
    )


for _owner, _name in (
    (sentence_transformers, "SentenceTransformer"),
    (sentence_transformers, "SparseEncoder"),
    (sentence_transformers, "CrossEncoder"),
    (models, "Transformer"),
):
    _kind: Any = getattr(_owner, _name, None)  # SparseEncoder is from version 5 on
    if isinstance(_kind, type) and issubclass(_kind, nn.Module):
        _kind.parameters = _floats_first  # type: ignore[method-assign]
