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
from seeing_models import seeing_folder
from serving import Served, serving

from torch_metalmm import load_packed
from torch_metalmm.tools.cli import main

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
        ([{"type": "image_url", "image_url": 5}], "parts must be"),
        ([part(picture(1, 1))] * 33, "at most 32"),
        ([part(picture(1)), {"type": "text", "text": "<image>"}], "processor takes no such"),
        ([part(Image.new("1", (9000, 9000)))], "pixels"),
        ([part(picture(1)), {"type": "text", "text": "a" * 512}], "the context has"),
    ],
)
def test_what_is_refused(served: Served, content: Any, said: str) -> None:
    body = {"messages": [{"role": "user", "content": content}]}
    status, _, told = served.ask("/v1/chat/completions", body)
    assert status == 400 and said in told["error"]["message"], told
    assert told["error"]["param"] == "messages"


def test_a_model_that_sees_nothing_says_so(smol: Served) -> None:
    body = {"messages": [{"role": "user", "content": [part(picture(1))]}]}
    status, _, told = smol.ask("/v1/chat/completions", body)
    assert status == 400 and "the model sees none" in told["error"]["message"]
