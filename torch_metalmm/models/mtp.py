"""A model's own head for the token after the next one (multi-token prediction, MTP; nextn in GGUF).

With h_i what the model gives its output head at position i, and t_i its tokens, DeepSeek-V3 (arXiv
2412.19437, section 2.2), GLM-4.5, Qwen3-Next and Qwen3.5 were trained with

    g_i = norm(block(eh_proj([enorm(embed(t_i+1)), hnorm(h_i)]))),    logits of t_i+2 = head(g_i)

whose embedding and output head are the model's. For one more token g_i stands in for h_i+1, as in
engines that draft several by one such head.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.exact import MOST
from .cache_argument import with_cache

OWN = ("enorm", "hnorm", "eh_proj")  # what a head has beside its layer and last norm


class Logits(OrderedDict[str, Any]):
    """logits [1, 1, vocabulary] and the cache, as models of transformers return them."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        vars(self).update(values)


class Given:
    """Inputs of a head's steps in memory that stays, so that steps can be replayed: rows of the
    model for up to MOST tokens, and all that a step of one token behind the last step reads."""

    def __init__(self) -> None:
        self._memory: dict[Any, Tensor] = {}
        self.rows = torch.empty(0)
        # (the token [1, 1], its position [1, 1]) that the last step has left for the next one,
        # which writes others there; None: there was no step.
        self.left: tuple[Tensor, Tensor] | None = None

    def take(self, rows: Tensor) -> None:
        if rows.shape[1] <= MOST:
            rows = self._memory_of(rows).copy_(rows)
        self.rows = rows

    def _memory_of(self, rows: Tensor) -> Tensor:
        key = rows.shape, rows.dtype, rows.device
        if key not in self._memory:
            with torch.inference_mode(False):
                self._memory[key] = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        return self._memory[key]

    def leave(self, token: Tensor, position: Tensor, row: Tensor) -> None:
        """The step behind this one may be of the token [1, 1], with the row [1, 1, hidden_size]."""
        if self.left is None or self.left[0].device != token.device:
            with torch.inference_mode(False):
                self.left = torch.empty_like(token), torch.empty_like(position)
            for each in self.left:
                each.stays = True  # type: ignore[attr-defined]
        self._row = self._memory_of(row).copy_(row)
        self.left[0].copy_(token)
        self.left[1].copy_(position)

    def go_on(self) -> None:
        """Give the row that the last step has left."""
        self.rows = self._row

    def likeliest(self) -> Tensor:
        """The token [1, 1] that the last step has left, in memory of its own."""
        return self.left[0].clone()  # type: ignore[index]


def check_own(head: object, model: Any) -> None:
    """ValueError: the head is none of that model."""
    own = isinstance(head, MtpHead) and (
        head.block.get_input_embeddings() is model.get_input_embeddings()
    )
    if not own:
        raise ValueError(f"head must be the model's own, of load_mtp, got {type(head).__name__}")


class MtpHead(nn.Module):
    """block: a causal LM of one layer, by which fuse_, quantize_ and a PackedCache know it. The
    embedding and the output head are the model's own modules."""

    def __init__(self, model: Any, block: Any) -> None:
        super().__init__()
        self.block = block
        self.share(model)
        norm = block.get_decoder().norm
        size, dtype = block.config.hidden_size, block.dtype
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False, device="meta", dtype=dtype)
        self.config, self.given = block.config, Given()

    def share(self, model: Any) -> None:
        """Take the embedding and the output head of the model, which quantize_ replaces."""
        self.block.set_input_embeddings(model.get_input_embeddings())
        self.block.set_output_embeddings(model.get_output_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self.block.dtype

    def get_decoder(self) -> Any:
        return self.block.get_decoder()

    def forward(self, input_ids: Tensor, position_ids: Tensor, cache: Any) -> Logits:
        """Behind the last of the tokens [1, n], each of which follows the position of one of the
        given rows [1, n, hidden_size]. What comes next by them is given then."""
        embedded, decoder = self.block.get_input_embeddings()(input_ids), self.get_decoder()
        rows = torch.cat([self.enorm(embedded), self.hnorm(self.given.rows)], -1)
        own = {"position_ids": position_ids, "use_cache": True, **with_cache(decoder, cache)}
        g = decoder(inputs_embeds=self.eh_proj(rows), **own)[0][:, -1:]
        logits = self.block.get_output_embeddings()(g)
        self.given.leave(logits.argmax(-1), position_ids[:, -1:] + 1, g)
        return Logits(logits=logits, cache=cache)
