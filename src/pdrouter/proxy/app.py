"""The ASGI entry: routes, limits of the body, and the edge where errors become replies."""

from collections.abc import Callable, Mapping

import structlog

from pdrouter.core.router import Router
from pdrouter.errors import ClientGone, InvariantViolation, MethodNotAllowed, NotFound, PayloadTooLarge, RouterError
from pdrouter.proxy import workers
from pdrouter.proxy.client import Client, Receive, Scope, Send
from pdrouter.proxy.dispatch import Dispatcher
from pdrouter.proxy.ids import Ids
from pdrouter.proxy.intake import Api, Intake
from pdrouter.proxy.replies import JSON_HEADERS, error_body, error_headers
from pdrouter.telemetry.metrics import CONTENT_TYPE, Metrics

Page = Callable[[], tuple[int, bytes, bytes]]
"""A read-only page: status, content type, body."""


class App:
    """Routes a request to the data plane or to a page."""

    def __init__(
        self,
        router: Router,
        intake: Intake,
        dispatcher: Dispatcher,
        metrics: Metrics,
        ids: Ids,
        clock: Callable[[], float],
        max_payload_bytes: int,
    ) -> None:
        self._router = router
        self._intake = intake
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._ids = ids
        self._clock = clock
        self._max_payload_bytes = max_payload_bytes
        self._log = structlog.stdlib.get_logger("pdrouter.app")
        self._apis: Mapping[str, Api] = {api.value: api for api in Api}
        self._pages: Mapping[str, Page] = {
            "/v1/models": lambda: (200, b"application/json", workers.models_page(router)),
            "/workers": lambda: (200, b"application/json", workers.workers_page(router)),
            "/get_loads": lambda: (200, b"application/json", workers.loads_page(router, clock())),
            "/debug/fleet": lambda: (200, b"application/json", workers.fleet_page(router, clock())),
            "/readiness": lambda: _json_page(*workers.readiness_page(router)),
            "/health": lambda: (200, b"text/plain", b"OK"),
            "/liveness": lambda: (200, b"text/plain", b"OK"),
            "/metrics": lambda: (200, CONTENT_TYPE, metrics.render()),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            api = self._apis.get(scope["path"])
            if api is None:
                self._serve_page(scope, Client(scope, send))
            else:
                await self._serve_api(api, scope, receive, Client(scope, send))

    async def _serve_api(self, api: Api, scope: Scope, receive: Receive, client: Client) -> None:
        began_s = self._clock()
        self._metrics.began()
        headers = dict(scope["headers"])
        request_id = self._intake.request_id(headers, api, self._ids.letters)
        try:
            _check_method(scope, "POST")
            body = await _read_body(headers, receive, self._max_payload_bytes)
            facts, inbound = self._intake.read(api, scope["headers"], body, request_id)
            await self._dispatcher.run(facts, inbound, client)
        except RouterError as error:
            self._refuse(client, error, request_id)
        except Exception as error:  # noqa: BLE001
            self._log.exception("internal error", request_id=request_id)
            self._refuse(client, InvariantViolation(f"internal error: {type(error).__name__}"), request_id)
        finally:
            self._metrics.ended(api, client.status or ClientGone.status, self._clock() - began_s)

    def _serve_page(self, scope: Scope, client: Client) -> None:
        try:
            page = self._page(scope["path"])
            _check_method(scope, "GET", "HEAD")
            status, content_type, body = page()
            client.reply(status, [(b"content-type", content_type)], body)
        except RouterError as error:
            client.reply(error.status, error_headers(error), error_body(error))

    def _page(self, path: str) -> Page:
        page = self._pages.get(path)
        if page is None:
            raise NotFound(f"no such path: {path[:256]}")
        return page

    def _refuse(self, client: Client, error: RouterError, request_id: str) -> None:
        self._metrics.failed(error.code)
        if isinstance(error, ClientGone) or client.is_started:
            return
        headers = [*error_headers(error), (b"x-request-id", request_id.encode("latin-1", "replace"))]
        client.reply(error.status, headers, error_body(error))


async def _read_body(headers: Mapping[bytes, bytes], receive: Receive, limit_bytes: int) -> bytes:
    """Read a request's body.

    Raises: PayloadTooLarge as soon as that is known; ClientGone.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise PayloadTooLarge(f"the body of {int(declared)} bytes exceeds {limit_bytes} (max_payload_size)")
    pieces: list[bytes] = []
    total_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone("the client left before its request was whole")
        piece = message.get("body", b"")
        total_bytes += len(piece)
        if total_bytes > limit_bytes:  # I9
            raise PayloadTooLarge(f"the body exceeds {limit_bytes} bytes (max_payload_size)")
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _check_method(scope: Scope, *allowed: str) -> None:
    if scope["method"] not in allowed:
        raise MethodNotAllowed(f"{scope['path']} takes {' and '.join(allowed)}", param=", ".join(allowed))


def _json_page(status: int, body: bytes) -> tuple[int, bytes, bytes]:
    return status, JSON_HEADERS[0][1], body
