"""save_pretrained of diffusers' models refuses packed layers: its files could not name them."""

from __future__ import annotations

import functools
from typing import Any

from diffusers.models.modeling_utils import ModelMixin

from .config import stored_config

_save = ModelMixin.save_pretrained


@functools.wraps(_save)
def _save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
    config = stored_config(self)
    if config is not None:
        raise ValueError(
            f"{type(self).__name__} has {len(config.modules)} packed layers, "
            f"{min(config.modules)} for one, which diffusers could not load again: keep its "
            "state_dict() with torch.save, and load that into a model that is packed alike"
        )
    return _save(self, *args, **options)


ModelMixin.save_pretrained = _save_pretrained
