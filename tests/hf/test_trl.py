"""TRL's SFTTrainer, whose loss multiplies rows of lm_head.weight, on models that are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import IDS, random_model
from layer_models import dense

from torch_metalmm import QuantLinear, quantize_

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def trained(model: Any, folder: Path) -> tuple[list[float], Any]:
    """The loss of each of three steps, and the trainer's model."""
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, 320)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="<pad>", bos_token="<s>"
    )
    torch.manual_seed(0)
    arguments = trl.SFTConfig(
        str(folder),
        max_steps=3,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    rows = datasets.Dataset.from_dict({"input_ids": IDS.repeat(8, 1).tolist()})
    trainer = trl.SFTTrainer(
        model,
        arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # a head of its own, a tied one
def test_sft_of_a_packed_model_is_sft_of_its_decoded_weights(
    architecture: str, tmp_path: Path
) -> None:
    packed = quantize_(random_model(architecture), "q4_k", progress=False)
    assert type(packed.get_output_embeddings()) is QuantLinear
    decoded = dense(packed)
    losses, model = trained(packed, tmp_path)
    want, of_dense = trained(decoded, tmp_path)
    assert losses == pytest.approx(want, rel=2.0**-14) and losses[-1] < losses[0]
    theirs = dict(of_dense.named_parameters())
    for name, ours in model.named_parameters():
        if "lora_" in name:
            assert ours.any() and (ours - theirs[name]).abs().max() <= theirs[name].abs().max() / 64
    answer = model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert answer.shape == (1, IDS.shape[1] + 3)
