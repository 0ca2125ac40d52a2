"""The router's core: ``decide``, ``observe`` and ``settle`` are the only verbs that change it.

Synchronous and closed: the moment is an argument, chance is a constructor argument, so the same calls give the same
decisions (I4, I5). ``decide`` reserves the load before it returns; nothing can come between choosing and counting.
Read next: ``ledger.py``, ``load.py``, ``policies/base.py``.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from pdrouter.core import events
from pdrouter.core.decision import Decision, Placement, Rejection, Why
from pdrouter.core.fleet import Endpoint, Fleet, Role
from pdrouter.core.ledger import UNASSIGNED, LegKind, RankKey
from pdrouter.core.lifecycle import State, advance
from pdrouter.core.load import EndpointLoad, LoadView
from pdrouter.core.policies import ENGINE, POLICIES, RANK_POLICIES
from pdrouter.core.policies.base import Policy, PolicyOptions, Question
from pdrouter.core.prefix import PrefixIndex
from pdrouter.core.request import RequestFacts
from pdrouter.core.tokens import TokenEstimator
from pdrouter.errors import InvalidRank, ModelNotFound, NoReadyPair, RouterError

_MAX_NAMED = 8
"""Endpoints that a rejection names one by one."""

_KINDS: Mapping[Role, LegKind] = {
    Role.PREFILL: LegKind.PREFILL,
    Role.DECODE: LegKind.DECODE,
    Role.REGULAR: LegKind.REGULAR,
}


_ONLY_ENDPOINT = Why("single", "the only endpoint")
_ONLY_RANK = Why("single", "the only rank")
_CLIENTS_RANK = Why("client", "the client's own rank")
_ENGINES_RANK = Why(ENGINE, "left to the engine")


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The core's settings; ``config.py`` says what they mean."""

    policy: str
    prefill_policy: str
    decode_policy: str
    rank_policy: str
    report_max_age_s: float
    visible_delay_s: float
    history_events: int
    bytes_per_token: float
    max_models: int
    prefix_entries: int
    policy_options: PolicyOptions


class Router:
    """One fleet, one ledger, one decision per request."""

    def __init__(self, options: RouterOptions) -> None:
        self.fleet = Fleet()
        self.load = LoadView(
            report_max_age_s=options.report_max_age_s,
            visible_delay_s=options.visible_delay_s,
            history_events=options.history_events,
        )
        self.prefixes = PrefixIndex(options.prefix_entries)
        self.tokens = TokenEstimator(options.bytes_per_token, options.max_models)
        self.live: dict[int, Decision] = {}
        self.decided = 0
        self.missing_reports: dict[str, int] = {}
        self._policies: dict[Role, Policy] = {
            role: POLICIES[name](options.policy_options)
            for role, name in (
                (Role.PREFILL, options.prefill_policy),
                (Role.DECODE, options.decode_policy),
                (Role.REGULAR, options.policy),
            )
        }
        self._rank_policies: dict[Role, Policy] = (
            {}
            if options.rank_policy == ENGINE
            else {role: RANK_POLICIES[options.rank_policy](options.policy_options) for role in Role}
        )

    # decide

    def decide(self, facts: RequestFacts, now_s: float) -> Decision | Rejection:
        """Place a request and reserve its load, or say why that can't be done."""
        self.load.expire(now_s)
        try:
            return self._place(facts, self._known_model(facts.model), now_s)
        except RouterError as error:
            return Rejection(error)

    def _place(self, facts: RequestFacts, model: str | None, now_s: float) -> Decision:
        if self.fleet.ready(Role.PREFILL, model):
            return self._place_pair(facts, model, now_s)
        if self.fleet.ready(Role.REGULAR, model):
            return self._place_regular(facts, model, now_s)
        raise NoReadyPair(self.why_nobody(model))

    def _place_pair(self, facts: RequestFacts, model: str | None, now_s: float) -> Decision:
        cached = self._cached_tokens(facts)
        question = Question((Role.PREFILL, model or ""), Role.PREFILL, facts.prompt_tokens, cached)
        prefills = self._with_rank(self._prefills(facts, model), facts.prefill_rank, Role.PREFILL)
        prefill, prefill_why = self._choose_endpoint(question, prefills)
        prefill_rank, prefill_rank_why = self._choose_rank(question, prefill, facts.prefill_rank)

        question = Question((Role.DECODE, model or "", prefill.endpoint.group), Role.DECODE, facts.prompt_tokens, {})
        decodes = self._with_rank(self.fleet.partners(prefill.endpoint, model), facts.decode_rank, Role.DECODE)
        decode, decode_why = self._choose_endpoint(question, decodes)
        decode_rank, decode_rank_why = self._choose_rank(question, decode, facts.decode_rank)
        self.fleet.check_pair(prefill.endpoint, decode.endpoint)  # I6

        held = cached.get(_key(prefill, prefill_rank), 0)
        return self._record(
            facts,
            self._reserve(prefill, prefill_rank, (prefill_why, prefill_rank_why), facts, held, now_s),
            self._reserve(decode, decode_rank, (decode_why, decode_rank_why), facts, 0, now_s),
            held,
            now_s,
        )

    def _prefills(self, facts: RequestFacts, model: str | None) -> Sequence[Endpoint]:
        """Return those that may read the prompt: with a partner that has the decode rank asked for, if any does."""
        ready, rank = self.fleet.ready(Role.PREFILL, model), facts.decode_rank
        if rank is None:
            return ready
        return [p for p in ready if any(rank < d.dp_size for d in self.fleet.partners(p, model))] or ready

    def _place_regular(self, facts: RequestFacts, model: str | None, now_s: float) -> Decision:
        cached = self._cached_tokens(facts)
        question = Question((Role.REGULAR, model or ""), Role.REGULAR, facts.prompt_tokens, cached)
        rank_wanted = facts.decode_rank if facts.decode_rank is not None else facts.prefill_rank
        workers = self._with_rank(self.fleet.ready(Role.REGULAR, model), rank_wanted, Role.REGULAR)
        worker, why = self._choose_endpoint(question, workers)
        if any(e.role is not Role.REGULAR for e in self.fleet):
            why = Why(
                why.policy,
                f"no ready pair, a regular endpoint serves: {why.rule}",
                why.candidates,
                why.values,
                is_notable=True,
            )
        rank, rank_why = self._choose_rank(question, worker, rank_wanted)
        self.fleet.check_pair(worker.endpoint, worker.endpoint)  # I6
        placement = self._reserve(worker, rank, (why, rank_why), facts, 0, now_s)
        return self._record(facts, None, placement, cached.get(_key(worker, rank), 0), now_s)

    def _choose_endpoint(self, question: Question, candidates: Sequence[EndpointLoad]) -> tuple[EndpointLoad, Why]:
        if len(candidates) == 1:
            return candidates[0], _ONLY_ENDPOINT
        pick = self._policies[question.role].choose(question, candidates)
        return candidates[pick.index], pick.why

    def _choose_rank(self, question: Question, load: EndpointLoad, wanted: int | None) -> tuple[int | None, Why]:
        if wanted is not None:
            return wanted, _CLIENTS_RANK
        if len(load.ranks) == 1:
            return 0, _ONLY_RANK
        policy = self._rank_policies.get(question.role)
        if policy is None:
            return None, _ENGINES_RANK
        scoped = Question((question.role, load.key), question.role, question.prompt_tokens, question.cached_tokens)
        pick = policy.choose(scoped, load.ranks)
        return pick.index, pick.why

    def _reserve(
        self,
        load: EndpointLoad,
        rank: int | None,
        whys: tuple[Why, Why],
        facts: RequestFacts,
        cached_tokens: int,
        now_s: float,
    ) -> Placement:
        kind = _KINDS[load.endpoint.role]
        account = load.unassigned if rank is None else load.ranks[rank].account
        prompt_tokens = facts.prompt_tokens
        reservation = account.reserve(kind, max(1, prompt_tokens - cached_tokens), prompt_tokens, now_s)  # I3
        age_s = None if rank is None else load.ranks[rank].age_s(now_s)
        return Placement(load.endpoint, kind, rank, reservation, *whys, age_s)

    def _record(
        self,
        facts: RequestFacts,
        prefill: Placement | None,
        decode: Placement,
        prefix_tokens: int,
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
        self.live[decision.number] = decision
        if facts.prefix_blocks:
            reader = prefill or decode
            self.prefixes.insert(facts.prefix_blocks, reader.reservation.account.key)
        return decision

    # observe

    def observe(self, event: events.Event, now_s: float) -> None:
        """Take in what happened."""
        match event:
            case events.TokensGenerated():
                leg = event.decision.decode.reservation
                leg.account.grow(leg, event.tokens, now_s)
            case events.FirstTokenSeen():
                self._first_token_seen(event.decision, now_s)
            case events.UsageSeen():
                self._usage_seen(event)
            case events.LoadReported():
                self.load.expire(now_s)
                self.load.accept(event.address, event.ranks, event.t_report_s, now_s)
            case events.LoadMissing():
                self.missing_reports[event.reason] = self.missing_reports.get(event.reason, 0) + 1
            case events.EndpointJoined():
                self.fleet.put(event.endpoint, out=event.out)
                self.load.add(event.endpoint)
            case events.EndpointDescribed():
                if self.fleet.get(event.endpoint.address) is not None:
                    self.fleet.put(event.endpoint)
                    self.load.add(event.endpoint)
            case events.ReadinessChanged():
                self.fleet.set_ready(event.address, event.out)
            case events.EndpointLeft():
                self.fleet.remove(event.address)
                self.load.remove(event.address)
                self.prefixes.forget(event.address)
            case _:
                assert_never(event)

    def _first_token_seen(self, decision: Decision, now_s: float) -> None:
        if decision.state is not State.PREFILLING:
            return
        decision.state = advance(decision.state, State.DECODING, decision.facts.request_id)
        if decision.prefill is not None:
            leg = decision.prefill.reservation
            leg.account.settle(leg, now_s)

    def _usage_seen(self, event: events.UsageSeen) -> None:
        facts = event.decision.facts
        model = self._learning_key(facts.model)
        if facts.prompt_bytes:
            self.tokens.learn(model, facts.prompt_bytes, event.prompt_tokens)
        self.tokens.learn_event_tokens(model, event.events, event.completion_tokens)

    # settle

    def settle(self, decision: Decision, now_s: float) -> bool:
        """Return all load of a decision that is still held; ``False`` if that was done before (I2)."""
        if self.live.pop(decision.number, None) is None:
            return False
        for placement in decision.placements:
            placement.reservation.account.settle(placement.reservation, now_s)
        decision.state = State.SETTLED
        return True

    # questions

    def estimate_tokens(self, model: str | None, prompt_bytes: int) -> int:
        """Return how many tokens a prompt of so many bytes has."""
        return self.tokens.estimate(self._learning_key(model), prompt_bytes)

    def tokens_per_event(self, model: str | None) -> float:
        """Return how many tokens one event of a model's streams carries."""
        return self.tokens.event_tokens(self._learning_key(model))

    def validate(self) -> None:
        """Check the books (I1, I2, I11).

        Raises: InvariantViolation.
        """
        self.load.validate()

    def _known_model(self, model: str | None) -> str | None:
        """Return the model to filter by: in a fleet of one model, engines judge the name themselves."""
        models = self.fleet.models
        if len(models) <= 1 or model is None:
            return None
        if model not in models:
            raise ModelNotFound(f"the model {model!r} is not served; known: {', '.join(sorted(models))}", param="model")
        return model

    def _learning_key(self, model: str | None) -> str | None:
        return model if model in self.fleet.models else None

    def _cached_tokens(self, facts: RequestFacts) -> Mapping[RankKey, int]:
        if not facts.prefix_blocks:
            return {}
        matched = self.prefixes.match(facts.prefix_blocks)
        most = max(0, facts.prompt_tokens - 1)  # an engine computes at least one token
        return {rank: min(most, int(blocks * facts.block_tokens)) for rank, blocks in matched.items()}

    def _with_rank(self, pool: Sequence[Endpoint], rank: int | None, role: Role) -> list[EndpointLoad]:
        loads = self.load.endpoints
        if rank is None:
            return [loads[e.address] for e in pool]
        having = [loads[e.address] for e in pool if 0 <= rank < e.dp_size]
        if not having:
            largest = max(e.dp_size for e in pool)
            raise InvalidRank(f"data-parallel rank {rank} isn't there: {role} endpoints have 0 to {largest - 1}")
        return having

    def why_nobody(self, model: str | None) -> str:
        """Return why no request for ``model`` can be placed: who is known, and why each is out."""
        known = [e for e in self.fleet if e.serves(model)]
        if not known:
            return "no endpoint is known"
        is_some_ready = any(self.fleet.is_ready(e.address) for e in known)
        lines = [
            f"{e.role} {e.address}: {self.fleet.why_out(e.address) or 'ready, but no partner is'}"
            for e in known[:_MAX_NAMED]
        ]
        more = f" and {len(known) - _MAX_NAMED} more" if len(known) > _MAX_NAMED else ""
        missing = "no ready pair of prefill and decode endpoints" if is_some_ready else "no ready endpoint"
        wanted = f" for model {model!r}" if model else ""
        return f"{missing}{wanted} ({len(known)} known: {'; '.join(lines)}{more})"


def _key(load: EndpointLoad, rank: int | None) -> RankKey:
    return RankKey(load.key, UNASSIGNED if rank is None else rank)
