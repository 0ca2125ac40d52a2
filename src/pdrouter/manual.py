"""Prints pages that are derived: ``docs/config.md`` from the settings, ``docs/errors.md`` from the errors."""

import sys
from collections.abc import Iterable, Iterator

from pdrouter.config import ENDPOINT_SETTINGS, SETTINGS
from pdrouter.errors import RouterError
from pdrouter.setting import Setting

_DOCUMENT = """\
# Settings

Each setting has one name. From weakest to strongest, its value comes from

1. its default;
2. a YAML file (`pdrouter serve --config FILE`, or `PDROUTER_CONFIG`): `worker_load_check_interval: 2`;
   dashes work, too;
3. the environment: `PDROUTER_WORKER_LOAD_CHECK_INTERVAL=2`; lists are separated by commas, and an empty
   variable counts as not set;
4. a flag: `--worker-load-check-interval 2`; for true and false `--decision-headers` and
   `--no-decision-headers`.

A list replaces the list of a weaker source; `none` unsets what may be unset. An unknown name, a value out of
range or a URL that isn't one stops the start. `pdrouter check-config` prints the effective settings and where
each came from.

`python -m pdrouter.manual` writes this page.
"""

_ENDPOINT = """\
### An endpoint

Members of `prefill`, `decode` and `worker`: in YAML a mapping of these, or the text
`URL [BOOTSTRAP_PORT|none]`; as repeatable flags `--prefill URL [BOOTSTRAP_PORT|none]`, `--decode URL` and
`--worker URL`; in the environment `PDROUTER_PREFILL="URL [BOOTSTRAP_PORT|none], URL"`.
"""

_ERRORS = """\
# Errors

What the router answers of its own accord is a JSON object `error` with `message`, `type`, `code` and `param`, in the
form of the API that was asked (`/v1/messages`: Anthropic's). In a stream that has begun it is an event. `code` and
status stay as they are; each failure is counted by its code in `pdrouter_failures_total{code}`.

What an engine answers goes to the client as it came, unless another attempt is made; it is counted as `engine_reply`,
and as `engine_failure` where it was [inside a 200](engines.md#failures-inside-a-200).

Another attempt is made of what is marked so, within the limits of [further
attempts](operating.md#further-attempts); what is marked as the engine's fault counts for its
[breaker](operating.md#breakers).

`python -m pdrouter.manual errors` writes this page.

| Code | Status | Another attempt | The engine's fault | What it means |
|--|--|--|--|--|
"""


_GENERAL = {
    "internal_error": "Anything else that went wrong in the router.",
    "upstream_error": "Anything else that went wrong on the way to or from an engine.",
}
"""What the bases mean where nothing more special fits."""


def errors_document() -> str:
    """Return ``docs/errors.md``: one row for each code, those of one status together."""
    kinds: dict[str, type[RouterError]] = {}
    for kind in sorted(_kinds(RouterError), key=lambda kind: str(kind.__doc__).startswith("Base of")):
        kinds.setdefault(kind.code, kind)  # of several with one code the most general that isn't only a base
    rows = [_error_row(kind) for kind in sorted(kinds.values(), key=lambda kind: (kind.status, kind.code))]
    return _ERRORS + "\n".join(rows) + "\n"


def _kinds(kind: type[RouterError]) -> Iterator[type[RouterError]]:
    """Yield a kind of error and all below it, of those that are defined where it is."""
    if kind.__module__ == RouterError.__module__:
        yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _error_row(kind: type[RouterError]) -> str:
    meaning = _GENERAL.get(kind.code) or (kind.__doc__ or "").split("\n\n")[0].replace("``", "`")
    marks = ["yes" if mark else "" for mark in (kind.is_retryable, kind.counts_against_health)]
    return f"| `{kind.code}` | {kind.status} | {marks[0]} | {marks[1]} | {meaning} |"


def document() -> str:
    """Return ``docs/config.md``."""
    lines = [_DOCUMENT]
    for group in dict.fromkeys(item.group for item in SETTINGS.values()):
        lines += [f"## {group}\n", _table(item for item in SETTINGS.values() if item.group == group)]
        if group == "Fleet":
            lines += [_ENDPOINT, _table(ENDPOINT_SETTINGS.values())]
    return "\n".join(lines)


def _table(items: Iterable[Setting]) -> str:
    rows = ["| Name | Default | Unit | Range | What it does |", "|--|--|--|--|--|"]
    for item in items:
        cells = (f"`{item.name}`", item.default_text, item.unit, item.range_text, item.description)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(errors_document() if sys.argv[1:] == ["errors"] else document())
