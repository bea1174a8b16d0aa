"""The hidden states that a model's decoder gives its output head, for heads of later tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class LastHidden:
    """rows: the last hidden states of the model's last step, [batch, tokens, hidden_size], behind
    the final norm; None: no step has been computed.

    A hook of the decoder keeps them. A replayed step, which calls no hook, sets them
    (hf/replay.py).
    """

    def __init__(self, model: Any) -> None:
        """model: one of transformers with a decoder and an output head."""
        self.rows: Tensor | None = None
        model.get_decoder().register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, out: Any) -> None:
        self.rows = out[0]


def last_hidden(model: Any) -> LastHidden | None:
    """The model's last hidden states, if somebody keeps them."""
    hooks = model.get_decoder()._forward_hooks.values() if hasattr(model, "get_decoder") else ()
    return next((h.__self__ for h in hooks if is_ours(h)), None)


def is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), LastHidden)
