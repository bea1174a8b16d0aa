"""llama.cpp's mixtures of formats, as Q4_K_M: what matters most gets more bits than the rest.

The rules are llama-quantize's, of the release that tests/models/mixtures.py names, without an
importance matrix. A model has no GGUF names; what a layer is follows from its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .. import formats
from .experts import Site, Sites, Stack

Layers = Callable[[int, int], bool]  # whether the i-th of n layers with such a tensor fits


def _first(share: int) -> Layers:
    return lambda i, n: i < n // share


def _more(i: int, n: int) -> bool:
    """An eighth of the layers at either end, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _all(i: int, n: int) -> bool:
    return True


V, DOWN, OUT = "values", "down", "output of attention"
_Rules = dict[str, list[tuple[Layers, str]]]
# {mixture: (format of most tensors, {what it is: its formats, the first whose layers fit})}.
MIXTURES: dict[str, tuple[str, _Rules]] = {
    "q3_k_s": ("q3_k", {}),
    "q3_k_m": (
        "q3_k",
        {
            V: [(lambda i, n: i < 2, "q5_k"), (_all, "q4_k")],
            DOWN: [(_first(16), "q5_k"), (_all, "q4_k")],
            OUT: [(_all, "q4_k")],
        },
    ),
    "q3_k_l": ("q3_k", {V: [(_all, "q5_k")], DOWN: [(_all, "q5_k")], OUT: [(_all, "q5_k")]}),
    "q4_k_s": ("q4_k", {V: [(lambda i, n: i < 4, "q5_k")], DOWN: [(_first(8), "q5_k")]}),
    "q4_k_m": ("q4_k", {V: [(_more, "q6_k")], DOWN: [(_more, "q6_k")]}),
    "q5_k_s": ("q5_k", {}),
    "q5_k_m": ("q5_k", {V: [(_more, "q6_k")], DOWN: [(_more, "q6_k")]}),
}
_FALCON: dict[str, _Rules] = {
    "q3_k_m": {DOWN: [(_first(16), "q5_k"), (_more, "q4_k")], OUT: []},
    "q3_k_l": {DOWN: [(_all, "q4_k")], OUT: [(_all, "q4_k")]},
    "q4_k_s": {DOWN: []},
    "q4_k_m": {DOWN: [(_first(16), "q6_k"), (_more, "q5_k")]},
}
_EIGHT_EXPERTS = ("q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m")  # whose output of attention has q5_k

# The role of a layer by the end of its name: the first pattern that matches.
_K, _KEPT = "keys", "dense"
_ROLES = [
    (_KEPT, r"router|gate|gate_inp|shared_expert_gate|wpe|token_type_embeddings"),
    (_KEPT, r"\w*position\w*|relative_attention_bias"),
    (V, r"v_proj|value|v|qkv_proj|query_key_value|in_proj_qkv|Wqkv|attn\.c_attn|kv_b_proj"),
    (_K, r"k_proj|key|k"),
    (OUT, r"o_proj|(?<!linear_)(attn|attention)\.(c_proj|dense|out_proj|output\.dense|out_lin)"),
    (DOWN, r"down_proj|c_proj|fc2|dense_4h_to_h|output\.dense|wo|w2|output_linear"),
]


def resolve(name: str) -> str:
    """The name of a format or of a mixture, lower case. ValueError: neither, as formats.get."""
    return name.lower() if name.lower() in MIXTURES else formats.get(name).name


class Mixture:
    """The formats that the mixtures give the weights of one model."""

    def __init__(self, model: nn.Module, groups: Iterable[Sites]) -> None:
        """groups: the weights, each with the layers that hold it, in the order of the model."""
        groups = list(groups)
        config = _text_config(model)
        self._falcon = getattr(config, "model_type", None) == "falcon"
        stacks = [site[1] for sites in groups for site in sites if isinstance(site[1], Stack)]
        self._eight = any(stack.shape[0] == 8 for stack in stacks)
        self._head = _head(model)
        heads = getattr(config, "num_attention_heads", None)
        # llama.cpp's word for this: a model of 70B.
        grouped = getattr(config, "num_key_value_heads", heads) != heads
        self._wide = getattr(config, "num_hidden_layers", None) == 80 and grouped
        has_head = any(self._is_head(site) for sites in groups for site in sites)
        self._tied = not has_head
        self._places: dict[str, tuple[int, int]] = {}
        self._count([site for sites in groups for site in sites[:1]], bool(stacks))

    def format(self, mixture: str, sites: Sites, k: int) -> str | None:
        """The format of a weight [N, K]; None for what llama.cpp leaves dense.

        Where K does not fit, resolve_format's choice is llama.cpp's too, but of q3_k.
        """
        found = self._format(mixture, sites)
        return "q4_0" if found == "q3_k" and k % 256 else found

    def _format(self, mixture: str, sites: Sites) -> str | None:
        base, rules = MIXTURES[mixture]
        if any(self._is_head(site) for site in sites):
            return "q8_0" if self._falcon else "q6_k"
        name, module = sites[0]
        role = _role(name)
        if role == _KEPT:
            return None
        if isinstance(module, nn.Embedding) or hasattr(module, "embedding_dim"):
            return ("q8_0" if self._falcon else "q6_k") if self._tied else base
        if self._eight and role in (V, _K):
            return "q8_0"
        if self._eight and role == OUT:
            return "q5_k" if mixture in _EIGHT_EXPERTS else base
        if self._falcon:
            rules = rules | _FALCON.get(mixture, {})
        i, n = self._places.get(name, (0, 1))
        found = next((format for fits, format in rules.get(role or "", []) if fits(i, n)), base)
        return "q5_k" if self._wide and role == V and found in ("q3_k", "q4_k") else found

    def _is_head(self, site: Site) -> bool:
        return site[1] is self._head or site[0].rpartition(".")[2] in ("lm_head", "embed_out")

    def _count(self, sites: list[Site], mixes: bool) -> None:
        """Say of each layer which it is of those of its kind, in each sequence of layers.

        Down projections are numbered by their layer where the model has experts, else one by one,
        of as many as there are layers; values one by one, of as many as there are.
        """
        found: dict[tuple[str, str], list[tuple[int, str]]] = {}
        layers: dict[str, int] = {}
        for name, _ in sites:
            place = re.match(r"(.*?)\.(\d+)\.", name)
            if place is None:
                continue
            stem, layer = place[1], int(place[2])
            layers[stem] = max(layers.get(stem, 0), layer + 1)
            role = _role(name)
            if role in (V, DOWN):
                found.setdefault((stem, role), []).append((layer, name))
        for (stem, role), each in found.items():
            for i, (layer, name) in enumerate(sorted(each)):
                n = len(each) if role == V else layers[stem]
                self._places[name] = (layer if mixes and role == DOWN else i, n)


def _role(name: str) -> str | None:
    """The role of the layer; None: every mixture treats the layer alike."""
    for role, pattern in _ROLES:
        if re.search(rf"(^|[._])({pattern})$", name):
            return role
    return None


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _head(model: Any) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()
