"""Why nobody can serve a request, in words that tell an operator where to look: by role, with each one's own cause.

It decides nothing; ``router.py`` asks it when there is no way left.
"""

from collections.abc import Sequence

import msgspec

from pdrouter.core.fleet import Endpoint, Fleet, Role
from pdrouter.core.ledger import RankKey
from pdrouter.core.request import RequestFacts, Task

_MAX_NAMED = 8
"""Endpoints of a role that are named one by one."""


def why_nobody(fleet: Fleet, model: str | None) -> str:
    """Return why no request for ``model`` can be placed, such as ``no prefill endpoint is ready (1 known: ...)``."""
    known = [endpoint for endpoint in fleet if endpoint.serves(model)]
    of_model = f" of model {model!r}" if model else ""
    if not known:
        return f"no endpoint{of_model} is known"
    roles = {role: [e for e in known if e.role is role] for role in Role}
    is_paired = bool(roles[Role.PREFILL] or roles[Role.DECODE])
    needed = [role for role in Role if roles[role] or (is_paired and role is not Role.REGULAR)]
    lacking = [role for role in needed if not any(fleet.is_ready(e.address) for e in roles[role])]
    if lacking:
        return "; ".join(_lack(fleet, role, roles[role], of_model) for role in lacking)
    if is_paired:
        return (
            f"no ready prefill endpoint{of_model} has a ready decode endpoint as its partner "
            f"(engine, KV transport, group and model must agree; {len(known)} known)"
        )
    return f"no ready endpoint{of_model} can do this ({len(known)} known)"


def why_never(fleet: Fleet, model: str | None, facts: RequestFacts) -> str | None:
    """Return why the fleet can't serve such a request whoever is ready, ``None`` if it might.

    An endpoint that is out and hasn't told its version may turn out to be able to. A fleet that can't serve a plain
    request either lacks endpoints, which may join. Several answers to a prompt can be had one by one.
    """
    facts = msgspec.structs.replace(facts, copies=1)
    known = [endpoint for endpoint in fleet if endpoint.serves(model)]
    is_told = all(endpoint.version is not None or fleet.is_ready(endpoint.address) for endpoint in known)
    plain = msgspec.structs.replace(facts, task=Task.GENERATE, is_list=False)
    if not is_told or _might(known, facts) or not _might(known, plain):
        return None
    is_count = facts.task is Task.COUNT
    unable = known if is_count else [e for e in known if e.role is not Role.REGULAR and not e.parts(facts)]
    causes = [f"{e.address} is {e.engine} {e.version or 'of an unknown version'}" for e in unable]
    if is_count:
        return f"the fleet can't count the tokens of messages: no engine has it ({_named(causes)})"
    what = f"{facts.task} requests" + (" for a list of prompts" if facts.is_list else "")
    return f"the fleet can't serve {what}: no regular endpoint, and no pair that can ({_named(causes)})"


def _might(known: Sequence[Endpoint], facts: RequestFacts) -> bool:
    """Whether some of these could serve a request if all were ready."""
    roles = {endpoint.role for endpoint in known}
    if facts.task is Task.OTHER:
        return bool(roles)
    if facts.task is Task.COUNT:
        return any(endpoint.counts_messages for endpoint in known)
    if facts.task is Task.READ:
        return bool(roles & {Role.REGULAR, Role.PREFILL})
    if Role.REGULAR in roles or any(e.role is Role.DECODE and e.reads_prompts for e in known):
        return True
    able = [endpoint for endpoint in known if endpoint.parts(facts)]
    decodes = [endpoint for endpoint in able if endpoint.role is Role.DECODE]
    return any(p.role is Role.PREFILL and any(map(p.pairs_with, decodes)) for p in able)


def why_no_rank(fleet: Fleet, role: Role, having: Sequence[Endpoint], rank: int) -> str:
    """Return why none of those that have a rank can use it: ``rank 2 of no prefill endpoint is ready (...)``."""
    causes = [f"{e.address} {fleet.why_out(RankKey(e.address, rank))}" for e in having]
    return f"rank {rank} of no {role} endpoint is ready ({_named(causes)})"


def _lack(fleet: Fleet, role: Role, known: Sequence[Endpoint], of_model: str) -> str:
    if not known:
        return f"no {role} endpoint{of_model} is known"
    causes = [f"{e.address} {fleet.why_out(e.address)}" for e in known]
    return f"no {role} endpoint{of_model} is ready ({len(known)} known: {_named(causes)})"


def _named(causes: Sequence[str]) -> str:
    more = f" and {len(causes) - _MAX_NAMED} more" if len(causes) > _MAX_NAMED else ""
    return "; ".join(causes[:_MAX_NAMED]) + more
