"""Who may use which route of `metalmm serve`: keys, hosts, pages of other sites, large bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gguf_files import random_model
from serving import KEY, OTHER_KEY, Served, serving

pytest.importorskip("uvicorn")

ORIGIN = "https://chat.example:8080"
CHATS = ("chat/completions", "responses", "messages", "messages/count_tokens")
POSTS = (*CHATS, "completions", "embeddings")
GETS = ("models", "models/tiny")
ROUTES = [*(f"/v1/{path}" for path in (*POSTS, *GETS)), "/metrics"]
OPEN = "/health"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = random_model(tmp_path_factory.mktemp("serve") / "tiny.gguf", "llama")
    flags = ("--max-body", "2000", "--origin", ORIGIN)
    with serving(str(file), *flags, "--name", "tiny") as found:
        yield found


def ask(served: Served, path: str, body: Any = b"{}", **headers: Any) -> tuple[int, Any, Any]:
    """A POST where the route is one; a body may be bytes of any kind."""
    is_post = path.removeprefix("/v1/") in POSTS
    return served.ask(path, body if is_post else None, **headers)


@pytest.mark.parametrize("path", ROUTES)
def test_keys(served: Served, path: str) -> None:
    """As OpenAI's clients give them and as Anthropic's; what they ask is looked at afterwards."""
    both = f"{KEY} {OTHER_KEY}"
    for headers in ({"key": ""}, {"key": "wrong"}, {"key": KEY[:-1]}, {"X_Api_Key": both}):
        status, _, told = ask(served, path, **{"key": ""} | headers)
        assert status == 401 and "the API key is missing or wrong" in str(told)
    for headers in ({}, {"key": "", "X_Api_Key": OTHER_KEY}, {"Authorization": f"bearer {KEY}"}):
        assert ask(served, path, **headers)[0] in (200, 400)


def test_a_key_of_no_ascii(served: Served) -> None:
    assert ask(served, ROUTES[0], key="", X_Api_Key="\xe9")[0] == 401


@pytest.mark.parametrize("path", [*ROUTES, OPEN])
def test_names_of_other_hosts(served: Served, path: str) -> None:
    """They may lead to this machine; those that are its own are let in."""
    port = served.url.rpartition(":")[2]
    for host in ("localhost", "[::1]", "evil.example"):
        _, _, told = ask(served, path, Host=f"{host}:{port}")
        assert ("is no name of this server" in str(told)) == (host == "evil.example")


@pytest.mark.parametrize("path", [*ROUTES, OPEN])
def test_pages_of_other_sites(served: Served, path: str) -> None:
    """Only those that --origin names may use the server, and are told so."""
    for origin in ("https://evil.example", "null", ORIGIN + "1", ORIGIN.upper(), served.url):
        status, headers, told = ask(served, path, Origin=origin)
        assert status == 403 and "may not use this server" in str(told)
        assert "access-control-allow-origin" not in headers
    status, headers, _ = ask(served, path, Origin=ORIGIN)
    assert status in (200, 400) and headers["access-control-allow-origin"] == ORIGIN
    # Refused by the key, a page may read why.
    if path != OPEN:
        status, headers, _ = ask(served, path, key="", Origin=ORIGIN)
        assert status == 401 and headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("origin", "status"), ((ORIGIN, 200), ("https://evil.example", 400)))
def test_browsers_ask_before(served: Served, path: str, origin: str, status: int) -> None:
    """Without the key."""
    import http.client

    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type"
    connection.request("OPTIONS", path, headers=headers)
    answer = connection.getresponse()
    assert answer.status == status
    assert answer.getheader("access-control-allow-origin") == (origin if status == 200 else None)
    connection.close()


@pytest.mark.parametrize("path", [f"/v1/{path}" for path in POSTS])
def test_bodies_that_are_not_said_to_be_json(served: Served, path: str) -> None:
    """As curl -d sends them; not where a browser may have been made to."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
        for sign in ({"Origin": ORIGIN}, {"Referer": ORIGIN}, {"Sec_Fetch_Site": "none"}):
            assert ask(served, path, Content_Type=kind, **sign)[0] == 415
        status, _, told = ask(served, path, Content_Type=kind)
        assert status == 400 and "Content-Type" not in str(told)


@pytest.mark.parametrize("path", [f"/v1/{path}" for path in POSTS])
def test_bodies(served: Served, path: str) -> None:
    """Too large, no JSON, no object."""
    assert ask(served, path, b" " * 2001)[0] == 413
    for body in (b"{", b"[" * 1999, b"[]", b"\xff", b"3", b'{"n": 1' + b"0" * 1900 + b"}"):
        assert ask(served, path, body)[0] == 400, body
    assert served.ask(path)[0] == 405
    many = json.dumps({f"x{i}": 1 for i in range(100)}).encode()
    assert ask(served, path, many)[0] == 400
