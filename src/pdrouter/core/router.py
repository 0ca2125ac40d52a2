"""The router's core: ``decide``, ``observe`` and ``settle`` are the only verbs that change it.

Synchronous and closed: the moment is an argument, chance is a constructor argument, so the same calls give the same
decisions (I4, I5). ``decide`` reserves the load before it returns; nothing can come between choosing and counting.
Read next: ``ledger.py``, ``load.py``, ``policies/base.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

import msgspec

from pdrouter.core import events
from pdrouter.core.breaker import BreakerOptions, Breakers
from pdrouter.core.chooser import Chooser, PolicyTable, Spot
from pdrouter.core.cost import Profile
from pdrouter.core.decision import Decision, Note, Placement, PrefillUsage, Rejection, Usage
from pdrouter.core.drains import DrainRates
from pdrouter.core.ejections import EjectionOptions, Ejections, Name
from pdrouter.core.entrance import Entrance, EntranceOptions, MustWait
from pdrouter.core.event_tokens import EventTokens
from pdrouter.core.fleet import BREAKER, ROLE_OF, Disaggregation, Endpoint, Fleet, Role
from pdrouter.core.holders import cached_tokens
from pdrouter.core.journal import Journal
from pdrouter.core.ledger import LegKind, RankKey
from pdrouter.core.lifecycle import State, advance
from pdrouter.core.load import LoadView
from pdrouter.core.names import Target
from pdrouter.core.outcomes import Outcomes
from pdrouter.core.outputs import OutputEstimator
from pdrouter.core.policies import ENGINE, POLICIES
from pdrouter.core.policies.base import Ancestors, PolicyOptions, Question, RandomSource
from pdrouter.core.policies.books import Books
from pdrouter.core.policies.least_work import LeastWork
from pdrouter.core.prefix import PrefixIndex
from pdrouter.core.profiles import ProfileRule, Profiles
from pdrouter.core.reasons import why_never, why_nobody
from pdrouter.core.request import RequestFacts, Task
from pdrouter.core.shadow import Shadow, Shadowed, ShadowOptions
from pdrouter.core.snapshot import Snapshot, take_snapshot
from pdrouter.core.tokens import TokenEstimator
from pdrouter.core.work import WorkIndex
from pdrouter.errors import NoReadyPair, NotSupported, RouterError

_EAGER_USAGES, _USAGE_STEP = 256, 8
"""Usage is learned from for so many decisions, then for one in so many; see benchmarks/proxy.py."""

_SCATTER = 0x9E3779B1
"""Knuth's multiplier for scattering numbers: 2^32 divided by the golden ratio."""

_SHORT_SHARE = 8
"""An eighth of the index's memory is for prompts shorter than a block, so that they evict no long ones; chosen."""

_LOST_BLOCKS = 2
"""A cache that lacks more than this of what was predicted has lost it; less is rounding and the estimate of tokens."""

# Read as members of their enums they would cost a tenth of a microsecond each time.
_PREFILL, _DECODE, _REGULAR = LegKind.PREFILL, LegKind.DECODE, LegKind.REGULAR
_PREFILLING, _DECODING, _SETTLED = State.PREFILLING, State.DECODING, State.SETTLED
_READ = Task.READ


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The core's settings; ``config.py`` says what they mean."""

    policy: str
    prefill_policy: str
    decode_policy: str
    rank_policy: str
    disaggregation: Disaggregation
    accept_any_model: bool
    breaker: BreakerOptions
    ejections: EjectionOptions
    entrance: EntranceOptions | None
    report_max_age_s: float
    visible_delay_s: float
    history_events: int
    bytes_per_token: float
    max_models: int
    prefix_bytes: int
    prefix_block_tokens: float
    output_tokens: float
    profile: Profile
    profiles: Mapping[str, Profile]
    profile_rules: Sequence[ProfileRule] = ()
    chance: RandomSource
    load_aware_spread_requests: float
    load_aware_sigma: float
    ancestors: Ancestors
    journal_decisions: int
    shadow: ShadowOptions | None = None
    plugins: PolicyTable = {}

    def uses(self, name: str) -> bool:
        """Whether a policy of that name decides anything, or looks on."""
        names = [self.policy, self.prefill_policy, self.decode_policy, self.rank_policy]
        return name in names or (self.shadow is not None and name in (self.shadow.policy, self.shadow.rank_policy))


class Router:
    """One fleet, one ledger, one decision per request."""

    def __init__(self, options: RouterOptions) -> None:
        self.fleet = Fleet(options.disaggregation, takes_any=options.accept_any_model)
        self.load = LoadView(
            report_max_age_s=options.report_max_age_s,
            visible_delay_s=options.visible_delay_s,
            history_events=options.history_events,
        )
        short_bytes = options.prefix_bytes // _SHORT_SHARE
        self.prefixes = PrefixIndex(options.prefix_bytes - short_bytes)
        self.short_prompts = PrefixIndex(short_bytes)
        self.tokens = TokenEstimator(options.bytes_per_token, options.max_models)
        self.event_tokens = EventTokens()
        self.live: dict[int, Decision] = {}
        self.journal = Journal(options.journal_decisions)
        self.decided = 0
        self.missing_reports: dict[str, int] = {}
        self.outputs = OutputEstimator(options.output_tokens, options.max_models)
        self.lost_prefixes = 0
        self.alone: dict[str, int] = {}
        self._profiles = Profiles(options.profile, options.profiles, options.profile_rules)
        self.work = WorkIndex(self._profiles, self.fleet.names)
        self._prefix_block_tokens = options.prefix_block_tokens
        self._is_work_kept = options.uses(LeastWork.name)
        self.drains = DrainRates()
        self.books = Books()
        self.ejections = Ejections(options.ejections, self.fleet)
        breakers: Breakers[Name] = Breakers(options.breaker)
        self.outcomes = Outcomes(
            breakers,
            lambda change, now_s: self._eject(self.ejections.wish(change.key, change.out), now_s),
            names_ranks=options.rank_policy != ENGINE,
        )
        self.entrance = (
            None
            if options.entrance is None
            else Entrance(options.entrance, self.work, self.live, is_kept=self._is_work_kept)
        )
        made = PolicyOptions(
            chance=options.chance,
            load_aware_spread_requests=options.load_aware_spread_requests,
            load_aware_sigma=options.load_aware_sigma,
            work=self.work,
            drains=self.drains,
            books=self.books,
            ancestors=options.ancestors,
        )
        names = {
            Role.PREFILL: options.prefill_policy,
            Role.DECODE: options.decode_policy,
            Role.REGULAR: options.policy,
        }
        table = {**POLICIES, **options.plugins}
        self._chooser = Chooser(self.fleet, self.load, names, options.rank_policy, table, made)
        self.shadow: Shadow | None = None
        if (shadow := options.shadow) is not None:
            names = dict.fromkeys(Role, shadow.policy)
            made = msgspec.structs.replace(made, chance=shadow.chance)
            chooser = Chooser(self.fleet, self.load, names, shadow.rank_policy, table, made)
            self.shadow = Shadow(shadow.policy, chooser)

    # decide

    def decide(
        self, facts: RequestFacts, now_s: float, avoid: frozenset[RankKey] = frozenset(), *, is_admitted: bool = False
    ) -> Decision | Rejection | MustWait:
        """Place a request and reserve its load, or say why that can't be done, or that it had better wait.

        ``avoid`` are ranks that failed it. One that ``is_admitted`` has had its turn, and never waits.
        """
        self._expire(now_s)
        self.outcomes.tick(now_s)
        try:
            target = self.fleet.names.target(facts.model, facts.adapter)
            return self._place(facts, target, avoid, now_s, is_admitted=is_admitted)
        except RouterError as error:
            self.journal.rejected(facts, error, now_s)
            return Rejection(error)

    def _place(
        self, facts: RequestFacts, target: Target, avoid: frozenset[RankKey], now_s: float, *, is_admitted: bool
    ) -> Decision | MustWait:
        model = target.name
        ways = self.fleet.ways(model, facts)
        if not ways:
            never = why_never(self.fleet, model, facts)
            raise NoReadyPair(self.why_nobody(model)) if never is None else NotSupported(never)
        question = self._question(ROLE_OF[ways[0]], facts, target, avoid, now_s)
        choice = self._chooser.choose(question, model, ways)
        if self.entrance is not None and not is_admitted:
            held = self.entrance.hold(target.line, choice, facts.prompt_tokens, now_s)
            if held is not None:
                return held
        shadowed = None if self.shadow is None else self.shadow.look_on(question, model, ways, choice)
        tokens, prefill = facts.prompt_tokens, None
        if choice.prefill is not None:
            prefill = self._reserve(choice.prefill, _PREFILL, tokens, now_s)
            decode = self._reserve(choice.decode, _DECODE, tokens, now_s)
        else:
            kind = _PREFILL if facts.task is _READ else _REGULAR
            decode = self._reserve(choice.decode, kind, tokens, now_s)
        return self._record(facts, prefill, decode, choice.prefix_tokens, shadowed, now_s)

    def _question(
        self, role: Role, facts: RequestFacts, target: Target, avoid: frozenset[RankKey], now_s: float
    ) -> Question:
        output_tokens = self.outputs.expected_tokens(target.base, facts)
        cached = cached_tokens(self._index_for(facts), facts)
        return Question(
            (role, target.name or ""), role, facts.prompt_tokens, cached, output_tokens, now_s, facts, avoid
        )

    def _reserve(self, spot: Spot, kind: LegKind, prompt_tokens: int, now_s: float) -> Placement:
        load, rank, cached_tokens = spot.load, spot.rank, spot.cached_tokens
        account = load.unassigned if rank is None else load.ranks[rank].account
        is_first = account.requests == 0
        tokens = prompt_tokens - cached_tokens if kind is _PREFILL else prompt_tokens
        reservation = account.reserve(kind, max(1, tokens), prompt_tokens, now_s)  # I3
        if self._is_work_kept and rank is not None:
            reservation.was_alone = is_first
            self.work.reserved(reservation, cached_tokens, now_s)
        age_s = None if rank is None else load.ranks[rank].age_s(now_s)
        return Placement(load.endpoint, kind, rank, reservation, spot.endpoint_why, spot.rank_why, age_s)

    def _record(
        self,
        facts: RequestFacts,
        prefill: Placement | None,
        decode: Placement,
        prefix_tokens: int,
        shadowed: Shadowed | None,
        now_s: float,
    ) -> Decision:
        self.decided += 1
        decision = Decision(
            number=self.decided,
            facts=facts,
            prefill=prefill,
            decode=decode,
            prefix_tokens=prefix_tokens,
            decided_at_s=now_s,
        )
        decision.shadowed = shadowed
        self.live[decision.number] = decision
        if prefill is None:
            role = decode.endpoint.role.value
            self.alone[role] = self.alone.get(role, 0) + 1
        self.outcomes.placed(decision, now_s)
        self.books.placed(decision)
        self.journal.decided(decision)
        if facts.prefix_blocks:
            reader, index = prefill or decode, self._index_for(facts)
            decision.prefix_is_read = index.insert(facts.prefix_blocks, reader.reservation.account.key)
            decision.insert = index.inserts
            if prefill is not None and decode.endpoint.reads_prompts:
                index.insert(facts.prefix_blocks, decode.reservation.account.key)
        return decision

    # observe

    def observe(self, event: events.Event, now_s: float) -> None:
        """Take in what happened."""
        match event:
            case events.TokensGenerated():
                leg = event.decision.decode.reservation
                leg.account.grow(leg, event.tokens, now_s)
                leg.account.answered_at_s = event.decision.grown_at_s = now_s
                self.outcomes.went_well(event.decision, event.decision.decode, now_s)
                if self._is_work_kept:
                    self.work.grown(leg)
            case events.FirstTokenSeen():
                self._first_token_seen(event.decision, now_s)
            case events.UsageSeen():
                self._usage_seen(event, now_s)
            case events.PrefillUsageSeen():
                self._prefill_usage_seen(event, now_s)
            case events.Noted():
                event.decision.notes += (Note(now_s, event.text),)
            case events.LoadReported():
                self._expire(now_s)
                self._load_reported(event, now_s)
            case events.LoadMissing():
                self.missing_reports[event.reason] = self.missing_reports.get(event.reason, 0) + 1
            case _:
                self._fleet_changed(event, now_s)

    def _fleet_changed(self, event: events.FleetEvent, now_s: float) -> None:
        match event:
            case events.EndpointJoined():
                self.fleet.put(event.endpoint, out=event.out)
                self._describe(event.endpoint, now_s)
            case events.EndpointDescribed():
                self._describe_anew(event.endpoint, now_s)
            case events.ReadinessChanged():
                self._set_ready(event.address, event.out, event.source, now_s)
            case events.EndpointRestarted():
                self._restarted(event.address, now_s)
            case events.EndpointLeft():
                self.fleet.remove(event.address)
                self.outcomes.forget(event.address)
                self.load.remove(event.address)
                self.work.remove(event.address)
                self.drains.remove(event.address)
                self.books.left(event.address)
                self._forget_prefixes(event.address)
                self.event_tokens.forget(event.address)
            case _:
                assert_never(event)
        if not self.ejections.is_idle:
            self._eject(self.ejections.judge(), now_s)

    def _eject(self, changes: Iterable[tuple[Name, str | None]], now_s: float) -> None:
        for name, out in list(changes):
            self._set_ready(name, out, BREAKER, now_s)

    def _set_ready(self, name: Name, out: str | None, source: str, now_s: float) -> None:
        self.fleet.set_ready(name, out, source)
        address = name if isinstance(name, str) else name.endpoint
        if address in self.load.endpoints:
            self._sort_out(address, now_s)

    def _sort_out(self, address: str, now_s: float) -> None:
        """Let those ranks of an endpoint be chosen that are in."""
        ranks_out = self.fleet.ranks_out.get(address, ())
        self.load.leave_out(address, ranks_out)
        self.work.set_ready(address, now_s, is_ready=self.fleet.is_ready(address), ranks_out=ranks_out)

    def _restarted(self, address: str, now_s: float) -> None:
        """What was learned of its speed stays: it is the same machine."""
        endpoint = self.fleet.get(address)
        if endpoint is not None:
            self.load.restart(address)
            self.work.reported(address, now_s)
            self.books.left(address)
            self._forget_prefixes(address)
            self._bound_prefixes(endpoint)

    def _describe_anew(self, endpoint: Endpoint, now_s: float) -> None:
        if self.fleet.get(endpoint.address) is not None:
            self.fleet.put(endpoint)
            self._describe(endpoint, now_s)

    def _describe(self, endpoint: Endpoint, now_s: float) -> None:
        self.load.add(endpoint)
        self.drains.add(endpoint.address)
        self._bound_prefixes(endpoint)
        if self._is_work_kept:
            self.work.add(self.load.endpoints[endpoint.address], now_s)
        self.outcomes.watch(endpoint, now_s)
        self._sort_out(endpoint.address, now_s)

    def _index_for(self, facts: RequestFacts) -> PrefixIndex:
        return self.short_prompts if facts.is_short else self.prefixes

    def _forget_prefixes(self, address: str) -> None:
        self.prefixes.forget(address)
        self.short_prompts.forget(address)

    def _bound_prefixes(self, endpoint: Endpoint) -> None:
        """A rank holds no more of prompts than its KV takes, where engine or profile says how much that is."""
        capacity_tokens = self._profiles.of(endpoint).kv_capacity_tokens
        if capacity_tokens is not None and (endpoint.role is not Role.DECODE or endpoint.reads_prompts):
            blocks = int(capacity_tokens / self._prefix_block_tokens)
            for rank in range(endpoint.dp_size):
                self.prefixes.set_capacity(RankKey(endpoint.address, rank), blocks)

    def _expire(self, now_s: float) -> None:
        for rank in self.load.expire(now_s):
            self.work.refreshed(rank.key, now_s)

    def _load_reported(self, event: events.LoadReported, now_s: float) -> None:
        ranks = event.ranks
        good = self.load.accept(event.address, ranks, event.t_report_s, now_s)
        if good and good == len(ranks) == len(self.load.endpoints[event.address].ranks):
            tokens = [r.prefill_tokens_total for r in ranks if r.prefill_tokens_total is not None]
            busy_s = [r.prefill_busy_s_total for r in ranks if r.prefill_busy_s_total is not None]
            if len(tokens) == len(busy_s) == good:
                self.work.learn_totals(event.address, sum(tokens), sum(busy_s))
        self.work.reported(event.address, now_s)

    def _first_token_seen(self, decision: Decision, now_s: float) -> None:
        if decision.state is not _PREFILLING:
            return
        decision.state = advance(decision.state, _DECODING, decision.facts.request_id)
        decision.first_token_at_s = now_s
        self.outcomes.went_well(decision, decision.prefill or decision.decode, now_s)
        self.books.prefill_ended(decision)
        leg = (decision.prefill or decision.decode).reservation
        leg.account.answered_at_s = now_s
        if decision.insert:
            self._index_for(decision.facts).read(leg.account.key, decision.insert)
        if self._is_work_kept:
            decision.prefill_took_s = self.work.prefill_seen(leg, decision.prefix_tokens, now_s)
            if decision.prefill_usage is not None:
                self._learn_prefill(decision)
        if decision.prefill is not None:
            leg.account.settle(leg, now_s)
        if self._is_work_kept:
            self.work.prefill_ended(leg, now_s)

    def _usage_seen(self, event: events.UsageSeen, now_s: float) -> None:
        event.decision.usage = Usage(now_s, event.prompt_tokens, event.completion_tokens)
        facts = event.decision.facts
        model = event.decision.decode.endpoint.model
        if facts.text is not None:
            self.tokens.learn(model, facts.text, event.prompt_tokens)
        address = event.decision.decode.endpoint.address
        if self.fleet.get(address) is not None:
            self.event_tokens.learn(address, event.events, event.completion_tokens)
        self.outputs.learn(model, event.completion_tokens)
        first_at_s = event.decision.first_token_at_s
        if self._is_work_kept and first_at_s is not None:
            self.work.learn_steps(event.decision.decode.reservation, event.completion_tokens, now_s - first_at_s)

    def _prefill_usage_seen(self, event: events.PrefillUsageSeen, now_s: float) -> None:
        decision, prompt_tokens, cached_tokens = event.decision, event.prompt_tokens, event.cached_tokens
        if not 0 <= cached_tokens <= prompt_tokens or not prompt_tokens:
            return
        decision.prefill_usage = PrefillUsage(now_s, prompt_tokens, cached_tokens)
        self._learn_prefill(decision)
        facts = decision.facts
        held_tokens = facts.prompt_tokens * cached_tokens / prompt_tokens  # counted as the prediction was
        is_lost = decision.prefix_tokens - held_tokens > _LOST_BLOCKS * facts.block_tokens
        if is_lost and decision.prefix_is_read:
            self.lost_prefixes += 1
            key = (decision.prefill or decision.decode).reservation.account.key
            held_blocks = int(held_tokens / facts.block_tokens)
            self._index_for(facts).correct(facts.prefix_blocks, key, held_blocks, decision.insert)

    def _learn_prefill(self, decision: Decision) -> None:
        """Learn from how long a prompt took, by the engine's own count of what it had to read if that is known."""
        took_s, decision.prefill_took_s = decision.prefill_took_s, None
        if took_s is None:
            return
        usage, cached_tokens = decision.prefill_usage, decision.prefix_tokens
        uncached_tokens = max(1, decision.facts.prompt_tokens - cached_tokens)
        if usage is not None:
            cached_tokens = usage.cached_tokens
            uncached_tokens = usage.prompt_tokens - cached_tokens
        leg = (decision.prefill or decision.decode).reservation
        self.work.learn_prefill(leg, uncached_tokens, cached_tokens, took_s)

    # settle

    def settle(
        self, decision: Decision, now_s: float, error: RouterError | None = None, at_fault: Sequence[Placement] = ()
    ) -> bool:
        """Return all load of a decision that is still held; ``False`` if that was done before (I2).

        ``error`` is why it failed, ``None`` if it was answered; ``at_fault`` the legs whose engines are to blame.
        """
        if self.live.pop(decision.number, None) is None:
            return False
        self.outcomes.settled(decision, error, at_fault, now_s)
        for placement in decision.placements:
            leg = placement.reservation
            if error is None:
                leg.account.answered_at_s = now_s
            if leg.account.settle(leg, now_s) and self._is_work_kept:
                self.work.settled(leg, now_s)
        if decision.prefill_took_s is not None:
            self._learn_prefill(decision)
        if decision.first_token_at_s is not None:
            self.drains.ended(decision.decode.endpoint.address, now_s)
        self.books.ended(decision)
        decision.state = _SETTLED
        self.journal.settled(decision, error, now_s)
        return True

    # questions

    def wants_usage(self, decision: Decision) -> bool:
        """Whether it is worth reading what an engine counted: for the first decisions, later for some of them.

        Which ones is scattered, so that they don't fall in step with turns that are taken.
        """
        number = decision.number
        return number <= _EAGER_USAGES or not (number * _SCATTER >> 16) % _USAGE_STEP

    def base_model(self, facts: RequestFacts) -> str | None:
        """Return the base model that serves a request, ``None`` if that isn't known."""
        return self.fleet.names.base(facts.model, facts.adapter)

    def validate(self) -> None:
        """Check the books (I1, I2, I11).

        Raises: InvariantViolation.
        """
        self.load.validate()
        self.prefixes.validate()
        self.short_prompts.validate()

    def snapshot(self, now_s: float) -> Snapshot:
        """Return readiness and load of the whole fleet at ``now_s``; it changes nothing."""
        return take_snapshot(self.fleet, self.load, len(self.live), now_s)

    def why_nobody(self, model: str | None) -> str:
        """Return why no request for ``model`` can be placed."""
        return why_nobody(self.fleet, model)
