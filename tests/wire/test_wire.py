"""The exact bytes of all that is sent for each client request in ``tests/wire/<engine>/*.http``.

A fixture begins with what is fixed (engine, versions, ranks; SGLang's usual ones needn't be said), then has sections:
``--- client`` as it came, and where legs run in turn ``--- prefill answer`` as it came; the others are what goes out:
both legs, the end of each (``abort``, ``release``), or the client's ``answer`` where the prefill's is the last word.
Lines of heads end in CRLF on the wire, in LF in the file; bodies are exact, up to the LF that ends them. Rewrite them
with ``PDROUTER_REWRITE_WIRE=1`` and read the difference.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from pdrouter.config import Settings
from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.request import RequestFacts
from pdrouter.engines.base import Attempt, Engine, Inbound, Leg, with_traits
from pdrouter.engines.samples import one_sample_body
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.engines.trtllm import Trtllm
from pdrouter.engines.vllm import Vllm
from pdrouter.options import intake_options
from pdrouter.proxy.intake import Api, Intake
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

    @property
    def engine(self) -> str:
        """The kind of engine."""
        return self.settings.get("engine", "sglang")

    def number(self, name: str, default: int | None = None) -> int | None:
        """Return a setting that is a number or ``none``; ``default`` if there is none."""
        text = self.settings.get(name)
        if text is None:
            return default
        return None if text == "none" else int(text)


def _header(line: str) -> tuple[bytes, bytes]:
    name, _, value = line.partition(": ")
    return name.lower().encode(), value.encode("latin-1")


def _read(fixture: Fixture) -> tuple[RequestFacts, Inbound]:
    options = intake_options(Settings())
    owns_ranks = fixture.settings.get("rank_fields") != "none"
    intake = Intake(make_router([]), msgspec.structs.replace(options, owns_ranks=owns_ranks))
    request_id = intake.request_id(dict(fixture.headers), fixture.api, lambda: "A" * 24)
    facts, inbound = intake.read(fixture.api, fixture.headers, fixture.body, request_id)
    _check_unread(fixture, inbound)
    if facts.copies > 1 and fixture.engine == "sglang" and fixture.settings["fleet"] == "pair":
        one = one_sample_body(fixture.body, is_generate=fixture.api is Api.GENERATE)
        return intake.read(fixture.api, fixture.headers, one, request_id)  # one of several that are the same
    return facts, inbound


def _engine(fixture: Fixture) -> Engine:
    rank_fields = RankFields(fixture.settings.get("rank_fields", "auto"))
    engines: Mapping[str, Engine] = {"sglang": Sglang(rank_fields), "vllm": Vllm(), "trtllm": Trtllm()}
    return engines[fixture.engine]


def _endpoint(fixture: Fixture, engine: Engine, role: Role) -> Endpoint:
    """Return an endpoint as the settings of the fixture have it; it can do what its engine can."""
    settings = fixture.settings
    endpoint = make_endpoint(
        role,
        engine=fixture.engine,
        kv_transport=settings.get("kv_transport", engine.kv_transports[0]),
        version=settings["version"],
        bootstrap_port=fixture.number("bootstrap_port"),
        dp_size=fixture.number("dp_size", 4),
        dp_attention=settings.get("dp_attention") == "true",
        rank_base=fixture.number("rank_base", 0),
        kv_address=settings.get(f"{role.value}_kv_address"),
        kv_engine_ids=tuple(settings.get("kv_engine_ids", "").split()),
    )
    return with_traits(engine, endpoint)


def _decision(fixture: Fixture, engine: Engine, facts: RequestFacts) -> Decision:
    """Return who serves it: two where the fleet has them and the engine does such a request in two legs."""
    decode_rank = fixture.number("decode_rank") if facts.decode_rank is None else facts.decode_rank
    if fixture.settings["fleet"] == "regular":
        return make_decision(None, place(_endpoint(fixture, engine, Role.REGULAR), decode_rank))
    decode = place(_endpoint(fixture, engine, Role.DECODE), decode_rank)
    if not decode.endpoint.parts(facts):
        return make_decision(None, decode)
    prefill_rank = fixture.number("prefill_rank") if facts.prefill_rank is None else facts.prefill_rank
    return make_decision(place(_endpoint(fixture, engine, Role.PREFILL), prefill_rank), decode)


def _check_unread(fixture: Fixture, inbound: Inbound) -> None:
    """Hold that a body without a field of ours isn't touched (I10)."""
    if fixture.settings["body"] == "untouched":
        assert bytes(inbound.rest(())) == fixture.body[fixture.body.index(b"{") + 1 :]


def _rendered(fixture: Fixture) -> dict[str, bytes]:
    facts, inbound = _read(fixture)
    engine = _engine(fixture)
    decision = _decision(fixture, engine, facts)
    rooms = range(_FIRST_ROOM, _FIRST_ROOM + (inbound.batch or 1))
    plan = engine.plan(decision, inbound, Attempt("0123456789abcdef", rooms))
    sections = {"client": fixture.sections["client"]}
    if plan.prefill is not None:
        sections["prefill"] = _message(plan.prefill)
    if plan.decode is not None:
        sections["decode"] = _message(plan.decode)
    else:
        answer = sections["prefill answer"] = fixture.sections["prefill answer"].removesuffix(b"\n")
        after = engine.hand_over(decision, inbound, plan, answer)
        if after.decode is None:
            sections["answer"] = after.answer
        else:
            sections["decode"] = _message(after.decode)
        release = engine.release(decision, answer)
        if release is not None:
            sections["release"] = _text(release[1])
    aborts = engine.abort(decision.decode.endpoint, plan)
    if aborts:
        sections["abort"] = b"\n".join(map(_text, aborts))
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
    """Heads and bodies of all that is sent are those of the fixture."""
    fixture = Fixture(path.read_bytes())
    sections = _rendered(fixture)
    if REWRITES:
        parts = [fixture.intro, *(name.encode() + b"\n" + text.rstrip(b"\n") for name, text in sections.items())]
        path.write_bytes(b"\n--- ".join(parts) + b"\n")
    shown = {name: text.rstrip(b"\n") for name, text in fixture.sections.items()}
    assert REWRITES or {name: text.rstrip(b"\n") for name, text in sections.items()} == shown


_NAMES = {"sglang": "SGLang", "vllm": "vLLM", "trtllm": "TensorRT-LLM"}


def test_there_are_fixtures() -> None:
    """Each says what it is in its first line, with the version; every engine and KV transport has its own."""
    shown = set()
    for path in FIXTURES:
        fixture = Fixture(path.read_bytes())
        assert fixture.engine == path.parent.name
        first = f"# {_NAMES[fixture.engine]} {fixture.settings['version']}"
        assert fixture.intro.decode().startswith((f"{first}: ", f"{first}, "))
        shown.add((fixture.engine, fixture.settings.get("kv_transport", "bootstrap")))
    engines: Mapping[str, Engine] = {"sglang": Sglang(RankFields.AUTO), "vllm": Vllm(), "trtllm": Trtllm()}
    assert shown == {(name, transport) for name, engine in engines.items() for transport in engine.kv_transports}
