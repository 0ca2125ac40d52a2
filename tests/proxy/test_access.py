"""Who may change the fleet: never a web page of another site, and without a key only this machine."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdrouter.errors import ClientError
from pdrouter.proxy.access import Access
from pdrouter.proxy.client import Client
from pdrouter.proxy.connection import Connection
from pdrouter.proxy.edge import attempt
from pdrouter.proxy.limits import is_loopback
from pdrouter.setting import Secret
from tests.front import Front
from tests.lab import Lab, Reply, connect, make_lab

ACCESS = Access(api_key=None, allowed_hosts={b"router.example"}, origins={b"https://ops.example"}, is_open=False)
FORM = {"content-type": "application/x-www-form-urlencoded"}
CHANGES = (
    ("POST", "/workers"),
    ("PUT", "/workers/127.0.0.1:9"),
    ("DELETE", "/workers/127.0.0.1:9"),
    ("POST", "/add_worker?url=http://evil:1"),
    ("POST", "/add_worker/?url=http://evil:1"),
    ("POST", "/remove_worker?url=http://evil:1"),
    ("POST", "/flush_cache"),
)


def refusal(access: Access, *, is_local: bool = True, **header: Any) -> str:
    """Return the code with which a change is refused, if it is."""
    fields = {name.replace("_", "-").encode(): value.encode("latin-1") for name, value in header.items()}
    wire: Any = SimpleNamespace(is_local=is_local)
    client = Client(wire, b"POST", b"/x", list(fields.items()), fields, 0.0, takes_chunks=True, keeps_alive=True)
    error = attempt(access.check_change, client)
    assert error is None or isinstance(error, ClientError)
    return "" if error is None else error.code


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ({"host": "127.0.0.1:30000"}, ""),
        ({"host": "localhost"}, ""),
        ({"host": "LocalHost.:30000"}, ""),
        ({"host": "[::1]:30000"}, ""),
        ({"host": "[fe80::1]"}, ""),
        ({"host": "10.1.2.3"}, ""),
        ({"host": "Router.Example:80"}, ""),
        ({}, ""),
        ({"host": "evil.example"}, "host_not_allowed"),
        ({"host": "evil.example:30000"}, "host_not_allowed"),
        ({"host": "localhost.evil.example"}, "host_not_allowed"),
        ({"host": "127.0.0.1.evil.example"}, "host_not_allowed"),
        ({"host": "[evil]"}, "host_not_allowed"),
        ({"host": ""}, "host_not_allowed"),
        ({"host": "\xff"}, "host_not_allowed"),
        ({"host": "127.0.0.1:30000", "origin": "http://127.0.0.1:30000"}, ""),
        ({"host": "127.0.0.1:30000", "origin": "http://127.0.0.1:30000", "sec_fetch_site": "same-origin"}, ""),
        ({"host": "127.0.0.1:30000", "sec_fetch_site": "none"}, ""),
        ({"host": "127.0.0.1:30000", "origin": "https://ops.example", "sec_fetch_site": "cross-site"}, ""),
        ({"host": "127.0.0.1:30000", "origin": "http://127.0.0.1:8080"}, "cross_site"),
        ({"host": "127.0.0.1:30000", "origin": "http://localhost:30000"}, "cross_site"),
        ({"host": "127.0.0.1:30000", "origin": "http://evil.example"}, "cross_site"),
        ({"host": "127.0.0.1:30000", "origin": "http://evil.example@127.0.0.1:30000"}, "cross_site"),
        ({"host": "127.0.0.1:30000", "origin": "null"}, "cross_site"),
        ({"host": "127.0.0.1:30000", "origin": ""}, "cross_site"),
        ({"host": "127.0.0.1:30000", "sec_fetch_site": "cross-site"}, "cross_site"),
        ({"host": "127.0.0.1:30000", "sec_fetch_site": "same-site"}, "cross_site"),
        ({"host": "127.0.0.1:30000", "sec_fetch_site": "anything new"}, "cross_site"),
        (
            {"host": "evil.example", "origin": "http://evil.example", "sec_fetch_site": "same-origin"},
            "host_not_allowed",
        ),
        ({"host": "127.0.0.1", "x_forwarded_for": "10.0.0.1"}, "key_needed"),
        ({"host": "127.0.0.1", "forwarded": "for=10.0.0.1"}, "key_needed"),
        ({"host": "127.0.0.1", "via": "1.1 proxy"}, "key_needed"),
    ],
)
def test_who_is_refused(header: dict[str, Any], code: str) -> None:
    """Other origins and sites, names that a page could have given the router, and what a proxy passes on."""
    assert refusal(ACCESS, **header) == code


def test_other_machines() -> None:
    """They need a key, or the setting that opens the API; a page is refused nevertheless."""
    opened = msgspec.structs.replace(ACCESS, is_open=True)
    locked = msgspec.structs.replace(ACCESS, api_key=Secret("k"))
    assert refusal(ACCESS, is_local=False, host="10.0.0.1") == "key_needed"
    assert refusal(opened, is_local=False, host="10.0.0.1") == ""
    assert refusal(opened, is_local=False, host="evil.example") == "host_not_allowed"
    assert refusal(locked, is_local=False, host="anything") == "unauthorized"
    assert refusal(locked, is_local=False, host="anything", authorization="Bearer k", x_forwarded_for="::1") == ""
    assert refusal(locked, host="a", authorization="Bearer k", origin="http://evil") == "cross_site"


async def call(lab: Lab, method: str, path: str, headers: Mapping[str, str]) -> Reply:
    """Send a form as a page of another site would."""
    async with await connect(lab.url) as one:
        one.send(method, path, b"url=http://evil:1", {**FORM, **headers})
        return await one.finish()


@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}])
async def test_a_form_of_another_site(headers: dict[str, str]) -> None:
    """It changes nothing, whatever the path, even where CORS allows any page to read."""
    async with make_lab(0, 0, 1, cors_allowed_origins="*") as lab:
        for method, path in CHANGES:
            reply = await call(lab, method, path, headers)
            assert (reply.status, reply.json()["code"]) == (403, "CROSS_SITE"), path
        assert [endpoint.url for endpoint in lab.core.fleet] == [lab.workers[0].url]


async def test_a_rebound_name() -> None:
    """A page whose host name points here is refused, and may still read."""
    async with make_lab(0, 0, 1, allowed_hosts=[]) as lab:
        for method, path in CHANGES:
            reply = await call(lab, method, path, {})
            assert (reply.status, reply.json()["code"]) == (403, "HOST_NOT_ALLOWED"), path
        assert (await lab.get("/workers")).status == 200


async def test_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key it may read, and use the models."""
    monkeypatch.setattr(Connection, "is_local", False)
    async with make_lab(0, 0, 1) as lab:
        for method, path in CHANGES:
            reply = await call(lab, method, path, {})
            assert (reply.status, reply.json()["code"]) == (403, "KEY_NEEDED"), path
        assert (await lab.get("/workers")).status == 200
        assert (await lab.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}})).status == 200


def test_what_is_this_machine() -> None:
    """Loopback addresses of either kind, mapped ones too."""
    for peer in (("127.0.0.1", 1), ("127.8.8.8", 1), ("::1", 1, 0, 0), ("::ffff:127.0.0.1", 1, 0, 0)):
        assert is_loopback(peer), peer
    for other in (("10.0.0.1", 1), ("::", 1, 0, 0), ("::ffff:10.0.0.1", 1, 0, 0), ("fe80::1%lo", 1, 0, 1), "", None):
        assert not is_loopback(other), other
    assert not Front().connection.is_local
