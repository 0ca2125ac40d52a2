"""Fetches the lives of a request from a router and puts them into lines for people: ``pdrouter explain``.

Colours on a terminal, the same lines without them elsewhere. It knows what was kept, not how it was decided.
"""

import re
import sys
from http.client import HTTPException
from typing import TextIO
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import urlopen

import msgspec
from rich.console import Console
from rich.text import Text

from pdrouter.core.story import Explanation, LegStory, ShadowStory, Stories, Story

_TIMEOUT_S = 10.0

_SHADOW = {"same": "the same", "other_endpoint": "another endpoint", "other_rank": "another rank"}

_GOOD, _LIVE, _BAD, _QUIET = "green", "cyan", "red", "dim"


class NoStory(Exception):
    """The router couldn't be asked, or doesn't know the request."""


class _Error(msgspec.Struct, frozen=True):
    message: str


class _ErrorPage(msgspec.Struct, frozen=True):
    error: _Error


def fetch_stories(url: str, request_id: str) -> Stories:
    """Ask the router at ``url`` for a request's lives.

    Raises: NoStory with the reason.
    """
    page = f"{url.rstrip('/')}/debug/story/{quote(request_id, safe='', errors='surrogateescape')}"
    if not re.match(r"https?://[^/]", url):
        raise NoStory(f"{url} is not a URL; write http://HOST:PORT")
    try:
        with urlopen(page, timeout=_TIMEOUT_S) as reply:  # noqa: S310 - http or https
            return msgspec.json.decode(reply.read(), type=Stories)
    except HTTPError as error:
        raise NoStory(_reason(url, error)) from None
    except msgspec.MsgspecError:
        raise NoStory(f"what answers at {url} is no pdrouter") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise NoStory(f"no router can be reached at {url}: {reason}") from None


def _reason(url: str, error: HTTPError) -> str:
    with error:
        try:
            return _shown(msgspec.json.decode(error.read(), type=_ErrorPage).error.message)
        except (OSError, HTTPException, msgspec.MsgspecError):
            return f"{url} answered {error.code}; it is no pdrouter that keeps a journal"


def print_stories(page: Stories, file: TextIO | None = None) -> None:
    """Print each life, to standard output unless a file is given."""
    console = Console(file=file or sys.stdout, highlight=False, soft_wrap=True)
    for index, story in enumerate(page.lives):
        if index:
            console.print()
        for line in _lines(story):
            console.print(line)


def _lines(story: Story) -> list[Text]:
    style = {"answered": _GOOD, "live": _LIVE}.get(story.outcome, _BAD)
    lines = [Text.assemble((f"request {_shown(story.request_id)}", "bold"), ": ", (_shown(story.outcome), style))]
    if story.message:
        lines.append(Text(f"  {_shown(story.message)}", _BAD))
    facts = [
        f"decision {story.number}, {story.decided_ago_s:.1f} s ago"
        if story.number
        else f"{story.decided_ago_s:.1f} s ago",
        f"model {_shown(story.model)}" if story.model else "",
        f"{story.prompt_tokens} prompt tokens",
        f"{story.prefix_tokens} of them expected in the cache" if story.prefix_tokens else "",
    ]
    lines.append(Text("  " + "; ".join(fact for fact in facts if fact), _QUIET))
    for leg in story.legs:
        lines += _leg_lines(leg)
    lines += [Text.assemble((f"  {moment.after_s:+10.3f} s  ", _QUIET), moment.what) for moment in story.moments]
    if story.shadow is not None:
        lines += _shadow_lines(story.shadow)
    return lines


def _shadow_lines(shadow: ShadowStory) -> list[Text]:
    said = _SHADOW[shadow.result] if shadow.failure is None else f"nothing: {_shown(shadow.failure)}"
    lines = [Text.assemble(f"  shadow policy {shadow.policy} would have chosen ", (said, "bold"))]
    for leg in shadow.legs:
        lines += [Text("  ") + line for line in _leg_lines(leg, told_age=False)]
    return lines


def _leg_lines(leg: LegStory, *, told_age: bool = True) -> list[Text]:
    rank = "rank left to the engine" if leg.rank is None else f"rank {leg.rank}"
    age = "no load report" if leg.report_age_s is None else f"load report {leg.report_age_s:.1f} s old"
    return [
        Text.assemble((f"  {leg.kind} on {leg.endpoint} {rank}", "bold"), (f"  {age}" if told_age else "", _QUIET)),
        _why_line("endpoint", leg.endpoint_why),
        _why_line("rank", leg.rank_why),
    ]


def _why_line(what: str, why: Explanation) -> Text:
    return Text.assemble(f"    {what}: ", (_shown(why.sentence), "yellow" if why.is_notable else ""))


def _shown(text: str) -> str:
    """Return text that can't move the cursor: clients choose their ids."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
