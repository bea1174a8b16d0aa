"""Methods of PreTrainedModel that would take packed bytes for weights.

The methods are replaced in the class, because nothing tells a model that its layers are packed one
by one.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from ..models.replace import weight_shape
from ..nn import QuantEmbedding, QuantExperts, QuantLinear
from ..nn.fused import MergedLinear

_num_parameters = PreTrainedModel.num_parameters
_resize = PreTrainedModel.resize_token_embeddings


def _values(model: PreTrainedModel) -> dict[int, int]:
    """{id of a packed parameter: the number of weights in it}."""
    values = {}
    for module in model.modules():
        if isinstance(module, QuantExperts):
            for stack in module.formats:
                n, k = module.shape(stack)
                values[id(module._parameters[stack])] = module.num_experts * n * k
        weight = module._parameters.get("weight")
        if weight is not None and isinstance(module, MergedLinear):
            values[id(weight)] = weight.shape[0] * module.in_features
        elif weight is not None and isinstance(module, QuantLinear | QuantEmbedding):
            n, k = weight_shape(module)
            values[id(weight)] = n * k
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
    """ValueError: the table or the output head is packed and has another number of rows."""
    head = self.get_output_embeddings()  # type: ignore[no-untyped-call]
    for layer in (self.get_input_embeddings(), head):
        if not isinstance(layer, QuantEmbedding | QuantLinear):
            continue
        rows = weight_shape(layer)[0]
        wanted, multiple = new_num_tokens or rows, pad_to_multiple_of or 1
        if -(-wanted // multiple) * multiple != rows:
            raise ValueError(
                f"resize_token_embeddings: the {type(layer).__name__} has {rows} rows packed in "
                f"{layer.format}, which cannot be resized (to {wanted}, in multiples of "
                f"{multiple}); resize the dense model and pack it then"
            )
    return _resize(self, new_num_tokens, pad_to_multiple_of, mean_resizing)


PreTrainedModel.num_parameters = num_parameters  # type: ignore[method-assign]
PreTrainedModel.resize_token_embeddings = resize_token_embeddings  # type: ignore[method-assign]
