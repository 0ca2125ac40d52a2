"""What must hold of names: the model and an adapter are listed as the engine tells them, and answer by their names."""

from typing import Any

from tests.real.sglang.answer_checks import PROMPT, TOKENS
from tests.real.sglang.asking import CHAT, COMPLETIONS, GENERATE, MESSAGES, Api, Reply
from tests.real.sglang.pair import Found, Pair
from tests.real.sglang.servers import ADAPTER, CONTEXT_TOKENS, MODEL, Kind

FULL_NAME = f"{MODEL}:{ADAPTER}"
"""How SGLang is asked for an adapter. Source: SGLang 0.5.23, ``serving_base.py``, ``_parse_model_parameter``."""


async def check_names(pair: Pair, kind: Kind) -> None:
    """Check the names of the model, and those of its adapter where this kind of DP can have one."""
    await pair.hold("the model is listed", lambda: _models(pair))
    await pair.hold("the engine's cards are ours", lambda: _cards(pair))
    if not kind.has_adapter:
        return
    await pair.hold("the adapter is listed", lambda: _adapter_is_listed(pair))
    for api in (CHAT, COMPLETIONS, MESSAGES):
        for name in (FULL_NAME, ADAPTER):
            for is_stream in (False, True):
                how = f"{api.name}, {'stream' if is_stream else 'whole'}"
                await pair.hold(
                    f"asked for {name!r}, {how}",
                    lambda a=api, n=name, s=is_stream: _adapter_answers(pair, a, s, model=n),  # type: ignore[misc]
                )
    await pair.hold("lora_path, generate", lambda: _adapter_answers(pair, GENERATE, is_stream=False, lora_path=ADAPTER))


async def _models(pair: Pair) -> Found:
    listed = await _listed(pair)
    one = await pair.client.get(f"/v1/models/{MODEL}")
    told = {name: listed[MODEL].get(name) for name in ("owned_by", "root", "parent", "max_model_len")}
    expected = {"owned_by": "sglang", "root": MODEL, "parent": None, "max_model_len": CONTEXT_TOKENS}
    return one.status == 200 and told == expected, f"{sorted(listed)}, {told}, the one {one.status}"


async def _cards(pair: Pair) -> Found:
    """What the router lists is what both engines list; the time of creation is that of asking there."""
    seen = await _listed(pair)
    truths = [_cards_of(await pair.leg(engine).get("/v1/models")) for engine in (pair.prefill, pair.decode)]
    alike = [
        {name: _lasting(card) for name, card in truth.items()}
        == {name: _lasting(seen[name]) for name in truth if name in seen}
        for truth in truths
    ]
    return all(alike), f"{sorted(seen)}; {' and '.join(str(sorted(truth)) for truth in truths)}"


async def _adapter_is_listed(pair: Pair) -> Found:
    card = (await _listed(pair))[ADAPTER]
    one = await pair.client.get(f"/v1/models/{ADAPTER}")
    held = card["parent"] == MODEL and one.status == 200
    return held, f"parent {card['parent']}, root {str(card['root'])[-20:]}, the one {one.status}"


async def _adapter_answers(pair: Pair, api: Api, is_stream: bool, **name: str) -> Found:
    """The adapter's answer is that of both legs by hand, and not the base model's."""
    reply = await pair.client.post(api.path, api.body(PROMPT, TOKENS, is_stream=is_stream) | name)
    if reply.status != 200:
        return False, str(reply)
    by_hand = {"lora_path": ADAPTER} if api is GENERATE else {"model": FULL_NAME}
    seen = api.read(reply)
    truth = api.read(await pair.by_hand(api, api.body(PROMPT, TOKENS) | by_hand, 0, 1))
    base = api.read(await pair.by_hand(api, api.body(PROMPT, TOKENS), 0, 1))
    whose = "the adapter's" if seen == truth else "the base model's" if seen == base else "neither's"
    return seen == truth != base, f"{whose}: {seen}"


async def _listed(pair: Pair) -> dict[str, Any]:
    return _cards_of(await pair.client.get("/v1/models"))


def _cards_of(reply: Reply) -> dict[str, Any]:
    return {card["id"]: card for card in reply.json()["data"]}


def _lasting(card: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in card.items() if name != "created"}
