"""The intake: what the client asks for, its ids and ranks, and what bad input gets."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.config import Settings
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.request import RequestFacts
from pdrouter.engines.base import Inbound, forward
from pdrouter.engines.sglang import OWNED_FIELDS
from pdrouter.engines.sglang_ranks import RANK_FIELDS
from pdrouter.errors import ClientError
from pdrouter.options import intake_options
from pdrouter.proxy.intake import Api, Intake
from tests.core.builders import make_router, regular
from tests.engines.builders import body_of, decode_leg, make_decision, make_endpoint, place

Headers = Sequence[tuple[bytes, bytes]]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}
GENERATE = {"text": "Hi"}
PLAIN: Mapping[Api, Mapping[str, object]] = {Api.CHAT: CHAT, Api.COMPLETIONS: COMPLETION, Api.GENERATE: GENERATE}


def make_intake(fleet: Iterable[Endpoint] = (), /, **options: Any) -> Intake:
    """Return an intake with the default settings but for these options."""
    return Intake(make_router(fleet), msgspec.structs.replace(intake_options(Settings()), **options))


def read(
    api: Api, body: Mapping[str, object] | bytes, headers: Headers = (), **options: Any
) -> tuple[RequestFacts, Inbound]:
    """Take in a body."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return make_intake(**options).read(api, headers, raw, "r")


@pytest.mark.parametrize(
    ("most", "asked", "priority"), [(0, 10**9, 0), (0, -(10**9), 0), (5, 10**9, 5), (5, -(10**9), -5), (5, 3, 3)]
)
def test_a_client_may_not_jump_the_queue(most: int, asked: int, priority: int) -> None:
    """By body or by header it gets no more than the operator allows, up or down; engines get what it wrote."""
    facts, inbound = read(Api.CHAT, {**CHAT, "priority": asked}, max_priority=most)
    assert facts.priority == priority
    assert json.loads(inbound.body)["priority"] == asked
    header = [(b"x-request-priority", b"%d" % max(-999_999_999, min(asked, 999_999_999)))]
    assert read(Api.CHAT, CHAT, header, max_priority=most)[0].priority == priority


@pytest.mark.parametrize(
    ("senses", "model", "priority"),
    [
        ({"a": (False,), "b": (True,)}, "a", 2),
        ({"a": (False,), "b": (True,)}, "b", -2),
        ({"a": (False, True, True)}, "a", -2),
        ({"a": (False, True)}, "a", 2),
        ({"a": (True,)}, None, -2),
        ({}, "a", 2),
    ],
)
def test_a_priority_is_meant_as_the_engines_read_it(
    senses: Mapping[str, Sequence[bool]], model: str | None, priority: int
) -> None:
    """Low first is a fact of the engines of the model that is asked for; where they differ, of most of them."""
    fleet = [
        regular(f"{model}{n}:1", model=model, puts_low_first=low)
        for model, several in senses.items()
        for n, low in enumerate(several)
    ]
    body = {**CHAT, "model": model, "priority": 2}
    facts, _ = make_intake(fleet, max_priority=9).read(Api.CHAT, [], json.dumps(body).encode(), "r")
    assert facts.priority == priority


def test_the_engine_learns_how_a_priority_is_meant() -> None:
    """A body's priority is meant as most engines of its model read it; headers are the router's alone."""
    fleet = [regular(f"a{n}:1", model="a", puts_low_first=n > 0) for n in range(3)]
    intake = make_intake(fleet, max_priority=0)
    body = json.dumps({**CHAT, "model": "a", "priority": "5"}).encode()
    inbound = intake.read(Api.CHAT, [], body, "r")[1]
    assert (inbound.priority, inbound.is_low_first) == (5, True)
    plain = json.dumps({**CHAT, "model": "a"}).encode()
    inbound = intake.read(Api.CHAT, [(b"x-request-priority", b"7")], plain, "r")[1]
    assert (inbound.priority, inbound.is_low_first) == (0, False)


def test_tenants_are_those_that_are_listed() -> None:
    """A new key for each request gives nobody a share of its own, unless the operator vouches for the header."""
    keys = [[(b"authorization", b"Bearer %d" % n)] for n in range(3)]
    listed = {b"1": 2.5}
    facts = [read(Api.CHAT, CHAT, key, tenant_weights=listed)[0] for key in keys]
    assert [(fact.tenant is None, fact.weight) for fact in facts] == [(True, 1.0), (False, 2.5), (True, 1.0)]
    facts = [read(Api.CHAT, CHAT, key, tenant_weights=listed, takes_any_tenant=True)[0] for key in keys]
    assert len({fact.tenant for fact in facts} - {None}) == 3
    assert [fact.weight for fact in facts] == [1.0, 2.5, 1.0]


@pytest.mark.parametrize("api", [Api.EMBEDDINGS, Api.RERANK, Api.SCORE, Api.CLASSIFY, Api.TOKENIZE, Api.SPEECH])
def test_fields_that_are_the_routers_own(api: Api) -> None:
    """What goes to one engine goes without them too: an engine must hear of rooms, ranks and ids from the router."""
    theirs = b'"input" : "x", "query":"q", "request_id":"mine","n": 1e0'
    ours = b', "bootstrap_room":7,"rid":"another\'s","kv_transfer_params":{"a":[1]},"routed_dp_rank": 1'
    facts, inbound = read(api, b"{" + theirs + ours + b"}")
    decision = make_decision(None, place(make_endpoint(Role.REGULAR), None))
    leg = decode_leg(forward(decision, inbound))
    assert json.loads(body_of(leg)) == json.loads(b"{" + theirs + b"}")
    assert b"content-length: %d\r\n" % len(body_of(leg)) in leg.head
    assert facts.decode_rank == 1
    assert body_of(decode_leg(forward(decision, read(api, b"{" + theirs + b"}")[1]))) == b"{" + theirs + b"}"
    kept = read(api, b"{" + theirs + ours + b"}", owns_ranks=False)[1]
    assert "routed_dp_rank" not in kept.fields


def refuse(api: Api, body: Mapping[str, object] | bytes, headers: Headers = ()) -> tuple[int, str, str | None]:
    """Return status, code and param of a body that is refused."""
    with pytest.raises(ClientError) as caught:
        read(api, body, headers)[1].rest(OWNED_FIELDS)
    assert caught.value.message
    return caught.value.status, caught.value.code, caught.value.param


# What is read


@pytest.mark.parametrize("api", PLAIN)
def test_a_plain_request(api: Api) -> None:
    """Its facts and its bytes; nothing is asked for that the client didn't ask for."""
    facts, inbound = read(api, PLAIN[api])
    assert (facts.request_id, facts.model, facts.prompts) == ("r", PLAIN[api].get("model"), 1)
    assert (facts.prefill_rank, facts.decode_rank) == (None, None)
    assert (inbound.path, inbound.request_id, inbound.is_stream) == (api, "r", False)
    assert (inbound.batch, inbound.rid, inbound.wants_prompt_logprobs) == (None, None, False)
    assert b"{" + bytes(inbound.rest(OWNED_FIELDS)) == json.dumps(PLAIN[api]).encode()


def test_a_prompt_of_nothing() -> None:
    """A message without content has no bytes to compare; it is for the engine to judge."""
    facts, _ = read(Api.MESSAGES, {"model": "m", "max_tokens": 2, "messages": [{}], "system": None, "tools": None})
    assert (facts.prompt_tokens, len(facts.prefix_blocks), facts.block_tokens) == (1, 0, 0.0)


@pytest.mark.invariant("I10")
def test_a_body_without_fields_of_ours_is_not_copied() -> None:
    """What goes on is a view of what came."""
    body = json.dumps({**GENERATE, "x": {"rid": 1}}).encode()
    rest = read(Api.GENERATE, body)[1].rest(OWNED_FIELDS)
    assert isinstance(rest, memoryview)
    assert rest.obj is body


@pytest.mark.parametrize(("stream", "is_stream"), [(True, True), (False, False), (None, False)])
def test_streaming(stream: bool | None, is_stream: bool) -> None:
    """As the client says; null is no."""
    assert read(Api.CHAT, {**CHAT, "stream": stream})[1].is_stream is is_stream


@pytest.mark.parametrize(
    ("api", "fields", "batch"),
    [
        (Api.CHAT, {"n": 1}, None),
        (Api.CHAT, {"n": None}, None),
        (Api.CHAT, {"n": 3}, 3),
        (Api.COMPLETIONS, {"prompt": ["a", "b"]}, 2),
        (Api.COMPLETIONS, {"prompt": ["a"]}, 1),
        (Api.COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (Api.COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (Api.COMPLETIONS, {"prompt": [1, 2]}, None),
        (Api.COMPLETIONS, {"prompt": ["a"], "n": 4096}, 4096),
        (Api.GENERATE, {"n": 2}, None),
        (Api.GENERATE, {"sampling_params": {"n": 2}}, 2),
        (Api.GENERATE, {"sampling_params": {"n": 2, "beam_width": 1}}, 2),
        (Api.GENERATE, {"sampling_params": {"n": 2, "beam_width": 2}}, None),
        (Api.GENERATE, {"sampling_params": {"max_new_tokens": 2}}, None),
        (Api.GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 4),
    ],
)
def test_batches(api: Api, fields: dict[str, object], batch: int | None) -> None:
    """As many samples as SGLang makes: it needs a room for each."""
    assert read(api, {**PLAIN[api], **fields})[1].batch == batch


@pytest.mark.parametrize(
    ("flag", "wants"),
    [(True, True), (False, False), (None, False), ([False, True], True), ([False], False), ([], False)],
)
def test_prompt_logprobs(flag: object, wants: bool) -> None:
    """Wanted if any sample wants them; only ``/generate`` has them."""
    assert read(Api.GENERATE, {**GENERATE, "return_logprob": flag})[1].wants_prompt_logprobs is wants
    assert not read(Api.CHAT, {**CHAT, "return_logprob": flag})[1].wants_prompt_logprobs


@pytest.mark.parametrize(
    ("echo", "logprobs", "wants"),
    [(True, 1, True), (1, 5, True), (True, 0, False), (True, None, False), (False, 1, False), (None, 1, False)],
)
def test_echoed_prompt_logprobs(echo: object, logprobs: object, wants: bool) -> None:
    """A completion tells the prompt's logprobs where it echoes the prompt and has logprobs at all."""
    fields = {"echo": echo, "logprobs": logprobs}
    assert read(Api.COMPLETIONS, {**PLAIN[Api.COMPLETIONS], **fields})[1].wants_prompt_logprobs is wants
    assert not read(Api.CHAT, {**CHAT, **fields})[1].wants_prompt_logprobs


# Ranks


@pytest.mark.parametrize(
    ("fields", "prefill_rank", "decode_rank"),
    [
        ({"routed_dp_rank": 2}, 2, 2),
        ({"routed_dp_rank": 2, "disagg_prefill_dp_rank": 1}, 1, 2),
        ({"data_parallel_rank": 1}, 1, 1),
        ({"data_parallel_rank": 1, "decode_dp_rank": 2}, 1, 2),
        ({"data_parallel_rank": 1, "data_parallel_rank_decode": 2}, 1, 2),
        ({"disagg_prefill_dp_rank": 1}, 1, None),
        ({"decode_dp_rank": 0}, None, 0),
        ({"routed_dp_rank": None, "data_parallel_rank": 3}, 3, 3),
        ({"routed_dp_rank": None}, None, None),
        ({"routed_dp_rank": -1}, -1, -1),
    ],
)
def test_ranks_in_the_body(fields: dict[str, object], prefill_rank: int | None, decode_rank: int | None) -> None:
    """In each spelling, the most specific first; a rank that isn't there is left to the core to refuse."""
    facts, inbound = read(Api.CHAT, {**fields, **CHAT})
    assert (facts.prefill_rank, facts.decode_rank) == (prefill_rank, decode_rank)
    assert not any(name.encode() in bytes(inbound.rest(OWNED_FIELDS)) for name in fields)
    assert json.loads(b"{" + bytes(inbound.rest(OWNED_FIELDS))) == CHAT


def test_a_rank_by_header_beats_the_body() -> None:
    """For both legs, as in SGLang; the header isn't sent on, the leg's own is."""
    facts, inbound = read(Api.CHAT, {**CHAT, "routed_dp_rank": 1}, [(b"x-data-parallel-rank", b"3")])
    assert (facts.prefill_rank, facts.decode_rank) == (3, 3)
    assert b"parallel" not in inbound.headers
    assert b"routed_dp_rank" not in bytes(inbound.rest(OWNED_FIELDS))


@pytest.mark.invariant("I10")
def test_ranks_that_are_not_ours_go_through() -> None:
    """With ``rank_fields: none`` the router has no say in them, in body and header; the rid stays ours."""
    body = {**CHAT, "routed_dp_rank": "any", "rid": "mine"}
    facts, inbound = read(Api.CHAT, body, [(b"x-data-parallel-rank", b"any")], owns_ranks=False)
    assert (facts.prefill_rank, facts.decode_rank, inbound.rid) == (None, None, "mine")
    assert inbound.headers.endswith(b"x-data-parallel-rank: any\r\n")
    assert bytes(inbound.rest(OWNED_FIELDS - RANK_FIELDS)).endswith(b'"routed_dp_rank":"any"}')


# Ids and headers


@pytest.mark.parametrize(
    ("rid", "kept"),
    [
        ("mine", "mine"),
        (["one", "two"], "one"),
        (["one"], "one"),
        ("x" * 256, "x" * 256),
        ("", None),
        (None, None),
        ([], None),
        ([""], None),
    ],
)
def test_the_clients_rid(rid: object, kept: str | None) -> None:
    """Of a list the first; whatever it is, it doesn't stay in the body."""
    inbound = read(Api.GENERATE, {"rid": rid, **GENERATE})[1]
    assert inbound.rid == kept
    assert bytes(inbound.rest(OWNED_FIELDS)) == b'"text":"Hi"}'


@pytest.mark.parametrize(
    ("rid", "kept"),
    [
        (["one", "two"], ("one", "two")),
        (["one"], ("one",)),
        (["", "two"], ("", "two")),
        ("mine", "mine"),
        ([], None),
        ("", None),
        (None, None),
    ],
)
def test_the_clients_rids_of_a_batch(rid: object, kept: object) -> None:
    """All of a list are kept, however many; the engine judges their number."""
    inbound = read(Api.GENERATE, {"rid": rid, "text": ["a", "b"]})[1]
    assert inbound.rid == kept
    assert bytes(inbound.rest(OWNED_FIELDS)) == b'"text":["a", "b"]}'


@pytest.mark.parametrize(
    ("value", "kept"), [("mine", "mine"), ("", None), (None, None), (5, None), (["a"], None), ({"a": 1}, None)]
)
def test_the_clients_id_of_a_response(value: object, kept: str | None) -> None:
    """``/v1/responses`` calls it ``request_id``; what isn't a string is the engine's to judge."""
    inbound = read(Api.RESPONSES, {"input": "hi", "request_id": value, "rid": "other"})[1]
    assert inbound.rid == kept


@pytest.mark.parametrize(
    ("headers", "api", "request_id"),
    [
        ([], Api.CHAT, "chatcmpl-abc"),
        ([], Api.COMPLETIONS, "cmpl-abc"),
        ([], Api.GENERATE, "gnt-abc"),
        ([(b"x-request-id", b"one")], Api.CHAT, "one"),
        ([(b"request-id", b"four"), (b"x-trace-id", b"three"), (b"x-correlation-id", b"two")], Api.CHAT, "two"),
        ([(b"request-id", b"four"), (b"x-trace-id", b"three")], Api.CHAT, "three"),
        ([(b"request-id", b"four")], Api.CHAT, "four"),
        ([(b"x-correlation-id", b"two"), (b"x-request-id", b"one")], Api.CHAT, "one"),
        ([(b"x-request-id", b""), (b"request-id", b"four")], Api.CHAT, "four"),
        ([(b"x-request-id", b"x" * 256)], Api.CHAT, "x" * 256),
        ([(b"x-request-id", b"x" * 257)], Api.CHAT, "chatcmpl-abc"),
        ([(b"x-request-id", b"x" * 257), (b"request-id", b"four")], Api.CHAT, "four"),
        ([(b"x-request-id", b"caf\xe9")], Api.CHAT, "caf\xe9"),
        ([(b"x-other-id", b"no")], Api.CHAT, "chatcmpl-abc"),
    ],
)
def test_request_ids(headers: Headers, api: Api, request_id: str) -> None:
    """The first header that has one of a usable length, else a new one that tells the path."""
    assert make_intake().request_id(dict(headers), api, lambda: "abc") == request_id


def test_headers_sent_on() -> None:
    """What engines and traces need, in order; not cookies, not what belongs to the client's connection."""
    headers = [
        (b"host", b"router"),
        (b"authorization", b"Bearer x"),
        (b"cookie", b"a=b"),
        (b"connection", b"keep-alive, x-secret"),
        (b"transfer-encoding", b"chunked"),
        (b"content-type", b"text/plain"),
        (b"content-length", b"5"),
        (b"x-prefiller-host-port", b"evil:1"),
        (b"x-override-bootstrap-room", b"1"),
        (b"x-request-id", b"theirs"),
        (b"traceparent", b"00-1"),
        (b"accept", b"*/*"),
    ]
    inbound = read(Api.CHAT, CHAT, headers)[1]
    assert inbound.headers == b"content-type: application/json\r\ntraceparent: 00-1\r\naccept: */*\r\n"
    assert inbound.credentials == b"authorization: Bearer x\r\n"


@pytest.mark.parametrize(
    ("headers", "routing", "client"),
    [
        ((), None, None),
        (((b"cookie", b"c"),), None, b"c"),
        (((b"cookie", b"c"), (b"x-forwarded-for", b"1.2.3.4")), None, b"1.2.3.4"),
        (((b"cookie", b"c"), (b"x-forwarded-for", b"1.2.3.4"), (b"authorization", b"Bearer x")), None, b"Bearer x"),
        (((b"authorization", b"Bearer x"), (b"x-smg-routing-key", b"k")), b"k", b"k"),
        (((b"authorization", b"Bearer x"), (b"x-smg-routing-key", b"")), None, b"Bearer x"),
    ],
)
def test_keys_of_clients(headers: Headers, routing: bytes | None, client: bytes | None) -> None:
    """The first header of four tells a client, only one is a routing key; decisions see hashes and no passwords."""
    facts = read(Api.CHAT, CHAT, headers)[0]
    hashes = [None if key is None else xxhash.xxh3_64_intdigest(key) for key in (routing, client)]
    assert [facts.routing_key, facts.client_key] == hashes


# Bad input


@pytest.mark.parametrize("api", PLAIN)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"model":"m"',
        b'{"model":}',
        b"{'model':1}",
        b'{"model":NaN,"x":NaN}',
        b'{"a":1}{"b":2}',
        b'{"a":1} x',
        b"\xef\xbb\xbf{}",
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
        json.dumps(CHAT).encode("utf-16"),
    ],
)
def test_what_is_not_json(api: Api, body: bytes) -> None:
    """Cut short, in another encoding, too deep: told apart from a wrong request."""
    assert refuse(api, body) == (400, "invalid_json", None)


@pytest.mark.parametrize("api", PLAIN)
@pytest.mark.parametrize("body", [b"[]", b"null", b'"text"', b"1", b"true", b"[{}]", b"[" * 100_000])
def test_what_is_not_an_object(api: Api, body: bytes) -> None:
    """JSON, but no request."""
    assert refuse(api, body) == (400, "invalid_request", None)


DEEP = b"[" * 3000 + b"]" * 3000
NO_PROMPTS: Sequence[object] = (None, [], 5, {}, True, [None], [1.5], [-1], [{}], [True], [[]], [[[1]]])
MIXED_PROMPTS: Sequence[object] = (["a", 1], [1, "a"], [1, [2]], [[1], 2], [[1], "a"], ["a", [1]], [[1, "a"]])


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        *((api, {"model": 5}, "model") for api in PLAIN),
        *((api, {"stream": "maybe"}, "stream") for api in PLAIN),
        *((api, {"n": "two"}, "n") for api in PLAIN if api is not Api.GENERATE),
        *((api, {"n": 1.5}, "n") for api in PLAIN if api is not Api.GENERATE),
        *((api, {"n": False}, "n") for api in PLAIN if api is not Api.GENERATE),
        *((api, {"n": 2**70}, "n") for api in PLAIN if api is not Api.GENERATE),
        *((api, {"rid": 5}, "rid") for api in PLAIN),
        *((api, {"rid": [5]}, "rid") for api in PLAIN),
        *((api, {"rid": "x" * 257}, "rid") for api in PLAIN),
        *((api, {"rid": ["a", "x" * 257]}, "rid") for api in PLAIN),
        *((api, {"routed_dp_rank": "1"}, "routed_dp_rank") for api in PLAIN),
        *((api, {"routed_dp_rank": 1.5}, "routed_dp_rank") for api in PLAIN),
        *((api, {"data_parallel_rank": True}, "data_parallel_rank") for api in PLAIN),
        *((api, {"decode_dp_rank": [1]}, "decode_dp_rank") for api in PLAIN),
        *((api, {"disagg_prefill_dp_rank": {}}, "disagg_prefill_dp_rank") for api in PLAIN),
        (Api.CHAT, {"n": 0}, "n"),
        (Api.CHAT, {"n": -1}, "n"),
        (Api.CHAT, {"n": 4097}, "n"),
        (Api.COMPLETIONS, {"n": 0}, "n"),
        (Api.COMPLETIONS, {"prompt": ["a"] * 3, "n": 2000}, "n"),
        (Api.COMPLETIONS, {"prompt": ["a"] * 4097}, "n"),
        (Api.GENERATE, {"sampling_params": {"n": 0}}, "n"),
        (Api.GENERATE, {"sampling_params": [{"n": 2}, {}]}, "n"),
        (Api.GENERATE, {"sampling_params": {"n": 5000}}, "n"),
        (Api.GENERATE, {"sampling_params": {"n": "2"}}, "sampling_params"),
        (Api.GENERATE, {"sampling_params": 5}, "sampling_params"),
        (Api.GENERATE, {"sampling_params": [5]}, "sampling_params"),
        (Api.GENERATE, {"return_logprob": "maybe"}, "return_logprob"),
        (Api.CHAT, {"messages": None}, "messages"),
        (Api.CHAT, {"messages": []}, "messages"),
        (Api.CHAT, {"messages": "Hi"}, "messages"),
        (Api.CHAT, {"messages": {"role": "user"}}, "messages"),
        (Api.CHAT, {"messages": ["Hi"]}, "messages"),
        (Api.CHAT, {"messages": [{"content": ["Hi"]}]}, "messages"),
        (Api.CHAT, {"messages": [{"content": [1]}]}, "messages"),
        *((Api.COMPLETIONS, {"prompt": prompt}, "prompt") for prompt in (*NO_PROMPTS, *MIXED_PROMPTS)),
        (Api.GENERATE, {"text": None}, "text"),
        (Api.GENERATE, {"text": []}, "text"),
        (Api.GENERATE, {"input_ids": [1]}, "text"),
        (Api.GENERATE, {"text": None, "input_ids": []}, "input_ids"),
        (Api.GENERATE, {"text": None, "input_ids": [1e3]}, "input_ids"),
        (Api.GENERATE, {"text": None, "input_embeds": []}, "input_embeds"),
        (Api.GENERATE, {"text": None, "input_embeds": 5}, "input_embeds"),
        (Api.GENERATE, {"text": None, "input_embeds": [1.5]}, "input_embeds"),
        (Api.GENERATE, {"text": None, "input_embeds": [[[1.5]], 5]}, "input_embeds"),
    ],
)
def test_wrong_fields(api: Api, fields: dict[str, object], param: str) -> None:
    """A wrong type, an empty or a mixed list, a number out of range: 400, with the field's name."""
    assert refuse(api, {**PLAIN[api], **fields}) == (400, "invalid_request", param)


@pytest.mark.parametrize(
    ("api", "param"), [(Api.CHAT, "messages"), (Api.COMPLETIONS, "prompt"), (Api.GENERATE, "text")]
)
def test_a_prompt_is_needed(api: Api, param: str) -> None:
    """An empty object, or the body of another path."""
    assert refuse(api, b"{}") == (400, "invalid_request", param)
    assert refuse(api, {"model": "m", "query": "x"}) == (400, "invalid_request", param)


@pytest.mark.parametrize("value", [b"", b"-1", b"x", b"1.5", b" 1", b"1" * 10, b"9" * 5000, "\u0661".encode()])
def test_a_rank_header_that_is_none(value: bytes) -> None:
    """Refused by name, whatever its length."""
    headers = [(b"x-data-parallel-rank", value)]
    assert refuse(Api.CHAT, CHAT, headers) == (400, "invalid_request", "x-data-parallel-rank")


@pytest.mark.parametrize(
    "name", ["rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "decode_dp_rank"]
)
@pytest.mark.parametrize("value", [b"null", b"1"])
def test_a_field_of_ours_twice(name: str, value: bytes) -> None:
    """Also in an escaped spelling; nested ones are the client's business."""
    if name == "rid":
        value = value.replace(b"1", b'"a"')
    escaped = "".join(f"\\u{ord(c):04X}" for c in name).encode()
    for again in (name.encode(), escaped):
        body = b'{"text":"Hi","%s":%s,"%s":%s}' % (name.encode(), value, again, value)
        assert refuse(Api.GENERATE, body) == (400, "duplicate_field", name)
    nested = b'{"text":"Hi","%s":%s,"x":{"%s":1,"%s":2}}' % (name.encode(), value, name.encode(), escaped)
    rest = bytes(read(Api.GENERATE, nested)[1].rest(OWNED_FIELDS))
    assert rest.endswith(b'"x":{"%s":1,"%s":2}}' % (name.encode(), escaped))


def test_deep_values_are_nobodys_crash() -> None:
    """In a field that is read, sent on raw, or owned: a refusal or a pass, never more."""
    for name in (
        b"model",
        b"messages",
        b"prompt",
        b"text",
        b"tools",
        b"sampling_params",
        b"rid",
        b"routed_dp_rank",
        b"x",
    ):
        for api in PLAIN:
            with suppress(ClientError):
                read(api, b'{"text":"a","prompt":"a","messages":[{}],"%s":%s}' % (name, DEEP))
    with suppress(ClientError):
        read(Api.CHAT, b'{"messages":[{"content":%s}]}' % DEEP)


@pytest.mark.invariant("I10")
@pytest.mark.parametrize("text", [b'"\xff\xfe"', b'"\xc3"', b'"\xed\xa0\x80"'])
def test_text_is_the_engines_to_judge(text: bytes) -> None:
    """Bytes of a prompt that aren't UTF-8 go through: the engine says what is wrong with them."""
    body = b'{"messages":[{"role":"user","content":%s}]}' % text
    assert b"{" + bytes(read(Api.CHAT, body)[1].rest(OWNED_FIELDS)) == body


# Anything


SEEDS = [
    *(json.dumps(body).encode() for body in PLAIN.values()),
    json.dumps({**CHAT, "tools": [{"a": 1}], "n": 2, "rid": ["a"], "routed_dp_rank": 1}).encode(),
    json.dumps({"messages": [{"content": [{"text": "a\u4f60"}, {"image_url": 1}], "tool_calls": [{}]}]}).encode(),
    json.dumps({"prompt": [[1, 2], [3]], "n": 2, "bootstrap_room": [1], "stream": True}).encode(),
    json.dumps({"input_ids": [1, 2], "sampling_params": [{"n": 2}], "return_logprob": [True]}).encode(),
    json.dumps({"input_embeds": [[[0.5]]], "data_parallel_rank": None, "rid": "a"}).encode(),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return a valid body with a few bytes replaced, dropped, doubled, or put in from elsewhere."""
    body = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(body)))
        end = min(len(body), start + draw(st.integers(0, 6)))
        part = draw(
            st.one_of(
                st.sampled_from(
                    [b'"', b"[", b"]", b"{", b"}", b",", b":", b"\\", b"null", b"-1", b"\\ud800", b"1e999"]
                ),
                st.binary(max_size=3),
                st.just(body[start:end] * 2),
            )
        )
        body = body[:start] + part + body[end:]
    return body


@given(st.sampled_from([*PLAIN]), st.one_of(mutated(), st.binary(max_size=40)))
def test_whatever_comes_is_read_or_refused(api: Api, body: bytes) -> None:
    """Any bytes: a request, or a failure that is the client's; what is read goes on as JSON."""
    try:
        facts, inbound = read(api, body)
    except ClientError:
        return
    assert facts.prompt_tokens >= 1
    assert facts.prompts == (inbound.batch or 1)
    assert bytes(inbound.rest(OWNED_FIELDS)).rstrip().endswith(b"}")


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)
    ),
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(st.text(max_size=5), values, max_size=3)),
    max_leaves=5,
)
NAMES = [
    *(
        "model",
        "stream",
        "n",
        "rid",
        "bootstrap_host",
        "bootstrap_room",
        "routed_dp_rank",
        "messages",
        "tools",
        "prompt",
    ),
    *("text", "input_ids", "input_embeds", "sampling_params", "return_logprob", "decode_dp_rank"),
]


@given(st.sampled_from([*PLAIN]), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6), st.booleans())
def test_whatever_stands_in_a_field_is_read_or_refused(api: Api, body: dict[str, object], is_valid: bool) -> None:
    """Any JSON in the fields that are read."""
    with suppress(ClientError):
        read(api, {**PLAIN[api], **body} if is_valid else body)
