"""From what a client saw to the figures that a simulation has, so that both stand in one table.

Times are told in the trace's time: with engines that are emulated and faster than life, ``speed`` times as long as
measured.
"""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdrouter.sim.replay.player import Played, Sent
from pdrouter.sim.virtual.figures import Objective, curves_of, figures_of, percentile
from pdrouter.sim.virtual.recorded import without_hits
from pdrouter.sim.virtual.run import Answer, Run
from pdrouter.sim.virtual.sweep import Result
from pdrouter.sim.virtual.trace import Trace

_FIELDS = (
    "number", "at_s", "late_s", "ttft_s", "end_to_end_s", "prompt_tokens", "output_tokens", "cached_tokens",
    "prefill", "decode", "problem",
)  # fmt: skip

_LATE_SHARE = 0.2
"""How late a client may be beside a first token; chosen."""


class Places(msgspec.Struct, frozen=True):
    """The ranks that read prompts and those that write answers, each as the router's replies name it; or none."""

    readers: Sequence[str] = ()
    writers: Sequence[str] = ()

    @property
    def are_known(self) -> bool:
        """Whether anybody told."""
        return bool(self.readers and self.writers)

    def seen_in(self, answered: Sequence[Sent]) -> "Places":
        """Return them with whoever else was seen to read or write; nobody if a reply doesn't say who it was."""
        names = [(_reader(sent), sent.seen.decode) for sent in answered]
        if not self.are_known or not all(map(all, names)):
            return Places()
        readers, writers = zip(*names, strict=True) if names else ((), ())
        return Places([*dict.fromkeys([*self.readers, *readers])], [*dict.fromkeys([*self.writers, *writers])])


class Measure(NamedTuple):
    """How a replay is told: under which names, how many times faster than the trace it went, what a good answer is."""

    title: str
    name: str
    seed: int
    speed: float
    objective: Objective


def result_of(played: Played, trace: Trace, places: Places, measure: Measure) -> Result:
    """Return a replay's figures and curves; one that was cut off stands for the time until its last request."""
    answered = [sent for sent in played.sent if not sent.seen.problem]
    span_s = max(sent.request.at_s for sent in played.sent) or 1.0 if played.cut else trace.span_s
    places = places.seen_in(answered)
    run = Run(len(played.sent), span_s, len(places.readers), len(places.writers))
    run.preemptions = None
    run.rejected = Counter(sent.seen.problem for sent in played.sent if sent.seen.problem)
    readers, writers = ({name: i for i, name in enumerate(side)} for side in (places.readers, places.writers))
    for sent in answered:
        seen, request = sent.seen, sent.request
        run.answers.append(
            Answer(
                sent.number,
                request.at_s,
                (seen.first_s - sent.due_s) * measure.speed,
                (seen.last_s - sent.due_s) * measure.speed,
                seen.prompt_tokens or request.prompt_tokens,
                seen.output_tokens or request.output_tokens,
                seen.cached_tokens or 0,
                readers.get(_reader(sent), 0),
                writers.get(seen.decode, 0),
            )
        )
    figures = figures_of(run, None, measure.objective)
    if all(sent.seen.cached_tokens is None for sent in answered):
        figures = without_hits(figures)
    return Result(measure.title, measure.name, measure.seed, run.planned / span_s, 0.0, figures, curves_of(run))


def _reader(sent: Sent) -> str:
    """Return who read a prompt: where there is no pair, whoever wrote the answer."""
    return sent.seen.prefill or sent.seen.decode


def notes_of(played: Played, planned: int) -> list[str]:
    """Return what is to be known beside the figures: how well the client kept time, lengths, and failures by cause."""
    sent = played.sent
    ttfts_s = sorted(one.seen.first_s - one.due_s for one in sent if not one.seen.problem)
    late_ms = sorted(1000 * (one.sent_s - one.due_s) for one in sent)
    lag_ms = 1000 * percentile(played.lags_s, 0.99)
    shown = [f"{percentile(late_ms, share):.1f}" for share in (0.5, 0.99, 1.0)]
    late = f"sent {shown[0]} ms late (p50), {shown[1]} ms (p99), {shown[2]} ms at most, which counts as their time"
    notes = [f"{len(sent):,} of {planned:,} requests ended; {late}; the client's loop was {lag_ms:.1f} ms late (p99)"]
    if percentile(late_ms, 0.99) > _LATE_SHARE * 1000 * percentile(ttfts_s, 0.5):
        notes.append("the client couldn't keep up, and times are too long by that: let it send less, or elsewhere")
    if played.held:
        notes.append(
            f"{played.held:,} requests were held back, because as many as --max-in-flight allows were under way: "
            "the endpoint was too slow for this rate, or the limit too low"
        )
    if played.cut:
        notes.append(f"stopped: {played.cut:,} requests under way were cut off and aren't counted")
    notes += [f"failed: {count:,} x {cause}" for cause, count in _problems(sent).most_common()]
    answered = [one for one in sent if one.seen.prompt_tokens and not one.seen.problem]
    if answered:
        prompts = _ratio([(one.seen.prompt_tokens, one.request.prompt_tokens) for one in answered])
        outputs = _ratio([(one.seen.output_tokens, one.request.output_tokens) for one in answered])
        notes.append(f"tokens by the endpoint's count, over the trace's: prompts {prompts:.3f}, answers {outputs:.3f}")
    return notes


def _problems(sent: Sequence[Sent]) -> "Counter[str]":
    return Counter(one.seen.problem for one in sent if one.seen.problem)


def _ratio(pairs: Sequence[tuple[int | None, int]]) -> float:
    return sum(counted or 0 for counted, _ in pairs) / sum(wanted for _, wanted in pairs)


def write_requests(path: Path, played: Played, speed: float) -> None:
    """Write a line for each request."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_FIELDS)
        for sent in sorted(played.sent, key=lambda sent: sent.number):
            writer.writerow(_row(sent, speed))


def _row(sent: Sent, speed: float) -> Sequence[object]:
    seen = sent.seen
    ttft_s, took_s = (f"{(at_s - sent.due_s) * speed:.6f}" if at_s else "" for at_s in (seen.first_s, seen.last_s))
    late_s = f"{(sent.sent_s - sent.due_s) * speed:.6f}"
    counts = (seen.prompt_tokens, seen.output_tokens, seen.cached_tokens)
    at_s = f"{sent.request.at_s:.6f}"
    return (sent.number, at_s, late_s, ttft_s, took_s, *counts, seen.prefill, seen.decode, seen.problem)
