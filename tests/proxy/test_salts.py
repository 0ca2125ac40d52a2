"""Salts: no tenant's prompt is known by another's, whatever it writes into its body."""

import json
from collections.abc import Mapping

import pytest

from pdrouter.core.request import RequestFacts
from pdrouter.engines.base import Inbound
from pdrouter.errors import DuplicateField
from pdrouter.proxy.intake import Api
from tests.proxy.test_intake import make_intake

TEXT = "All work and no play makes Jack a dull boy. " * 200
BODIES: Mapping[Api, Mapping[str, object]] = {
    Api.CHAT: {"messages": [{"role": "user", "content": TEXT}]},
    Api.COMPLETIONS: {"prompt": TEXT},
    Api.GENERATE: {"text": TEXT},
    Api.RESPONSES: {"input": TEXT},
    Api.MESSAGES: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
}
FORBIDDEN = "@/\\\0"


def read(api: Api, key: str, **fields: object) -> tuple[RequestFacts, Inbound]:
    """Take in a body of a tenant."""
    raw = json.dumps({"model": "m", **BODIES[api], **fields}).encode()
    return make_intake(salts_tenants=True).read(api, [(b"authorization", f"Bearer {key}".encode())], raw, "r")


def salt_of(api: Api, inbound: Inbound) -> str:
    """Return the salt that engines get."""
    salt = json.loads(inbound.body)["extra_key" if api is Api.GENERATE else "cache_salt"]
    assert isinstance(salt, str)
    return salt


@pytest.mark.parametrize("api", BODIES)
def test_tenants_share_nothing(api: Api) -> None:
    """Neither in the index nor in engines; one tenant's own requests do."""
    (first, sent), (again, _), (other, others) = read(api, "a"), read(api, "a"), read(api, "b")
    assert first.prefix_blocks == again.prefix_blocks
    assert len(first.prefix_blocks) > 5
    assert not set(first.prefix_blocks) & set(other.prefix_blocks)
    assert salt_of(api, sent) != salt_of(api, others)
    body = json.loads(sent.body)
    assert {name: body[name] for name in BODIES[api]} == BODIES[api]


@pytest.mark.parametrize("api", BODIES)
def test_a_client_can_not_take_anothers_salt(api: Api) -> None:
    """What it writes counts within its own."""
    victim, sent = read(api, "a")
    own = salt_of(api, read(api, "b")[1])
    for name in ("cache_salt", "extra_key"):
        for value in (salt_of(api, sent), [salt_of(api, sent)], "", "x" * 10_000):
            facts, inbound = read(api, "b", **{name: value})
            assert salt_of(api, inbound).startswith(own)
            assert len(salt_of(api, inbound)) in (32, 64)
            assert not set(facts.prefix_blocks) & set(victim.prefix_blocks)
            if api is Api.GENERATE:
                assert "cache_salt" not in json.loads(inbound.body)


def test_a_clients_own_salt_still_separates() -> None:
    """Within its tenant's; null is none."""
    salts = [salt_of(Api.CHAT, read(Api.CHAT, "a", **given)[1]) for given in ({"cache_salt": v} for v in (None, 1, 2))]
    assert len(set(salts)) == 3
    assert salts[0] == salt_of(Api.CHAT, read(Api.CHAT, "a")[1])


@pytest.mark.parametrize("api", BODIES)
def test_a_salted_body_is_left_alone(api: Api) -> None:
    """It is read twice where samples are requests of their own."""
    facts, inbound = read(api, "a")
    headers = [(b"authorization", b"Bearer a")]
    again, same = make_intake(salts_tenants=True).read(api, headers, inbound.body, "r")
    assert (again.prefix_blocks, same.body) == (facts.prefix_blocks, inbound.body)


def test_engines_take_it() -> None:
    """Some (vLLM) refuse more than 128 characters, and some of them; the key can't be read from it."""
    salt = salt_of(Api.CHAT, read(Api.CHAT, "my-key", cache_salt="a/b")[1])
    assert len(salt) <= 128
    assert not set(FORBIDDEN) & set(salt)
    assert "my-key" not in salt


def test_it_may_not_stand_twice() -> None:
    """An engine could read the other."""
    raw = b'{"model":"m","prompt":"x","cache_salt":"a","cache_salt":"b"}'
    with pytest.raises(DuplicateField):
        make_intake(salts_tenants=True).read(Api.COMPLETIONS, [], raw, "r")


def test_those_without_a_name_have_one_salt() -> None:
    """So that they can't choose another's either."""
    _, inbound = make_intake(salts_tenants=True).read(Api.COMPLETIONS, [], b'  {"prompt":"x"}', "r")
    assert len(salt_of(Api.COMPLETIONS, inbound)) == 32


def test_it_is_off_by_default() -> None:
    """Bodies go through as they come."""
    raw = b'{"model":"m","prompt":"x","cache_salt":"a"}'
    headers = [(b"authorization", b"Bearer a")]
    assert make_intake().read(Api.COMPLETIONS, headers, raw, "r")[1].body == raw
