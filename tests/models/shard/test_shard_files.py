"""What a rank reads of a file, what it has then, and what a save of all ranks writes.

Pages without bytes of the rank's part cannot be touched: a load that reads one kills the process.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import expert_model
from gguf_files import tensors_of, write_gguf
from hf_models import random_model
from ranks import on_each_rank
from safetensors import safe_open
from test_shard_models import GPT2
from tiny_models import tiny_llama, token_ids

from torch_metalmm import (
    MetalMMConfig,
    formats,
    fuse_,
    load_gguf,
    load_mlx,
    load_packed,
    quantize_,
    save_gguf,
    save_mlx,
    save_packed,
    shard_,
)
from torch_metalmm.files.gguf.file import GgufFile
from torch_metalmm.files.gguf.map import gguf_names
from torch_metalmm.hf.parallel import shard_skeleton
from torch_metalmm.nn.fused import LinearPart
from torch_metalmm.nn.sharded import ColumnsLinear, RowsEmbedding, RowsLinear, Shard, Sharded

PAGE = mmap.PAGESIZE

Spans = list[tuple[int, int]]  # bytes of a file, ends excluded

# Long rows of W where columns are divided: a rank's part of a row has pages of its own.
LONG = {
    "hidden_size": 64,
    "intermediate_size": 1 << 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
KINDS: dict[str, Any] = {"packed": {"*down_proj": "q4_k", "*": "q8_0"}, "gguf": "q8_0"}
KINDS |= {"mlx": "affine8_g64", "dense": "q4_0"}
MOST = 1.1


def pages(spans: Iterable[tuple[int, int]]) -> set[int]:
    """The pages that have any of the bytes."""
    return {page for a, b in spans for page in range(a // PAGE, -(-b // PAGE))}


def forbid(path: Path, allowed: set[int]) -> int:
    """Let only the pages `allowed` of the file be touched where it is mapped now; how many maps."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or fields[5] != str(path.resolve()):
            continue
        first, last = (int(part, 16) for part in fields[0].split("-"))
        begin = int(fields[2], 16) // PAGE
        found += 1
        for page in range((last - first) // PAGE):
            if page + begin not in allowed and libc.mprotect(first + page * PAGE, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
    return found


def dense_model() -> Any:
    return tiny_llama(seed=3, **LONG)


def pack(kind: str, model: Any) -> Any:
    return quantize_(model, KINDS[kind], progress=False)


def write(kind: str, folder: Path, model: Any) -> None:
    """The dense model, as one of these."""
    if kind == "dense":
        model.save_pretrained(folder)
    elif kind == "packed":
        save_packed(pack(kind, model), None, folder)
    elif kind == "mlx":
        save_mlx(pack(kind, model), None, folder)
    else:
        write_model(pack(kind, model), folder)


def write_model(model: Any, folder: Path) -> None:
    """model.gguf, with a tokenizer."""
    folder.mkdir(exist_ok=True)
    save_gguf(model, None, folder / "weights")
    values = GgufFile(folder / "weights").metadata
    kind = values["general.architecture"]
    own = {k.removeprefix(f"{kind}."): v for k, v in values.items() if k.startswith(f"{kind}.")}
    write_gguf(folder / "model.gguf", kind, dict(tensors_of(folder / "weights")), own)


def load(kind: str, folder: Path, mesh: Any) -> Any:
    if kind == "packed":
        return load_packed(folder, mesh=mesh)[0]
    if kind == "mlx":
        return load_mlx(folder, mesh=mesh)[0]
    if kind == "gguf":
        return load_gguf(folder / "model.gguf", mesh=mesh)[0]
    from transformers import AutoModelForCausalLM

    config = MetalMMConfig(KINDS[kind])
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, tp_plan="auto")


def file_of(kind: str, folder: Path) -> Path:
    return folder / ("model.gguf" if kind == "gguf" else "model.safetensors")


def tensors(kind: str, model: Any, file: Path) -> Iterator[tuple[str, int, int, int]]:
    """(name of the layer, first byte, rows, bytes of a row) of each tensor of the file."""
    if kind == "gguf":
        stored = GgufFile(file).tensors
        packed = [n for n, m in model.named_modules() if hasattr(m, "format")]
        names = gguf_names(model, packed)
        for name, entry in stored.items():
            rows = entry.nbytes // formats.get(entry.format).row_bytes(entry.shape[-1])
            yield names.get(name, ""), entry.offset, rows, entry.nbytes // rows
        return
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        rows = entry["shape"][0]
        yield name.rpartition(".")[0], 8 + length + begin, rows, (end - begin) // rows


def spans_of(kind: str, model: Any, file: Path, layers: dict[str, Any]) -> Spans:
    """The bytes of this rank's part of the file, and its header."""
    found: Spans = []
    least = 1 << 62
    for name, begin, rows, row in tensors(kind, model, file):
        least = min(least, begin)
        shard = getattr(layers.get(name), "shard", None)
        if shard is None:
            found.append((begin, begin + rows * row))
        elif shard.rows:
            a, b = shard.range
            found.append((begin + a * row, begin + b * row))
        else:
            found += [
                (begin + r * row + a, begin + r * row + b)
                for r in range(rows)
                for a, b in columns(shard, row)
            ]
    return [(0, least), *found]


def columns(shard: Shard, row: int) -> Spans:
    """The bytes of a row that hold the rank's columns; every plane of a file is divided alike."""
    a, b = shard.range
    return [(a * row // shard.k, -(-b * row // shard.k))]


@contextmanager
def only(file: Path, allowed: set[int]) -> Iterator[list[int]]:
    """Inside, files are opened with all pages but those forbidden; how many maps each time."""
    import safetensors
    import transformers.modeling_utils as theirs

    import torch_metalmm.files.gguf.load as gguf

    maps: list[int] = []

    def forbidding(opens: Any) -> Any:
        def opened(*args: Any, **options: Any) -> Any:
            made = opens(*args, **options)
            maps.append(forbid(file, allowed))
            return made

        return opened

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((gguf, "open_gguf"), (safetensors, "safe_open"), (theirs, "safe_open")):
            patch.setattr(owner, name, forbidding(getattr(owner, name)))
        yield maps


def check_same(got: Any, want: Any) -> None:
    """The loaded model has the layers of the one that was sharded, bytes and all."""
    layers = {n: m for n, m in want.named_modules() if isinstance(m, Sharded)}
    assert {type(m) for m in layers.values()} == {RowsEmbedding, RowsLinear, ColumnsLinear}
    for name, layer in layers.items():
        mine = got.get_submodule(name)
        state = mine.state_dict()
        assert type(mine) is type(layer) and state.keys() == layer.state_dict().keys(), name
        assert all(torch.equal(t, state[n]) for n, t in layer.state_dict().items()), name


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    write(kind, tmp_path, dense_model())
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
@on_each_rank(2)
def test_a_rank_reads_its_part(mesh: Any, kind: str, folder: Path) -> None:
    want = shard_(pack(kind, dense_model()), mesh)
    layers = {n: m for n, m in want.named_modules() if isinstance(m, Sharded)}
    file = file_of(kind, folder)
    spans = spans_of(kind, want, file, layers)
    allowed = pages(spans)
    assert len(allowed) * PAGE <= MOST * sum(b - a for a, b in spans)
    with only(file, allowed) as maps:
        got = load(kind, folder, mesh)
    assert sum(maps) > 0
    ids = token_ids(1, 5)
    with torch.inference_mode():
        assert torch.equal(got(ids).logits, want(ids).logits)
    check_same(got, want)


SAVED: dict[str, Any] = {"packed": "q4_0", "dense head": {"lm_head": None, "*": "q4_0"}}


@on_each_rank(2)
def save(mesh: Any, folder: Path, what: str, fused: bool) -> None:
    model = quantize_(tiny_llama(seed=1), SAVED[what], progress=False)
    shard_(model, mesh)
    if fused:
        fuse_(model, "swiglu")
    before = [(n, type(m)) for n, m in model.named_modules()]
    kinds = {kind for _, kind in before}
    assert ColumnsLinear in kinds and (LinearPart in kinds) == fused
    save_packed(model, None, folder)
    assert [(n, type(m)) for n, m in model.named_modules()] == before


def files(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("what", SAVED)
def test_a_save_is_that_of_the_whole_model(what: str, fused: bool, tmp_path: Path) -> None:
    whole = quantize_(tiny_llama(seed=1), SAVED[what], progress=False)
    save_packed(whole, None, tmp_path / "one")
    save(folder=tmp_path / "two", what=what, fused=fused)
    assert "model.safetensors" in files(tmp_path / "one")
    assert files(tmp_path / "one") == files(tmp_path / "two")


@on_each_rank(2)
def load_and_save(mesh: Any, folder: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    model.save_pretrained(out)
    divided = sum(isinstance(m, Sharded) for m in model.modules())
    assert divided == 2 + 2 * 3  # o has one block: attention stays whole


def test_from_pretrained_of_a_packed_folder_and_back(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    spec = {"lm_head": None, "*": "q4_k"}
    save_packed(quantize_(tiny_llama(intermediate_size=1024), spec, progress=False), None, one)
    load_and_save(folder=one, out=two)
    with (
        safe_open(one / "model.safetensors", "pt") as a,
        safe_open(two / "model.safetensors", "pt") as b,
    ):
        assert sorted(a.keys()) == sorted(b.keys())
        assert all(torch.equal(a.get_tensor(n), b.get_tensor(n)) for n in sorted(b.keys()))
    assert (one / "config.json").read_text() == (two / "config.json").read_text()


def test_packing_while_a_rank_loads_gpt2(tmp_path: Path) -> None:
    """GPT-2 has its weights transposed, and no plan of its own."""
    random_model("gpt2").save_pretrained(tmp_path)
    check_gpt2(folder=tmp_path)


@on_each_rank(2)
def check_gpt2(mesh: Any, folder: Path) -> None:
    from transformers import GPT2LMHeadModel
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(tp_size=2, tp_plan=GPT2)
    options = {"quantization_config": MetalMMConfig("q4_0"), "distributed_config": config}
    got = GPT2LMHeadModel.from_pretrained(folder, **options)
    want = shard_(quantize_(random_model("gpt2"), "q4_0", progress=False), mesh, GPT2)
    assert sum(isinstance(m, Sharded) for m in want.modules()) == 2 + 2 * 4
    check_same(got, want)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"pp_size": 2}, "pp_size"),
        ({"fsdp_size": 2}, "dp_size"),
        ({"tp_size": 2, "ep_size": 2}, "ep_size"),
    ],
)
def test_other_ways_to_divide_are_refused(asked: dict[str, int], name: str) -> None:
    """Before a process group is asked for."""
    from transformers.distributed.configuration_utils import DistributedConfig

    model = random_model("gpt2")
    model.config.distributed_config = DistributedConfig(**asked)
    with pytest.raises(ValueError, match=f"{name} = 2; packed layers are divided by tensor"):
        shard_skeleton(model, [], None)


def mixture() -> Any:
    return expert_model(norm_topk_prob=True)  # what readers of a GGUF file take it to be


@pytest.mark.filterwarnings("ignore:K is not a multiple")
def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    """By shard_ and every way to load with a mesh."""
    for kind in KINDS:
        write(kind, tmp_path / kind, mixture())
    check_experts(folder=tmp_path)


@on_each_rank(2)
def check_experts(mesh: Any, folder: Path) -> None:
    ways = [lambda kind=kind: load(kind, folder / kind, mesh) for kind in KINDS]
    for model in (mixture(), quantize_(mixture(), "q4_0", progress=False)):
        ways.append(lambda model=model: shard_(model, mesh))
    for call in ways:
        with pytest.raises(ValueError, match="experts are not sharded yet: model.layers.0.mlp.exp"):
            call()
