"""Fewer, larger ops: SwiGLU MLPs, and linear layers that have their input in common.

Nothing goes by the names of models or layers. Which layers have one input is read from the code of
their parent's forward and confirmed by running it (merge.py); which modules are SwiGLU MLPs is
found by running them.
"""

from __future__ import annotations

import warnings
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import QuantEmbedding, QuantLinear
from ...nn.fused import FORMS, MergedLinear, Roles, SwiGLU, plain, unhooked
from ..replace import summary
from .merge import evaluating, merge_layers
from .times import MLP, faster_forms


def fuse_(model: nn.Module, mlp_form: str | None = None) -> nn.Module:
    """Compute SwiGLU MLPs, and packed layers of one input and format, in fewer ops, in place.

    MLPs that are down(silu(gate(x)) * up(x)), whatever they are called, become SwiGLU modules; gate
    and up may be halves of one layer (Phi3). mlp_form says how one row is computed: "swiglu" or
    "swiglu_linear" (see SwiGLU); None times both, once for each size of layer and device. Other
    packed layers called with one input (q, k and v; gate and up of a GELU MLP) become parts of one
    MergedLinear, as far as their formats are equal: their bytes move into one tensor. Layers are
    merged where nothing in their parent's forward can write the input between the calls, and where
    that forward, run on two rows of random numbers, gives the same before and after.

    state_dict keeps its names and bytes, so the model is saved as before; results differ by
    rounding. Layers with adapters, hooks, shared or trained tensors stay as they are; a merged
    layer that gets an adapter or a hook later computes alone. Meant for inference: for x that
    requires grad nothing is merged. To merge adapters, quantize again or replace layers, call
    unfuse_ first.
    Returns `model`. ValueError: mlp_form is no form, or a packed weight is on the meta device.
    """
    if mlp_form is not None and mlp_form not in FORMS:
        raise ValueError(f"mlp_form: {mlp_form!r}; allowed: None, {', '.join(map(repr, FORMS))}")
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and module.weight.is_meta:
            raise ValueError(f"{name}.weight is on the meta device and has no data")
    once, dtype = _unshared(model), _activation_dtype(model)
    adapted, mlps = [], {}
    for name, parent in list(model.named_modules()):
        if isinstance(parent, SwiGLU):
            continue
        if any(isinstance(getattr(c, "base_layer", None), QuantLinear) for c in parent.children()):
            adapted.append(name)
        roles = _swiglu_roles(parent) if name else None
        if roles is not None:
            mlps[name] = MLP(parent, roles)
        else:
            merge_layers(parent, once, dtype)
    chosen = faster_forms(list(mlps.values()), dtype) if not mlp_form else {}
    for name, mlp in mlps.items():
        form, note = chosen.get(mlp.sizes(), (mlp_form or FORMS[0], ""))
        model.set_submodule(name, SwiGLU(mlp.module, mlp.roles, form, note))
    if adapted:
        warnings.warn(f"layers with adapters are not fused: {summary(adapted)}", stacklevel=2)
    return model


def unfuse_(model: nn.Module) -> nn.Module:
    """Put the modules back that fuse_ replaced, in place; their bytes are shared, not copied."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SwiGLU):
            module.original.training = module.training
            model.set_submodule(name, module.original)
    for parent in list(model.modules()):
        for child in list(parent.children()):
            if isinstance(child, MergedLinear):
                child.detach(parent)
    return model


def _activation_dtype(model: nn.Module) -> torch.dtype:
    for module in model.modules():
        if isinstance(module, QuantEmbedding):
            return module.dtype
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.float32)


def _unshared(model: nn.Module) -> set[int]:
    """The ids of packed layers that are in the model once, with tensors of their own."""
    owners: dict[int, int] = {}
    paths: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        paths[id(module)] = paths.get(id(module), 0) + 1
    for module in model.modules():
        for p in module._parameters.values():
            owners[id(p)] = owners.get(id(p), 0) + 1
    return {
        id(m)
        for m in model.modules()
        if plain(m)
        and paths[id(m)] == 1
        and all(owners[id(p)] == 1 and not p.requires_grad for p in m.parameters())
    }


# ---- SwiGLU


def _swiglu_roles(module: nn.Module) -> Roles | None:
    """The roles of its layers if the module computes SwiGLU, None otherwise."""
    layers = {n: c for n, c in module._modules.items() if isinstance(c, QuantLinear)}
    others = (c for n, c in module._modules.items() if c is not None and n not in layers)
    if len(layers) not in (2, 3) or not all(plain(layer) for layer in layers.values()):
        return None
    if module._parameters or module._buffers or any(_is_more(c) for c in others):
        return None
    if not unhooked(module):
        return None
    candidates = _candidates(layers)
    if not candidates:
        return None
    for training in (False, True):  # some have a dropout in their forward
        with evaluating(module):
            module.train(training)
            candidates = [r for r in candidates if _computes_swiglu(module, r)]
    return next(iter(candidates), None)


def _is_more(module: nn.Module) -> bool:
    """Whether the module may be more than an activation function."""
    state = bool(module._parameters or module._buffers or module._modules)
    return state or (isinstance(module, nn.Dropout) and module.p > 0)


def _candidates(layers: dict[str, QuantLinear]) -> list[Roles]:
    """The roles that fit the shapes; gate and up have no bias."""
    found: list[Roles] = []
    for names in permutations(layers):
        gate, down = layers[names[0]], layers[names[-1]]
        if gate.bias is not None:
            continue
        if len(names) == 2:
            if gate.out_features == 2 * down.in_features:
                found += [Roles(names[0], None, names[1], first) for first in (True, False)]
            continue
        up = layers[names[1]]
        sizes = (gate.in_features, gate.out_features)
        if up.bias is None and sizes == (up.in_features, up.out_features) == (
            up.in_features,
            down.in_features,
        ):
            found.append(Roles(*names))
    return found


def _computes_swiglu(module: Any, roles: Roles) -> bool:
    """Whether the module gives, bit for bit, what its layers give as SwiGLU.

    If the module is one, both are the same ops in the same order. The inputs include large numbers,
    because some modules clamp.
    """
    gate, down = module._modules[roles.gate], module._modules[roles.down]
    x = torch.randn(2, gate.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(gate.weight.device)
    with torch.inference_mode():
        for scale in (1.0, 1000.0):
            if roles.up is None:
                a, b = gate(x * scale).chunk(2, dim=-1)
                a, b = (a, b) if roles.gate_first else (b, a)
            else:
                a, b = gate(x * scale), module._modules[roles.up](x * scale)
            want = down(nn.functional.silu(a) * b)
            given = x * scale
            try:
                got = module(given)
            except Exception:
                return False  # it takes other arguments
            if not isinstance(got, Tensor) or not torch.equal(got, want):
                return False
            if not torch.equal(given, x * scale):
                return False  # it writes its input, too
    return True
