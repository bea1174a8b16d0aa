"""The time drafts save: prompt lookup on tasks that repeat their text and on one that does not.

SmolLM2 as it is packed, after fuse_(cache=...): an answer without drafts and one with, by turns in
one process. The texts are the beginnings of Moby-Dick and of Python's textwrap.py.

With --mtp speed by a model's own head for later tokens, of small models that are trained with one
first, byte by byte on the modules of Python's standard library, by AdamW on the device of the run:
a model of full attention, and one whose layers but each fourth are gated delta rules. The head is
trained on two of its own steps, as it is used. Both are written as their makers publish such
models (mtp.*), loaded and packed; the last modules, which training has not seen, are gone on with.

With --told the models are random ones of the sizes of 4 B parameters, and in place of what the head
computes the text's tokens are proposed, right with that probability.
"""

from __future__ import annotations

import copy
import math
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from torch_metalmm import PackedCache, activations_, fuse_, load_gguf, load_mtp, quantize_
from torch_metalmm.hf.answer import on_device
from torch_metalmm.hf.caches.layers import DTYPE_NAMES
from torch_metalmm.hf.decoding import decode
from torch_metalmm.hf.drafts import Pace
from torch_metalmm.hf.mtp import Mtp
from torch_metalmm.models.cache_argument import cache_of_generate
from torch_metalmm.models.mtp import MtpHead
from torch_metalmm.tools.generate import demo_model

from ..runner import Record, Run
from ..tables import status
from ..timing import Ticks
from .quality import TEXT

PROSE = TEXT.read_text()
CODE = Path(textwrap.__file__).read_text()
# {task: (what is asked, the text behind it)}
TASKS = {
    "edit prose": ("Copy the following text exactly, but write 'Whale' for 'whale'.", PROSE[:2500]),
    "edit code": ("Write this Python code with the class renamed to Wrapper.", CODE[:2500]),
    "summarize prose": ("Summarize the following text, quoting its sentences.", PROSE[:4000]),
    "summarize code": ("Explain this Python code, quoting its lines.", CODE[:4000]),
    "free text": ("Tell me a long story about a lighthouse keeper and the sea.", ""),
}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8},
}


def run(run: Run) -> Iterator[Record]:
    """One record per task and choice of tokens."""
    device, args = run.device.type, run.args
    dtype = torch.float32 if device == "cpu" else torch.float16
    with torch.inference_mode(False), torch.no_grad():
        loaded, tokenizer = load_gguf(demo_model(), device=device, dtype=dtype)
        model = fuse_(loaded, cache=DTYPE_NAMES[dtype])
    for kind in (None, *args.activations):
        activations_(model, kind)
        title = f"SmolLM2, {device}, x {kind or 'exact'}, answers of {args.new_tokens} tokens"
        for task, (asked, text) in TASKS.items():
            message = {"role": "user", "content": f"{asked}\n\n{text}".rstrip()}
            prompt = tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"].to(device)
            drafters = {f"{task}, {prompt.shape[1]} tokens": "lookup"}
            yield from raced(title, model, [prompt], drafters, args)


def raced(
    title: str,
    model: Any,
    prompts: Sequence[Tensor],
    drafters: Mapping[str, Any],
    args: Any,
    tell: Callable[[Tensor], object] | None = None,
) -> Iterator[Record]:
    """Answers without drafts and with those of each drafter, by turns; a record for each drafter
    and choice of tokens. tell: given each answer before it is drafted."""
    # As a chat keeps them, so that steps are recorded once.
    caches = {n: PackedCache(model.config, DTYPE_NAMES[model.dtype]) for n in ("", *drafters)}
    for choice, how in CHOICES.items():
        plain, others = list[float](), {name: list[float]() for name in drafters}
        paces, equal = {name: Pace() for name in drafters}, dict.fromkeys(drafters, True)
        for turn in range(1 + len(prompts) * args.repetitions):  # the first is not counted
            prompt = prompts[turn % len(prompts)]
            want, speed = answered(model, prompt, args.new_tokens, caches[""], **how)
            plain.append(speed)
            if tell is not None:
                tell(want[0])
            for name, draft in drafters.items():
                status(f"{title}, {name}, {choice}, {turn}")
                given = how | {"draft": draft, "pace": paces[name]}
                got, speed = answered(model, prompt, args.new_tokens, caches[name], **given)
                others[name].append(speed)
                equal[name] &= torch.equal(got, want)
        for name, speeds in others.items():
            pace, pairs = paces[name], zip(plain[1:], speeds[1:], strict=True)
            yield {
                "kind": "drafts",
                "model": title,
                "task": f"{name}, {choice}",
                "plain": median(plain[1:]),
                "drafted": median(speeds[1:]),
                "speed": median(with_ / without for without, with_ in pairs),
                "drafts": pace.drafted / len(speeds),
                "share": pace.accepted / max(1, pace.drafted),
                "ok": equal[name],
            }


def answered(
    model: Any, prompt: Tensor, count: int, cache: Any, **how: Any
) -> tuple[Tensor, float]:
    """(the sequence, tokens a second behind the first). The cache is emptied first."""
    torch.manual_seed(0)
    cache.reset()
    ticks = Ticks()
    draft = {name: how.pop(name) for name in ("draft", "pace") if name in how}
    out: Tensor = model.generate(
        prompt,
        **{cache_of_generate(): cache},
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        custom_generate=partial(decode, streamer=ticks, **draft),
        **how,
    )
    return out, (len(ticks.at) - 1) / (ticks.at[-1] - ticks.at[0])


# ---- models with heads for later tokens

BATCH, LENGTH, RATE, DEPTH = 32, 256, 1.5e-3, 2
PROMPT, PROMPTS = 400, 4  # tokens
_SIZES = {
    **{"vocab_size": 256, "num_hidden_layers": 24, "head_dim": 64},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 4096},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
_SIZES_4B = {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32} | {
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 152064},
}
_QUICK = {"num_hidden_layers": 2}
_EACH_FOURTH = ["linear_attention"] * 3 + ["full_attention"]
KINDS = {"full attention": ["full_attention"] * 4, "hybrid": _EACH_FOURTH}
_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "block.model.layers": "mtp.layers",
    "block.model.norm": "mtp.norm",
}


def sizes_of(hidden: int) -> dict[str, Any]:
    """The sizes of a model that is trained, by its hidden size."""
    return _SIZES | {
        **{"hidden_size": hidden, "intermediate_size": 3 * hidden},
        **{"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256},
        **{"linear_num_key_heads": hidden // 128, "linear_num_value_heads": hidden // 128},
    }


def text() -> Tensor:
    """The bytes of the standard library's modules, int64 [1, T], the same on each machine of one
    Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = "".join(f.read_text(errors="ignore") for f in sorted(folder.glob("*.py"))).encode()
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).long()[None]


class Told(Mtp):
    """Proposes what comes next, each token with the probability `right`, else another; the head
    computes all the same."""

    def __init__(self, model: Any, head: MtpHead, right: float) -> None:
        super().__init__(model, head)
        self._told, self._right, self._draws = list[int](), right, torch.Generator().manual_seed(0)

    def tell(self, sequence: Tensor) -> None:
        """Set the text that comes, int64 [T]."""
        self._told = sequence.tolist()

    def propose(self, most: int) -> Tensor:
        device = super().propose(most).device
        count = len(self._tokens)
        found = [*self._told[count : count + most], *[0] * most][:most]
        wrong = torch.rand(most, generator=self._draws) >= self._right
        return on_device(
            [t ^ 1 if w else t for t, w in zip(found, wrong.tolist(), strict=True)], device
        )


def run_heads(run: Run) -> Iterator[Record]:
    """One record per model and choice of tokens."""
    ids = text()
    if run.args.told is not None:
        for kind in KINDS:
            sizes = _SIZES | _SIZES_4B | (_QUICK if run.args.quick else {})
            with torch.inference_mode(False), torch.device(run.device.type):
                model, head = untrained(kind, sizes, run.device.dtype)
            for each in (model, head):
                each.eval().requires_grad_(False)
            yield from answers(kind, model, head, run.args.formats.split(",")[0], ids, run)
        return
    with TemporaryDirectory() as folder:
        for kind in KINDS:
            path = (run.args.folder or Path(folder)) / kind.replace(" ", "-")
            if not path.exists():
                with torch.inference_mode(False):
                    train(kind, path, ids[:, : -2 * PROMPT * PROMPTS], run)
            yield from measured(kind, path, ids, run)


def untrained(kind: str, sizes: dict[str, Any], dtype: torch.dtype) -> tuple[Any, MtpHead]:
    """(a random model, its random head)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = (KINDS[kind] * 8)[-sizes["num_hidden_layers"] :]
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **sizes, layer_types=kinds)
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.layer_types = 1, ["full_attention"]
    model, block = (AutoModelForCausalLM.from_config(c, dtype=dtype) for c in (config, one))
    head = MtpHead(model, block)
    head.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False, dtype=dtype)
    return model, head


def losses(model: Any, head: MtpHead, ids: Tensor) -> Tensor:
    """The loss of the model's next token and of the head's DEPTH tokens behind it."""
    found = nn.functional.cross_entropy

    def loss(hidden: Tensor, ahead: int) -> Tensor:
        logits = model.lm_head(hidden[:, : ids.shape[1] - ahead])
        return found(logits.flatten(0, 1).float(), ids[:, ahead:].flatten())

    hidden = model.model(input_ids=ids, use_cache=False)[0]
    total = loss(hidden, 1)
    for depth in range(1, DEPTH + 1):
        hidden = hidden[:, : ids.shape[1] - depth]
        embedded = model.model.embed_tokens(ids[:, depth:])
        rows = torch.cat([head.enorm(embedded), head.hnorm(hidden)], -1)
        hidden = head.get_decoder()(inputs_embeds=head.eh_proj(rows), use_cache=False)[0]
        total = total + 0.3 * loss(hidden, depth + 1)
    return total


def train(kind: str, path: Path, ids: Tensor, run: Run) -> None:
    """Write a model that was trained for the seconds of the run."""
    from safetensors.torch import load_file, save_file

    device = run.device.type
    sizes = sizes_of(run.args.hidden) | (_QUICK if run.args.quick else {})
    most = RATE * math.sqrt(512 / run.args.hidden)
    model, head = untrained(kind, sizes, torch.float32)
    model, head = model.to(device).train(), head.to(device).train()
    parameters = list(dict.fromkeys((*model.parameters(), *head.parameters())))
    optimizer = torch.optim.AdamW(parameters, most, fused=device == "cuda")
    ids, begun, steps, seen = ids.clone().to(device), time.monotonic(), 0, float("nan")
    while (spent := (time.monotonic() - begun) / run.args.train) < 1:
        for group in optimizer.param_groups:
            group["lr"] = most * min(1.0, (steps + 1) / 50, 1.05 - spent)
        first = torch.randint(ids.shape[1] - LENGTH, (BATCH, 1), device=device)
        part = ids[0, first + torch.arange(LENGTH, device=device)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = losses(model, head, part)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 20 == 0:
            seen = float(loss)
            status(f"{kind}: {steps} steps, loss {seen:.2f}")
    model.cpu().half().save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name, value in head.cpu().half().state_dict().items():
        own = next((n for n in _NAMES if name.startswith(n)), None)
        if own is not None:
            tensors[_NAMES[own] + name.removeprefix(own)] = value.contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    status(f"{kind}: {steps} steps, loss {seen:.2f}\n")


def measured(kind: str, path: Path, ids: Tensor, run: Run) -> Iterator[Record]:
    """Records of a trained model, in each format."""
    from transformers import AutoModelForCausalLM

    for format in run.args.formats.split(","):
        with torch.inference_mode(False), torch.no_grad():
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=run.device.dtype)
            model = model.eval().to(run.device.type)
            head = load_mtp(model, path, format)
        yield from answers(kind, model, head, format, ids, run)


def answers(
    kind: str, model: Any, head: MtpHead, format: str, ids: Tensor, run: Run
) -> Iterator[Record]:
    """Packed and fused: answers without drafts, by lookup and by the head, in turns."""
    device, args = run.device.type, run.args
    with torch.inference_mode(False), torch.no_grad():
        quantize_(model, format, progress=False)
        quantize_(head, format, progress=False)
        for each in (model, head):
            fuse_(each, "swiglu", cache=DTYPE_NAMES[run.device.dtype])
    drafters: dict[str, Any] = {"lookup": "lookup", "own head": Mtp(model, head)}
    told = None if args.told is None else Told(model, head, args.told)
    if told is not None:
        drafters = {f"own head, right by {args.told:.0%}": told}
    ends = [ids.shape[1] - PROMPT * i for i in range(PROMPTS)]
    prompts = [ids[:, end - 2 * PROMPT : end - PROMPT].to(device) for end in ends]
    title = f"{kind}, {format}, {device}, {args.new_tokens} tokens"
    yield from raced(title, model, prompts, drafters, args, told and told.tell)
