"""Who may use which route of `metalmm serve`: keys, hosts, pages of other sites, large bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import KEY, ORIGIN, OTHER_KEY, Served

CHATS = ("chat/completions", "responses", "messages", "messages/count_tokens")
POSTS = (*CHATS, "completions", "embeddings")
GETS = ("models", "models/tiny")
OLLAMA_POSTS = ("/api/chat", "/api/generate", "/api/show")
OLLAMA = (*OLLAMA_POSTS, "/api/tags", "/api/version")
ROUTES = [*(f"/v1/{path}" for path in (*POSTS, *GETS)), "/metrics", *OLLAMA]
OPEN = "/health"


def ask(tiny: Served, path: str, body: Any = b"{}", **headers: Any) -> tuple[int, Any, Any]:
    """A POST where the route is one; a body may be bytes of any kind."""
    is_post = path.removeprefix("/v1/") in POSTS or path in OLLAMA_POSTS
    return tiny.ask(path, body if is_post else None, **headers)


@pytest.mark.parametrize("path", ROUTES)
def test_keys(tiny: Served, path: str) -> None:
    """As OpenAI's clients give them and as Anthropic's; what they ask is looked at afterwards."""
    both = f"{KEY} {OTHER_KEY}"
    for headers in ({"key": ""}, {"key": "wrong"}, {"key": KEY[:-1]}, {"X_Api_Key": both}):
        status, _, told = ask(tiny, path, **{"key": ""} | headers)
        assert status == 401 and "the API key is missing or wrong" in str(told)
    for headers in ({}, {"key": "", "X_Api_Key": OTHER_KEY}, {"Authorization": f"bearer {KEY}"}):
        assert ask(tiny, path, **headers)[0] in (200, 400)


@pytest.mark.parametrize(("server", "wanted"), (("smol", [0, 0, 128]), ("tiny", [0, 128, 128])))
def test_prompts_of_keys(server: str, wanted: list[int], request: pytest.FixtureRequest) -> None:
    """What was read for one is not there for another, but with --share-prefixes."""
    served: Served = request.getfixturevalue(server)
    body, found = {"prompt": [3 + i % 60 for i in range(200)], "max_tokens": 2}, list[int]()
    for key in (KEY, OTHER_KEY, KEY):
        status, _, told = served.ask("/v1/completions", body, key)
        assert status == 200
        found.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == wanted


def test_a_key_of_no_ascii(tiny: Served) -> None:
    assert ask(tiny, ROUTES[0], key="", X_Api_Key="\xe9")[0] == 401


@pytest.mark.parametrize("path", [*ROUTES, OPEN])
def test_names_of_other_hosts(tiny: Served, path: str) -> None:
    """They may lead to this machine; those that are its own are let in."""
    port = tiny.url.rpartition(":")[2]
    for host in ("localhost", "[::1]", "evil.example"):
        _, _, told = ask(tiny, path, Host=f"{host}:{port}")
        assert ("is no name of this server" in str(told)) == (host == "evil.example")


@pytest.mark.parametrize("path", [*ROUTES, OPEN])
def test_pages_of_other_sites(tiny: Served, path: str) -> None:
    """Only those that --origin names may use the server, and are told so."""
    for origin in ("https://evil.example", "null", ORIGIN + "1", ORIGIN.upper(), tiny.url):
        status, headers, told = ask(tiny, path, Origin=origin)
        assert status == 403 and "may not use this server" in str(told)
        assert "access-control-allow-origin" not in headers
    status, headers, _ = ask(tiny, path, Origin=ORIGIN)
    assert status in (200, 400) and headers["access-control-allow-origin"] == ORIGIN
    # Refused by the key, a page may read why.
    if path != OPEN:
        status, headers, _ = ask(tiny, path, key="", Origin=ORIGIN)
        assert status == 401 and headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("origin", "status"), ((ORIGIN, 200), ("https://evil.example", 400)))
def test_browsers_ask_before(tiny: Served, path: str, origin: str, status: int) -> None:
    """Without the key."""
    import http.client

    connection = http.client.HTTPConnection(tiny.url.removeprefix("http://"), timeout=60)
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type"
    connection.request("OPTIONS", path, headers=headers)
    answer = connection.getresponse()
    assert answer.status == status
    assert answer.getheader("access-control-allow-origin") == (origin if status == 200 else None)
    connection.close()


@pytest.mark.parametrize("path", [f"/v1/{path}" for path in POSTS])
def test_bodies_that_are_not_said_to_be_json(tiny: Served, path: str) -> None:
    """As curl -d sends them; not where a browser may have been made to."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
        for sign in ({"Origin": ORIGIN}, {"Referer": ORIGIN}, {"Sec_Fetch_Site": "none"}):
            assert ask(tiny, path, Content_Type=kind, **sign)[0] == 415
        status, _, told = ask(tiny, path, Content_Type=kind)
        assert status == 400 and "Content-Type" not in str(told)


@pytest.mark.parametrize("path", [f"/v1/{path}" for path in POSTS])
def test_bodies(tiny: Served, path: str) -> None:
    """Too large, no JSON, no object."""
    assert ask(tiny, path, b" " * 2001)[0] == 413
    for body in (b"{", b"[" * 1999, b"[]", b"\xff", b"3", b'{"n": 1' + b"0" * 1900 + b"}"):
        assert ask(tiny, path, body)[0] == 400, body
    assert tiny.ask(path)[0] == 405
    many = json.dumps({f"x{i}": 1 for i in range(100)}).encode()
    assert ask(tiny, path, many)[0] == 400
