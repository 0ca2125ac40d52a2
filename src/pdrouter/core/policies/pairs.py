"""The PairPolicy protocol: choose prefill and decode endpoint together, over groups that may be paired."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from pdrouter.core.decision import Why
from pdrouter.core.load import EndpointLoad
from pdrouter.core.policies.base import Question


class Group(NamedTuple):
    """Ready endpoints, at least one of each side, of which each prefill may be paired with each decode."""

    prefills: list[EndpointLoad]
    decodes: list[EndpointLoad]


class PairPick(NamedTuple):
    """The chosen pair, and why."""

    prefill: EndpointLoad
    prefill_why: Why
    decode: EndpointLoad
    decode_why: Why


class PairPolicy(Protocol):
    """Chooses a pair of at least one group."""

    def choose_pair(self, question: Question, groups: Sequence[Group]) -> PairPick:
        """Return the pick; ``question`` is the prefill side's."""
        ...


def grouped(prefills: Iterable[EndpointLoad], partners: Callable[[EndpointLoad], list[EndpointLoad]]) -> list[Group]:
    """Return the groups of prefill endpoints with their partners: those alike in all that decides who is one."""
    groups: dict[tuple[str, str, str, str | None], Group] = {}
    for prefill in prefills:
        of = prefill.endpoint
        key = (of.engine, of.kv_transport, of.group, of.model)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group([], partners(prefill))
        group.prefills.append(prefill)
    return list(groups.values())
