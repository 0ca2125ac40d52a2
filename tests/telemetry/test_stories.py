"""``pdrouter explain``: a request's lives in lines that people read, or one line that says why there are none."""

import asyncio
import io
import socket

import msgspec
import pytest
from rich.text import Text

from pdrouter.cli import main
from pdrouter.core import events
from pdrouter.core.load import RankReport
from pdrouter.core.story import Stories
from pdrouter.errors import UpstreamTimeout
from pdrouter.telemetry import stories
from pdrouter.telemetry.stories import NoStory, fetch_stories, print_stories
from tests.core.builders import decide, decode, facts, make_options, make_router, prefill, reject
from tests.core.test_shadow import make_shadow
from tests.lab import CHAT, chat, http, make_lab

Output = pytest.CaptureFixture[str]


def make_stories(request_id: str) -> Stories:
    """Return three lives of one id: answered, failed, turned away."""
    router = make_router([prefill("p:1", dp_size=2), decode("d:1")])
    first = decide(router, facts(100, request_id=request_id, model="m"), 1.0)
    router.observe(events.FirstTokenSeen(first), 1.25)
    router.settle(first, 2.0)
    router.settle(decide(router, facts(100, request_id=request_id), 3.0), 4.0, UpstreamTimeout("too slow"))
    reject(router, facts(100, request_id=request_id, decode_rank=9), 5.0)
    return Stories(request_id, router.journal.story(request_id, 6.0))


def test_lines() -> None:
    """Plain where it is no terminal, each fact once, nothing wrapped."""
    out = io.StringIO()
    print_stories(make_stories("r1"), out)
    first, second, third = out.getvalue().split("\n\n")
    assert first.splitlines() == [
        "request r1: answered",
        "  decision 1, 5.0 s ago; model m; 100 prompt tokens",
        "  prefill on p:1 rank 0  no load report",
        "    endpoint: single: the only endpoint",
        "    rank: minimum_tokens: fewest tokens, less what it holds of this prompt (rank 0=0, rank 1=0)",
        "  decode on d:1 rank 0  no load report",
        "    endpoint: single: the only endpoint",
        "    rank: single: the only rank",
        "      +0.000 s  decided",
        "      +0.250 s  first token",
        "      +1.000 s  settled: answered",
    ]
    assert second.splitlines()[:2] == ["request r1: upstream_timeout", "  too slow"]
    assert third.splitlines()[0] == "request r1: invalid_rank"
    assert third.splitlines()[-1] == "      +0.000 s  turned away"


def test_a_shadow_is_told() -> None:
    """What it would have chosen, and how; or why it chose nothing."""
    options = make_options(policy="round_robin", shadow=make_shadow("minimum_tokens"))
    router = make_router([prefill("p:1"), prefill("p:2"), decode("d:1")], options)
    for address, tokens in (("p:1", 500.0), ("p:2", 0.0)):
        router.observe(events.LoadReported(address, [RankReport(0, tokens=tokens)], 0.5), 0.5)
    decision = decide(router, facts(100, request_id="a"), 1.0)
    out = io.StringIO()
    print_stories(Stories("a", router.journal.story("a", 6.0)), out)
    lines = out.getvalue().splitlines()
    at = lines.index("  shadow policy minimum_tokens would have chosen another endpoint")
    assert lines[at + 1] == "    prefill on p:2 rank 0"
    assert lines[at + 2].startswith("      endpoint: minimum_tokens: fewest tokens")
    assert decision.shadowed is not None
    decision.shadowed = msgspec.structs.replace(decision.shadowed, choice=None, failure="KeyError: 'x'")
    out = io.StringIO()
    print_stories(Stories("a", router.journal.story("a", 6.0)), out)
    assert out.getvalue().splitlines()[-1] == "  shadow policy minimum_tokens would have chosen nothing: KeyError: 'x'"


def test_ids_can_not_move_the_cursor() -> None:
    """A client's id is shown without its control characters."""
    out = io.StringIO()
    print_stories(make_stories("a\x1b[2Jb\n"), out)
    assert out.getvalue().startswith("request a?[2Jb?: answered\n")


def test_notable_choices_stand_out() -> None:
    """On a terminal the outcome has a colour."""
    line = stories._lines(make_stories("a").lives[0])[0]
    assert [span.style for span in line.spans] == ["bold", "green"]
    assert isinstance(line, Text)


async def _in_thread(words: list[str]) -> int:
    return await asyncio.to_thread(main, words)


async def test_explain(capsys: Output) -> None:
    """It asks a running router, with any id."""
    async with make_lab() as lab:
        for request_id in ("plain", "a/b?c%20é"):
            await lab.post(CHAT, chat("x"), {"x-request-id": request_id.encode().decode("latin-1")})
            assert await _in_thread(["explain", lab.url + "/", request_id]) == 0
            out = capsys.readouterr().out
            assert "\n  prefill on " in out
            assert "settled: answered" in out
        assert await _in_thread(["explain", lab.url, "nobody"]) == 1
        assert capsys.readouterr().err == (
            "pdrouter explain: the journal doesn't know the request 'nobody'; it keeps the last 10000 decisions\n"
        )
        await lab.settled()


def test_nobody_listens(capsys: Output) -> None:
    """One line says that no router can be reached, and why; or that the URL is none."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert main(["explain", url, "x"]) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"pdrouter explain: no router can be reached at {url}: ")
    assert line.count("\n") == 1
    for text in ("file:///etc", "127.0.0.1:80"):
        assert main(["explain", text, "x"]) == 1
        assert capsys.readouterr().err == f"pdrouter explain: {text} is not a URL; write http://HOST:PORT\n"
    assert main(["explain", "http://[", "x"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(200, b"hello"), "is no pdrouter"),
        (http(404, b"nothing here"), "answered 404; it is no pdrouter that keeps a journal"),
        (http(200, {"request_id": "x"}), "is no pdrouter"),
        (b"SSH-2.0\r\n", "no router can be reached"),
    ],
)
async def test_somebody_else_listens(answer: bytes, words: str) -> None:
    """Another server is told apart from a router."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(NoStory, match=words):
            await asyncio.to_thread(fetch_stories, f"http://{host}:{port}", "x")


def test_wrong_words(capsys: Output) -> None:
    """A flag that isn't one is refused, and the help names both words."""
    assert main(["explain", "http://a", "x", "--foo"]) == 2
    assert capsys.readouterr().err == "--foo: unknown flag\n"
    assert main(["explain", "--help"]) == 0
    assert "pdrouter explain URL REQUEST_ID" in capsys.readouterr().out
