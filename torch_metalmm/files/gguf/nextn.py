"""The layer of a GGUF file that predicts the token after the next: a model of one layer, as MtpHead
has it, read and written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...formats import DTYPES
from ...models.mtp import OWN, MtpHead
from ...models.skeleton import put_dense, put_packed
from ...nn import QuantLinear
from ...nn.place import place
from .experts import check_format
from .file import GgufFile
from .load import model_of
from .split import open_gguf

_SHARED = ("token_embd.weight", "output.weight", "output_norm.weight", "token_embd_norm.weight")
NORM = "output_norm.weight"  # the norm of a head is stored as this one


class OneLayer(GgufFile):
    """The first of the layers behind the model's in the place of all, with its own last norm."""

    def __init__(self, file: GgufFile) -> None:
        """ValueError: the file has no such layer."""
        self.__dict__.update(vars(file))  # the file's map and all that was read
        self._file, kind = file, file.architecture
        count = file.stated("nextn_predict_layers", 0)
        self._layers = file.stated("block_count", 0)
        if type(count) is not int or type(self._layers) is not int or not 0 < count < self._layers:
            raise ValueError(f"{file.path} has no layer that predicts later tokens (nextn)")
        self.number = self._layers - count
        self.prefix = f"blk.{self.number}.nextn."
        needed = [f"{self.prefix}{name}.weight" for name in OWN]
        if missing := [name for name in needed if name not in file.tensors]:
            raise ValueError(f"{file.path} has no tensor {', '.join(missing)}")
        self.metadata = file.metadata | {
            f"{kind}.block_count": 1,
            f"{kind}.nextn_predict_layers": 0,
            f"{kind}.leading_dense_block_count": 0,
            f"{kind}.full_attention_interval": 1,
        }
        self._names = {name: name for name in _SHARED if name in file.tensors}
        if f"{self.prefix}shared_head_norm.weight" in file.tensors:
            self._names[NORM] = f"{self.prefix}shared_head_norm.weight"
        for given in file.tensors:
            leaf = re.fullmatch(rf"blk\.{self.number}\.(?!nextn\.)(.*)", given)
            if leaf is not None:
                self._names[f"blk.0.{leaf[1]}"] = given
        self.tensors = {name: file.tensors[given] for name, given in self._names.items()}

    def packed(self, name: str) -> Tensor:
        return self._file.packed(self._names[name])

    def stated(self, key: str, default: Any = None) -> Any:
        value = super().stated(key, default)
        is_each = isinstance(value, list) and len(value) == self._layers
        return value[self.number : self.number + 1] if is_each else value


def mtp_of_gguf(model: Any, path: Any) -> MtpHead:
    """The head of the file, for the model that was loaded from the file."""
    file = open_gguf(path)
    layer = OneLayer(file)
    block, mapping = model_of(layer, "cpu", model.dtype)
    head = MtpHead(model, block)
    for norm in ("enorm", "hnorm"):
        (value,) = mapping.convert(
            NORM, file.dense(f"{layer.prefix}{norm}.weight").numpy()
        ).values()
        put_dense(head, [f"{norm}.weight"], value, model.device)
    name = f"{layer.prefix}eh_proj.weight"
    packed, wanted = file.packed(name), tuple(head.eh_proj.weight.shape)
    if file.tensors[name].shape != wanted:
        raise ValueError(f"{path}: {name} is {file.tensors[name].shape}; it must be {wanted}")
    put_packed(head, ["eh_proj.weight"], place(packed, model.device), file.tensors[name].format)
    return head.to(model.device).requires_grad_(False).eval()


def stored_head(
    head: MtpHead,
    block: Mapping[str, tuple[Tensor, str]],
    norm_of: Callable[[str, Tensor], Tensor],
    number: int,
) -> dict[str, tuple[Tensor, str]]:
    """{name in the file: (tensor, format)} of a head that is the layer of that number.

    block: the same of head.block. norm_of(name, value) is what the file has of the value of a norm
    that is stored as the last one is. ValueError: eh_proj has a format that GGUF does not have.
    """
    layer = f"blk.{number}."
    stored = {layer + n.removeprefix("blk.0."): t for n, t in block.items() if n.startswith("blk.")}
    stored[f"{layer}nextn.shared_head_norm.weight"] = block[NORM]
    for norm in ("enorm", "hnorm"):
        value = head.get_parameter(f"{norm}.weight").detach().float().cpu()
        stored[f"{layer}nextn.{norm}.weight"] = norm_of(norm, value), "f32"
    projection, weight = head.eh_proj, head.eh_proj.weight.detach().cpu()
    if isinstance(projection, QuantLinear):
        check_format("eh_proj of the head", projection.format)
        format = projection.format
    else:
        format = next(name for name, dtype in DTYPES.items() if dtype == weight.dtype)
    return stored | {f"{layer}nextn.eh_proj.weight": (weight, format)}
