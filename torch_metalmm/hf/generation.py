"""A PackedCache as what generate() of a model makes where its caller names no cache."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from ..models.attach import plug_in_caches
from ..models.cache_argument import cache_in, cache_of_generate
from . import attention as attention  # which registers ATTENTION
from .caches import ATTENTION, format_of, name_of, pair_of

_METHOD = "_prepare_cache_for_generation"


class DefaultCache:
    """The maker of a cache for generate() of `model`. The model stays the object that it was.

    Only a cache that generate() would choose on its own is another one: not one that the caller
    gives, and not that of a cache_implementation. A forward outside of generate() makes the cache
    that it always made: there a packed one would change logits without a word, and refuse to train.
    """

    def __init__(self, model: Any, format: str) -> None:
        self.model, self.format = model, format
        self.attention: str = _text_config(model)._attn_implementation

    def attach(self) -> None:
        _set_attention(self.model, ATTENTION)
        self.model.__dict__[_METHOD] = self.prepare

    def detach(self) -> None:
        del self.model.__dict__[_METHOD]
        if _text_config(self.model)._attn_implementation == ATTENTION:
            _set_attention(self.model, self.attention)

    def prepare(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        from transformers import DynamicCache

        from .cache import PackedCache

        is_given = cache_in(model_kwargs) is not None
        usual = getattr(type(self.model), _METHOD)
        usual(self.model, generation_config, model_kwargs, *args, **kwargs)
        made = cache_in(model_kwargs)
        if is_given or type(made) is not DynamicCache or generation_config.cache_implementation:
            return
        cache = PackedCache(self.model.config, self.format)
        if made.layers and any(map(made.is_recording_past, range(len(made.layers)))):
            cache.activate_past_recording()  # type: ignore[no-untyped-call]
        model_kwargs[cache_of_generate()] = cache


def default_cache(model: Any) -> DefaultCache | None:
    owner = getattr(model.__dict__.get(_METHOD), "__self__", None)
    return owner if isinstance(owner, DefaultCache) else None


def check_cache(models: Iterable[Any], format: str) -> None:
    """ValueError: set_cache(models, format) would fail."""
    if not isinstance(format, str):
        raise ValueError(f"cache: {format!r}; must be the name of a format, or of two")
    try:
        kinds = [format_of(name)[0] for name in pair_of(format)]
    except ValueError as error:
        raise ValueError(f"cache: {str(error).removeprefix('format: ')}") from None
    generating = _generating(models)
    if not generating:
        raise ValueError(f"cache: {format!r}; the model is none of transformers that generates")
    for model in generating:
        config = _text_config(model)
        if model.config.is_encoder_decoder:
            raise ValueError(f"cache: {format!r}; {type(model).__name__} has an encoder, too")
        for size, kind in product(_head_sizes(config), kinds):
            if size % kind.block_values:
                raise ValueError(
                    f"cache: {format!r}; its blocks of {kind.block_values} values do not divide "
                    f"the {size} of a head of {type(model).__name__}"
                )
        for part in model.modules():
            is_text = isinstance(part, PreTrainedModel) and part.config is config
            if is_text and not part._can_set_attn_implementation():
                raise ValueError(
                    f"cache: {format!r}; {type(part).__name__} has attention of its own, which "
                    "cannot be chosen"
                )


def set_cache(models: Iterable[Any], format: str) -> None:
    """generate() of the models that generate makes PackedCache(config, format)."""
    from .replay import Replayed

    models = list(models)
    check_cache(models, format)
    for model in _generating(models):
        if (earlier := default_cache(model)) is not None:
            earlier.format = name_of(pair_of(format))
            _set_attention(model, ATTENTION)
        else:
            DefaultCache(model, name_of(pair_of(format))).attach()
        if "forward" not in model.__dict__:
            Replayed(model).attach()


def drop_cache(models: Iterable[Any]) -> None:
    """Caches and attention functions of the models are what they were before set_cache."""
    from .replay import replayed

    for model in _generating(models):
        if (found := default_cache(model)) is not None:
            found.detach()
        if (steps := replayed(model)) is not None:
            steps.detach()


def _generating(models: Iterable[Any]) -> list[Any]:
    """The models that generate, with their parts that do: generate() of Blip2 calls a part's."""
    parts = (part for model in models for part in model.modules())
    return [part for part in parts if isinstance(part, PreTrainedModel) and part.can_generate()]


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _head_sizes(config: Any) -> set[int]:
    """The sizes of keys and values of any layer."""
    sizes: set[int] = set()
    for layer in getattr(config, "per_layer_config", None) or [config]:
        head = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
        heads = getattr(layer, "num_attention_heads", None)
        if not head and heads:
            head = layer.hidden_size // heads
        sizes |= {size for size in (head, getattr(layer, "v_head_dim", None)) if size}
    return sizes


def _set_attention(model: Any, name: str) -> None:
    """The attention function of the text model, which may be a part of the whole."""
    model.set_attn_implementation(_keyed(model.config, _text_config(model), name))


def _keyed(config: Any, wanted: Any, name: str) -> Any:
    """`name` under the keys that lead from config to the config that is wanted; None: none do."""
    if config is wanted:
        return name
    for key in config.sub_configs:
        inner = getattr(config, key, None)
        found = None if inner is None else _keyed(inner, wanted, name)
        if found is not None:
            return {key: found}
    return None


plug_in_caches(check=check_cache, set=set_cache, drop=drop_cache)
