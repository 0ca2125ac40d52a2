"""Joins ledger and engine reports into one view of load (I11).

A report replaces only the work that it can have counted: what was reserved since is added, what it still counted and
has been settled since is taken back. A report older than ``report_max_age_s`` has no weight.
"""

import heapq
import itertools
from collections.abc import Collection, Sequence

import msgspec

from pdrouter.core.fleet import Endpoint
from pdrouter.core.ledger import UNASSIGNED, Account, RankKey

_MOST = 1e12
"""More than any rank can hold, of tokens or of requests; a report beyond it isn't a load."""


class RankReport(msgspec.Struct, frozen=True):
    """What an engine tells of one rank: tokens held or queued, and requests; ``None`` where it doesn't say.

    ``waiting_requests`` is how many of ``requests`` don't run yet, ``kv_use`` the share of KV in use, of 1.
    ``prefill_tokens_total`` are the prompt tokens that it has computed since it began, ``prefill_busy_s_total`` the
    time that this took.
    """

    rank: int
    tokens: float | None = None
    requests: float | None = None
    throughput_tokens_per_s: float | None = None
    kv_use: float | None = None
    waiting_requests: float | None = None
    prefill_tokens_total: float | None = None
    prefill_busy_s_total: float | None = None


class PeerMean:
    """The mean of what others than we put on the ranks of a pool that tell: the guess for those that don't."""

    __slots__ = ("ranks", "total", "value")

    def __init__(self) -> None:
        self.total = 0.0
        self.ranks = 0
        self.value = 0.0

    def add(self, extra: float, sign: int) -> None:
        """Count a rank in (``sign`` 1) or out (-1)."""
        self.ranks += sign
        self.total = self.total + sign * extra if self.ranks else 0.0
        self.value = max(0.0, self.total / self.ranks) if self.ranks else 0.0


class Peers:
    """The ranks of one role and model, as far as they tell tokens and requests."""

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.tokens = PeerMean()
        self.requests = PeerMean()


class Correction(msgspec.Struct, frozen=True):
    """How one number of a report differs from what it can have counted of ours.

    ``extra`` is work that we don't know of. ``excess`` is the share of our visible work that the engine doesn't see
    (our estimate was too high): it fades as that work is settled.
    """

    extra: float
    excess: float

    @classmethod
    def between(cls, reported: float, visible: float, others: float) -> "Correction":
        """Compare a reported number with ours; ``others`` is the share of a surplus that isn't ours."""
        if reported >= visible:
            return cls((reported - visible) * others, 0.0)
        return cls(0.0, 1.0 - reported / visible)


class RankLoad:
    """The load of one rank: its ledger account, corrected by the newest report.

    ``effective_*`` is the ledger alone while no fresh report tells the number. ``comparable_*`` is what policies weigh:
    unknown is not idle, so a rank that doesn't tell is given what a typical peer carries for others.
    """

    __slots__ = ("_peers", "_requests_fix", "_tokens_fix", "account", "key", "report", "reported_at_s")

    def __init__(self, account: Account, peers: Peers) -> None:
        self.account = account
        self.key = account.key
        self.report: RankReport | None = None
        self.reported_at_s = 0.0
        self._peers = peers
        self._tokens_fix: Correction | None = None
        self._requests_fix: Correction | None = None

    @property
    def effective_tokens(self) -> float:
        """Tokens on the rank now, as far as we can know."""
        fix, account = self._tokens_fix, self.account
        return account.tokens + (fix.extra - fix.excess * account.visible_tokens if fix is not None else 0.0)

    @property
    def effective_requests(self) -> float:
        """Requests on the rank now, as far as we can know."""
        fix, account = self._requests_fix, self.account
        return account.requests + (fix.extra - fix.excess * account.visible_requests if fix is not None else 0.0)

    @property
    def comparable_tokens(self) -> float:
        """``effective_tokens``, fair beside ranks of which more is known."""
        return self.effective_tokens + (self._peers.tokens.value if self._tokens_fix is None else 0.0)

    @property
    def comparable_requests(self) -> float:
        """``effective_requests``, fair beside ranks of which more is known."""
        return self.effective_requests + (self._peers.requests.value if self._requests_fix is None else 0.0)

    def comparable(self) -> tuple[float, float]:
        """Return ``comparable_tokens`` and ``comparable_requests`` in one call."""
        account, tokens_fix, requests_fix = self.account, self._tokens_fix, self._requests_fix
        if tokens_fix is None:
            tokens = account.tokens + self._peers.tokens.value
        else:
            tokens = account.tokens + tokens_fix.extra - tokens_fix.excess * account.visible_tokens
        if requests_fix is None:
            return tokens, account.requests + self._peers.requests.value
        return tokens, account.requests + requests_fix.extra - requests_fix.excess * account.visible_requests

    def join(self, peers: Peers) -> None:
        """Count among other peers from now on; the report in use goes along."""
        self._count_among_peers(-1)
        self._peers = peers
        self._count_among_peers(1)

    def age_s(self, now_s: float) -> float | None:
        """Age of the report in use, ``None`` if there is none."""
        return None if self.report is None else now_s - self.reported_at_s

    def accept(
        self, report: RankReport, t_s: float, tokens_fix: Correction | None, requests_fix: Correction | None
    ) -> None:
        """Let a report taken at ``t_s`` correct the ledger."""
        self.drop()
        self.account.mark_visible(t_s)
        self.report, self.reported_at_s = report, t_s
        self._tokens_fix, self._requests_fix = tokens_fix, requests_fix
        self._count_among_peers(1)

    def drop(self) -> None:
        """Give the report no weight any more."""
        self._count_among_peers(-1)
        self.report = self._tokens_fix = self._requests_fix = None

    def _count_among_peers(self, sign: int) -> None:
        if self._tokens_fix is not None:
            self._peers.tokens.add(self._tokens_fix.extra, sign)
        if self._requests_fix is not None:
            self._peers.requests.add(self._requests_fix.extra, sign)


def comparable_tokens(ranks: Sequence[RankLoad]) -> list[float]:
    """Return ``RankLoad.comparable_tokens`` of many ranks; a scan's cost is in calls, so it makes none."""
    tokens = []
    for rank in ranks:
        account, fix = rank.account, rank._tokens_fix
        if fix is None:
            tokens.append(account.tokens + rank._peers.tokens.value)
        else:
            tokens.append(account.tokens + fix.extra - fix.excess * account.visible_tokens)
    return tokens


class EndpointLoad:
    """The load of an endpoint: its ranks, and the account of work whose rank the engine chooses."""

    __slots__ = ("endpoint", "key", "ranks", "unassigned")

    def __init__(self, endpoint: Endpoint, ranks: list[RankLoad], unassigned: Account) -> None:
        self.endpoint = endpoint
        self.key = endpoint.address
        self.ranks = ranks
        self.unassigned = unassigned

    @property
    def comparable_requests(self) -> float:
        """Requests on the endpoint."""
        total = float(self.unassigned.requests)
        for rank in self.ranks:
            total += rank.comparable_requests
        return total

    @property
    def comparable_tokens(self) -> float:
        """Tokens on the endpoint."""
        total = float(self.unassigned.tokens)
        for rank in self.ranks:
            total += rank.comparable_tokens
        return total

    @property
    def ledger_requests(self) -> int:
        """Requests that we hold on the endpoint."""
        return self.unassigned.requests + sum(rank.account.requests for rank in self.ranks)


class LoadView:
    """All load, by endpoint, kept over changes of readiness and description; ``usable``: without ranks that are out."""

    def __init__(self, *, report_max_age_s: float, visible_delay_s: float, history_events: int) -> None:
        self.endpoints: dict[str, EndpointLoad] = {}
        self.usable: dict[str, EndpointLoad] = {}
        self.rejected_reports: dict[str, int] = {}
        self._report_max_age_s = report_max_age_s
        self._visible_delay_s = visible_delay_s
        self._history_events = history_events
        self._peers: dict[tuple[str, str | None], Peers] = {}
        self._fresh: list[tuple[float, int, RankLoad]] = []  # a heap, one entry for each reporting rank (I9)
        self._serials = itertools.count()

    def add(self, endpoint: Endpoint) -> None:
        """Make room for an endpoint's ranks; those it had keep their load."""
        known = self.endpoints.get(endpoint.address)
        ranks = known.ranks if known else []
        peers = self._peers.setdefault((endpoint.role, endpoint.model), Peers())
        for rank_load in ranks:
            rank_load.join(peers)
        for rank in range(len(ranks), endpoint.dp_size):
            ranks.append(RankLoad(self._account(endpoint, rank), peers))
        for rank_load in ranks[endpoint.dp_size :]:
            rank_load.drop()
        del ranks[endpoint.dp_size :]
        unassigned = known.unassigned if known else self._account(endpoint, UNASSIGNED)
        load = EndpointLoad(endpoint, ranks, unassigned)
        self.endpoints[endpoint.address] = self.usable[endpoint.address] = load

    def leave_out(self, address: str, ranks: Collection[int]) -> None:
        """Let these ranks of an endpoint not be found among the usable."""
        load = self.endpoints[address]
        if ranks:
            rest = [rank for rank in load.ranks if rank.key.rank not in ranks]
            load = EndpointLoad(load.endpoint, rest, load.unassigned)
        self.usable[address] = load

    def remove(self, address: str) -> None:
        """Forget an endpoint; legs that still run on it settle on accounts that nobody reads."""
        self.usable.pop(address, None)
        gone = self.endpoints.pop(address, None)
        for rank in gone.ranks if gone else ():
            rank.drop()

    def restart(self, address: str) -> None:
        """Drop the reports of an endpoint that has begun anew."""
        ranks = set(self.endpoints[address].ranks)
        for rank in ranks:
            rank.drop()
        self._fresh = [entry for entry in self._fresh if entry[2] not in ranks]
        heapq.heapify(self._fresh)

    def accept(self, address: str, reports: Sequence[RankReport], t_s: float, now_s: float) -> int:
        """Take in an endpoint's report, taken at ``t_s``; return how many ranks it was good for.

        Shape: one entry a rank; what can't be a load (negative, NaN, unknown rank, out of order) is counted in
        ``rejected_reports`` and is no report.
        """
        load = self.endpoints.get(address)
        if load is None or (reason := self._why_useless(reports, t_s, now_s)):
            self._reject("unknown_endpoint" if load is None else reason, 1)
            return 0
        known = [(load.ranks[r.rank], r) for r in reports if 0 <= r.rank < len(load.ranks)]
        self._reject("unknown_rank", len(reports) - len(known))
        self._reject("missing_rank", len(load.ranks) - len(known))
        good = [(rank, r) for rank, r in known if self._is_usable(load, rank, r, t_s)]
        visible = [rank.account.visible_at(t_s) for rank, _ in good]
        unassigned_tokens, unassigned_requests = load.unassigned.visible_at(t_s)
        lags = load.endpoint.reports_lag
        tokens = _corrections([r.tokens for _, r in good], [v[0] for v in visible], unassigned_tokens, lags=lags)
        requests = _corrections([r.requests for _, r in good], [v[1] for v in visible], unassigned_requests, lags=lags)
        for (rank, report), tokens_fix, requests_fix in zip(good, tokens, requests, strict=True):
            if rank.report is None:
                heapq.heappush(self._fresh, (t_s, next(self._serials), rank))
            rank.accept(report, t_s, tokens_fix, requests_fix)
        return len(good)

    def is_fresh(self, rank: RankLoad, now_s: float) -> bool:
        """Whether a rank's report has weight at ``now_s``; ``expire`` drops those that have none."""
        return rank.report is not None and rank.reported_at_s >= now_s - self._report_max_age_s

    def expire(self, now_s: float) -> Sequence[RankLoad]:
        """Drop the reports that became too old and return their ranks; O(log ranks) for each, nothing while none is."""
        fresh, oldest_s = self._fresh, now_s - self._report_max_age_s
        if not fresh or fresh[0][0] >= oldest_s:
            return ()
        dropped = []
        while fresh and fresh[0][0] < oldest_s:
            _, serial, rank = heapq.heappop(fresh)
            if self.is_fresh(rank, now_s):
                heapq.heappush(fresh, (rank.reported_at_s, serial, rank))
            else:
                rank.drop()
                dropped.append(rank)
        return dropped

    def validate(self) -> None:
        """Check I1 and I11 on every rank.

        Raises: InvariantViolation.
        """
        for load in self.endpoints.values():
            load.unassigned.validate()
            for rank in load.ranks:
                rank.account.validate()

    def _account(self, endpoint: Endpoint, rank: int) -> Account:
        key = RankKey(endpoint.address, rank)
        return Account(
            key,
            visible_delay_s=self._visible_delay_s,
            history_s=self._report_max_age_s + self._visible_delay_s,
            history_events=self._history_events,
        )

    def _why_useless(self, reports: Sequence[RankReport], t_s: float, now_s: float) -> str:
        if not t_s <= now_s:  # NaN, too
            return "from_the_future"
        if now_s - t_s > self._report_max_age_s:
            return "too_old"
        return "rank_twice" if len({r.rank for r in reports}) != len(reports) else ""

    def _is_usable(self, load: EndpointLoad, rank: RankLoad, report: RankReport, t_s: float) -> bool:
        numbers = [n for n in (report.tokens, report.requests) if n is not None]
        if not numbers or not all(0 <= n <= _MOST for n in numbers):
            return self._reject("not_a_load", 1)
        remembered_s = max(rank.account.folded_until_s, load.unassigned.folded_until_s)
        if t_s < remembered_s or (rank.report is not None and t_s <= rank.reported_at_s):
            return self._reject("out_of_order", 1)
        return True

    def _reject(self, reason: str, times: int) -> bool:
        if times > 0:
            self.rejected_reports[reason] = self.rejected_reports.get(reason, 0) + times
        return False


def _corrections(
    reported: Sequence[float | None], visible: Sequence[int], unassigned: int, *, lags: bool
) -> list[Correction | None]:
    """Compare one number of each rank with ours; what ranks show beyond it is unassigned work first, then others'.

    Where reports lag, one that shows less than ours hasn't seen it yet: then ours stands.
    """
    pairs = list(zip(reported, visible, strict=True))
    if lags:
        reported = [None if number is None else max(number, ours) for number, ours in pairs]
        pairs = list(zip(reported, visible, strict=True))
    others = 1.0
    if unassigned:
        beyond = sum(max(0.0, number - ours) for number, ours in pairs if number is not None)
        others = max(0.0, 1.0 - unassigned / beyond) if beyond else 0.0
    return [None if number is None else Correction.between(number, ours, others) for number, ours in pairs]
