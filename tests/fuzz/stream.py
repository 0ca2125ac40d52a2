"""An answer on its way: whatever engines say, however it is cut and however slow its client, it comes out the same.

Where something of the prefill's is put into it, nothing else changes. The whole data plane between the engines' bytes
and the client's takes part, without a network.
"""

import asyncio
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import h11
import msgspec

from pdrouter.config import Settings
from pdrouter.core import events
from pdrouter.core.fleet import Disaggregation, Endpoint, Role
from pdrouter.core.router import Router
from pdrouter.engines.base import Engine, with_traits
from pdrouter.engines.logprobs import MERGED_FIELDS
from pdrouter.engines.openai import OpenAi
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.engines.trtllm import Trtllm
from pdrouter.engines.usage import CACHED_TOKENS, with_cached_tokens
from pdrouter.engines.vllm import Vllm
from pdrouter.errors import RouterError
from pdrouter.options import dispatch_options
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.client import Client
from pdrouter.proxy.dispatch import Dispatcher
from pdrouter.proxy.ids import Ids
from pdrouter.proxy.intake import Intake
from pdrouter.telemetry.logs import DecisionLog
from pdrouter.telemetry.metrics import Metrics
from pdrouter.upstream.exchange import Exchange
from tests import back
from tests.core.builders import make_endpoint, make_options
from tests.fuzz.asked import without
from tests.fuzz.intake import OPTIONS
from tests.fuzz.source import Source, anything, array, either, number, record, text, word

MOST_BYTES = 1 << 20
CHANGED = frozenset({*MERGED_FIELDS, CACHED_TOKENS.decode().strip('"')})
ENGINES: Mapping[str, Engine] = {
    "sglang": Sglang(RankFields.AUTO),
    "vllm": Vllm(),
    "trtllm": Trtllm(),
    "openai": OpenAi(),
}

_COUNT = either(number, word(b"0", b"5", b"123456789", b"1234567890", b"-1", b"1.5", b"null", b'"5"'))
_DETAILS = record(cached_tokens=_COUNT, audio_tokens=_COUNT)
_USAGE = record(prompt_tokens=_COUNT, completion_tokens=_COUNT, prompt_tokens_details=_DETAILS)
_LOGPROBS = either(array(word(b"[-0.1,5,null]", b"[-1e-5, 7, null]")), word(b"[]", b"null"), anything)
_META = record(
    prompt_tokens=_COUNT, completion_tokens=_COUNT, cached_tokens=_COUNT, **dict.fromkeys(MERGED_FIELDS, _LOGPROBS)
)
_SAMPLE = record(text=text, index=word(b"0", b"1", b"-1", b"null"), meta_info=_META)
_CHUNK = record(id=text, choices=array(record(index=_COUNT, delta=anything, finish_reason=text)), usage=_USAGE)
_PREFILL = record(
    usage=_USAGE,
    kv_transfer_params=either(word(b"null", b'{"remote_host":"h"}'), anything),
    prompt_token_ids=word(b"null", b"[1,2]"),
    choices=array(
        record(
            finish_reason=word(b'"length"', b'"stop"', b"null"),
            message=record(content=text, tool_calls=either(word(b"null"), array(record(id=text)))),
            disaggregated_params=either(word(b"null", b'{"ctx_request_id":1}'), anything),
        )
    ),
    meta_info=_META,
)
_COUNTED = word(
    b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":123}}}',
    b'{"text":"x","meta_info":{"prompt_tokens":9,"cached_tokens" : 4}}',
)
_FAILED = word(
    b'{"error": {"object": "error", "message": "KV is lost", "code": 500}}',
    b'{"error":{"message":"too long","type":"invalid_request_error","code":400}}',
    b'{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"KV is lost","status_code":500}}}',
    b'{"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}',
    b'{"type":"error","code":null,"message":"x"}',
)
_OPENING = word(
    b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
    b'{"choices":[]}',
    b'{"type":"message_start"}',
    b'{"text":"","output_ids":[],"meta_info":{}}',
)
_ENDS = (b"\n\n", b"\n\n", b"\r\n\r\n", b"\n", b"\n\n\n", b"")
_STARTS = (b"data: ", b"data: ", b"data:", b"event: x\ndata: ", b": ping", b"")
_DONE = b"data: [DONE]\n\n"
_NO_DATA = frozenset({b"data:", b"data: ", b"data: [DONE]", b"data:[DONE]"})
_MARKS = (b'"error"', b'"abort"')
_TO_THE_END = re.compile(rb".*?(?<![^\n])data: ?\[DONE\]\r?\n\r?\n", re.DOTALL)


class Way(NamedTuple):
    """How a request is served, and what it asks for."""

    engine: str
    transport: str
    api: Api
    body: bytes
    is_pair: bool = True


_CHAT = b'{"messages":[{"role":"user","content":"x"}]'
_GENERATE = b'{"text":"x"'
_LOGPROBS_TOO = b'{"text":"x","return_logprob":true'
WAYS = (
    Way("openai", "none", Api.CHAT, _CHAT, is_pair=False),
    Way("sglang", "bootstrap", Api.GENERATE, _LOGPROBS_TOO),
    Way("sglang", "bootstrap", Api.GENERATE, _GENERATE),
    Way("vllm", "nixl", Api.CHAT, _CHAT),
    Way("vllm", "shared_storage", Api.COMPLETIONS, b'{"prompt":"x"'),
    Way("trtllm", "native", Api.CHAT, _CHAT + b',"stream_options":{"include_usage":true}'),
)


class Told(NamedTuple):
    """What came of a request: the client's reply, its failure's code, and what the router was told."""

    status: int
    body: bytes
    code: str
    usage: Sequence[tuple[int, ...]]
    tokens: int


class Case(NamedTuple):
    """A request, and what its engines say to it."""

    way: Way
    is_stream: bool
    prefill: bytes
    answer: bytes
    prefill_after: int
    """How many pieces of the answer come before the prefill's, where both legs run at once."""


def one_input(raw: bytes) -> None:
    """Serve one request twice, its answers whole and cut, and compare what came out, and with what went in."""
    source = Source(raw)
    way, is_stream = source.pick(WAYS), source.once_in(2)
    full = [source.once_in(2) for _ in range(source.below(4))]
    prefill_after = source.below(4)
    prefill = source.spoilt(source.pick((_PREFILL, _SAMPLE, _COUNTED))(source))
    whole_answer = either(_SAMPLE, _CHUNK, array(_SAMPLE), _COUNTED)
    answer = stream(source) if is_stream else source.spoilt(whole_answer(source))
    if source.below(8) == 7:
        prefill = _FAILED(source)
    if source.below(8) == 7 and not is_stream:
        answer = _FAILED(source)
    if is_failed(prefill):  # or it would depend on the pieces who is first
        prefill_after = 0
    case = Case(way, is_stream, prefill, answer, prefill_after)
    whole = asyncio.run(serve(case, [prefill], [answer], []))
    hold(case, whole)
    cut = asyncio.run(serve(case, source.pieces(prefill), source.pieces(answer), full))
    if prefill_after:  # then the answer may be over before the prefill has told anything
        cut, whole = (told._replace(usage=(), body=with_cached_tokens(told.body, 5)) for told in (cut, whole))
    assert cut == whole


def stream(source: Source) -> bytes:
    """Write a stream of events, most of them good."""
    if source.once_in(16):
        return source.rest()
    written = [
        source.pick(_STARTS) + source.spoilt(either(_SAMPLE, _CHUNK, _COUNTED)(source)) + source.pick(_ENDS)
        for _ in range(source.below(5))
    ]
    for event in (_OPENING, _FAILED):
        if source.below(4) == 3:
            written.insert(source.below(len(written) + 1), b"data: " + event(source) + source.pick(_ENDS))
    return b"".join(written) + source.pick((_DONE, b"", b"data: [DONE]", _DONE + b": more"))


def is_failed(reply: bytes) -> bool:
    """Whether a reply may be a failure inside a good status."""
    return any(mark in reply for mark in _MARKS)


class Watched(Router):
    """A router that remembers what it was told of an answer."""

    def __init__(self) -> None:
        super().__init__(make_options(policy="least_work", disaggregation=Disaggregation.ALWAYS))
        self.usage: list[tuple[int, ...]] = []
        self.grown = 0

    def observe(self, event: events.Event, now_s: float) -> None:
        """Take note."""
        match event:
            case events.UsageSeen(_, prompt_tokens, completion_tokens, seen):
                self.usage.append((prompt_tokens, completion_tokens, seen))
            case events.PrefillUsageSeen(_, prompt_tokens, cached_tokens):
                self.usage.append((prompt_tokens, cached_tokens))
            case events.TokensGenerated(_, tokens):
                self.grown += tokens
        super().observe(event, now_s)


class Pools:
    """Engines of which each request gets its own."""

    def __init__(self) -> None:
        self.asked: dict[str, back.Engine] = {}

    def get(self, endpoint: Endpoint) -> "Pool":
        """Return the connections to an endpoint."""
        return Pool(self.asked, endpoint.address)


class Pool:
    """Opens a connection for each request."""

    def __init__(self, asked: dict[str, back.Engine], address: str) -> None:
        self._asked = asked
        self._address = address

    def start(self, *request: bytes | memoryview) -> Exchange:
        """Send a request."""
        assert self._address not in self._asked
        engine = self._asked[self._address] = back.Engine(MOST_BYTES, keeps=False)
        return engine.ask(request)


class Aborter:
    """Sends nothing."""

    def abort(self, endpoint: Endpoint, request: bytes) -> None:
        """Take note of nothing."""

    send = abort


class Wire:
    """Takes what is written, and is full where it is told to."""

    def __init__(self, full: Sequence[bool]) -> None:
        self.is_full = False
        self.is_local = True
        self.written = b""
        self.is_over = False
        self._full = list(full)

    def write(self, data: bytes) -> None:
        """Keep it."""
        assert not self.is_over
        self.written += data
        self.is_full = bool(self._full) and self._full.pop()

    def replied(self, client: Client) -> None:
        """No more may come."""
        self.is_over = True

    def close(self) -> None:
        """No more may come."""
        self.is_over = True

    abort = close


def endpoints(way: Way) -> Sequence[Endpoint]:
    """Return who serves."""
    roles = (Role.PREFILL, Role.DECODE) if way.is_pair else (Role.REGULAR,)
    made = [make_endpoint(f"{r}:1", r, engine=way.engine, kv_transport=way.transport) for r in roles]
    return [with_traits(ENGINES[way.engine], endpoint) for endpoint in made]


async def serve(case: Case, prefill: Sequence[bytes], answer: Sequence[bytes], full: Sequence[bool]) -> Told:
    """Return what comes of a request when its engines say these pieces."""
    router = Watched()
    for endpoint in endpoints(case.way):
        router.observe(events.EndpointJoined(endpoint), 0.0)
    pools: Any = Pools()
    aborter: Any = Aborter()
    options = msgspec.structs.replace(dispatch_options(Settings()), max_attempts=1, max_reply_bytes=MOST_BYTES)
    log, ids = DecisionLog("error"), Ids(random.Random(1))
    dispatcher = Dispatcher(
        router, ENGINES, pools, aborter, Metrics(router, lambda: 0.0), log, ids, time.monotonic, options
    )
    wire = Wire(full)
    began_s = time.monotonic()
    client = Client(wire, b"POST", case.way.api.encode(), [], {}, began_s, takes_chunks=True, keeps_alive=True)
    body = case.way.body + (b',"stream":true}' if case.is_stream else b"}")
    facts, inbound = Intake(router, OPTIONS).read(case.way.api, [], body, "r")
    ended: list[RouterError | None] = []
    dispatcher.start(facts, inbound, client, lambda _client, _path, _id, error: ended.append(error))
    say = Saying(pools.asked, client, wire)
    if case.way.is_pair and "decode:1" in pools.asked:
        await say.begin("decode:1", case.answer)
        await say.pieces("decode:1", answer[: case.prefill_after])
        await say.whole("prefill:1", case.prefill, prefill)
        await say.pieces("decode:1", answer[case.prefill_after :])
    else:
        if case.way.is_pair:
            await say.whole("prefill:1", case.prefill, prefill)
        for name in ("decode:1", "regular:1"):
            await say.whole(name, case.answer, answer)
    assert len(ended) == 1
    router.validate()
    assert not router.live
    status, told = reply(wire.written)
    return Told(status, told, ended[0].code if ended[0] is not None else "", router.usage, router.grown)


_MOST_TURNS = 64
"""What is said at once is read within so many turns of the loop, unless nobody reads it any more."""


class Saying:
    """Lets engines speak, and the client read on where it was behind."""

    def __init__(self, engines: Mapping[str, back.Engine], client: Client, wire: Wire) -> None:
        self._engines = engines
        self._client = client
        self._wire = wire

    async def whole(self, name: str, reply: bytes, pieces: Sequence[bytes]) -> None:
        """Let an engine that was asked give a whole reply."""
        if name in self._engines:
            await self.begin(name, reply)
            await self.pieces(name, pieces)

    async def begin(self, name: str, reply: bytes) -> None:
        """Let an engine say how it will be."""
        self._engines[name].say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(reply))
        await self._settle()

    async def pieces(self, name: str, pieces: Sequence[bytes]) -> None:
        """Let an engine say some of it."""
        for piece in pieces:
            self._engines[name].say(piece)
            await self._settle()

    async def _settle(self) -> None:
        """Let the router read on, turn by turn, and the client."""
        await asyncio.sleep(0)
        for _ in range(_MOST_TURNS):
            if self._wire.is_full and self._client.listener is not None:
                self._wire.is_full = False
                self._client.listener.client_drained()
            elif not any(engine.exchange and engine.exchange.pieces for engine in self._engines.values()):
                return
            await asyncio.sleep(0)


def reply(written: bytes) -> tuple[int, bytes]:
    """Return status and body as another parser reads them; nothing where nothing was written."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(written)
    if not written:
        return 0, b""
    head = reader.next_event()
    assert isinstance(head, h11.Response)
    body = b""
    while isinstance(event := reader.next_event(), h11.Data):
        body += event.data
    return head.status_code, body


def hold(case: Case, told: Told) -> None:
    """Hold that an answer came through with nothing changed but what is to be; another status has its reason."""
    if told.code:
        assert not told.status
        if told.code == "empty_stream":
            assert {line for line in case.answer.splitlines() if line.startswith(b"data:")} <= _NO_DATA
    elif told.status != 200:
        assert told.status in (400, 500)
        assert is_failed(case.answer) or is_failed(case.prefill)
    else:
        answer = case.answer
        to_the_end = _TO_THE_END.match(answer) if case.is_stream else None
        if to_the_end is not None and not told.body.endswith(answer[to_the_end.end() :]):
            answer = to_the_end[0]
        hold_answer(case.way, answer, told.body)


def hold_answer(way: Way, answer: bytes, body: bytes) -> None:
    """Hold that a body is an answer in which nothing is changed but what is to be."""
    if not way.is_pair:
        assert body == answer
    elif way.body is not _LOGPROBS_TOO and way.engine != "trtllm":
        assert with_cached_tokens(body, 5) == with_cached_tokens(answer, 5)
    elif way.body is _LOGPROBS_TOO:
        for before, after in zip(answer.split(b"\n\n"), body.split(b"\n\n"), strict=True):
            hold_sample(before, after)


def hold_sample(before: bytes, after: bytes) -> None:
    """Hold that only the prompt's logprobs and its cached tokens differ."""
    if with_cached_tokens(before, 5) != with_cached_tokens(after, 5):
        (start, told), (start_after, told_after) = _split(before), _split(after)
        assert start == start_after
        assert without(CHANGED, told) == without(CHANGED, told_after)


def _split(sample: bytes) -> tuple[bytes, bytes]:
    """Return what stands before the JSON of an event, or of a whole reply, and the JSON."""
    start, mark, data = sample.partition(b"data:")
    return (start, data) if mark and not start.lstrip().startswith((b"{", b"[")) else (b"", sample)
