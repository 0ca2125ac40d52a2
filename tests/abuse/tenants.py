"""Tenants that want to know what others have written."""

from collections.abc import Sequence
from typing import Any

from tests.abuse.case import case, must
from tests.abuse.stage import Router, Stage, ready
from tests.lab import get, post

COMPLETIONS = "/v1/completions"
PROMPT = "The merger with Initech is planned for the third of May. " * 400


async def _known(router: Router, key: str, **fields: object) -> int:
    """Ask as a tenant; return how many tokens of the prompt the router thought that an engine had."""
    name = f"of-{key}"
    headers = {"authorization": f"Bearer {key}", "x-request-id": name}
    reply = await post(router.url, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1} | fields, headers)
    must(reply.status == 200, f"status {reply.status}: {reply.body[:120]!r}")
    story: Any = (await get(router.url, f"/debug/story/{name}")).json()
    return int(story["lives"][-1]["prefix_tokens"])


@case(14, "another tenant's prompt, its salt guessed or given", "no prefix is known", is_shared=False)
async def others_prefix(stage: Stage) -> str:
    async with stage.route("--worker", stage.regular, cache_salt="tenant") as router:
        await ready(router.url)
        must(await _known(router, "victim") == 0, "a first prompt was known")
        must(await _known(router, "victim") > 1000, "its own prompt wasn't known")
        tries: Sequence[dict[str, object]] = ({}, {"cache_salt": "victim"}, {"cache_salt": ""}, {"extra_key": "victim"})
        for number, given in enumerate(tries):
            known = await _known(router, f"spy{number}", **given)
            must(known == 0, f"{known} tokens were known with {given}")
    return "none known"
