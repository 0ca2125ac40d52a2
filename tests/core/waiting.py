"""Builders for tests of admission: a request that may wait, in a line; a gate that opens when it is told."""

import msgspec

from pdrouter.core.admission import Admission, AdmissionOptions, Admitted, Queued, Rejected
from pdrouter.core.line import Place, Waiting
from pdrouter.errors import QueueFull

INFINITY = float("inf")

OPTIONS = AdmissionOptions(
    max_waiting=100, max_waiting_bytes=1000, max_wait_s=60.0, aging_rate=0.1, rate_per_s=None, rate_burst=1.0
)


def waiting(request: str = "r", work_s: float = 1.0, **fields: object) -> Waiting[str]:
    """Return a request that may wait."""
    made: Waiting[str] = Waiting(
        request=request,
        model=None,
        priority=0,
        tenant="t",
        weight=1.0,
        work_s=work_s,
        size_bytes=1,
        deadline_s=INFINITY,
    )
    return msgspec.structs.replace(made, **fields)


class Switch:
    """A gate that is shut until it is told the moment, for all models or for one."""

    def __init__(self) -> None:
        self.opens_s = INFINITY
        self.of: dict[str | None, float] = {}

    def opens_at_s(self, model: str | None) -> float:
        """Return the moment that it was told."""
        return self.of.get(model, self.opens_s)


def made(**changes: object) -> tuple[Admission[str], Switch]:
    """Return an admission and its gate, which is shut."""
    gate = Switch()
    return Admission(msgspec.structs.replace(OPTIONS, **changes), gate), gate


def queued(admission: Admission[str], one: Waiting[str], now_s: float = 0.0) -> Place[str]:
    """Let a request wait, for which nobody has to go."""
    answer = admission.offer(one, now_s)
    assert isinstance(answer, Queued)
    assert answer.shed is None
    return answer.place


def rejected(admission: Admission[str], one: Waiting[str], now_s: float = 0.0) -> QueueFull:
    """Return why a request can't wait."""
    answer = admission.offer(one, now_s)
    assert isinstance(answer, Rejected)
    assert isinstance(answer.error, QueueFull)
    return answer.error


def is_admitted(admission: Admission[str], one: Waiting[str], now_s: float = 0.0) -> bool:
    """Offer a request and tell whether it goes on at once."""
    return isinstance(admission.offer(one, now_s), Admitted)


def released(admission: Admission[str], now_s: float = 0.0) -> list[str]:
    """Release while the gate is open; return whom, in order."""
    gone = []
    while (one := admission.release(now_s)) is not None:
        gone.append(one.request)
    return gone
