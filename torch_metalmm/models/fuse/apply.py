"""Fewer, larger ops: decoder layers, gated MLPs, norms.

Nothing goes by the names of models or layers. Which modules are gated MLPs is found by running them
(gated.py). What a decoder layer computes is read from the tensors that its modules
pass each other in short runs of the model (observe.py, understand.py, projections.py), and
confirmed by running both forms (confirm.py).
"""

from __future__ import annotations

import warnings

from torch import nn

from ...nn import QuantLinear
from ...nn.activations import exactly
from ...nn.fused import FORMS, FusedMLP, MergedLinear, plain
from ..attach import check_cache, drop_cache, set_cache
from ..replace import check_model, summary
from .gated import gated_mlp
from .layers import fuse_layers, transformers_models, unfuse_layers
from .runs import telling_of_kernels


def fuse_(model: nn.Module, mlp_form: str | None = None, cache: str | None = None) -> nn.Module:
    """Compute decoder layers, gated MLPs and norms in fewer ops, in place.

    Decoder layers of transformers models with RMS norms, rotated heads and a gated MLP get a
    forward of five ops beside attention and cache, or a few more where there are more norms; an
    MLP of another kind (experts) is called as it is, between a norm and a sum. The
    model runs on a few random tokens to see what its layers do; a layer stays as it is where both
    forms, run with caches, masks and positions, differ by more than rounding. The layer's own
    forward computes where gradients are recorded, in training, under autocast, and where a module
    of the layer has a hook, an adapter or another forward. Layers stay the objects that they were.
    Confirming takes the time of a prompt of about 200 tokens.

    MLPs that are down(act(gate(x)) * up(x)), act a name that the op swiglu takes, whatever they are
    called, become FusedMLP modules; gate and up may be halves of one layer (Phi3).
    mlp_form says how one row is computed: "swiglu", which None is, too, or "swiglu_linear" (see
    FusedMLP).

    The packed layers of one input and one format in a fused layer (q, k and v) become parts of one
    MergedLinear: their bytes move into one tensor.
    Move or copy a model before: behind `.to()` or deepcopy a mixture's shared expert no longer lies
    behind the others, and takes ops of its own.

    state_dict keeps its names and bytes, so the model is saved as before; results differ by
    rounding. Layers with adapters, hooks, shared or trained tensors stay as they are; a layer
    that gets an adapter or a hook later computes alone. Meant for inference. To merge adapters,
    quantize again or replace layers, call unfuse_ first.

    cache: the format ("q8_0", "f16", "q4_0", ...) of the PackedCache that generate() makes where
    its caller gives no past_key_values and neither the caller nor the model's generation_config a
    cache_implementation. The model's attention function becomes "metalmm", so that a fused layer
    writes and reads the cache itself. None leaves both as they are.
    Returns `model`. A kernel that does not run on this machine is a warning: what would need it
    stays as it is. ValueError, before anything changes: model is no module, mlp_form is no form, a
    packed weight is on the meta device, cache is no format or one whose blocks do not divide the
    model's heads, or is for a model that does not generate, has an encoder beside its decoder, or
    attention that cannot be chosen.
    """
    check_model(model)
    if mlp_form is not None and mlp_form not in FORMS:
        raise ValueError(f"mlp_form: {mlp_form!r}; allowed: None, {', '.join(map(repr, FORMS))}")
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and module.weight.is_meta:
            raise ValueError(f"{name}.weight is on the meta device and has no data")
    if cache is not None:
        check_cache(transformers_models(model), cache)
    once = _unshared(model)
    with exactly(model), telling_of_kernels("fuse_"):
        adapted = _fuse(model, mlp_form or FORMS[0], once)
    if cache is not None:
        set_cache(transformers_models(model), cache)
    if adapted:
        warnings.warn(f"layers with adapters are not fused: {summary(adapted)}", stacklevel=2)
    return model


def _fuse(model: nn.Module, form: str, once: dict[int, str | None]) -> list[str]:
    """The names of modules that are not fused for their adapters."""
    adapted: list[str] = []
    for name, parent in list(model.named_modules()):
        if isinstance(parent, FusedMLP):
            continue
        if any(isinstance(getattr(c, "base_layer", None), QuantLinear) for c in parent.children()):
            adapted.append(name)
        if name and (mlp := gated_mlp(parent)) is not None:
            model.set_submodule(name, FusedMLP(mlp, form))
    fuse_layers(model, form, once)
    return adapted


def unfuse_(model: nn.Module) -> nn.Module:
    """Put the modules back that fuse_ replaced, in place; their bytes are shared, not copied.

    generate() makes the cache, and the model calls the attention function, as before fuse_.
    """
    drop_cache(transformers_models(model))
    unfuse_layers(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, FusedMLP):
            module.gated.module.training = module.training
            model.set_submodule(name, module.gated.module)
    for parent in list(model.modules()):
        for child in list(parent.children()):
            if isinstance(child, MergedLinear):
                child.detach(parent)
    return model


def _unshared(model: nn.Module) -> dict[int, str | None]:
    """{id: activations} of packed layers that are in the model once, with tensors of their own."""
    owners: dict[int, int] = {}
    paths: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        paths[id(module)] = paths.get(id(module), 0) + 1
    for module in model.modules():
        for p in module._parameters.values():
            owners[id(p)] = owners.get(id(p), 0) + 1
    return {
        id(m): m.activations
        for m in model.modules()
        if isinstance(m, QuantLinear)
        and plain(m)
        and paths[id(m)] == 1
        and all(owners[id(p)] == 1 and not p.requires_grad for p in m.parameters())
    }
