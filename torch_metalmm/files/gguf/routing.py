"""A file's entries on the choice of experts, checked before a model is made.

transformers checks none of these numbers. A number of groups that does not divide the experts makes
groups of several tokens' scores, and others fail in the first product, or leave experts out.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from .file import GgufFile

_COUNT, _USED = "expert_count", "expert_used_count"
_GROUPS, _GROUPS_USED = "expert_group_count", "expert_group_used_count"
_SCALE = "expert_weights_scale"
GATING, SOFTMAX, SIGMOID = "expert_gating_func", 1, 2
_CORRECTION = "exp_probs_b.bias"


def check_routing(
    file: GgufFile,
    prefix: str,
    keys: Mapping[str, str],
    states: Mapping[str, int],
    values: dict[str, Any],
) -> None:
    """Check the choice of experts in the values of a config, and set what the file leaves unset.

    keys and states are those of the file's row. llama.cpp takes 0 groups, and 0 as the scale of the
    experts' sum, for what is not set, and of one group does not read how many are used.
    ValueError: a number that the model cannot choose experts by, or a correction of their scores
    that it has not.
    """
    if _COUNT not in keys:
        return
    if states.get(GATING) == SOFTMAX:
        _check_softmax(file, prefix + GATING)
    count = file.integer(prefix + _COUNT, values[keys[_COUNT]], 1)
    file.integer(prefix + _USED, values[keys[_USED]], 1, count)
    if _SCALE in keys:
        _check_scale(file, prefix + _SCALE, keys[_SCALE], values)
    if _GROUPS not in keys:
        return
    key = prefix + _GROUPS
    groups = values[keys[_GROUPS]] = file.integer(key, values[keys[_GROUPS]], 0) or 1
    # The score of a group is the best in it, or with sigmoids the sum of the two best.
    least = 2 if states.get(GATING) == SIGMOID else 1
    if count % groups or count // groups < least:
        raise ValueError(
            f"{file.path}: {key} = {groups}; allowed: 0 and divisors of {_COUNT}, {count}, that "
            f"leave {least} or more experts in each group"
        )
    if groups == 1:
        values[keys[_GROUPS_USED]] = 1
    file.integer(prefix + _GROUPS_USED, values[keys[_GROUPS_USED]], 1, groups)


def one_group(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a config; of one whose experts are one group, what else says how it is chosen goes.

    DeepSeek V2's config has None groups by default.
    """
    if values.get("n_group", 0) not in (None, 1):
        return values
    rest = {k: v for k, v in values.items() if k not in ("topk_group", "topk_method")}
    return rest | {"n_group": 1}


def _check_scale(file: GgufFile, key: str, name: str, values: dict[str, Any]) -> None:
    scale = values[name]
    if isinstance(scale, bool) or not isinstance(scale, float | int) or not isfinite(scale):
        raise ValueError(f"{file.path}: {key} = {scale!r}; allowed: finite numbers")
    values[name] = scale or 1.0


def _check_softmax(file: GgufFile, key: str) -> None:
    """A file of the newer model without its key would be read as the older one."""
    corrected = next((name for name in file.tensors if name.endswith(_CORRECTION)), None)
    if corrected is not None:
        given = file.metadata.get(key)
        said = f"{key} is missing" if given is None else f"{key} is {given!r}"
        raise ValueError(
            f"{file.path}: {said}, but {corrected} corrects scores; a model with it has {SIGMOID}"
        )
