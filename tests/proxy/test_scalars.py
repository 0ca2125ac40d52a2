"""Numbers and booleans: what pydantic takes is taken, as the same value, and nothing else."""

import json
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from pdrouter.errors import InvalidRequest
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.scalars import MAX_INTEGER, Scalar, boolean, count, integer
from tests.proxy.test_intake import CHAT, COMPLETION, GENERATE, read, refuse

INTEGERS = (
    *("16", "16.0", "16.00", " 16 ", "\n16", "+16", "-16", "1_000", "016", "-0", "00_1", "0.0", "1_0.0", "\u00a016"),
    *("16.", "16.5", "1e3", "--1", "+-1", "1__0", "_1", "1_", "0x10", "", " ", "\u0661", "1 0", "1.0_0", "- 1", ".0"),
    *("1,000", "inf", "nan", "true", "16 .0", "+", ".", "1\x00"),
    *(16, 0, -1, 16.0, 16.5, 1e3, -0.0, True, False),
)
BOOLEANS = (
    *("true", "True", "tRuE", "t", "T", "yes", "Y", "y", "on", "ON", "1", "0", "off", "f", "n", "no", "false", "FALSE"),
    *(" true", "true ", "1.0", "01", "+1", "", "2", "truth", "ja", "\u0131"),
    *(1, 0, 2, -1, 1.0, 0.0, -0.0, 0.5, True, False),
)


def as_pydantic(kind: type, value: Scalar) -> object:
    """Return pydantic's reading of a value that stands in JSON, ``None`` where it refuses."""
    try:
        return TypeAdapter(kind).validate_python(json.loads(json.dumps(value)))
    except ValidationError:
        return None


def as_ours(reader: Callable[[str, Scalar], object], value: Scalar) -> object:
    """Return our reading, ``None`` where it is refused."""
    try:
        return reader("x", value)
    except InvalidRequest:
        return None


@pytest.mark.parametrize("value", INTEGERS)
def test_integers(value: Scalar) -> None:
    """Each spelling."""
    assert as_ours(integer, value) == as_pydantic(int, value)


@pytest.mark.parametrize("value", BOOLEANS)
def test_booleans(value: Scalar) -> None:
    """Each spelling."""
    assert as_ours(boolean, value) == as_pydantic(bool, value)


NUMBERS = st.text(st.sampled_from("0123456789+-._ \t\n\u0661eE"), max_size=8)
WORDS = st.one_of(NUMBERS, st.sampled_from(["true", "off", "yes"]), st.text(max_size=4))
VALUES = st.one_of(
    WORDS,
    st.booleans(),
    st.integers(-MAX_INTEGER, MAX_INTEGER),
    st.floats(allow_nan=False, allow_infinity=False),
)


@given(VALUES)
def test_any_value(value: Scalar) -> None:
    """Whatever JSON may say; beyond what engines' counters hold, pydantic's limits aren't ours."""
    read_so = as_pydantic(int, value)
    if read_so is None or (isinstance(read_so, int) and abs(read_so) <= MAX_INTEGER):
        assert as_ours(integer, value) == read_so
    assert as_ours(boolean, value) == as_pydantic(bool, value)


@pytest.mark.parametrize("value", [10**400, -(10**400), 2**63, 1e300, "9" * 65, "1" + "0" * 400, f"{2**63}"])
def test_numbers_beyond_any_counter(value: Scalar) -> None:
    """Are refused, whatever their spelling."""
    assert as_ours(integer, value) is None
    assert as_ours(count, value) is None


def test_null_and_negative_numbers() -> None:
    """Null is nothing, and a count can't be negative."""
    assert (integer("x", None), count("x", None), boolean("x", None)) == (None, None, False)
    assert (integer("x", "-1"), count("x", "0")) == (-1, 0)
    for reader, value in ((count, -1), (integer, "a"), (integer, 2**63), (boolean, "a")):
        with pytest.raises(InvalidRequest, match=r"^x (must be|is)") as caught:
            reader("x", value)
        assert caught.value.param == "x"


# In bodies


@pytest.mark.parametrize("spelling", [2, 2.0, "2", " 2.0 "])
def test_counts_in_a_body(spelling: object) -> None:
    """Each number that is read of chats and completions, however it is spelt; the body goes on as it came."""
    for api, plain in ((Api.CHAT, CHAT), (Api.COMPLETIONS, COMPLETION)):
        facts, inbound = read(api, {**plain, "n": spelling, "max_tokens": spelling}, max_priority=9)
        assert (facts.prompts, facts.max_output_tokens) == (2, 2)
        assert read(api, {**plain, "priority": spelling}, max_priority=9)[0].priority == 2
        assert json.loads(inbound.body)["n"] == spelling


@pytest.mark.parametrize("spelling", [True, 1, 1.0, "true", "YES", "on"])
def test_flags_in_a_body(spelling: object) -> None:
    """``stream`` on each path, and ``return_logprob`` of one prompt or of several."""
    for api, plain in ((Api.CHAT, CHAT), (Api.GENERATE, GENERATE), (Api.EMBEDDINGS, {"input": "x"})):
        assert read(api, {**plain, "stream": spelling})[1].is_stream
    for flags in (spelling, [False, spelling]):
        assert read(Api.GENERATE, {**GENERATE, "return_logprob": flags})[1].wants_prompt_logprobs


@pytest.mark.parametrize(
    ("api", "fields", "limit"),
    [
        (Api.CHAT, {"max_tokens": 5}, 5),
        (Api.CHAT, {"max_completion_tokens": 5}, 5),
        (Api.CHAT, {"max_tokens": 900, "max_completion_tokens": 1}, 900),
        (Api.CHAT, {"max_tokens": 1, "max_completion_tokens": 900}, 900),
        (Api.CHAT, {"max_tokens": None, "max_completion_tokens": 0}, 0),
        (Api.CHAT, {"max_output_tokens": 5, "max_new_tokens": 5}, None),
        (Api.COMPLETIONS, {"max_tokens": 900, "max_completion_tokens": 1}, 900),
        (Api.COMPLETIONS, {"max_completion_tokens": 5}, None),
        (Api.RESPONSES, {"max_output_tokens": 900, "max_tokens": 1}, 900),
        (Api.RESPONSES, {"max_tokens": 5}, None),
        (Api.MESSAGES, {"max_tokens": 900, "max_completion_tokens": 1}, 900),
        (Api.GENERATE, {"sampling_params": {"max_new_tokens": 900}, "max_tokens": 1}, 900),
        (Api.GENERATE, {"sampling_params": [{"max_new_tokens": 1}, {}, {"max_new_tokens": 9}]}, 9),
    ],
)
def test_the_limit_that_the_engine_reads(api: Api, fields: dict[str, object], limit: int | None) -> None:
    """Each API has its own name for it; other names don't count."""
    assert read(api, {**BODIES[api], **fields})[0].max_output_tokens == limit


BODIES: Mapping[Api, Mapping[str, object]] = {
    Api.CHAT: CHAT,
    Api.COMPLETIONS: COMPLETION,
    Api.GENERATE: GENERATE,
    Api.RESPONSES: {"input": "Hi"},
    Api.MESSAGES: CHAT,
}
LIMITS = {
    Api.CHAT: ("max_tokens", "max_completion_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
    Api.MESSAGES: ("max_tokens",),
}


@pytest.mark.parametrize("value", [-1, 10**400, 2**63, "-1", -1.0, 1.5, "many", [], {}])
def test_limits_that_cant_be(value: object) -> None:
    """A negative number, one beyond counting, and what is none: refused by name on each API."""
    for api, names in LIMITS.items():
        for name in names:
            assert refuse(api, {**BODIES[api], name: value}) == (400, "invalid_request", name)
    if isinstance(value, int):
        body = {**GENERATE, "sampling_params": {"max_new_tokens": value}}
        assert refuse(Api.GENERATE, body) == (400, "invalid_request", "max_new_tokens")
