"""Names: what a request may call a model, who has it, and what is kept by it."""

import pytest

from pdrouter.core.fleet import Disaggregation, Endpoint, Fleet
from pdrouter.core.names import Card, Names, Target, names_of, renewed
from pdrouter.errors import ModelNotFound

from .builders import decide, decode, facts, make_options, make_router, prefill, regular, reject

BASE = Card("m", root="/m", max_model_len=4096)
ALIAS = Card("gpt", root="/m")
SQL = Card("sql", parent="m")
JOINED = Card("sql", parent="m", names=("m:sql",))


def names_in(*endpoints: Endpoint, takes_any: bool = True) -> Names:
    """Return the names of a fleet."""
    fleet = Fleet(Disaggregation.AUTO, takes_any=takes_any)
    for endpoint in endpoints:
        fleet.put(endpoint)
    return fleet.names


def test_an_endpoint_serves_what_it_lists() -> None:
    """Its base model, aliases, adapters and their further names; before it has told anything, all."""
    endpoint = regular("w", model="m", cards=(BASE, ALIAS, JOINED))
    assert endpoint.names == {"m", "gpt", "sql", "m:sql"}
    assert all(map(endpoint.serves, (None, *endpoint.names)))
    assert not endpoint.serves("other")
    assert regular("w").serves("anything")
    assert regular("w", model="m").serves("m")
    assert names_of("m", (BASE, ALIAS, JOINED)) == {"m": None, "gpt": None, "sql": "sql", "m:sql": "sql"}


@pytest.mark.parametrize("name", ["m", "gpt", "sql", "m:sql"])
def test_what_all_of_one_model_have_needs_no_filter(name: str) -> None:
    """Requests for it share turns, pools and the line with all others."""
    names = names_in(*(regular(f"w{n}", model="m", cards=(BASE, ALIAS, JOINED)) for n in range(2)))
    assert names.target(name, None) == Target(None, "m", None)
    assert not names.partial_holders(name)


def test_what_all_of_one_model_of_several_have_is_asked_for_by_that_model() -> None:
    """So that an alias costs no more than the name itself."""
    names = names_in(regular("a", model="m", cards=(BASE, ALIAS)), regular("b", model="n"))
    assert names.target("gpt", None) == names.target("m", None) == Target("m", "m", "m")
    assert names.target(None, None) == Target()


def test_what_only_some_have_is_asked_for_by_itself() -> None:
    """It waits in its model's line; once all have it, and once the others have left, it is like any other name."""
    having, lacking = regular("a", model="m", cards=(BASE, SQL)), regular("b", model="m", cards=(BASE,))
    names = names_in(having, lacking)
    assert names.target("sql", None) == Target("sql", "m", None)
    assert list(names.partial_holders("sql")) == ["a"]
    names.put("b", "m", (BASE, SQL))
    assert names.target("sql", None) == Target(None, "m", None)
    names.put("b", "m", (BASE,))
    assert names.target("sql", None).name == "sql"
    names.remove("b")
    assert names.target("sql", None) == Target(None, "m", None)
    names.put("c", "n", ())
    names.put("b", "m", (BASE,))
    assert names.target("sql", None) == Target("sql", "m", "m")


def test_a_name_of_two_models_is_asked_for_by_itself() -> None:
    """Also where all endpoints of both have it, or where it is the base model's name of one."""
    alias = Card("prod")
    names = names_in(regular("a", model="m", cards=(alias,)), regular("b", model="n", cards=(alias,)))
    assert names.target("prod", None) == Target("prod", None, None)
    assert set(names.partial_holders("prod")) == {"a", "b"}
    names.put("b", "n", (Card("m"),))
    assert names.target("m", None) == Target("m", None, None)


@pytest.mark.parametrize(
    ("model", "adapter", "found"),
    [
        ("m", "sql", "m:sql"),
        (None, "sql", "sql"),
        ("unknown", "sql", "sql"),
        ("m:sql", "other", "m:sql"),
        ("m", "unlisted", None),
        ("m:unlisted", None, None),
        ("m:x:y", None, None),
    ],
)
def test_an_adapter_may_be_named_beside_the_model(model: str | None, adapter: str | None, found: str | None) -> None:
    """One in the model's name counts more; one that nobody lists is for the model's endpoints to judge."""
    names = names_in(
        regular("a", model="m", cards=(BASE, JOINED)), regular("b", model="m", cards=(BASE,)), regular("c", model="n")
    )
    assert names.target(model, adapter) == Target(found or "m", "m", "m")


def test_a_model_with_a_colon_in_its_name() -> None:
    """Its own name comes first, then what stands before the last colon, then before the first."""
    names = names_in(regular("a", model="s3://b/m"), regular("b", model="n"))
    assert names.target("s3://b/m", None).name == "s3://b/m"
    assert names.target("s3://b/m:sql", None).name == "s3://b/m"
    assert names.target("n:a:b", None).name == "n"
    with pytest.raises(ModelNotFound):
        names.target("s3:x", None)


def test_unknown_names() -> None:
    """Left to the engines while all have one model, unless the setting says no; 404 among several."""
    one, two = regular("a", model="m"), regular("b", model="n")
    assert names_in(one).target("zzz", None) == Target(None, "m", None)
    assert names_in(takes_any=False).target("zzz", None) == Target()
    assert names_in(regular("a"), takes_any=False).target("zzz", None) == Target()
    assert names_in(one, takes_any=False).target(None, None).name is None
    for names in (names_in(one, takes_any=False), names_in(one, two)):
        with pytest.raises(ModelNotFound, match="'zzz' is not served; known: m"):
            names.target("zzz", None)
        with pytest.raises(ModelNotFound):
            names.target("", None)


def test_the_message_about_an_unknown_name_is_short() -> None:
    """However long the name is, and however many models there are."""
    names = names_in(*(regular(f"w{n:02}", model=f"m{n:02}") for n in range(20)))
    with pytest.raises(ModelNotFound) as caught:
        names.target("x" * 100_000, None)
    assert caught.value.message.endswith("m14, m15 and 4 more")
    assert len(caught.value.message) < 500


def test_kv_is_kept_by_the_base_model_and_an_adapters_apart() -> None:
    """Whatever the name is; an adapter that nobody lists has KV of its own, too."""
    names = names_in(regular("a", model="m", cards=(BASE, ALIAS, JOINED)))
    base = names.cache_key("m", None)
    assert base == names.cache_key("gpt", None) == names.cache_key(None, None) == names.cache_key("zzz", None)
    sql = names.cache_key("sql", None)
    assert sql == names.cache_key("m:sql", None) == names.cache_key("gpt", "sql") == names.cache_key("m", "sql")
    keys = {base, sql, names.cache_key("m:other", None), names.cache_key("m", "another")}
    assert len(keys) == 4
    assert names_in().cache_key("m", None) != names_in().cache_key("n", None)


def test_the_base_model_of_a_request() -> None:
    """By which rates and lengths are learned."""
    names = names_in(regular("a", model="m", cards=(BASE, ALIAS, JOINED)))
    assert {names.base(n, None) for n in ("m", "gpt", "sql", "m:sql", "m:x", "zzz", None)} == {"m"}
    names.put("b", "n", (ALIAS,))
    assert [names.base(n, None) for n in ("m", "gpt", "sql", "zzz", None)] == ["m", None, "m", None, None]


def test_a_card_keeps_the_time_of_its_creation() -> None:
    """Engines write the present time into each reply; all else is news."""
    first = (Card("a", 1), Card("b", 1))
    assert renewed(first, (Card("a", 2), Card("b", 2))) == first
    assert renewed(first, (Card("b", 2, root="/"), Card("c", 2))) == (Card("b", 1, root="/"), Card("c", 2))


def test_nothing_stays_of_endpoints_that_left() -> None:
    """Neither names nor counts; what is listed again is no change."""
    names = names_in()
    for _ in range(2):
        names.put("a", "m", (BASE, SQL))
        version = names.version
        names.put("a", "m", (BASE, SQL))
        assert names.version == version
        names.put("a", "n", (SQL,))
        assert list(names.bases) == ["n"]
        names.put("a", None, ())
        names.remove("gone")
        assert not names.bases
        assert not names._names
        assert not names._listed


@pytest.mark.invariant("I6")
@pytest.mark.parametrize("policy", ["least_work", "round_robin", "cache_aware", "load_aware"])
def test_an_adapter_is_asked_of_those_that_have_it_on_both_sides(policy: str) -> None:
    """Whatever the policy; its base model is asked of all."""
    sides = [(make, f"{letter}{n}", (BASE, SQL) if n in (1, 3) else (BASE,)) for make, letter in
             ((prefill, "p"), (decode, "d")) for n in range(4)]  # fmt: skip
    router = make_router(
        [make(address, model="m", cards=cards) for make, address, cards in sides], make_options(policy=policy)
    )
    used: dict[str, set[str]] = {}
    for number in range(24):
        for model in ("sql", "m"):
            placed = decide(router, facts(100 + number, model=model), number / 100)
            used.setdefault(model, set()).update(p.endpoint.address for p in placed.placements)
    assert used["sql"] == {"p1", "p3", "d1", "d3"}
    assert used["m"] >= {"p0", "p2", "d0", "d2"}


def test_an_adapter_on_one_side_only_is_served_by_no_pair() -> None:
    """The reason names the side that lacks it, and the model is served as before."""
    router = make_router([prefill("p", model="m", cards=(BASE, SQL)), decode("d", model="m", cards=(BASE,))])
    assert "no decode endpoint of model 'sql' is known" in reject(router, facts(model="sql"), 0.0).message
    decide(router, facts(model="m"), 0.0)


@pytest.mark.invariant("I9")
def test_of_very_many_ranks_with_an_adapter_others_are_looked_at_each_time() -> None:
    """All get some, and those that hold the prompt are looked at, too."""
    cards = [(BASE, SQL)] * 60 + [(BASE,)]
    router = make_router(
        [regular(f"w{n}", model="m", cards=cards[n], dp_size=4) for n in range(61)], make_options(policy="least_work")
    )
    placed = [decide(router, facts(1000, model="sql"), 0.0) for _ in range(240)]
    assert len({p.decode.reservation.account.key for p in placed}) == 240
    for decision in placed:
        router.settle(decision, 0.1)
    long = facts(100_000, model="sql", prefix_blocks=tuple(range(1, 100)), block_tokens=1000.0)
    holders = set()
    for now_s in (100.0, 200.0, 300.0):
        decision = decide(router, long, now_s)
        holders.add(decision.decode.reservation.account.key)
        router.settle(decision, now_s + 50.0)
    assert len(holders) == 1
