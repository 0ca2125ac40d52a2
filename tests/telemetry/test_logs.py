"""Log lines: each decision explains itself at debug, what an operator wants to hear of comes at info."""

import json
import sys
from collections.abc import Iterator

import pytest
import structlog

from pdrouter.core.decision import Decision, Why
from pdrouter.core.fleet import Role
from pdrouter.core.ledger import RankKey
from pdrouter.core.request import RequestFacts
from pdrouter.errors import ClientGone, InvalidRank, InvalidRequest, NoReadyPair, RouterError, UpstreamClosed
from pdrouter.proxy.forms import form_fields
from pdrouter.proxy.legs import EngineReply
from pdrouter.telemetry.logs import DecisionLog, set_up_logs
from tests.engines.builders import make_decision, make_endpoint, place


class Candidate:
    """A rank that was looked at."""

    def __init__(self, rank: int) -> None:
        self.key = RankKey("prefill:30000", rank)


class Untold(Why, frozen=True, eq=False):
    """A reason that must not be put into words."""

    def sentence(self) -> str:
        """Fail."""
        raise AssertionError("a line that isn't shown was formatted")


QUIET = Why("least_request", "the least", (Candidate(0), Candidate(1)), (3.0, 1.5))
NOTABLE = Why("load_aware", "imbalance", (Candidate(0),), (17.0,), is_notable=True)


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """Leave structlog as it was."""
    yield
    structlog.reset_defaults()


def decision(why: Why = QUIET, report_age_s: float | None = 0.25) -> Decision:
    """Return a decision for a pair, made for the same reason throughout."""
    return make_decision(
        place(make_endpoint(Role.PREFILL), 1, why, report_age_s), place(make_endpoint(Role.DECODE), None, why, None)
    )


def make_log(level: str) -> DecisionLog:
    """Return a log that writes JSON lines."""
    set_up_logs(level, "json", sys.stderr)
    return DecisionLog(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """Return what was written since the last look, without the time stamps."""
    out, err = capsys.readouterr()
    assert out == ""
    told = [json.loads(line) for line in err.splitlines()]
    for line in told:
        assert "T" in line.pop("timestamp")
    return told


def test_a_decision_at_debug(capsys: pytest.CaptureFixture[str]) -> None:
    """Request id, pair, ranks, loads seen, the rule that fired, and how old the report was."""
    make_log("debug").decided(decision())
    why = "least_request: the least (rank 0=3, rank 1=1.5)"
    assert lines(capsys) == [
        {
            "level": "debug",
            "event": "decided",
            "request_id": "r-1",
            "prompt_tokens": 12,
            "prefix_tokens": 0,
            "prefill": "prefill:30000 rank 1",
            "prefill_why": f"{why}; {why}; report 0.2 s old",
            "decode": "decode:30000 rank engine",
            "decode_why": f"{why}; {why}; no report",
        }
    ]


@pytest.mark.parametrize(("level", "events"), [("debug", 5), ("info", 4), ("warning", 0), ("error", 0)])
def test_an_imbalance_or_a_fallback_at_info(capsys: pytest.CaptureFixture[str], level: str, events: int) -> None:
    """A line for each choice that an operator wants to hear of: which leg, what, and why."""
    make_log(level).decided(decision(NOTABLE))
    told = lines(capsys)
    assert len(told) == events
    if events:
        assert told[-1] == {
            "level": "info",
            "event": "imbalance",
            "request_id": "r-1",
            "leg": "decode",
            "chosen": "decode:30000 rank engine",
            "reason": "load_aware: imbalance (rank 0=17)",
        }


@pytest.mark.parametrize(
    ("level", "is_notable"), [("info", False), ("warning", False), ("warning", True), ("error", True)]
)
def test_nothing_is_formatted_that_is_not_shown(
    capsys: pytest.CaptureFixture[str], level: str, is_notable: bool
) -> None:
    """The data plane pays for lines that are read."""
    log, made = make_log(level), decision(Untold("p", "r", is_notable=is_notable))
    log.decided(made)
    if level != "info":
        log.failed(made, ClientGone("gone"))
    if level == "error":
        log.failed(made, UpstreamClosed("closed"))
    assert lines(capsys) == []


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (UpstreamClosed("the engine closed"), "warning"),
        (RouterError("ours"), "warning"),
        (NoReadyPair("nobody"), "warning"),
        (ClientGone("the client left"), "info"),
        (InvalidRank("no such rank"), "info"),
    ],
)
def test_a_failure_tells_who_and_where(capsys: pytest.CaptureFixture[str], error: RouterError, level: str) -> None:
    """With code, reason and the whole decision; a client that left is no warning."""
    make_log("info").failed(decision(), error)
    (told,) = lines(capsys)
    assert (told["event"], told["level"], told["code"], told["reason"]) == ("failed", level, error.code, error.message)
    assert (told["request_id"], told["prefill"]) == ("r-1", "prefill:30000 rank 1")
    assert told["decode"] == "decode:30000 rank engine"


@pytest.mark.parametrize(("level", "is_told"), [("debug", True), ("info", False), ("warning", False)])
def test_what_an_engine_said_may_be_the_prompt(
    capsys: pytest.CaptureFixture[str], level: str, *, is_told: bool
) -> None:
    """It is told at debug level only."""
    error = EngineReply(make_decision(None, place(make_endpoint(Role.REGULAR), 0)).decode, 500, [], b"my secret")
    make_log(level).failed(decision(), error)
    (told,) = lines(capsys)
    assert ("my secret" in str(told)) == is_told


def test_a_malformed_form_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The library that reads forms warns of each: a client could fill the log so."""
    make_log("debug")
    with pytest.raises(InvalidRequest):
        form_fields(b"multipart/form-data; boundary=b", b"--c", frozenset((b"model",)))
    assert lines(capsys) == []


def test_a_rejection_tells_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Who was there, and why each was out, is in the reason."""
    facts = RequestFacts(request_id="r-9", prompt_tokens=1)
    make_log("warning").rejected(facts, NoReadyPair("prefill:1 (not reached)"))
    assert lines(capsys) == [
        {
            "level": "warning",
            "event": "rejected",
            "request_id": "r-9",
            "code": "no_ready_pair",
            "reason": "prefill:1 (not reached)",
        }
    ]


@pytest.mark.parametrize(("log_format", "is_json"), [("json", True), ("auto", True), ("console", False)])
def test_the_form_of_lines(capsys: pytest.CaptureFixture[str], log_format: str, is_json: bool) -> None:
    """JSON where nobody watches, unless told otherwise; always to stderr."""
    set_up_logs("info", log_format, sys.stderr)
    DecisionLog("info").rejected(RequestFacts(request_id="r-9", prompt_tokens=1), NoReadyPair("nobody"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("{") == is_json
    assert "rejected" in err
    assert "r-9" in err


def test_what_a_client_writes_stays_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A request id with line ends makes no line of its own."""
    facts = RequestFacts(request_id='x"\r\n{"event":"forged"}', prompt_tokens=1)
    make_log("info").rejected(facts, NoReadyPair("nobody"))
    (told,) = lines(capsys)
    assert told["request_id"] == 'x"\r\n{"event":"forged"}'
