"""One setting: how it is declared, what is known of it, and how a raw value becomes a checked one.

``setting()`` annotates a field of a settings struct, ``settings_of()`` reads the annotations back. It must
not know which settings there are: that is ``config.py``.
"""

import difflib
import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pdrouter.files import read_file


def setting(
    group: str,
    description: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    check: Callable[[str], str] | None = None,
) -> Meta:
    """Annotate a field: its group in help and documents, one sentence, and what a value has to hold.

    ``check`` returns text in its one spelling or raises ValueError saying what to write.
    """
    return Meta(ge=low, le=high, description=description, extra={"group": group, "unit": unit, "check": check})


_MAX_SHOWN_CHARS = 120

_MAX_KEY_BYTES = 65_536

SECRET = "(secret)"  # noqa: S105
"""What stands in logs, errors and documents for a secret."""


class Secret:
    """Text that isn't shown: whoever needs it asks for ``reveal()``."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return SECRET

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def reveal(self) -> str:
        """Return the text."""
        return self._text


class KeyFile(Secret):
    """A key that stands in a file; the file's path is what is shown.

    Raises: ValueError if there is no key in it.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        try:
            text = read_file(Path(path), _MAX_KEY_BYTES).decode("utf-8")
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path}: not UTF-8 text") from None
        self.path = path
        try:
            super().__init__(check_key(text.strip()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def __repr__(self) -> str:
        return self.path


class Setting(Struct, frozen=True, kw_only=True):
    """One field of a settings struct, as flags, environment, YAML and documents see it."""

    name: str
    base: object
    choices: tuple[str, ...]
    is_optional: bool
    is_required: bool
    default: object
    unit: str
    low: float | None
    high: float | None
    check: Callable[[str], str] | None
    group: str
    description: str

    @property
    def is_list(self) -> bool:
        """Several values; text holds them separated by commas."""
        return get_origin(self.base) is tuple

    @property
    def is_secret(self) -> bool:
        """Nothing that it was or is given may be shown."""
        return any(isinstance(kind, type) and issubclass(kind, Secret) for kind in (self.base, *get_args(self.base)))

    @property
    def range_text(self) -> str:
        """What it may be, in words; empty where any text goes."""
        if self.choices:
            return ", ".join(self.choices)
        if self.low is not None and self.high is not None:
            return f"{plain(self.low)} to {plain(self.high)}"
        return "true, false" if self.base is bool else ""

    @property
    def default_text(self) -> str:
        """The default, in words."""
        if self.is_required:
            return "required"
        if self.default is None or self.default is UNSET:
            return "unset"
        if isinstance(self.default, tuple):
            return ", ".join(map(str, self.default)) or "none"
        return plain(self.default) or "empty"

    def read(self, raw: object) -> object:
        """Return ``raw`` as the setting's type; text is read the same whatever its source.

        Raises ValueError with what is wrong.
        """
        if self.is_list:
            return tuple(self._read_text(item) for item in split(raw))
        if self.is_optional and (raw is None or raw == "none"):
            return None
        if self.base is bool:
            return _read_bool(raw)
        if self.base in (int, float):
            return self._read_number(raw)
        return self._read_text(raw)

    def _read_text(self, raw: object) -> str | Secret:
        if self.is_secret:
            return self._read_secret(raw)
        if self.choices and raw not in self.choices:
            raise ValueError(f"{shown(raw)} is not one of {self.range_text}")
        if not isinstance(raw, str):
            raise ValueError(f"{shown(raw)} is not text; put it in quotes")  # noqa: TRY004
        return self.check(raw) if self.check else raw

    def _read_secret(self, raw: object) -> Secret:
        if isinstance(raw, Secret):
            return raw
        if not isinstance(raw, str):
            raise ValueError("it is not text; put it in quotes")  # noqa: TRY004
        if self.base is KeyFile:
            return KeyFile(raw)
        if raw == SECRET:
            raise ValueError(f"{SECRET} only stands for it; write the secret itself")
        return Secret(self.check(raw) if self.check else raw)

    def _read_number(self, raw: object) -> float:
        kind = int if self.base is int else float
        unit = f" ({self.unit})" if self.unit else ""
        try:
            if isinstance(raw, bool) or not isinstance(raw, str | int | kind):
                raise ValueError  # noqa: TRY301, TRY004
            value = kind(raw)
        except (ValueError, OverflowError):
            a_kind = "a whole number" if kind is int else "a number"
            raise ValueError(f"{shown(raw)} is not {a_kind}{unit}") from None
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if not low <= value <= high:  # so is NaN
            raise ValueError(f"{shown(raw)} is out of range; write {self.range_text}{unit}")
        return value


def settings_of(struct: type[Struct], notes: Mapping[str, Meta] | None = None) -> dict[str, Setting]:
    """Return the settings that a struct declares, by name, in the order of its fields.

    ``notes`` annotates a struct that doesn't do so itself: only the fields noted are settings.
    """
    fields = msgspec.structs.fields(struct)
    if notes is None:
        return {field.name: _setting_of(field, _members(field.type)[1]) for field in fields}
    return {field.name: _setting_of(field, [notes[field.name]]) for field in fields if field.name in notes}


def with_choices(items: Mapping[str, Setting], choices: tuple[str, ...], more: Iterable[str]) -> dict[str, Setting]:
    """Return the settings; those that may be one of ``choices`` may be one of ``more`` as well."""
    wider = choices + tuple(more)
    return {
        name: msgspec.structs.replace(item, choices=wider) if item.choices == choices else item
        for name, item in items.items()
    }


def _setting_of(field: msgspec.structs.FieldInfo, metas: list[Meta]) -> Setting:
    members, _ = _members(field.type)
    meta = metas[0] if metas else Meta()
    bases = [member for member in members if member not in (NoneType, UnsetType)]
    choices = tuple(choice for base in bases if get_origin(base) is Literal for choice in get_args(base))
    extra = meta.extra or {}
    return Setting(
        name=field.name,
        base=str if choices else bases[0],
        choices=choices,
        is_optional=NoneType in members,
        is_required=field.required,
        default=field.default,
        unit=extra.get("unit", ""),
        low=meta.ge,
        high=meta.le,
        check=extra.get("check"),
        group=extra.get("group", "Options"),
        description=meta.description or "",
    )


def _members(hint: object) -> tuple[list[object], list[Meta]]:
    """Return the types that a hint unites, and the annotations of the hint and of each."""
    if get_origin(hint) is Annotated:
        inner, *annotations = get_args(hint)
        members, metas = _members(inner)
        return members, [item for item in annotations if isinstance(item, Meta)] + metas
    if get_origin(hint) in (Union, UnionType):
        pairs = [_members(member) for member in get_args(hint)]
        return [m for members, _ in pairs for m in members], [meta for _, metas in pairs for meta in metas]
    return [hint], []


def split(raw: object) -> list[object]:
    """Return the items of a list, or of text with commas."""
    if isinstance(raw, str):
        return [item.strip() for item in raw.split(",") if item.strip()]
    if isinstance(raw, list | tuple):
        return list(raw)
    raise ValueError(f"{shown(raw)} is not a list")


def _read_bool(raw: object) -> bool:
    word = plain(raw).lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError(f"{shown(raw)} is neither true nor false")


def shown(raw: object) -> str:
    """Quote a raw value for a message, shortened, on one line."""
    text = ""
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, default=str, skipkeys=True).iterencode(raw):
            text += piece
            if len(text) > _MAX_SHOWN_CHARS:  # YAML's aliases can make a value that never ends
                break
    except (ValueError, RecursionError):
        return "a value that contains itself"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."


def plain(value: object) -> str:
    """Write a value as one types it: ``true``, ``5`` for 5.0."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


_URL = re.compile(r"http://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?/?", re.IGNORECASE)


def check_url(text: str) -> str:
    """Return the URL of an endpoint as ``http://HOST:PORT``; ValueError says what is wrong with any other."""
    match = _URL.fullmatch(text)
    if match is None:
        raise ValueError(_url_fault(text))
    host, port = match[1].lower(), int(match[2] or 80)
    if host.startswith("["):
        try:
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
        except ValueError:
            raise ValueError(f"{shown(text)} has no valid IPv6 address between the brackets") from None
    if not 1 <= port <= 65535:
        raise ValueError(f"{shown(text)} has port {port}; write a port from 1 to 65535")
    return f"http://{host}:{port}"


def check_kv_address(text: str) -> str:
    """Return ``IP:PORT``; ValueError says what is wrong with anything else."""
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        is_right = 1 <= int(port) <= 65535
    except ValueError:
        is_right = False
    if not is_right:
        raise ValueError(f"{shown(text)} isn't an address; write IP:PORT")
    return text


def check_weight(text: str) -> str:
    """Return ``NAME=WEIGHT``; ValueError says what is wrong, without the name, which may be a key."""
    name, _, weight = text.rpartition("=")
    try:
        is_right = bool(name) and 0 < float(weight) < float("inf")
    except ValueError:
        is_right = False
    if not is_right:
        raise ValueError("one isn't a weight; write NAME=WEIGHT with a number above 0")
    return text


def _url_fault(text: str) -> str:
    if re.fullmatch(r"(https?://)?[^@]*@[0-9]+/?", text):
        return f"{shown(text)} names a rank; ranks are learned from the engine, write http://HOST:PORT"
    if "@" in text:  # not shown: it may hold a password
        return "the URL carries user info, which isn't sent to engines; write http://HOST:PORT"
    scheme = text.partition("://")[0].lower()
    if scheme in ("https", "grpc", "grpcs"):
        return f"{shown(text)}: {scheme} to engines is not served yet; write http://HOST:PORT"
    try:
        base = f"http://{urlsplit(text).netloc}"
    except ValueError:
        base = ""
    if _URL.fullmatch(base) and text.startswith(base):
        return f"{shown(text)} has a path, query or fragment; write http://HOST:PORT only"
    return f"{shown(text)} is not a URL; write http://HOST:PORT"


def check_host(text: str) -> str:
    """Return the text if an address or host name could look like it."""
    if not re.fullmatch(r"[0-9A-Za-z.:_-]+", text):
        raise ValueError(f"{shown(text)} is not an address or host name")
    return text


def check_origin(text: str) -> str:
    """Return ``*`` or an origin, as browsers write it; ValueError says what is wrong with anything else."""
    origin = text.lower()
    if text != "*" and not re.fullmatch(r"https?://[0-9a-z.:_\[\]-]+", origin):
        raise ValueError(f"{shown(text)} is not an origin; write https://HOST[:PORT], without a path, or *")
    return origin


def check_path(text: str) -> str:
    """Return the text if it is the path of a URL."""
    if not re.fullmatch(r"/[!-~]*", text):
        raise ValueError(f"{shown(text)} is not a path; it starts with / and has no spaces")
    return text


def check_key(text: str) -> str:
    """Return the text if it is a key that a header can carry; ValueError says what is wrong without it."""
    if not is_key(text):
        raise ValueError("a key has visible ASCII characters only, and at least one")
    return text


def is_key(text: str) -> bool:
    """Whether a text can stand behind ``authorization: Bearer``."""
    return re.fullmatch(r"[!-~]+", text) is not None


def check_header(text: str) -> str:
    """Return the name of a header, in lower case."""
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", text):
        raise ValueError(f"{shown(text)} is not a header name")
    return text.lower()


_NOT_FORWARDED = frozenset(
    [
        "connection",
        "content-length",
        "content-type",
        "cookie",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-data-parallel-rank",
        "x-request-id",
    ]
)
"""What ends at the router, or is its own to write."""


def check_forwarded(text: str) -> str:
    """Return the name of a header that may go on to engines, in lower case."""
    name = check_header(text)
    if name in _NOT_FORWARDED:
        raise ValueError(f"{name} ends at the router, or is its own to write")
    return name


def did_you_mean(name: str, known: Mapping[str, object], label: Callable[[str], str]) -> str:
    """Return ``; did you mean X?`` for the known name nearest to a mistyped one, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {label(close[0])}?" if close else ""
