"""Where requests wait in the router while the engines have enough to do: the queue, its gate, and the way past both.

What a decision has chosen tells most often that there is room; only where it doesn't is the gate asked.
"""

from collections.abc import Sized

import msgspec

from pdrouter.core.admission import Admission, AdmissionOptions
from pdrouter.core.chooser import Choice, Spot
from pdrouter.core.cost import prefill_s
from pdrouter.core.gate import Gate, GateOptions
from pdrouter.core.places import Worker
from pdrouter.core.work import WorkIndex


class EntranceOptions(msgspec.Struct, frozen=True):
    """Settings of the queue and of its gate."""

    admission: AdmissionOptions
    gate: GateOptions


class MustWait(msgspec.Struct, frozen=True):
    """The answer to a request that had better wait: nothing is reserved for it.

    ``model`` is whose ranks it waits for, ``None`` for any; ``work_s`` how long its prompt is expected to take.
    """

    model: str | None
    work_s: float


class Entrance:
    """One queue before one work index; ``running`` are the requests that are placed."""

    def __init__(self, options: EntranceOptions, work: WorkIndex, running: Sized, *, is_kept: bool) -> None:
        """Begin with an empty queue; ``is_kept`` says whether the work index is."""
        gate = Gate(options.gate, work, running)
        self.admission: Admission[object] = Admission(options.admission, gate)
        self._gate = gate
        self._options = options.gate
        self._work = work
        self._is_kept = is_kept
        self._running = running

    def set_options(self, options: EntranceOptions) -> None:
        """Use other settings; who waits already keeps its place."""
        self._options = options.gate
        self._gate.set_options(options.gate)
        self.admission.set_options(options.admission)

    def hold(self, model: str | None, choice: Choice, prompt_tokens: int, now_s: float) -> MustWait | None:
        """Return that a new request for which this was chosen has to wait, ``None`` if it hasn't."""
        most = self._options.max_running
        is_full = most is not None and len(self._running) >= most
        is_behind = is_full or self.admission.has_line(model)
        if not is_behind and (self._has_room(choice, now_s) or self._gate.opens_at_s(model) <= now_s):
            return None
        spot = choice.prefill or choice.decode
        worker = self._worker(spot)
        if worker is None:
            return MustWait(model, 0.0)
        return MustWait(model, prefill_s(worker.site.profile, prompt_tokens - spot.cached_tokens, spot.cached_tokens))

    def _has_room(self, choice: Choice, now_s: float) -> bool:
        reader, writer = choice.prefill or choice.decode, choice.decode
        if not self._is_kept or reader.rank is None or writer.rank is None:
            return True
        sites, most_s = self._work.sites, self._options.max_queue_s
        if most_s is not None and sites[reader.load.key].workers[reader.rank].free_at_s - now_s > most_s:
            return False
        site, share = sites[writer.load.key], self._options.max_kv_share
        capacity_tokens = site.profile.kv_capacity_tokens
        if share is None or capacity_tokens is None:
            return True
        return site.workers[writer.rank].load.comparable_tokens <= share * capacity_tokens

    def _worker(self, spot: Spot) -> Worker | None:
        site = None if spot.rank is None else self._work.sites.get(spot.load.key)
        return None if site is None or spot.rank is None else site.workers[spot.rank]
