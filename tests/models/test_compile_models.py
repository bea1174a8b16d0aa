"""A whole Llama with packed weights: one graph, any batch and length, plain and fused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_models import ids, near, small
from tiny_models import tiny_llama, token_ids
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from torch_metalmm import fuse_, quantize_

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

SHAPES = ((2, 5), (3, 7), (4, 16), (2, 33))
# Ops of ours in a layer: q k v o, gate up down; norm+q+k+v rope o, norm+gate*up down.
OPS = {"plain": 7, "fused": 5}
BESIDE = {"plain": 2, "fused": 4}  # embedding, head; rotation tables, the norm between


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No compiled code, and no limit reached, from another test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def llama(kind: str, **options: Any) -> Any:
    model = quantize_(tiny_llama(**options), "q4_k", progress=False)
    return fuse_(model, "swiglu_linear") if kind == "fused" else model


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def our_ops(graph: torch.fx.GraphModule) -> list[str]:
    names = (str(node.target) for node in graph.graph.nodes)
    return [name.split(".")[1] for name in names if "metalmm" in name]


def test_one_graph_serves_every_batch_and_length() -> None:
    """fullgraph: a graph break is an error. Sizes of 1 are graphs of their own, as ever."""
    model = llama("fused", num_hidden_layers=1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for shape in SHAPES:
        tokens = token_ids(*shape)
        torch._dynamo.mark_dynamic(tokens, (0, 1))
        assert torch.equal(logits(compiled, tokens), logits(model, tokens))
    assert counter.frame_count == 1
    assert len(our_ops(counter.graphs[0])) == OPS["fused"] + BESIDE["fused"]
    assert torch.equal(logits(compiled, token_ids(1, 9)), logits(model, token_ids(1, 9)))
    assert counter.frame_count == 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "smollm3"])
def test_decoding_takes_two_graphs(kind: str) -> None:
    """One for the prompt, one for every token after it, which takes the form for one row; of layers
    that differ, too: two tables of rotations, layers that do not rotate."""
    from transformers import StaticCache

    model = fuse_(small(kind), "swiglu_linear")
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)

    def generate(f: Any) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=16)
        step, position, out = ids(1, 6), torch.arange(6), []
        with torch.no_grad():
            for _ in range(4):
                y = f(step, past_key_values=cache, position_ids=position[None]).logits[:, -1]
                step, position = y.argmax(-1, keepdim=True), position[-1:] + 1
                out.append(y)
        return torch.cat(out)

    got, want = generate(compiled), generate(model)
    assert near(got, want)
    assert counter.frame_count == 2
    prompt, token = (our_ops(graph) for graph in counter.graphs)
    assert "swiglu" in prompt and "swiglu_linear" not in prompt
    assert "swiglu_linear" in token and "swiglu" not in token
    assert token.count("rope") == 2


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


@torch.no_grad()  # whole layers are fused where no gradient of their norms is recorded
@pytest.mark.parametrize("kind", OPS)
def test_the_exported_model_stays_packed_and_takes_every_size(kind: str, tmp_path: Path) -> None:
    """Batch and length from 1; the file holds the packed bytes and gives the same logits."""
    model = Logits(llama(kind))
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1, max=256)
    shapes = ({0: batch, 1: length},)
    program = torch.export.export(model, (token_ids(2, 5),), dynamic_shapes=shapes)
    ops = our_ops(program.graph_module)
    assert len(ops) == 2 * OPS[kind] + BESIDE[kind] and "dequantize" not in ops
    packed = sum(p.nbytes for p in model.parameters())
    assert sum(p.nbytes for p in program.parameters()) == packed
    torch.export.save(program, tmp_path / "llama.pt2")
    dense = sum(p.nbytes for p in tiny_llama().parameters())
    assert (tmp_path / "llama.pt2").stat().st_size < dense / 3
    loaded = torch.export.load(tmp_path / "llama.pt2").module()
    for shape in ((2, 5), (3, 7), (1, 9), (1, 1)):
        assert torch.equal(loaded(token_ids(*shape)), model(token_ids(*shape)))


def test_the_loss_of_a_compiled_model_has_the_same_gradients() -> None:
    """With adapters, forward and backward in one graph each."""
    from lora_cases import lora, randomize
    from peft import get_peft_model

    model = get_peft_model(llama("plain", num_hidden_layers=1), lora("q_proj", "down_proj"))
    randomize(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for f in (model, compiled):
        model.zero_grad()
        tokens = token_ids(2, 7)
        f(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(grads[0]) == 4 and all(map(torch.equal, *grads))


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_computes_the_same() -> None:
    """Its own kernels between our ops round otherwise: by parts in a million, not more."""
    model = llama("fused", num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for shape in ((2, 5), (3, 8)):
        want = logits(model, token_ids(*shape))
        got = logits(compiled, token_ids(*shape))
        assert near(got, want)
    assert not torch._dynamo.utils.counters["graph_break"]
