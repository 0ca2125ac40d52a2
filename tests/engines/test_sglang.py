"""SGLang: both legs' handshake and ranks in every spelling; what the engine tells of itself and of its load."""

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core.fleet import Role
from pdrouter.core.load import RankReport
from pdrouter.engines.base import Described, LoadReply, Plan
from pdrouter.engines.sglang import OWNED_FIELDS, Sglang
from pdrouter.engines.sglang_ranks import RANK_FIELDS, RankFields

from .builders import (
    ROOMS,
    body_of,
    decode_leg,
    fields_of,
    lines_of,
    make_attempt,
    make_decision,
    make_endpoint,
    make_inbound,
    make_pair,
    place,
    prefill_leg,
)

HANDSHAKE = {"rid": "r-1-a1", "bootstrap_host": "prefill", "bootstrap_port": 8998, "bootstrap_room": ROOMS[0]}


def sglang(rank_fields: RankFields = RankFields.AUTO) -> Sglang:
    """Return the engine under test."""
    return Sglang(rank_fields)


# Ranks


PREFILL = {"disagg_prefill_dp_rank": 1}
ROUTED = ({"routed_dp_rank": 1, **PREFILL}, {"routed_dp_rank": 2, **PREFILL})
LEGACY = ({"data_parallel_rank": 1}, {"decode_dp_rank": 2, "data_parallel_rank": 1})
BOTH_NAMES = ({**LEGACY[0], **PREFILL}, {**LEGACY[1], **PREFILL})
HEADER = (PREFILL, PREFILL)
NOTHING: tuple[dict[str, int], dict[str, int]] = ({}, {})


@pytest.mark.parametrize(
    ("rank_fields", "version", "ranks"),
    [
        (RankFields.AUTO, "0.5.10", ROUTED),
        (RankFields.AUTO, "v0.5.11", ROUTED),
        (RankFields.AUTO, "0.5.10rc1", ROUTED),
        (RankFields.AUTO, "0.5.10.post2", ROUTED),
        (RankFields.AUTO, "0.6", ROUTED),
        (RankFields.AUTO, "1", ROUTED),
        (RankFields.AUTO, None, ROUTED),
        (RankFields.AUTO, "", ROUTED),
        (RankFields.AUTO, "main", ROUTED),
        (RankFields.AUTO, "0.0.0.dev0+g123", ROUTED),
        (RankFields.AUTO, "\u0660.\u0665.\u0669", ROUTED),
        (RankFields.AUTO, "0.5.9", LEGACY),
        (RankFields.AUTO, "0.5.9.post1", LEGACY),
        (RankFields.AUTO, "0.5", LEGACY),
        (RankFields.AUTO, "v0.4.10", LEGACY),
        (RankFields.ROUTED, "0.5.0", ROUTED),
        (RankFields.LEGACY, "0.5.9", LEGACY),
        (RankFields.LEGACY, None, LEGACY),
        (RankFields.LEGACY, "0.6.0", BOTH_NAMES),
        (RankFields.HEADER, "0.5.10", HEADER),
        (RankFields.HEADER, "0.5.9", LEGACY),
        (RankFields.NONE, "0.5.10", NOTHING),
    ],
)
def test_ranks_are_written_as_the_version_reads_them(
    rank_fields: RankFields, version: str | None, ranks: tuple[dict[str, int], dict[str, int]]
) -> None:
    """Each leg gets its own rank and the prefill's; nothing else stands in the body."""
    inbound = make_inbound(path="/v1/completions")
    plan = sglang(rank_fields).plan(make_pair(version=version), inbound, make_attempt())
    for leg, fields in ((prefill_leg(plan), ranks[0]), (decode_leg(plan), ranks[1])):
        written = fields_of(leg)
        assert {name: written[name] for name in written if name not in HANDSHAKE} == {**fields, "text": "hi"}


def test_ranks_as_headers() -> None:
    """Each leg has its own; the other spellings have none, nor has the one path that doesn't read it."""
    inbound = make_inbound(path="/v1/chat/completions")
    plan = sglang(RankFields.HEADER).plan(make_pair(), inbound, make_attempt())
    assert prefill_leg(plan).head.count(b"\r\nx-data-parallel-rank: 1\r\n") == 1
    assert decode_leg(plan).head.count(b"\r\nx-data-parallel-rank: 2\r\n") == 1
    plan = sglang(RankFields.HEADER).plan(make_pair(), make_inbound(), make_attempt())
    assert b"parallel" not in prefill_leg(plan).head + decode_leg(plan).head
    assert fields_of(prefill_leg(plan))["routed_dp_rank"] == 1
    for spelling in set(RankFields) - {RankFields.HEADER}:
        plan = sglang(spelling).plan(make_pair(), inbound, make_attempt())
        assert b"parallel" not in prefill_leg(plan).head + decode_leg(plan).head


@pytest.mark.parametrize("spelling", RankFields)
@pytest.mark.parametrize("ranks", [(None, None), (0, None), (None, 0)])
def test_a_rank_that_is_not_chosen_is_left_out(spelling: RankFields, ranks: tuple[int | None, int | None]) -> None:
    """The engine chooses then; rank 0 is a rank."""
    plan = sglang(spelling).plan(make_pair(*ranks), make_inbound(path="/v1/completions"), make_attempt())
    for leg in (prefill_leg(plan), decode_leg(plan)):
        written = {name for name in fields_of(leg) if name in RANK_FIELDS}
        assert all(fields_of(leg)[name] == 0 for name in written)
        assert not written or ranks != (None, None)
        assert (b"x-data-parallel-rank: 0\r\n" in leg.head) == (
            spelling is RankFields.HEADER and leg.placement.rank == 0
        )
        assert b"None" not in leg.head + body_of(leg)


@pytest.mark.parametrize(
    ("spelling", "ranks"),
    [
        (RankFields.ROUTED, {"routed_dp_rank": 3}),
        (RankFields.LEGACY, {"data_parallel_rank": 3}),
        (RankFields.HEADER, {}),
        (RankFields.NONE, {}),
    ],
)
def test_a_regular_endpoint_gets_one_leg(spelling: RankFields, ranks: dict[str, int]) -> None:
    """With its rank and a rid to end it by, and without a handshake."""
    decision = make_decision(None, place(make_endpoint(Role.REGULAR), 3))
    inbound = make_inbound(path="/v1/completions", wants_prompt_logprobs=True)
    plan = sglang(spelling).plan(decision, inbound, make_attempt())
    assert plan.prefill is None
    assert not plan.merges_logprobs
    assert fields_of(decode_leg(plan)) == {"rid": "r-1-a1", **ranks, "text": "hi"}
    assert (b"x-data-parallel-rank: 3\r\n" in decode_leg(plan).head) == (spelling is RankFields.HEADER)


# Handshake


def test_both_legs_share_the_handshake_and_the_body() -> None:
    """Each goes to its own endpoint, with the right length; host and port are the prefill's."""
    inbound = make_inbound(b'"text":"hi","x":1e-05}', path="/v1/completions")
    plan = sglang().plan(make_pair(), inbound, make_attempt())
    for leg, host in ((prefill_leg(plan), "prefill"), (decode_leg(plan), "decode")):
        first, *lines = lines_of(leg.head)
        assert first == "POST /v1/completions HTTP/1.1"
        ours = [f"host: {host}:30000", f"content-length: {len(body_of(leg))}"]
        assert sorted(lines) == sorted([*ours, "content-type: application/json", "x-request-id: r-1"])
        assert body_of(leg).endswith(b',"text":"hi","x":1e-05}')


@pytest.mark.parametrize(("port", "text"), [(None, b"null"), (9000, b"9000")])
@pytest.mark.parametrize("batch", [None, 2])
def test_a_bootstrap_port_may_be_null(port: int | None, text: bytes, batch: int | None) -> None:
    """As the prefill endpoint tells it; for a batch once for each sample."""
    inbound = make_inbound(batch=batch)
    plan = sglang().plan(make_pair(bootstrap_port=port), inbound, make_attempt(ROOMS[: batch or 1]))
    written = text if batch is None else b"[%s,%s]" % (text, text)
    assert b'"bootstrap_port":%s,' % written in body_of(decode_leg(plan))


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_a_batch_has_an_array_for_each_sample(batch: int) -> None:
    """Hosts, ports and rooms are as many as samples, each room once; SGLang repeats a shorter list of rooms."""
    plan = sglang().plan(make_pair(), make_inbound(batch=batch), make_attempt(ROOMS[:batch]))
    assert body_of(prefill_leg(plan)).count(b"7000000000000000001") == 1
    for leg in (prefill_leg(plan), decode_leg(plan)):
        fields = fields_of(leg)
        assert fields["bootstrap_host"] == ["prefill"] * batch
        assert fields["bootstrap_port"] == [8998] * batch
        assert fields["bootstrap_room"] == list(ROOMS[:batch])
        assert fields["rid"] == "r-1-a1"


def test_logprobs_are_merged_where_the_client_wants_the_prompts() -> None:
    """And nowhere else, since it costs reading both replies."""
    for wanted in (True, False):
        plan = sglang().plan(make_pair(), make_inbound(wants_prompt_logprobs=wanted), make_attempt())
        assert plan.merges_logprobs is wanted


# Ids


@pytest.mark.parametrize(
    ("rid", "request_id", "sent"),
    [
        (None, "r-1", "r-1-a1"),
        ("mine", "r-1", "mine-a1"),
        ('q"\\\r\nx: y', "r-1", 'q"\\\r\nx: y-a1'),
        (None, "\xe9\u4f60\x00", "\xe9\u4f60\x00-a1"),
    ],
)
def test_a_rid_is_the_clients_with_a_suffix(rid: str | None, request_id: str, sent: str) -> None:
    """Unique for each attempt; JSON-escaped, so that nothing in it can leave its string or its line."""
    inbound = make_inbound(rid=rid, request_id=request_id)
    plan = sglang().plan(make_pair(), inbound, make_attempt())
    for leg in (prefill_leg(plan), decode_leg(plan)):
        assert fields_of(leg)["rid"] == sent
    assert plan.rid == sent
    endpoint = decode_leg(plan).placement.endpoint
    (abort,) = sglang().abort(endpoint, plan)
    head, end, body = abort.partition(b"\r\n\r\n")
    assert json.loads(body) == {"rid": sent}
    first, *lines = lines_of(head + end)
    assert first == "POST /abort_request HTTP/1.1"
    ours = [f"host: {endpoint.address}", f"content-length: {len(body)}", "content-type: application/json"]
    assert sorted(lines) == sorted(ours)


def aborted(plan: Plan) -> list[object]:
    """Return the ids that are ended at an engine."""
    requests = sglang().abort(decode_leg(plan).placement.endpoint, plan)
    return [json.loads(request.partition(b"\r\n\r\n")[2])["rid"] for request in requests]


@pytest.mark.parametrize(
    ("batch", "rid", "sent", "ended"),
    [
        (None, None, "r-1-a1", ["r-1-a1"]),
        (1, None, "r-1-a1", ["r-1-a1_0"]),
        (3, None, "r-1-a1", ["r-1-a1_0", "r-1-a1_1", "r-1-a1_2"]),
        (2, "mine", "mine-a1", ["mine-a1_0", "mine-a1_1"]),
        (2, ("one", "two"), ["one-a1", "two-a1"], ["one-a1", "two-a1"]),
        (2, ("one", "", "three"), ["one-a1", "-a1", "three-a1"], ["one-a1", "-a1", "three-a1"]),
    ],
)
def test_each_part_of_a_batch_is_ended(
    batch: int | None, rid: str | tuple[str, ...] | None, sent: object, ended: list[str]
) -> None:
    """By the exact id that the engine gives it, or that the client gave; all are new for each attempt."""
    for decision in (make_pair(), make_decision(None, place(make_endpoint(Role.REGULAR), 0))):
        inbound = make_inbound(batch=batch, rid=rid)
        plan = sglang().plan(decision, inbound, make_attempt(ROOMS[: batch or 1]))
        assert fields_of(decode_leg(plan))["rid"] == sent
        assert aborted(plan) == ended


@pytest.mark.parametrize(("rid", "base"), [(None, "r-1"), ("mine", "mine")])
def test_the_id_of_a_response(rid: str | None, base: str) -> None:
    """``/v1/responses`` has its own name for it, and the client's is replaced."""
    body = b'"request_id":"theirs","input":"hi"}'
    inbound = make_inbound(body, path="/v1/responses", rid=rid, fields=["request_id"])
    plan = sglang().plan(make_decision(None, place(make_endpoint(Role.REGULAR), 0)), inbound, make_attempt())
    fields = json.loads(body_of(decode_leg(plan)))
    assert (fields["request_id"], "rid" in fields, fields["input"]) == (f"{base}-a1", False, "hi")
    assert aborted(plan) == [f"{base}-a1"]


def test_a_message_has_no_id_to_end_it_by() -> None:
    """Closing its connection must do."""
    inbound = make_inbound(b'"max_tokens":1}', path="/v1/messages", rid="mine")
    plan = sglang().plan(make_decision(None, place(make_endpoint(Role.REGULAR), 0)), inbound, make_attempt())
    assert json.loads(body_of(decode_leg(plan))) == {"routed_dp_rank": 0, "max_tokens": 1}
    assert aborted(plan) == []


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_nothing_of_a_body_gets_into_a_head(rid: str, text: str) -> None:
    """A head has the lines that the router gave it, whatever the client writes."""
    rest = b'"text":' + json.dumps(text).encode() + b"}"
    inbound = make_inbound(rest, rid=rid, path="/v1/completions")
    plan = sglang(RankFields.HEADER).plan(make_pair(), inbound, make_attempt())
    for leg in (prefill_leg(plan), decode_leg(plan)):
        assert len(lines_of(leg.head)) == 6
        (abort,) = sglang().abort(leg.placement.endpoint, plan)
        assert len(lines_of(abort[: abort.index(b"{")])) == 4
        assert fields_of(leg)["text"] == text


def test_what_the_router_writes_it_owns() -> None:
    """No spelling writes a field that a client's body could carry a second time."""
    for spelling in RankFields:
        for version in ("0.5.9", "0.5.10"):
            plan = sglang(spelling).plan(make_pair(version=version), make_inbound(b"}"), make_attempt())
            assert set(fields_of(prefill_leg(plan))) | set(fields_of(decode_leg(plan))) <= OWNED_FIELDS


# What the server tells


NEW_INFO = {
    "model_path": "/models/m",
    "served_model_name": "m",
    "tp_size": 8,
    "dp_size": 4,
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 8998,
    "load_balance_method": "follow_bootstrap_room",
    "version": "0.5.23",
    "internal_states": 4 * [{"deep": [1, None]}],
}
OLD_INFO = {"model_path": "/models/m", "dp_size": 1, "disaggregation_mode": "decode", "version": "0.4.9"}


@pytest.mark.parametrize(
    ("info", "described"),
    [
        (NEW_INFO, Described(Role.PREFILL, "m", 4, bootstrap_port=8998, version="0.5.23")),
        (OLD_INFO, Described(Role.DECODE, "/models/m", 1, version="0.4.9")),
        ({"disaggregation_mode": None}, Described(Role.REGULAR)),
        ({"disaggregation_mode": "null"}, Described(Role.REGULAR)),
        ({"disaggregation_mode": ""}, Described(Role.REGULAR)),
        ({"disaggregation_mode": "encode"}, Described()),
        ({}, Described()),
        ({"dp_size": 0}, Described()),
        ({"dp_size": -1}, Described()),
        ({"served_model_name": "", "model_path": "p"}, Described(model="p")),
        ({"served_model_name": None, "model_path": None, "version": None}, Described()),
    ],
)
def test_server_info(info: dict[str, object], described: Described) -> None:
    """Old and new; a role that isn't told is not a role, null is regular."""
    assert sglang().describe("/server_info", json.dumps(info).encode()) == described


STATES: list[object] = [{}, {}, {}, {}]


@pytest.mark.parametrize(
    ("info", "ranks", "dp_attention"),
    [
        # 0.5.6 to 0.5.21: dp_size counts all ranks in both kinds of DP.
        ({"dp_size": 4, "enable_dp_attention": False, "internal_states": STATES}, 4, False),
        ({"dp_size": 4, "enable_dp_attention": True, "internal_states": STATES}, 4, True),
        # 0.5.22 and 0.5.23: replicas times ranks of one.
        ({"dp_size": 4, "attn_dp_size": 1, "enable_dp_attention": False, "internal_states": STATES}, 4, False),
        ({"dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": True, "internal_states": STATES}, 4, True),
        ({"dp_size": 1, "attn_dp_size": 4, "internal_states": STATES}, 4, True),
        ({"dp_size": 1, "attn_dp_size": 1, "enable_dp_attention": False, "internal_states": [{}]}, 1, False),
        # Parts that are missing or aren't what they should be.
        ({"dp_size": 2}, 2, None),
        ({"attn_dp_size": 2, "internal_states": STATES}, 4, True),
        ({"internal_states": STATES}, 4, None),
        ({"dp_size": 2, "internal_states": []}, 2, None),
        ({"dp_size": 2, "internal_states": None}, 2, None),
        ({"dp_size": 2, "internal_states": {"a": 1}}, 2, None),
        ({"dp_size": 2, "internal_states": "many"}, 2, None),
    ],
)
def test_all_ranks_are_counted(info: dict[str, object], ranks: int, dp_attention: bool | None) -> None:
    """Whichever part of the reply tells them."""
    described = sglang().describe("/server_info", json.dumps(info).encode())
    assert described == Described(dp_size=ranks, dp_attention=dp_attention)


@pytest.mark.parametrize(
    ("info", "ranks", "told"),
    [
        ({"dp_size": 1, "internal_states": STATES}, 4, "dp_size 1, entries of internal_states 4"),
        ({"dp_size": 8, "internal_states": STATES}, 8, "dp_size 8, entries of internal_states 4"),
        (
            {"dp_size": 1, "attn_dp_size": 1, "internal_states": STATES},
            4,
            "dp_size x attn_dp_size 1, entries of internal_states 4",
        ),
        ({"dp_size": 0, "internal_states": STATES}, 4, "dp_size 0, entries of internal_states 4"),
    ],
)
def test_parts_that_disagree_on_the_ranks(info: dict[str, object], ranks: int, told: str) -> None:
    """The largest number counts, and the contradiction is told."""
    described = sglang().describe("/server_info", json.dumps(info).encode())
    assert described is not None
    assert (described.dp_size, described.contradiction) == (ranks, f"/server_info contradicts itself: {told}")


NONSENSE = [
    b"",
    b"{",
    b"[]",
    b"1",
    b"null",
    b'"x"',
    b"<html>",
    b"\xff",
    b"[" * 100_000,
    b'{"loads":1}',
    b'{"a":' * 100_000,
]


@pytest.mark.parametrize("body", [*NONSENSE, b'{"dp_size":"4"}', b'{"version":5}'])
def test_server_info_that_is_none(body: bytes) -> None:
    """It isn't understood, or says nothing; nothing is raised."""
    assert sglang().describe("/server_info", body) in (None, Described())


# Load


CORE = {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 100, "num_total_tokens": 150}


def read(body: object) -> LoadReply:
    """Return what the engine understands of a load reply."""
    reply = sglang().read_load(json.dumps(body).encode())
    assert reply is not None
    return reply


@pytest.mark.parametrize(
    ("tokens", "busy_us", "read_tokens", "busy_s"),
    [
        (8192, 1_500_000, 8192, 1.5),
        (0, 0, 0, 0),
        (None, 5, None, 5e-6),
        (-1, -1, None, None),
        ("8192", 10**400, None, None),
        (10**400, "1", None, None),
    ],
)
def test_totals_of_a_ranks_prefills(
    tokens: object, busy_us: object, read_tokens: float | None, busy_s: float | None
) -> None:
    """Tokens as they are, time in seconds; what no counter can hold is left out."""
    totals = {"total_prefill_uncached_tokens": tokens, "total_prefill_busy_us": busy_us}
    (report,) = read({"loads": [{"dp_rank": 0, **CORE, **totals}]}).ranks
    assert (report.prefill_tokens_total, report.prefill_busy_s_total) == (read_tokens, busy_s)


@pytest.mark.parametrize(
    ("load", "tokens", "requests"),
    [
        (CORE, 150, 5),
        ({**CORE, "num_total_tokens": None}, 100, 5),
        ({**CORE, "num_waiting_reqs": None}, 150, 3),
        ({"num_reqs": 4, "num_waiting_reqs": 1, "num_tokens": 5120}, 5120, 4),
        ({"num_reqs": 4, "num_running_reqs": 1, "num_waiting_reqs": 1}, None, 4),
        ({"num_waiting_reqs": 2}, None, None),
        ({}, None, None),
        ({"num_total_tokens": 0, "num_used_tokens": 7, "num_running_reqs": 0}, 0, 0),
        ({"num_total_tokens": -1, "num_running_reqs": 1}, -1, 1),
        ({"num_running_reqs": -1, "num_waiting_reqs": 5}, None, -1),
        ({"num_running_reqs": 5, "num_waiting_reqs": -1}, None, -1),
        ({"num_total_tokens": "NaN", "num_used_tokens": 9, "num_running_reqs": "3"}, 9, None),
        ({"num_total_tokens": [1], "num_tokens": True, "num_reqs": {}}, None, None),
        ({"num_total_tokens": 1.5, "num_reqs": 2.0, "unknown": {"deep": [[]]}}, 1.5, 2.0),
        ({"num_total_tokens": 10**30}, 10**30, None),
        ({"num_total_tokens": 10**400, "num_tokens": 3, "num_running_reqs": 1.5, "num_waiting_reqs": 10**400}, 3, 1.5),
    ],
)
def test_one_ranks_load(load: dict[str, object], tokens: float | None, requests: float | None) -> None:
    """Of each version the best number it has; what isn't a number is left out, and -1 is left to the core to refuse."""
    for reply in (read({"loads": [{"dp_rank": 1, **load}]}), read([{"dp_rank": 1, **load}])):
        assert [(r.rank, r.tokens, r.requests) for r in reply.ranks] == [(1, tokens, requests)]
        assert reply.unix_s is None


@pytest.mark.parametrize("rank", [None, "1", 1.0, True, [1]])
def test_a_report_without_a_rank_names_none(rank: object) -> None:
    """The core refuses it, and takes in the others."""
    assert [r.rank for r in read([{"dp_rank": rank}, {"dp_rank": 3}]).ranks] == [-1, 3]
    assert [r.rank for r in read([{}]).ranks] == [-1]


@pytest.mark.parametrize(
    ("timestamp", "unix_s"),
    [
        (10**400, None),
        (1_700_000_000.25, 1_700_000_000.25),
        (1_700_000_000, 1_700_000_000),
        ("2023-11-14T22:13:20.250000+00:00", 1_700_000_000.25),
        ("2023-11-15T00:13:20+02:00", 1_700_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000),
        ("2023-11-14T22:13:20", None),
        ("0001-01-01T00:00:00", None),
        ("yesterday", None),
        ("", None),
        ("NaN", None),
        (None, None),
        (True, None),
        ([], None),
    ],
)
def test_a_reports_moment(timestamp: object, unix_s: float | None) -> None:
    """Unix seconds or ISO 8601 with an offset; a local time of a machine elsewhere says nothing."""
    reply = read({"timestamp": timestamp, "loads": []})
    assert reply.unix_s == unix_s


def test_an_early_versions_report() -> None:
    """``dp_rank_count`` and ``aggregate`` are passed over."""
    body = {
        "timestamp": "2026-01-01T00:00:00+00:00",
        "version": "0.5.8",
        "dp_rank_count": 2,
        "loads": [{"dp_rank": 0, **CORE}, {"dp_rank": 1, **CORE}],
        "aggregate": {"total_running_reqs": 6, "avg_token_usage": 0.1},
    }
    assert read(body).ranks == [RankReport(rank, 150, 5, waiting_requests=2) for rank in (0, 1)]


def test_a_full_report() -> None:
    """Queues and disaggregation are passed over, the ranks come in the engine's order."""
    extra = {"disaggregation": {"mode": "prefill"}, "queues": {"waiting": 1}, "token_usage": 0.5}
    ranks = [{"dp_rank": rank, **CORE, **extra} for rank in (2, 0, 1)]
    assert [report.rank for report in read({"loads": ranks}).ranks] == [2, 0, 1]


def test_throughput_kv_use_and_waiting_requests() -> None:
    """Where they are told, by numbers."""
    told = {"dp_rank": 0, **CORE, "gen_throughput": 812.5, "token_usage": 0.5}
    wrong = {"dp_rank": 1, **CORE, "gen_throughput": "812.5", "token_usage": True, "num_waiting_reqs": "2"}
    assert read({"loads": [told, wrong]}).ranks == [
        RankReport(0, 150, 5, 812.5, 0.5, waiting_requests=2),
        RankReport(1, 150, 3),
    ]


@pytest.mark.invariant("I9")
def test_a_load_reply_of_too_many_ranks() -> None:
    """It is none, by its bytes: nothing is made of 90,000 entries."""
    loads = [{"dp_rank": rank, "num_total_tokens": 1} for rank in range(90_000)]
    assert sglang().read_load(json.dumps(loads).encode()) is None


@pytest.mark.parametrize("body", [*NONSENSE, b'{"loads":[1]}', b"[[]]", b'[{"num_reqs":NaN}]', b'{"timestamp":1}'])
def test_a_load_reply_that_is_none(body: bytes) -> None:
    """It isn't understood, or names no rank; nothing is raised."""
    assert sglang().read_load(body) in (None, LoadReply([]))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(st.text(), values, max_size=3)),
    max_leaves=5,
)


@given(
    st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(("dp_rank", *CORE, "num_reqs"), JSON)), max_size=3), JSON
)
def test_any_load_reply_is_read_or_left(ranks: Sequence[dict[str, object]], timestamp: object) -> None:
    """Whatever JSON stands where numbers should, each rank is a report of finite numbers or of none."""
    for report in read({"loads": ranks, "timestamp": timestamp}).ranks:
        assert all(number is None or math.isfinite(number) for number in (report.tokens, report.requests))
