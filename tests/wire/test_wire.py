"""The exact bytes of both legs and of the abort, for each client request in ``tests/wire/<engine>/*.http``.

A fixture begins with what is fixed (versions, ranks), then has sections: ``--- client`` as it came, the others as they
are sent. Lines of heads end in CRLF on the wire, in LF in the file; bodies are exact, up to the LF that ends them.
Rewrite them with ``PDROUTER_REWRITE_WIRE=1`` and read the difference.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdrouter.config import Settings
from pdrouter.core.fleet import Role
from pdrouter.engines.base import Attempt, Inbound, Leg, Plan
from pdrouter.engines.sglang import RankFields, Sglang
from pdrouter.proxy.intake import Api, Intake, IntakeOptions
from tests.core.builders import make_router
from tests.engines.builders import body_of, make_decision, make_endpoint, place

FIXTURES = sorted(Path(__file__).parent.glob("*/*.http"))
REWRITES = os.environ.get("PDROUTER_REWRITE_WIRE") == "1"
_FIRST_ROOM = 7_000_000_000_000_000_001
"""Beyond 2^53, so that a float on the way would show."""


class Fixture:
    """One fixture: its settings, the client's request, and the text of each section."""

    def __init__(self, text: bytes) -> None:
        intro, *rest = text.split(b"\n--- ")
        lines = [line for line in intro.decode().splitlines() if not line.startswith("#")]
        self.intro = intro
        self.settings: Mapping[str, str] = dict(line.split(": ") for line in lines)
        self.sections = {name.decode(): body for name, _, body in (part.partition(b"\n") for part in rest)}
        head, _, body = self.sections["client"].partition(b"\n\n")
        first, *headers = head.decode().splitlines()
        self.api = Api(first.split(" ")[1])
        self.headers = [_header(line) for line in headers]
        self.body = body.removesuffix(b"\n")

    def number(self, name: str) -> int | None:
        """Return a setting that is a number or ``none``."""
        return None if self.settings[name] == "none" else int(self.settings[name])


def _header(line: str) -> tuple[bytes, bytes]:
    name, _, value = line.partition(": ")
    return name.lower().encode(), value.encode("latin-1")


def _plan(fixture: Fixture) -> tuple[Plan, Sglang]:
    rank_fields = RankFields(fixture.settings["rank_fields"])
    settings = Settings()
    options = IntakeOptions(
        request_id_headers=tuple(name.encode() for name in settings.request_id_headers),
        prefix_block_bytes=settings.prefix_block_bytes,
        image_tokens=settings.image_tokens,
        owns_ranks=rank_fields is not RankFields.NONE,
    )
    intake = Intake(make_router([]), options)
    request_id = intake.request_id(dict(fixture.headers), fixture.api, lambda: "A" * 24)
    facts, inbound = intake.read(fixture.api, fixture.headers, fixture.body, request_id)
    _check_unread(fixture, inbound)
    endpoint = {"version": fixture.settings["version"], "bootstrap_port": fixture.number("bootstrap_port")}
    prefill_rank = fixture.number("prefill_rank") if facts.prefill_rank is None else facts.prefill_rank
    decode_rank = fixture.number("decode_rank") if facts.decode_rank is None else facts.decode_rank
    if fixture.settings["fleet"] == "regular":
        decision = make_decision(None, place(make_endpoint(Role.REGULAR, **endpoint), decode_rank))
    else:
        decision = make_decision(
            place(make_endpoint(Role.PREFILL, **endpoint), prefill_rank),
            place(make_endpoint(Role.DECODE, **endpoint), decode_rank),
        )
    engine = Sglang(rank_fields)
    rooms = range(_FIRST_ROOM, _FIRST_ROOM + (inbound.batch or 1))
    return engine.plan(decision, inbound, Attempt("0123456789abcdef", rooms)), engine


def _check_unread(fixture: Fixture, inbound: Inbound) -> None:
    """Hold that a body without a field of ours isn't touched (I10)."""
    if fixture.settings["body"] == "untouched":
        assert bytes(inbound.rest) == fixture.body[fixture.body.index(b"{") + 1 :]


def _rendered(fixture: Fixture) -> dict[str, bytes]:
    plan, engine = _plan(fixture)
    sections = {"client": fixture.sections["client"]}
    if plan.prefill is not None:
        sections["prefill"] = _message(plan.prefill)
    sections["decode"] = _message(plan.decode)
    sections["abort"] = _text(engine.abort(plan.decode.placement.endpoint, plan.rid))
    return sections


def _message(leg: Leg) -> bytes:
    return _text(leg.head + body_of(leg))


def _text(message: bytes) -> bytes:
    head, _, body = message.partition(b"\r\n\r\n")
    assert b"\n" not in head.replace(b"\r\n", b"")
    return head.replace(b"\r\n", b"\n") + b"\n\n" + body + b"\n"


@pytest.mark.invariant("I10")
@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_bytes_on_the_wire(path: Path) -> None:
    """Each leg's head and body, and the abort, are those of the fixture."""
    fixture = Fixture(path.read_bytes())
    sections = _rendered(fixture)
    if REWRITES:
        parts = [fixture.intro, *(name.encode() + b"\n" + text.rstrip(b"\n") for name, text in sections.items())]
        path.write_bytes(b"\n--- ".join(parts) + b"\n")
    shown = {name: text.rstrip(b"\n") for name, text in fixture.sections.items()}
    assert REWRITES or {name: text.rstrip(b"\n") for name, text in sections.items()} == shown


def test_there_are_fixtures() -> None:
    """Each says what it is in its first line."""
    assert len(FIXTURES) >= 25
    assert all(path.read_bytes().startswith(b"# SGLang ") for path in FIXTURES)
