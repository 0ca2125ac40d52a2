"""Why nobody can serve a request, in words that tell an operator where to look: by role, with each one's own cause.

It decides nothing; ``router.py`` asks it when there is no way left.
"""

from collections.abc import Sequence

from pdrouter.core.fleet import Endpoint, Fleet, Role
from pdrouter.core.ledger import RankKey

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
