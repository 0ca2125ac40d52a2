"""What one engine has told of itself: whether that is all, when to ask again, and where it contradicts the settings.

An engine may answer its health check before it tells everything: vLLM 0.32 has no gauges, or those of some ranks only,
when its port opens. And ranks may be added while it runs. ``health.py`` asks; nothing here does I/O.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pdrouter.core.fleet import Endpoint, Role
from pdrouter.engines.about import ENGINE_OF_OWNER

_MAX_BACK_OFF = 64
"""The time between two descriptions doubles up to so many times the first; chosen."""

_LASTING = ("version", "dp_size", "dp_attention", "rank_base", "kv_capacity_tokens", "kv_engine_ids")
"""What an engine tells that doesn't change while it runs."""

_LASTING_WITH_MORE_RANKS = ("version",)
"""What of it doesn't change when ranks are added, or weren't all told before."""


class Description:
    """What one engine has told.

    ``tells`` are the names that engines of its kind tell once they run. ``due_s`` is when it is to be described again;
    infinite: it isn't. ``warning`` says what doesn't add up, though the endpoint can be used.
    """

    def __init__(self, tells: Collection[str]) -> None:
        self.due_s = math.inf
        self.warning: str | None = None
        self._tells = tells
        self._earliest_s = -math.inf
        self.forget()

    def forget(self) -> None:
        """Forget what was told: the process is another."""
        self._told: Collection[str] = ()
        self._unknown_rank: int | None = None
        self._back_off = 1

    def ask_again(self) -> None:
        """Let it be described again, as soon as it may be."""
        self.due_s = min(self.due_s, self._earliest_s)

    def reported(self, unknown_rank: int | None, now_s: float) -> bool:
        """Take note of a rank that a load report names and that the endpoint doesn't have; ``None``: there is none.

        Return whether the endpoint is to be described now.
        """
        self._unknown_rank = unknown_rank
        if unknown_rank is not None:
            self.ask_again()
        return self.due_s <= now_s

    def begin(self, now_s: float, first_s: float) -> None:
        """Take note that the endpoint is being described; the next time comes ``first_s`` later, then twice that."""
        self._earliest_s = now_s + self._back_off * first_s
        if self.due_s < math.inf:
            self.due_s = self._earliest_s
            self._back_off = min(2 * self._back_off, _MAX_BACK_OFF)

    def take(self, before: Endpoint, after: Endpoint, told: Collection[str]) -> None:
        """Take note of a whole description: the endpoint before and after it, and the names told.

        Another is due while something is missing, or a reported rank isn't known.
        """
        self._told = frozenset(told)
        if after.dp_size != before.dp_size:
            self._back_off = 1
        if self._unknown_rank is not None and _has_rank(after, self._unknown_rank):
            self._unknown_rank = None
        is_whole = self._unknown_rank is None and self._told.issuperset(self._tells)
        self.due_s = math.inf if is_whole else self._earliest_s

    def changed(self, before: Endpoint, after: Endpoint, *, is_in_use: bool) -> str | None:
        """Return the name of something lasting that was told before and is another now: the process is another."""
        has_grown = is_in_use and after.dp_size > before.dp_size
        names = _LASTING_WITH_MORE_RANKS if has_grown else _LASTING
        return next((n for n in names if n in self._told and getattr(before, n) != getattr(after, n)), None)

    def warn(self, endpoint: Endpoint, contradiction: str | None) -> bool:
        """Say what doesn't add up on the number of ranks; return whether that is something new.

        ``contradiction`` is what the engine's own pages disagree about.
        """
        before, self.warning = self.warning, contradiction
        if self._unknown_rank is not None:
            last = endpoint.rank_base + endpoint.dp_size - 1
            known = f"rank {last} is" if endpoint.dp_size == 1 else f"ranks {endpoint.rank_base} to {last} are"
            self.warning = f"load reports name rank {self._unknown_rank}, but only {known} known"
        return self.warning != before


def unknown_rank(endpoint: Endpoint, ranks: Iterable[int]) -> int | None:
    """Return the first of these ranks, as the engine numbers them, that an endpoint doesn't have."""
    return next((rank for rank in ranks if rank >= 0 and not _has_rank(endpoint, rank)), None)


def _has_rank(endpoint: Endpoint, rank: int) -> bool:
    return endpoint.rank_base <= rank < endpoint.rank_base + endpoint.dp_size


def contradictions(endpoint: Endpoint, fixed: Collection[str], told: Mapping[str, object]) -> Iterator[str]:
    """Yield where an engine contradicts the settings, such as ``configured role prefill, reports decode``.

    What isn't told contradicts nothing. Every SGLang server tells a bootstrap port; only a prefill's is used.
    """
    kinds = _kinds(told.get("cards"))
    if endpoint.engine in ENGINE_OF_OWNER.values() and kinds and endpoint.engine not in kinds:
        yield f"configured engine {endpoint.engine}, reports {kinds[0]}"
    checked = {"role"}
    if "dp_size" in fixed:
        checked.add("dp_size")
    if "bootstrap_port" in fixed and endpoint.role is Role.PREFILL and endpoint.bootstrap_port is not None:
        checked.add("bootstrap_port")
    for name in sorted(checked & told.keys()):
        configured = getattr(endpoint, name)
        if told[name] != configured:
            yield f"configured {name} {configured}, reports {told[name]}"


def _kinds(cards: object) -> Sequence[str]:
    """Return the kinds of engine that own what is listed, as far as they are known."""
    owners = [card.owned_by for card in cards] if isinstance(cards, tuple) else []
    return [ENGINE_OF_OWNER[owner] for owner in owners if owner in ENGINE_OF_OWNER]
