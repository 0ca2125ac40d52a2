"""Keys of clients: each spelling is one key, which is checked, counted and forwarded; a repeated one is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pdrouter.errors import InvalidRequest
from pdrouter.proxy.credentials import bare_key, check_once, credential, identity
from tests.lab import CHAT, ScriptedEngine, always, chat, connect, make_lab, route_to

MESSAGES = "/v1/messages"
MESSAGE = {"model": "emulated", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}

SPELLINGS: Sequence[Mapping[str, str]] = (
    {"authorization": "Bearer secret"},
    {"authorization": "bearer secret"},
    {"authorization": "BEARER   secret"},
    {"x-api-key": "secret"},
    {"authorization": "Bearer secret", "x-api-key": "of another service"},
)
WRONG: Sequence[Mapping[str, str]] = (
    {},
    {"authorization": "Bearer other"},
    {"authorization": "Basic secret"},
    {"authorization": "Bearersecret"},
    {"authorization": "secret"},
    {"authorization": "Bearer"},
    {"x-api-key": "other"},
    {"x-api-key": "Bearer secret"},
    {"authorization": "Bearer other", "x-api-key": "secret"},
)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b"Bearer k", b"k"),
        (b"bearer  k ", b"k"),
        (b" BeArEr k l", b"k l"),
        (b"Bearer", b""),
        (b"Bearerk", b"Bearerk "),
        (b"Basic dTpw", b"Basic dTpw"),
        (b"k", b"k "),
        (b"", b" "),
    ],
)
def test_one_key_has_one_spelling(value: bytes, key: bytes) -> None:
    """The scheme in any case, and any number of spaces."""
    assert bare_key(value) == key


def test_only_one_header_counts() -> None:
    """``authorization`` where it says something, else ``x-api-key``; other headers are taken as they are."""
    assert credential({b"authorization": b"Bearer a", b"x-api-key": b"b"}) == b"a"
    assert credential({b"authorization": b"", b"x-api-key": b" b "}) == b"b"
    assert credential({}) == b""
    for name in (b"authorization", b"x-api-key"):
        assert identity({b"authorization": b"bearer a"}, name) == identity({b"x-api-key": b"a"}, name) == b"a"
    assert identity({b"x-tenant": b"Bearer a"}, b"x-tenant") == b"Bearer a"
    assert identity({}, b"x-tenant") == b""


def test_a_repeated_header_is_named() -> None:
    """Only those that are asked for, wherever they stand."""
    headers = [(b"a", b"1"), (b"b", b"1"), (b"a", b"1"), (b"c", b"1")]
    check_once(headers, (b"b", b"c"))
    with pytest.raises(InvalidRequest, match="header a stands twice") as caught:
        check_once(headers, (b"a", b"b"))
    assert caught.value.param == "a"


async def test_each_spelling_opens() -> None:
    """On inference paths and the workers API; what is wrong gets 401 and is told how to ask."""
    async with make_lab(0, 0, 1, api_key="secret") as lab:
        for headers in SPELLINGS:
            assert (await lab.post(CHAT, chat("x"), headers)).status == 200, headers
            assert (await lab.post("/flush_cache", {}, headers)).status == 200, headers
        for headers in WRONG:
            for path in (CHAT, MESSAGES, "/flush_cache"):
                reply = await lab.post(path, chat("x"), headers)
                assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer"), headers


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("authorization", {}),
        ("x-api-key", {}),
        ("x-smg-routing-key", {}),
        ("x-request-priority", {}),
        ("x-data-parallel-rank", {}),
        ("x-tenant", {"tenant_header": "X-Tenant"}),
        ("x-team", {"rate_limit_key_header": "X-Team"}),
        ("x-forwarded-for", {"rate_limit_key_header": "x-forwarded-for"}),
    ],
)
async def test_a_key_that_is_repeated(name: str, flags: dict[str, Any]) -> None:
    """Whichever header tells who a client is, or how urgent: 400, as one reader takes the first and one the last."""
    async with make_lab(0, 0, 1, **flags) as lab:
        for values in (("1", "2"), ("1", "1")):
            async with await connect(lab.url) as call:
                lines = {name: values[0], name.upper(): values[1]}
                call.send("POST", CHAT, b'{"messages":[{"role":"user","content":"x"}]}', lines)
                reply = await call.finish()
                assert (reply.status, reply.error["param"]) == (400, name)
        assert lab.core.decided == 0


async def test_a_key_that_is_repeated_on_the_workers_api() -> None:
    """Also behind a header that hides one of them from engines."""
    async with make_lab(0, 0, 1, api_key="secret") as lab:
        for more in ({}, {"connection": "x-a", "x-a": "1"}):
            async with await connect(lab.url) as call:
                lines = {"authorization": "Bearer other", "Authorization": "Bearer secret"} | more
                call.send("POST", "/flush_cache", b"", lines)
                assert (await call.finish()).status == 400
            async with await connect(lab.url) as call:
                call.send("POST", CHAT, b'{"messages":[{"role":"user","content":"x"}]}', lines)
                assert (await call.finish()).status == 400


async def test_lists_may_be_repeated() -> None:
    """Proxies add lines to ``x-forwarded-for``, and cookies may come in several."""
    async with make_lab(0, 0, 1) as lab, await connect(lab.url) as call:
        lines = {"x-forwarded-for": "1.2.3.4", "X-Forwarded-For": "5.6.7.8", "cookie": "a=1", "Cookie": "b=2"}
        call.send("POST", CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":"x"}]}', lines)
        assert (await call.finish()).status == 200


async def test_no_other_spelling_gives_another_rate() -> None:
    """All spellings of a key share its bucket."""
    async with make_lab(0, 0, 1, rate_limit_requests_per_min=len(SPELLINGS)) as lab:
        statuses = [(await lab.post(CHAT, chat("x"), headers)).status for headers in SPELLINGS]
        assert statuses == [200] * len(SPELLINGS)
        for headers in SPELLINGS:
            assert (await lab.post(CHAT, chat("x"), headers)).status == 429, headers
        assert (await lab.post(CHAT, chat("x"), {"x-api-key": "other"})).status == 200


async def test_headers_of_anthropics_api_go_through() -> None:
    """An engine with keys of its own, or features by header, gets what it needs."""
    async with ScriptedEngine(None, {MESSAGES: always(200, {})}).listen() as engine, route_to((), (), [engine]) as lab:
        sent = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "tools"}
        assert (await lab.post(f"{MESSAGES}?beta=true", MESSAGE, sent)).status == 200
        lines = engine.asked_for(MESSAGES)[-1].head.decode().split("\r\n")
        assert {f"{name}: {value}" for name, value in sent.items()} <= set(lines)
