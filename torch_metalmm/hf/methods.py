"""Methods of PreTrainedModel that take packed bytes for weights, or refuse quantized models.

The methods are replaced in the class, because nothing tells a model that its layers are packed one
by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from ..models.shard.apply import whole_shape
from ..nn import QuantEmbedding, QuantLinear
from ..nn.packed import PackedState
from ..nn.sharded import Sharded
from .num_parameters import of_weights

_resize = PreTrainedModel.resize_token_embeddings


@functools.wraps(_resize)
def resize_token_embeddings(
    self: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> Any:
    """ValueError: the table or the output head is packed or a rank's part, and has another number
    of rows."""
    table = self.get_input_embeddings()
    head = self.get_output_embeddings()  # type: ignore[no-untyped-call]
    for layer in (table, head):
        if not isinstance(layer, QuantEmbedding | QuantLinear):
            continue
        rows = whole_shape(layer)[0]
        wanted, multiple = new_num_tokens or rows, pad_to_multiple_of or 1
        if -(-wanted // multiple) * multiple != rows:
            raise ValueError(
                f"resize_token_embeddings: the {type(layer).__name__} has {rows} rows packed in "
                f"{layer.format}, which cannot be resized (to {wanted}, in multiples of "
                f"{multiple}); resize the dense model and pack it then"
            )
    if isinstance(table, Sharded) or isinstance(head, Sharded):
        return table  # transformers would compare the rows of this rank
    return _resize(self, new_num_tokens, pad_to_multiple_of, mean_resizing)


def _cast(name: str) -> Callable[[PreTrainedModel], PreTrainedModel]:
    """half() or float(), which transformers refuses of every quantized model."""
    theirs = getattr(PreTrainedModel, name)

    @functools.wraps(theirs)
    def cast(self: PreTrainedModel, *args: Any) -> PreTrainedModel:
        method = getattr(nn.Module, name) if _is_packed(self) else theirs
        return method(self, *args)

    return cast


def double(self: PreTrainedModel) -> PreTrainedModel:
    """ValueError: the model has packed layers, which have no kernels of float64."""
    if _is_packed(self):
        raise ValueError(
            "double(): packed layers compute in float32, float16 or bfloat16; call dequantize() "
            "first"
        )
    return nn.Module.double(self)


def _is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedState) for module in model.modules())


PreTrainedModel.half = _cast("half")  # type: ignore[method-assign]
PreTrainedModel.float = _cast("float")  # type: ignore[method-assign]
PreTrainedModel.double = double  # type: ignore[assignment]
PreTrainedModel.num_parameters = of_weights(  # type: ignore[method-assign]
    PreTrainedModel.num_parameters
)
PreTrainedModel.resize_token_embeddings = resize_token_embeddings  # type: ignore[method-assign]
