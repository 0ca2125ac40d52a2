"""The API by which the fleet is changed, in the shape of sglang-router's: ``/workers``, and the older paths.

It turns requests into calls and results into replies; who belongs to the fleet is the control plane's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl, quote, unquote

import msgspec

from pdrouter.core.events import EndpointRestarted
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.router import Router
from pdrouter.errors import InvalidJson, InvalidRequest, InvariantViolation, MethodNotAllowed, NoReadyPair, RouterError
from pdrouter.proxy import workers
from pdrouter.proxy.access import Access
from pdrouter.proxy.client import Client
from pdrouter.proxy.edge import attempt
from pdrouter.proxy.head import check_encoding
from pdrouter.proxy.pages import Accepted, Flushed, Generating, NotFlushed, Refusal, Urls
from pdrouter.proxy.redaction import without_keys
from pdrouter.proxy.replies import JSON_HEADERS, error_headers

_WORKERS = b"/workers"
_WORKER = b"/workers/"

_NAMES: Mapping[str, str] = {"model_id": "model"}
_WITHOUT_EFFECT = frozenset({"priority", "cost", "labels"})
_CODES: Mapping[int, str] = {400: "BAD_REQUEST", 401: "UNAUTHORIZED", 405: "METHOD_NOT_ALLOWED"}

_GET = (b"GET", b"HEAD")
_POST = (b"POST",)

Given = bool | int | float | str | dict[str, str] | None
"""What a body may say of an endpoint; deeper than this nothing is nested."""

WORKER_NOT_FOUND = "WORKER_NOT_FOUND"

_ASK_TIMEOUT_S = 10.0
"""Time for an engine's answer; chosen."""

_GENERATE_TIMEOUT_S = 30.0
"""Time for a token. Source: SGLang waits for 20 s (``SGLANG_HEALTH_CHECK_TIMEOUT``) before it says no."""


class Changes(Protocol):
    """What can be changed; each raises InvalidRequest."""

    def add(self, worker_type: str, fields: Mapping[str, object]) -> str:
        """Let an endpoint join; return its address."""
        ...

    def change(self, address: str, fields: Mapping[str, object]) -> None:
        """Say something else of an endpoint."""

    def set_draining(self, address: str, *, is_draining: bool) -> None:
        """Give an endpoint nothing new, or again."""

    def remove(self, address: str) -> None:
        """Let an endpoint go."""


class Doors(NamedTuple):
    """Ways out of here: to change the fleet, to ask an engine (method, endpoint, path, time), to do so meanwhile.

    The last argument of ``spawn`` is called if what was to be done fails.
    """

    changes: Changes
    ask: Callable[[str, Endpoint, str, float], Awaitable[tuple[int, bytes]]]
    spawn: Callable[[str, Callable[[], Awaitable[None]], Callable[[], None]], object]


class _Waiting:
    """A client whose reply comes later, if it is still there then."""

    def __init__(self, client: Client) -> None:
        self._client: Client | None = client
        client.listener = self

    def client_drained(self) -> None:
        """One reply is no stream."""

    def client_gone(self) -> None:
        """Nobody waits any more."""
        self._client = None

    def reply(self, status: int, body: bytes) -> None:
        """Answer."""
        client, self._client = self._client, None
        if client is not None:
            client.listener = None
            client.reply(status, JSON_HEADERS, body)


class FleetApi:
    """Serves the paths that change the fleet, or ask its engines.

    With an ``api_key`` only those may do more than read pages who bring it along.
    """

    def __init__(self, router: Router, clock: Callable[[], float], doors: Doors, access: Access) -> None:
        self._router = router
        self._clock = clock
        self._doors = doors
        self.access = access
        self._paths: Mapping[bytes, tuple[tuple[bytes, ...], Callable[[Client], None]]] = {
            b"/add_worker": (_POST, self._add_by_query),
            b"/remove_worker": (_POST, self._remove_by_query),
            b"/list_workers": (_GET, self._list),
            b"/flush_cache": (_POST, self._flush),
            b"/get_server_info": (_GET, partial(self._pass_on, "/get_server_info")),
            b"/server_info": (_GET, partial(self._pass_on, "/server_info")),
            b"/get_model_info": (_GET, partial(self._pass_on, "/get_model_info")),
            b"/model_info": (_GET, partial(self._pass_on, "/model_info")),
            b"/health_generate": (_GET, self._generate),
        }

    def opened(self, client: Client) -> bool:
        """Take a request's head; return whether its body is needed.

        Raises: RouterError.
        """
        if client.method not in _GET and self._action(client) is not None:
            self.access.check_change(client)
        is_adding = client.path == _WORKERS and client.method == b"POST"
        return is_adding or (client.path.startswith(_WORKER) and client.method == b"PUT")

    def serve(self, client: Client) -> bool:
        """Serve a request, if it is one of these."""
        action = self._action(client)
        if action is None:
            return False
        error = attempt(self._act, client, action)
        if error is not None:
            _refuse(client, error)
        return True

    def _action(self, client: Client) -> Callable[[Client], None] | None:
        if client.path == _WORKERS and client.method not in _GET:
            return self._add if client.method == b"POST" else partial(_not_allowed, (*_GET, *_POST))
        if client.path.startswith(_WORKER):
            return self._one
        known = self._paths.get(client.path)
        if known is None:
            return None
        methods, action = known
        return action if client.method in methods else partial(_not_allowed, methods)

    def _act(self, client: Client, action: Callable[[Client], None]) -> None:
        if client.error is not None:
            raise client.error
        action(client)

    # One worker.

    def _add(self, client: Client) -> None:
        fields = _fields(client)
        worker_type = str(fields.pop("worker_type", "regular"))
        if worker_type != "prefill" and fields.get("bootstrap_port") is None:
            fields.pop("bootstrap_port", None)  # null stands for all that have none
        self._reply_added(client, self._doors.changes.add(worker_type, fields))

    def _one(self, client: Client) -> None:
        address = _address(unquote(client.path.removeprefix(_WORKER).decode("latin-1")))
        endpoint = self._router.fleet.get(address)
        if endpoint is None:
            _reply(client, 404, _no_worker(address))
        elif client.method in _GET:
            _reply(client, 200, workers.worker_of(self._router, endpoint))
        elif client.method == b"PUT":
            self._change(client, address)
        elif client.method == b"DELETE":
            self._doors.changes.remove(address)
            _reply_accepted(client, address, "it takes nothing new and leaves when its requests have ended")
        else:
            _not_allowed((*_GET, b"PUT", b"DELETE"), client)

    def _change(self, client: Client, address: str) -> None:
        fields = _fields(client)
        is_draining = fields.pop("draining", None)
        if not isinstance(is_draining, bool | None):
            raise InvalidRequest("draining: write true or false")
        if fields:
            self._doors.changes.change(address, fields)
        if is_draining is not None:
            self._doors.changes.set_draining(address, is_draining=is_draining)
        _reply_accepted(client, address, "changed")

    def _reply_added(self, client: Client, address: str) -> None:
        _reply_accepted(client, address, "it takes requests once it was reached")

    # The older paths.

    def _add_by_query(self, client: Client) -> None:
        fields: dict[str, object] = dict(parse_qsl(client.query.decode("latin-1")))
        worker_type = fields.pop("worker_type", "regular")
        self._reply_added(client, self._doors.changes.add(str(worker_type), fields))

    def _remove_by_query(self, client: Client) -> None:
        address = _address(dict(parse_qsl(client.query.decode("latin-1"))).get("url", ""))
        if self._router.fleet.get(address) is None:
            _reply(client, 404, _no_worker(address))
            return
        self._doors.changes.remove(address)
        _reply_accepted(client, address, "it takes nothing new and leaves when its requests have ended")

    def _list(self, client: Client) -> None:
        _reply(client, 200, Urls([endpoint.url for endpoint in self._router.fleet]))

    # What engines are asked.

    def _flush(self, client: Client) -> None:
        self._do_meanwhile("flush", self._flush_all, client)

    def _do_meanwhile(self, name: str, do: Callable[[_Waiting], Awaitable[None]], client: Client) -> None:
        waiting = _Waiting(client)
        error = InvariantViolation(f"internal error: {name} failed")
        self._doors.spawn(name, partial(do, waiting), partial(waiting.reply, error.status, _error(error)))

    async def _flush_all(self, waiting: _Waiting) -> None:
        endpoints = list(self._router.fleet)
        problems = await asyncio.gather(*map(self._flush_one, endpoints))
        failed = [NotFlushed(e.url, p) for e, p in zip(endpoints, problems, strict=True) if p is not None]
        flushed = [e.url for e, p in zip(endpoints, problems, strict=True) if p is None]
        told = Flushed("partial_success" if failed else "success", len(endpoints), flushed, failed)
        waiting.reply(206 if failed else 200, msgspec.json.encode(told))

    async def _flush_one(self, endpoint: Endpoint) -> str | None:
        try:
            status, _ = await self._doors.ask("POST", endpoint, "/flush_cache", _ASK_TIMEOUT_S)
        except RouterError as error:
            return error.message
        if status >= 400:
            return f"it answered {status}"
        self._router.observe(EndpointRestarted(endpoint.address), self._clock())
        return None

    def _pass_on(self, path: str, client: Client) -> None:
        ready = [endpoint for endpoint in self._router.fleet if self._router.fleet.is_ready(endpoint.address)]
        if not ready:
            raise NoReadyPair(self._router.why_nobody(None))
        self._do_meanwhile(f"ask for {path}", partial(self._ask_one, ready[0], path), client)

    async def _ask_one(self, endpoint: Endpoint, path: str, waiting: _Waiting) -> None:
        try:
            status, body = await self._doors.ask("GET", endpoint, path, _ASK_TIMEOUT_S)
            body = without_keys(body, endpoint.api_key)
        except RouterError as error:
            status, body = error.status, _error(error)
        waiting.reply(status, body)

    def _generate(self, client: Client) -> None:
        """Let a pair generate a token, or a regular endpoint: the first that are ready."""
        endpoints = self._ready_endpoints()
        if not endpoints:
            raise NoReadyPair(self._router.why_nobody(None))
        self._do_meanwhile("generate", partial(self._generate_on, endpoints), client)

    def _ready_endpoints(self) -> Sequence[Endpoint]:
        fleet = self._router.fleet
        ready = [endpoint for endpoint in fleet if fleet.is_ready(endpoint.address)]
        decodes = [endpoint for endpoint in ready if endpoint.role is Role.DECODE]
        for prefill in (endpoint for endpoint in ready if endpoint.role is Role.PREFILL):
            decode = next((endpoint for endpoint in decodes if prefill.pairs_with(endpoint)), None)
            if decode is not None:
                return prefill, decode
        return [endpoint for endpoint in ready if endpoint.role is Role.REGULAR][:1]

    async def _generate_on(self, endpoints: Sequence[Endpoint], waiting: _Waiting) -> None:
        problems = await asyncio.gather(*map(self._generate_one, endpoints))
        failed = [f"{e.address}: {p}" for e, p in zip(endpoints, problems, strict=True) if p is not None]
        if failed:
            waiting.reply(503, _error(NoReadyPair("; ".join(failed))))
        else:
            waiting.reply(200, msgspec.json.encode(Generating("ok", [e.url for e in endpoints])))

    async def _generate_one(self, endpoint: Endpoint) -> str | None:
        """Return what was wrong; an engine without the page is asked for its health."""
        try:
            status, _ = await self._doors.ask("GET", endpoint, "/health_generate", _GENERATE_TIMEOUT_S)
            if status == 404:
                status, _ = await self._doors.ask("GET", endpoint, "/health", _ASK_TIMEOUT_S)
        except RouterError as error:
            return error.message
        return None if status < 400 else f"it answered {status}"


def _fields(client: Client) -> dict[str, Given]:
    """Return what a body says of an endpoint, by the names of the settings."""
    check_encoding(client.header)
    try:
        given = msgspec.json.decode(client.body(), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body isn't a JSON object: {error}") from error
    fields = {name: _given(name, raw) for name, raw in given.items() if name not in _WITHOUT_EFFECT}
    return {
        _NAMES.get(name, name): value for name, value in fields.items() if value is not None or name == "bootstrap_port"
    }


def _given(name: str, raw: msgspec.Raw) -> Given:
    try:
        return msgspec.json.decode(raw, type=Given)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name[:256]}: {error}") from error


def _address(text: str) -> str:
    return text.removeprefix("http://").rstrip("/")


def _reply(client: Client, status: int, body: object) -> None:
    client.reply(status, JSON_HEADERS, msgspec.json.encode(body))


def _reply_accepted(client: Client, address: str, message: str) -> None:
    path = f"/workers/{quote(address, safe=':')}"
    told = Accepted("accepted", address, f"http://{address}", path, message)
    headers = [*JSON_HEADERS, (b"location", path.encode())]
    client.reply(202, headers, msgspec.json.encode(told))


def _no_worker(address: str) -> Refusal:
    return Refusal(f"there is no worker {address[:256]}", WORKER_NOT_FOUND)


def _not_allowed(methods: tuple[bytes, ...], client: Client) -> None:
    path, allowed = client.path.decode("latin-1"), b", ".join(methods).decode()
    raise MethodNotAllowed(f"{path[:256]} takes {allowed}", param=allowed)


def code_of(error: RouterError | type[RouterError]) -> str:
    """Return a failure's code as this API writes it."""
    return _CODES.get(error.status, error.code.upper())


def _error(error: RouterError) -> bytes:
    return msgspec.json.encode(Refusal(error.message, code_of(error)))


def _refuse(client: Client, error: RouterError) -> None:
    client.reply(error.status, error_headers(error), _error(error))
