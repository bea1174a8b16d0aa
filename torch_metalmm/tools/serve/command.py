"""`metalmm serve`: a model behind an API as OpenAI's."""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import os
import re
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import positive_int, start
from ..chat.flags import add_model, add_source, check_model, take_source
from ..sentences import POOLINGS, pooling_of

if TYPE_CHECKING:
    from .app import Server
    from .saved import SavedPrompts

_KEY = "METALMM_API_KEY"
_LOOPBACK = ["localhost", "127.0.0.1", "[::1]"]
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/*?#@]+")
_SPARE = 64  # requests beside those that are answered and wait; more get status 503
_BODY, _SEEN_BODY = 4 << 20, 32 << 20  # bytes of a request; of one that may have images
_SHUTDOWN = 5  # seconds that answers under way have when the server ends


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models over HTTP, "
        "as OpenAI's API does, for several clients at a time."
    )
    add_source(parser)
    add_model(parser.add_argument_group("model"))
    _add_server(parser.add_argument_group("server"))
    _add_limits(parser.add_argument_group("limits"))
    parser.set_defaults(run=run)


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    group.add_argument("--port", type=_port, default=8000, help="default: 8000; 0: a free one")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"what clients must give, this or another of those given; better in {_KEY}, with "
        "white space between several, which other users do not see. Needed where the host is not "
        "this machine",
    )
    group.add_argument(
        "--share-prefixes",
        action="store_true",
        help="a prompt may begin with what was read of another key's, who can tell by the time",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="what was read of prompts: taken from the file at the start, written when the server "
        "ends",
    )
    group.add_argument("--name", help="of the model in requests; default: its file or folder")
    group.add_argument(
        "--origin",
        action="append",
        default=[],
        metavar="URL",
        help="whose pages may use the server, as https://chat.example:8080; may be given again. "
        "Others' are refused",
    )
    group.add_argument(
        "--pooling",
        metavar="KIND",
        help=f"of embeddings: {', '.join(POOLINGS)}; default: what the folder says, else last of a "
        "model that generates, mean of another",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    def limit(flag: str, default: int | None, metavar: str, what: str) -> None:
        said = what if default is None else f"{what}; default: {default}"
        group.add_argument(flag, type=positive_int, default=default, metavar=metavar, help=said)

    limit("--parallel", 4, "N", "answers at a time")
    limit("--queue", 16, "N", "requests that wait for a place; more get status 429")
    limit(
        "--cache-memory",
        None,
        "MIB",
        "of the keys and values of all answers and of those kept for prompts to come; "
        "default: a quarter of what is free",
    )
    limit("--max-new-tokens", None, "N", "of any request; default: what the context has room for")
    limit(
        "--max-body",
        None,
        "BYTES",
        f"of a request; default: {_BODY}, {_SEEN_BODY} where the model sees images",
    )
    limit("--max-messages", 1024, "N", "of a chat, and texts of a request for embeddings")
    limit("--timeout", 600, "SECONDS", "of a request, with the time it waits")


def run(args: argparse.Namespace) -> None:
    """Serve until a signal comes. ValueError, OSError, ImportError: it cannot be done."""
    check_model(args)
    take_source(args)
    owners = _owners(args)
    if args.pooling not in (None, *POOLINGS):
        raise ValueError(f"--pooling {args.pooling}: must be one of {', '.join(POOLINGS)}")
    for origin in args.origin:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"--origin {origin}: must be a scheme and a host, as http://a:80")
    start(args, "psutil", "pydantic", "starlette", "uvicorn", "llguidance")
    import uvicorn

    from ..chat.template import Template
    from .wire import BACKLOG, connections_of, protocol

    bound = _bound(args.host, args.port)
    with closing(bound), closing(Template()) as template:
        template.start()
        server = _server(args, template, owners)
        host, port = bound.getsockname()[:2]
        config = uvicorn.Config(
            server.app(),
            log_level="warning",
            timeout_graceful_shutdown=_SHUTDOWN,
            server_header=False,
            backlog=BACKLOG,
            http=protocol(connections_of(server.limits.requests)),
        )
        saved = _saved(args, server)
        server.engine.start()
        try:
            print(f"{server.name}: http://{_shown(host)}:{port}/v1", file=sys.stderr, flush=True)
            uvicorn.Server(config).run(sockets=[bound])
        finally:
            server.engine.close()
            if saved is not None:
                server.engine.worker.call(saved.write).result()


def _server(args: argparse.Namespace, template: Any, owners: dict[bytes, bytes]) -> Server:
    from ..chat.loading import load
    from ..chat.session import Session
    from ..sequence import context_of
    from .access import Access
    from .app import Limits, Server
    from .batch import Batch, can_share, guessing_of
    from .embedding import Embedder
    from .engine import Engine, Runner, Worker
    from .forms import Forms
    from .prompts import Prompts
    from .seeing import Seeing
    from .sight import sight_of
    from .single import Single
    from .tokens import Tokens

    worker = Worker("metalmm-engine")
    loaded = worker.call(lambda: load(args, generating=False)).result()
    model, tokenizer = loaded.model, loaded.tokenizer
    generates = bool(getattr(model, "can_generate", lambda: False)())
    prompts, session, tokens, context = None, None, Tokens(model, tokenizer), args.ctx
    if generates:
        session = Session(model, tokenizer, cache=args.cache, draft=loaded.draft)
    runner: Runner = Single(session)
    guessing = guessing_of(loaded.draft, model, tokenizer)
    if generates and can_share(model) and (loaded.draft is None or guessing is not None):
        memory = args.cache_memory and args.cache_memory << 20
        runner = batch = Batch(model, tokenizer, args.parallel, args.cache, memory, guessing)
        context = min(context or batch.cache.slots, batch.cache.slots)
    else:
        for flag in ("cache_memory", "prompts"):
            if getattr(args, flag) is not None:
                name = "--" + flag.replace("_", "-")
                raise ValueError(f"{name}: the answers of this model share no cache")
    has_scores = isinstance(runner, Batch)
    if session is not None:
        forms = None if loaded.draft is not None and not has_scores else Forms(model, tokenizer)
        most, sight = args.max_new_tokens, sight_of(model, loaded.path)
        prompts = Prompts(model, tokenizer, template, context, most, tokens, forms, sight)
        if sight:
            runner = Seeing(runner, model, tokenizer, session.sequence.new_cache)
    pooling = args.pooling or pooling_of(loaded.path, generates)
    hosts = [*_LOOPBACK, _shown(args.host)] if _is_loopback(args.host) else []
    return Server(
        name=args.name or loaded.name,
        engine=Engine(runner, args.queue, worker),
        prompts=prompts,
        embedder=Embedder(model, tokenizer, pooling, context_of(model), tokens),
        limits=Limits(
            body=args.max_body or (_SEEN_BODY if isinstance(runner, Seeing) else _BODY),
            messages=args.max_messages,
            seconds=args.timeout,
            requests=args.parallel + args.queue + _SPARE,
        ),
        access=Access(owners, hosts, args.origin),
        has_scores=has_scores,
    )


def _saved(args: argparse.Namespace, server: Server) -> SavedPrompts | None:
    """The file of --prompts, read; it is to be written also where a signal ends the server."""
    from .saved import SavedPrompts
    from .seeing import Seeing

    if args.prompts is None:
        return None
    runner: Any = server.engine.runner
    runner = runner.inner if isinstance(runner, Seeing) else runner
    found = server.engine.worker.call(lambda: SavedPrompts(args.prompts, runner)).result()
    server.engine.worker.call(found.read).result()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return found


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"{value} is not from 0 to 65535")
    return value


def _owners(args: argparse.Namespace) -> dict[bytes, bytes]:
    """{SHA-256 of a key: whose prompts share what is read, of all where the flag says so}."""
    keys: list[str] | None = args.api_key
    if keys is None and (said := os.environ.get(_KEY)) is not None:
        keys = said.split() or [""]
    for key in keys or ():
        if not (key and key.isascii() and key.isprintable() and " " not in key):
            raise ValueError("--api-key: must be printable ASCII without spaces, and not empty")
    if keys is None and not _is_loopback(args.host):
        raise ValueError(f"--host {args.host}: others can reach it; give --api-key, or set {_KEY}")
    hashes = [hashlib.sha256(key.encode()).digest() for key in keys or ()]
    return {known: b"" if args.share_prefixes else known for known in hashes}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(host: str) -> str:
    """As it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address. OSError: it is taken, or not of this machine."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()  # before the address is told
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return bound
