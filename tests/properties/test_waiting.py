"""Admission under any course of arrivals, departures and time, judged by a plain list that is sorted anew each time."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from pdrouter.core.admission import Admission, AdmissionOptions, Admitted, Queued, Rejected
from pdrouter.core.line import Place, Waiting

MAX_WAITING, MAX_BYTES, MAX_WAIT_S, AGING_RATE = 6, 20, 10.0, 0.5
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}
MODELS = ("m", "n")


class Gate:
    """Open by model for so many more."""

    def __init__(self) -> None:
        self.room = dict.fromkeys(MODELS, 0)

    def opens_at_s(self, model: str | None) -> float:
        """Return whether there is room."""
        return -math.inf if model is not None and self.room[model] > 0 else math.inf


class Share:
    """What the oracle knows of the tenants of one model and priority, while any of them waits."""

    def __init__(self) -> None:
        self.virtual_s = 0.0
        self.starts_s: dict[str, float] = {}


class Courses(RuleBasedStateMachine):
    """The oracle keeps the waiting places in the order of their coming and looks at all of them for each answer."""

    places = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.number = 0
        self.gate = Gate()
        options = AdmissionOptions(
            max_waiting=MAX_WAITING,
            max_waiting_bytes=MAX_BYTES,
            max_wait_s=MAX_WAIT_S,
            aging_rate=AGING_RATE,
            rate_per_s=None,
            rate_burst=1.0,
        )
        self.admission: Admission[int] = Admission(options, self.gate)
        self.line: list[Place[int]] = []
        self.shares: dict[tuple[str | None, int], Share] = {}
        self.turns = dict.fromkeys(MODELS, 0)  # when a model had its last turn, or began to wait
        self.turn = 0

    # The oracle

    def of(self, model: str | None, priority: int | None = None) -> list[Waiting[int]]:
        """Return who waits of a model, at a priority or any."""
        ones = [place.waiting for place in self.line]
        return [one for one in ones if one.model == model and priority in (None, one.priority)]

    def came(self, place: Place[int]) -> None:
        """A tenant that didn't wait before starts at virtual time, or where it had got to."""
        one = place.waiting
        share = self.shares.setdefault((one.model, one.priority), Share())
        if not any(other.tenant == one.tenant for other in self.of(one.model, one.priority)):
            share.starts_s[str(one.tenant)] = max(share.virtual_s, share.starts_s.get(str(one.tenant), 0.0))
        if not self.of(one.model):
            self.turn += 1
            self.turns[str(one.model)] = self.turn
        self.line.append(place)

    def went(self, place: Place[int]) -> None:
        """What tenants were given is remembered while any of them waits."""
        one = place.waiting
        self.line.remove(place)
        if not self.of(one.model, one.priority):
            del self.shares[one.model, one.priority]

    def next(self) -> list[Place[int]]:
        """Return whose turn it may be: by model, priority, share of the tenant, work and age; several if they tie."""
        models = [model for model in MODELS if self.of(model) and self.gate.room[model]]
        if not models:
            return []
        model = min(models, key=lambda m: (-max(one.priority for one in self.of(m)), self.turns[m]))
        priority = max(one.priority for one in self.of(model))
        ones = [p for p in self.line if (p.waiting.model, p.waiting.priority) == (model, priority)]
        starts_s = self.shares[model, priority].starts_s
        least_s = min(starts_s[str(place.waiting.tenant)] for place in ones)
        left_s: dict[str, list[tuple[float, Place[int]]]] = {}
        for place in ones:
            tenant = str(place.waiting.tenant)
            if starts_s[tenant] == least_s:
                aged_s = place.waiting.work_s - AGING_RATE * (self.now_s - place.since_s)
                left_s.setdefault(tenant, []).append((aged_s, place))
        return [place for of in left_s.values() for aged_s, place in of if aged_s == min(a for a, _ in of)]

    def last(self) -> list[Place[int]]:
        """Return who may have to go: the youngest of each of the largest tenants of the lowest priority."""
        lowest = min(place.waiting.priority for place in self.line)
        youngest = {place.waiting.tenant: place for place in self.line if place.waiting.priority == lowest}
        most = max(self.size(tenant, lowest) for tenant in youngest)
        return [place for tenant, place in youngest.items() if self.size(tenant, lowest) == most]

    def size(self, tenant: object, priority: int) -> float:
        """Return how many a tenant has waiting at a priority, by its weight."""
        count = sum((p.waiting.tenant, p.waiting.priority) == (tenant, priority) for p in self.line)
        return count / WEIGHTS[str(tenant)]

    # What happens

    @rule(
        target=places,
        model=st.sampled_from(MODELS),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        tenant=st.sampled_from(sorted(WEIGHTS)),
        work_s=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
        size_bytes=st.sampled_from([1, 1, 1, 4, 9]),
        patience_s=st.sampled_from([math.inf, math.inf, 3.0]),
    )
    def offer(
        self, model: str, priority: int, tenant: str, work_s: float, size_bytes: int, patience_s: float
    ) -> object:
        """A request comes: it goes on, waits, or one has to go."""
        self.number += 1
        one = Waiting(
            request=self.number,
            model=model,
            priority=priority,
            tenant=tenant,
            weight=WEIGHTS[tenant],
            work_s=work_s,
            size_bytes=size_bytes,
            deadline_s=self.now_s + patience_s,
        )
        is_free = self.gate.room[model] > 0 and not self.of(model)
        used = sum(place.waiting.size_bytes for place in self.line)
        has_space = len(self.line) < MAX_WAITING and used + size_bytes <= MAX_BYTES
        answer = self.admission.offer(one, self.now_s)
        assert isinstance(answer, Admitted) == is_free
        if isinstance(answer, Admitted):
            self.gate.room[model] -= 1
            return multiple()
        if isinstance(answer, Rejected):
            assert not has_space
            return multiple()
        assert isinstance(answer, Queued)
        assert (answer.shed is None) == has_space
        if answer.shed is not None:
            self.judge(one, answer.shed.waiting)
        self.came(answer.place)
        return answer.place

    def judge(self, arrival: Waiting[int], gone: Waiting[int]) -> None:
        """Who had to go deserved it less than the arrival."""
        (place,) = [place for place in self.last() if place.waiting is gone]
        if arrival.priority == gone.priority:
            mine = self.size(arrival.tenant, arrival.priority) + 1 / WEIGHTS[str(arrival.tenant)]
            assert mine < self.size(gone.tenant, gone.priority)
        else:
            assert arrival.priority > gone.priority
        self.went(place)

    @rule(room=st.lists(st.integers(0, 2), min_size=len(MODELS), max_size=len(MODELS)))
    def free(self, room: list[int]) -> None:
        """Ranks are free again: those that wait go on in order, each of them at its turn."""
        self.gate.room = dict(zip(MODELS, room, strict=True))
        while expected := self.next():
            one = self.admission.release(self.now_s)
            assert one is not None
            (place,) = [place for place in expected if place.waiting is one]
            share = self.shares[one.model, one.priority]
            share.virtual_s = share.starts_s[str(one.tenant)]
            share.starts_s[str(one.tenant)] += one.work_s / one.weight
            self.went(place)
            self.turn += 1
            self.turns[str(one.model)] = self.turn
            self.gate.room[str(one.model)] -= 1
        assert self.admission.release(self.now_s) is None

    @rule(place=places)
    def cancel(self, place: Place[int]) -> None:
        """A client leaves, perhaps after its turn."""
        assert self.admission.cancel(place) == (place in self.line)
        if place in self.line:
            self.went(place)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        """Time goes on; who has waited too long goes."""
        self.now_s += seconds
        shed = {one.waiting.request for one in self.admission.expire(self.now_s)}
        late = [p for p in self.line if min(p.waiting.deadline_s, p.since_s + MAX_WAIT_S) <= self.now_s]
        assert shed == {place.waiting.request for place in late}
        for place in late:
            self.went(place)

    @invariant()
    def the_sums_are_right(self) -> None:
        """Number and bytes are those of the list and within their bounds; everybody is counted once."""
        admission, counts = self.admission, self.admission.counts
        assert len(admission) == len(self.line) <= MAX_WAITING
        assert admission.waiting_bytes == sum(p.waiting.size_bytes for p in self.line) <= MAX_BYTES
        assert admission.waiting == {model: len(self.of(model)) for model in MODELS if self.of(model)}
        gone = sum(counts[how] for how in ("released", "cancelled", "expired", "displaced"))
        assert counts["queued"] - gone == len(self.line)
        assert counts["admitted"] + counts["rejected"] + counts["queued"] == self.number
        assert all(place.is_kept for place in self.line)
        assert 1 <= admission.retry_after_s(self.now_s) <= MAX_WAIT_S

    def teardown(self) -> None:
        """When all have gone nothing is left of them."""
        for place in list(self.line):
            self.cancel(place)
        assert self.admission.waiting_bytes == 0
        assert not self.admission._lines
        assert not self.admission._crowd._bands
        assert not self.admission._crowd._priorities


@pytest.mark.invariant("I9")
def test_who_waits_is_right_after_every_step() -> None:
    """Who goes next, who has to go and what is counted, whatever comes in whatever order."""
    run_state_machine_as_test(Courses, settings=settings(stateful_step_count=50))
