"""Images in the requests of each API, beside texts."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from seeing_models import prompt_of, seeing, seeing_folder
from serving import Served, serving
from transformers import AutoTokenizer, DynamicCache

from torch_metalmm import load_packed
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.serve.engine import Job, Runner
from torch_metalmm.tools.serve.seeing import Seeing
from torch_metalmm.tools.writing import Options

NEW = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dense = seeing_folder(tmp_path_factory.mktemp("dense"))
    packed = tmp_path_factory.mktemp("packed")
    main(["quantize", str(dense), "--output", str(packed), "--format", "q8_0"])
    return packed


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(str(folder), "--max-body", "100000", "--parallel", "2") as found:
        yield found


def picture(seed: int, width: int = 40) -> Image.Image:
    make = torch.Generator().manual_seed(seed)
    corners = torch.rand(1, 3, 2, 2, generator=make)  # of colours, and what lies between
    pixels = 255 * torch.nn.functional.interpolate(corners, (50, width), mode="bilinear")
    return Image.fromarray(pixels[0].permute(1, 2, 0).byte().numpy())


def encoded(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url(image: Image.Image) -> str:
    return f"data:image/png;base64,{encoded(image)}"


def part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image)}}


def scans(count: int) -> str:
    """A JPEG of a few bytes that costs as many walks over its pixels."""
    file = io.BytesIO()
    picture(1).save(file, "JPEG", progressive=True)
    return (
        "data:image/jpeg;base64,"
        + base64.b64encode(file.getvalue()[:-2] + b"\xff\xda" * count).decode()
    )


def answers(folder: Path, text: str, images: list[Image.Image]) -> str:
    """By transformers' own processor and generate(), unfused."""
    from transformers import AutoProcessor

    model, _ = load_packed(folder)
    processor = AutoProcessor.from_pretrained(folder)
    given = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**given, max_new_tokens=NEW, do_sample=False)
    return str(processor.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


def chat(served: Served, content: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, "temperature": 0, "max_tokens": NEW, **fields}
    status, _, told = served.ask("/v1/chat/completions", body)
    assert status == 200, told
    return told["choices"][0]["message"]["content"]


def test_each_api_gives_what_the_model_sees(served: Served, folder: Path) -> None:
    image = picture(1)
    want = answers(folder, "<turn>user:see<image><turn>assistant:", [image])
    assert want != answers(folder, "<turn>user:see<image><turn>assistant:", [picture(2)])
    assert chat(served, [{"type": "text", "text": "see"}, part(image)]) == want
    source = {"type": "base64", "media_type": "image/png", "data": encoded(image)}
    seen = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
    body = {"messages": [{"role": "user", "content": seen}], "temperature": 0, "max_tokens": NEW}
    assert served.ask("/v1/messages", body)[2]["content"] == [{"type": "text", "text": want}]
    counted = served.ask("/v1/messages/count_tokens", {"messages": body["messages"]})[2]
    told = served.ask("/v1/messages", body)[2]["usage"]
    assert counted["input_tokens"] == told["input_tokens"]
    given = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": url(image)},
    ]
    body = {"input": [{"role": "user", "content": given}], "temperature": 0}
    told = served.ask("/v1/responses", body | {"max_output_tokens": NEW})[2]
    assert told["output"][0]["content"][0]["text"] == want
    # Images of Ollama's have no places: they come first.
    want = answers(folder, "<turn>user:<image>see<turn>assistant:", [image])
    message = {"role": "user", "content": "see", "images": [encoded(image)]}
    options = {"temperature": 0, "num_predict": NEW}
    body = {"messages": [message], "options": options, "stream": False}
    assert served.ask("/api/chat", body)[2]["message"]["content"] == want


def test_several_images_and_those_of_tools(served: Served, folder: Path) -> None:
    images = [picture(1), picture(2, 60)]
    text = "<turn>user:<image>and<image><turn>assistant:"
    content = [part(images[0]), {"type": "text", "text": "and"}, part(images[1])]
    want = answers(folder, text, images)
    assert chat(served, content) == want != answers(folder, text, images[::-1])
    source = {"type": "base64", "media_type": "image/png", "data": encoded(images[0])}
    used = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a"}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result | {"content": [{"type": "image", "source": source}]}]},
    ]
    body = {"messages": messages, "temperature": 0, "max_tokens": NEW}
    told = served.ask("/v1/messages", body)[2]["content"]
    text = "<turn>user:look<turn>assistant:<turn>tool:<image><turn>assistant:"
    assert told == [{"type": "text", "text": answers(folder, text, [images[0]])}]


def test_answers_with_and_without_images_go_on_together(served: Served) -> None:
    contents = ["a text", [part(picture(1))], "another", [part(picture(2))], [part(picture(3))]]
    alone = [chat(served, content, max_tokens=40) for content in contents]
    with ThreadPoolExecutor(5) as pool:
        both = list(pool.map(lambda content: chat(served, content, max_tokens=40), contents))
    assert both == alone
    sampled = {"temperature": 1, "seed": 5, "logprobs": True}
    assert chat(served, contents[1], **sampled) == chat(served, contents[1], **sampled)


@pytest.mark.parametrize(
    "content, said",
    [
        ([{"type": "image_url", "image_url": {"url": "http://a/b.png"}}], "fetches none"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "fetches none"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}], "cannot be"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}], "cannot be"),
        ([{"type": "image_url", "image_url": 5}], "images come as"),
        ([{"type": "image", "source": {"type": "base64"}}], "images come as"),
        ([{"type": "sound"}], "parts must be images, or texts"),
        (5, "content must be a text, or a list of parts"),
        ([part(picture(1, 1))] * 33, "at most 32"),
        ([part(picture(1)), {"type": "text", "text": "<image>"}], "processor takes no such"),
        ([part(picture(1)), {"type": "text", "text": "<patch>"}], "the model takes no such"),
        ([{"type": "image_url", "image_url": scans(65)}], "more than 64 scans"),
        ([part(Image.new("1", (9000, 9000)))], "pixels"),
        ([part(picture(1)), {"type": "text", "text": "a" * 512}], "the context has"),
    ],
)
def test_what_is_refused(served: Served, content: Any, said: str) -> None:
    body = {"messages": [{"role": "user", "content": content}]}
    status, _, told = served.ask("/v1/chat/completions", body)
    assert status == 400 and said in told["error"]["message"], told
    assert told["error"]["param"] == "messages"


def test_the_client_s_field_is_named(served: Served) -> None:
    bad = base64.b64encode(b"no image").decode()
    seen = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": bad}}
    user = {"role": "user"}
    asked = {"model": "m", "prompt": "see", "images": [bad], "stream": False}
    for path, body, field in (
        ("/v1/messages", {"messages": [user | {"content": [seen]}]}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [user | {"content": [seen]}]}, "messages"),
        ("/v1/responses", {"input": [user | {"content": [seen]}]}, "input"),
        ("/api/chat", {"messages": [user | {"content": "see", "images": [bad]}]}, "messages"),
        ("/api/generate", asked, "images"),
        ("/api/generate", asked | {"images": 5}, "images"),
        ("/api/generate", asked | {"images": [], "prompt": "a" * 512}, "prompt"),
    ):
        status, _, told = served.ask(path, body)
        error = told["error"]
        said = error["message"] if isinstance(error, dict) else error
        assert status == 400 and said.startswith(f"{field}: "), (path, said)
        assert field == "messages" or "messages" not in said
        assert path != "/v1/responses" or error["param"] == field


def test_grey_of_16_bits_is_not_clipped(served: Served) -> None:
    shades = torch.linspace(0, 255, 50 * 40).view(50, 40).to(torch.uint8)
    grey = Image.fromarray(shades.numpy())
    deep = Image.fromarray((shades.to(torch.int32) * 257).to(torch.uint16).numpy())
    assert deep.mode == "I;16"
    wrapped = "\n".join(url(deep).split("base64,", 1)[1][i : i + 76] for i in range(0, 9999, 76))
    in_lines = {"type": "image_url", "image_url": f"DATA:image/png;BASE64,{wrapped.strip()}"}
    assert chat(served, [in_lines]) == chat(served, [part(grey)])
    assert chat(served, [part(grey)]) != chat(served, [part(Image.new("L", (40, 50), 255))])


class Texts(Runner):
    """A runner of texts that takes two."""

    def __init__(self) -> None:
        self.taken: list[Job] = []

    def room(self) -> int:
        return 2 - len(self.taken)

    def is_busy(self) -> bool:
        return bool(self.taken)

    def take(self, job: Job) -> None:
        self.taken.append(job)

    def step(self) -> None:
        raise ArithmeticError("of the texts")

    def fail(self, error: Exception) -> None:
        for job in self.taken:
            job.tell(error)
        self.taken = []


def test_a_place_is_for_one_image_and_texts_pass_the_next(folder: Path) -> None:
    model, words = seeing("qwen2_5_vl"), AutoTokenizer.from_pretrained(folder)
    told: list[Any] = []

    def job(**inputs: Any) -> Job:
        return Job("", [15], Options(max_new_tokens=9), None, told.append, inputs=inputs)

    texts = Texts()
    runner = Seeing(texts, model, words, lambda: DynamicCache(config=model.config))
    first, second, text = job(**prompt_of("qwen2_5_vl")), job(**prompt_of("qwen2_5_vl")), job()
    assert runner.takes(first) and runner.takes(text)
    runner.take(first)
    assert not runner.takes(second) and runner.takes(text) and runner.room() == 1
    runner.take(text)
    assert not runner.takes(text)
    runner.step()  # the failure is told to the text alone
    assert isinstance(told[0], ArithmeticError) and runner.is_busy()
    assert model.model.rope_deltas is not None
    first.is_cancelled = True
    runner.step()
    assert not runner.is_busy() and runner.takes(second)
    # Or it would be added to the positions of the next text.
    assert model.model.rope_deltas is None


def test_a_model_that_sees_nothing_says_so(smol: Served) -> None:
    body = {"messages": [{"role": "user", "content": [part(picture(1))]}]}
    status, _, told = smol.ask("/v1/chat/completions", body)
    assert status == 400 and "the model sees none" in told["error"]["message"]
