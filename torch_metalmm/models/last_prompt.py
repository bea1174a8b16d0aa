"""The state that models of images keep of the last prompt."""

from __future__ import annotations

from typing import Any

from torch import nn

_KEPT = "rope_deltas"


def forget_prompt(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Let the model know nothing of the last prompt with images; (module, what it knew) of each.

    Kept is how many positions less than tokens such a prompt takes, which the model would add to
    those of the next text on a cache, in batches of the same size alone.
    """
    found = [(m, own) for m in model.modules() if (own := vars(m).get(_KEPT)) is not None]
    for module, _ in found:
        setattr(module, _KEPT, None)
    return found


def recall_prompt(found: list[tuple[nn.Module, Any]]) -> None:
    """Give the modules back the state that forget_prompt() found."""
    for module, own in found:
        setattr(module, _KEPT, own)
