"""CORS: pages of allowed origins may call the router and read what it says; all others may not."""

import pytest

from tests.lab import CHAT, Lab, Reply, chat, connect, make_lab

HOME = "https://app.example:8443"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-stainless-lang"}
PATHS = (CHAT, "/v1/models", "/workers", "/nothing")


async def call(lab: Lab, method: str, path: str, **headers: str) -> Reply:
    """Send a request with these headers."""
    async with await connect(lab.url) as one:
        one.send(method, path, b"", {name.replace("_", "-"): value for name, value in headers.items()})
        return await one.finish()


@pytest.mark.parametrize(
    ("allowed", "origin", "told"),
    [
        (HOME, HOME, HOME),
        (HOME, HOME + "0", None),
        (HOME, "null", None),
        (f"{HOME},http://other", "http://other", "http://other"),
        ("*", "http://anything", "*"),
    ],
)
async def test_who_may_read(allowed: str, origin: str, told: str | None) -> None:
    """Whatever is replied, errors too, says so to an allowed origin; a preflight says what may be sent."""
    async with make_lab(0, 0, 1, cors_allowed_origins=allowed) as lab:
        replies = [await call(lab, "GET", path, origin=origin) for path in PATHS]
        replies.append(await lab.post(CHAT, chat("x"), {"origin": origin}))
        replies.append(await lab.post(CHAT, chat("x", stream=True), {"origin": origin}))
        for reply in replies:
            assert reply.headers.get("access-control-allow-origin") == told
            assert (reply.headers.get("access-control-expose-headers") == "x-request-id") == (told is not None)
            assert (reply.headers.get("vary") == "origin") == (told not in (None, "*"))
        for path in PATHS:
            reply = await call(lab, "OPTIONS", path, origin=origin, **ASKS)
            assert (reply.status == 200) == (told is not None), path
            if told is not None:
                assert reply.headers["access-control-allow-methods"] == "GET, POST, OPTIONS"
                assert reply.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
                assert reply.headers["access-control-max-age"] == "3600"
                assert reply.body == b""
        assert (await lab.post(CHAT, chat("x"), {"origin": origin})).status == 200
        assert "pdrouter_requests_in_flight 0.0" in (await lab.get("/metrics")).body.decode()


async def test_nobody_is_allowed_unless_it_is_set() -> None:
    """By default nothing is told to browsers, and OPTIONS is a method like any other."""
    async with make_lab(0, 0, 1) as lab:
        reply = await call(lab, "OPTIONS", CHAT, origin=HOME, **ASKS)
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        assert not any(name.startswith("access-control") for name in reply.headers)


async def test_what_is_no_preflight() -> None:
    """OPTIONS that asks for no method is 405, and requests without an origin are told nothing."""
    async with make_lab(0, 0, 1, cors_allowed_origins="*") as lab:
        assert (await call(lab, "OPTIONS", CHAT, origin=HOME)).status == 405
        assert (await call(lab, "OPTIONS", CHAT, **ASKS)).status == 405
        assert "access-control-allow-origin" not in (await lab.post(CHAT, chat("x"))).headers
        assert "pdrouter_requests_in_flight 0.0" in (await lab.get("/metrics")).body.decode()
