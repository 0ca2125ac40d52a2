"""Prints ``docs/config.md``, which is derived from the settings."""

import sys
from collections.abc import Iterable

from pdrouter.config import ENDPOINT_SETTINGS, SETTINGS
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
    sys.stdout.write(document())
