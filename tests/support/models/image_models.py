"""Small random transformers of image models, in pipelines without text encoders.

Copies run: torch's own products round by how their operands lie in memory, and a loaded tensor lies
where its file says.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import diffusers
import torch
from torch import Tensor

from torch_metalmm import quantize_

_SIZES = {
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 256,
}
# name -> (the pipeline, its transformer and the arguments of that)
IMAGES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "flux": (
        diffusers.FluxPipeline,
        diffusers.FluxTransformer2DModel,
        _SIZES
        | {"in_channels": 64, "num_layers": 1, "num_single_layers": 1}
        | {"axes_dims_rope": (8, 28, 28), "guidance_embeds": True},
    ),
    "sd3": (
        diffusers.StableDiffusion3Pipeline,
        diffusers.SD3Transformer2DModel,
        _SIZES
        | {"in_channels": 16, "out_channels": 16, "num_layers": 2, "sample_size": 8}
        | {"caption_projection_dim": 256, "pos_embed_max_size": 16},
    ),
}


def random_transformer(name: str) -> Any:
    """In eval mode, the same at every call."""
    torch.manual_seed(0)
    return IMAGES[name][1](**IMAGES[name][2]).eval()


def packed_transformer(name: str, spec: Any = "q4_k") -> Any:
    """The random transformer, packed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "K is not a multiple")  # K = 64 of x_embedder
        return quantize_(random_transformer(name), spec, progress=False)


def pipeline(name: str) -> Any:
    """The random transformer with a small decoder of images and no text encoders."""
    transformer = random_transformer(name)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), latent_channels=16, norm_num_groups=4, shift_factor=0.0
    )
    made = {"transformer": transformer, "vae": vae.eval()}
    made["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler()
    return IMAGES[name][0](**made | dict.fromkeys(without(name)))


def without(name: str) -> list[str]:
    """The components that the pipeline of the tests does not have; loading it has to say so."""
    needs, _ = IMAGES[name][0]._get_signature_keys(IMAGES[name][0])
    optional = set(IMAGES[name][0]._optional_components)
    return sorted(({*needs} | optional) - {"transformer", "vae", "scheduler"})


def image(pipe: Any) -> Tensor:
    """An image of 8 x 8 after two steps, the same at every call; prompts in the pipe's dtype."""
    torch.manual_seed(1)
    given = {"prompt_embeds": torch.randn(1, 8, 256), "pooled_prompt_embeds": torch.randn(1, 256)}
    given = {key: value.to(pipe.dtype) for key, value in given.items()}
    if isinstance(pipe, diffusers.StableDiffusion3Pipeline):
        given |= {f"negative_{key}": torch.randn_like(value) for key, value in given.items()}
    pipe = type(pipe)(**{name: copy.deepcopy(part) for name, part in pipe.components.items()})
    pipe.set_progress_bar_config(disable=True)
    made: Tensor = pipe(**given, height=8, width=8, num_inference_steps=2, output_type="pt").images
    return made


def noise(model: Any) -> Tensor:
    """What the transformer predicts for a random latent, the same at every call."""
    torch.manual_seed(2)
    given = {
        "encoder_hidden_states": torch.randn(1, 8, 256),
        "pooled_projections": torch.randn(1, 256),
        "timestep": torch.tensor([0.5]),
    }
    if isinstance(model, diffusers.FluxTransformer2DModel):
        given |= {"hidden_states": torch.randn(1, 16, 64), "guidance": torch.tensor([3.5])}
        given |= {"img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(8, 3)}
    else:
        given["hidden_states"] = torch.randn(1, 16, 8, 8)
    with torch.inference_mode():
        out: Tensor = copy.deepcopy(model)(**given)[0]
    return out
