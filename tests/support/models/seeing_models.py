"""Models that see images, of a few layers with random weights, and folders of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.models.families import LINEAR, SIZES

_TEXT = SIZES | {"intermediate_size": 256, "max_position_embeddings": 512}
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "patch_size": 8}
_PATCHES = {"depth": 2, "num_heads": 4, "spatial_merge_size": 2, "out_hidden_size": 128} | _SIZES
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
# A quarter of each head is rotated, its frequencies by time, height and width in turn.
_THREE = {"rope_parameters": _ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.5}}
IMAGE, START, END = 4, 3, 5  # the tokens of a patch, before the first, behind the last

# model_type -> what its config is given
_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _TEXT
        | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
        "vision_config": _SIZES
        | {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "qwen2_5_vl": {
        "text_config": _TEXT | {"rope_parameters": _ROPE | {"mrope_section": [8, 4, 4]}},
        "vision_config": _PATCHES | {"fullatt_block_indexes": [1], "window_size": 32},
    },
    "qwen3_5": {
        "text_config": _TEXT | LINEAR | _THREE,
        "vision_config": _PATCHES | {"num_position_embeddings": 64},
    },
}
SEEING = tuple(_CONFIGS)


def seeing(kind: str) -> Any:
    """In eval mode, dense, f32; branches are larger than those of a new model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    options = _CONFIGS[kind]
    if kind != "gemma3":
        names = "image_token_id vision_start_token_id vision_end_token_id video_token_id"
        options = options | dict(zip(names.split(), (IMAGE, START, END, 6), strict=True))
    config = AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape) / 8
        if parameter.dim() == 1 or "mm_input_projection" in name:  # which begins with zeros
            parameter.data += noise
        else:
            parameter.data *= 2
    return model


def prompt_of(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """What generate() takes of a prompt with a random image of 4 tokens."""
    ids = torch.tensor([[15, 16, START, *[IMAGE] * 4, END, 17, 18, 19]])
    make = torch.Generator().manual_seed(seed)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "gemma3":
        pixels = torch.randn(1, 3, 32, 32, generator=make)
        return given | {"pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}
    pixels = torch.randn(16, 3 * 2 * 8 * 8, generator=make)
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    return given | grid | {"pixel_values": pixels, "mm_token_type_ids": (ids == IMAGE).long()}


def seeing_folder(folder: Path) -> Path:
    """A Gemma 3 with a processor, a tokenizer of bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    special = ["<pad>", "<bos>", "<eos>", "<image>", "<patch>", "</image>", "<turn>"]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    every = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=every)
    words.train_from_iterator([], trainer)
    marks = {"boi_token": "<image>", "image_token": "<patch>", "eoi_token": "</image>"}
    ends = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens=marks, **ends)
    tokenizer.chat_template = (
        "{% for m in messages %}<turn>{{ m.role }}:{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text or '<image>' }}{% endfor %}{% endif %}"
        "{% endfor %}<turn>assistant:"
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    model = seeing("gemma3")
    rows = model.get_input_embeddings().weight.data  # of the head, too: answers are of these
    letters = [i for word, i in tokenizer.get_vocab().items() if word.isascii() and len(word) == 1]
    kept = rows[letters]
    rows.zero_()
    rows[letters] = kept
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return folder
