"""Methods of PreTrainedModel that would take packed bytes for weights.

The methods are replaced in the class, because nothing tells a model that its layers are packed one
by one.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from ..models.shard.apply import whole_shape
from ..nn import QuantEmbedding, QuantExperts, QuantLinear
from ..nn.fused import MergedLinear
from ..nn.sharded import Sharded

_num_parameters = PreTrainedModel.num_parameters
_resize = PreTrainedModel.resize_token_embeddings


def _values(model: PreTrainedModel) -> dict[int, int]:
    """{id of a packed parameter, or of its bias: the number of weights in that of the model}."""
    values = {}
    for module in model.modules():
        if isinstance(module, QuantExperts):
            for stack in module.formats:
                n, k = module.shape(stack)
                values[id(module._parameters[stack])] = module.num_experts * n * k
        weight = module._parameters.get("weight")
        if weight is None or not isinstance(module, MergedLinear | QuantLinear | QuantEmbedding):
            continue
        layers = module.originals if isinstance(module, MergedLinear) else [module]
        shapes = [whole_shape(layer) for layer in layers]
        values[id(weight)] = sum(n * k for n, k in shapes)
        if (bias := module._parameters.get("bias")) is not None:
            values[id(bias)] = sum(n for n, _ in shapes)  # a rank has those of its rows
    return values


@functools.wraps(_num_parameters)
def num_parameters(
    self: PreTrainedModel, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """The count of the dense model: weights, not bytes. Packed weights are frozen."""
    total = _num_parameters(self, only_trainable, exclude_embeddings)
    values = {} if only_trainable else _values(self)
    left_out = {
        f"{name}.weight"
        for name, module in self.named_modules()
        if exclude_embeddings and isinstance(module, QuantEmbedding)
    }
    for name, parameter in self.named_parameters():
        if id(parameter) in values and name not in left_out:
            total += values[id(parameter)] - parameter.numel()
    return total


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


PreTrainedModel.num_parameters = num_parameters  # type: ignore[method-assign]
PreTrainedModel.resize_token_embeddings = resize_token_embeddings  # type: ignore[method-assign]
