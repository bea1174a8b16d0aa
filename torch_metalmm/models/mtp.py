"""A model's own head for the token after the next one (multi-token prediction, MTP; nextn in GGUF).

With h_i what the model gives its output head at position i, and t_i its tokens, DeepSeek-V3 (arXiv
2412.19437, section 2.2), GLM-4.5, Qwen3-Next and Qwen3.5 were trained with

    g_i = norm(block(eh_proj([enorm(embed(t_i+1)), hnorm(h_i)]))),    logits of t_i+2 = head(g_i)

whose embedding and output head are the model's. For one more token g_i stands in for h_i+1, as in
engines that draft several by one such head.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .cache_argument import with_cache


class MtpHead(nn.Module):
    """block: a causal LM of one layer, by which fuse_, quantize_ and a PackedCache know it. The
    embedding and the output head are the model's own modules."""

    def __init__(self, model: Any, block: Any) -> None:
        super().__init__()
        self.block = block
        block.set_input_embeddings(model.get_input_embeddings())
        block.set_output_embeddings(model.get_output_embeddings())
        norm = block.get_decoder().norm
        size, dtype = block.config.hidden_size, block.dtype
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False, device="meta", dtype=dtype)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, hidden: Tensor, cache: Any, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(logits [1, vocabulary], g [1, 1, hidden_size]) behind the last of the tokens [1, n], of
        which each follows the position of one row of hidden [1, n, hidden_size]."""
        embedded = self.block.get_input_embeddings()(tokens)
        rows = torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)
        decoder = self.block.get_decoder()
        given = {"position_ids": positions, "use_cache": True, **with_cache(decoder, cache)}
        g = decoder(inputs_embeds=self.eh_proj(rows), **given)[0][:, -1:]
        return self.block.get_output_embeddings()(g)[:, -1], g
