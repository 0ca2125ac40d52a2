"""The application: routes requests to the data plane or to a page, and turns errors into replies."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pdrouter.core.request import RequestFacts
from pdrouter.engines.base import Inbound
from pdrouter.errors import ClientGone, MethodNotAllowed, NotFound, RouterError
from pdrouter.proxy import openapi, workers
from pdrouter.proxy.client import Client
from pdrouter.proxy.cors import Cors
from pdrouter.proxy.dispatch import Dispatcher
from pdrouter.proxy.edge import attempt
from pdrouter.proxy.fleet_api import FleetApi
from pdrouter.proxy.head import check_encoding
from pdrouter.proxy.intake import Api, Intake
from pdrouter.proxy.limits import Clients
from pdrouter.proxy.rates import Rates
from pdrouter.proxy.reading import Reading
from pdrouter.proxy.replies import JSON_HEADERS, error_body, error_headers
from pdrouter.proxy.tokenizer import Counter
from pdrouter.telemetry.metrics import CONTENT_TYPE

_STORY = b"/debug/story/"
_MODEL = b"/v1/models/"

Page = Callable[[], tuple[int, bytes, bytes]]
"""A read-only page: status, content type, body."""


class App:
    """Routes a request to the data plane or to a page."""

    def __init__(
        self,
        intake: Intake,
        dispatcher: Dispatcher,
        clients: Clients,
        rates: Rates | None,
        counter: Counter | None,
        fleet_api: FleetApi,
        cors: Cors | None,
        *,
        needs_all_models: bool,
    ) -> None:
        """Serve pages and the inference paths; ``needs_all_models``: to be ready, see ``readiness_page``."""
        self._needs_all_models = needs_all_models
        self.clients = clients
        self.dying: Callable[[], Sequence[str]] = tuple  # names of loops that can't be kept alive
        self._access = fleet_api.access
        self._cors = cors
        self._fleet_api = fleet_api
        self._rates = rates
        self._counter = counter
        router = self._router = dispatcher.router
        self._intake = intake
        self._dispatcher = dispatcher
        metrics = self._metrics = dispatcher.metrics
        self._ids = dispatcher.ids
        clock = self._clock = dispatcher.clock
        self._models = workers.ModelPages(router)
        self._apis: Mapping[bytes, Api] = {api.value.encode(): api for api in Api}
        self._pages: Mapping[bytes, Page] = {
            b"/v1/models": lambda: _json_page(200, self._models.all()),
            b"/workers": lambda: (200, b"application/json", workers.workers_page(router)),
            b"/get_loads": lambda: (200, b"application/json", workers.loads_page(router, clock())),
            b"/debug/fleet": lambda: (200, b"application/json", workers.fleet_page(router, clock())),
            b"/readiness": lambda: _json_page(*self._readiness()),
            b"/health": lambda: (200, b"text/plain", b"OK"),
            b"/liveness": lambda: _liveness(self.dying()),
            b"/ping": lambda: (200, b"text/plain", b"OK"),
            b"/version": lambda: _json_page(200, workers.version_page()),
            b"/metrics": lambda: (200, CONTENT_TYPE, metrics.render()),
            b"/openapi.json": lambda: _json_page(200, openapi.page()),
        }

    def opened(self, client: Client) -> bool:
        """Take note of a request's head; return whether its body will be read.

        Raises: RouterError if the head is enough to refuse it.
        """
        if self._cors is not None:
            self._cors.allow(client)
        if client.path not in self._apis and client.path.endswith(b"/") and len(client.path) > 1:
            client.path = client.path[:-1]
        if self._is_preflight(client):
            return False
        if client.path not in self._apis:
            return self._fleet_api.opened(client)
        self._metrics.began()
        self._access.check_key(client.header)
        check_encoding(client.header)
        return client.method == b"POST"

    def __call__(self, client: Client) -> None:
        """Serve a request; the reply of an inference path comes later."""
        api = self._apis.get(client.path)
        if api is not None and not self._is_preflight(client):
            self._serve_api(api, client)
            return
        error = attempt(self._serve_page, client)
        if error is not None and not isinstance(error, ClientGone):
            client.reply(error.status, error_headers(error), error_body(error))

    def _serve_api(self, api: Api, client: Client) -> None:
        request_id = self._intake.request_id(client.header, api, self._ids.letters)
        error = attempt(self._start, api, client, request_id)
        if error is not None:
            self._ended(client, api, request_id, error)

    def _start(self, api: Api, client: Client, request_id: str) -> None:
        if client.error is not None:
            raise client.error
        if client.method != b"POST":
            raise _not_allowed(api, "POST")
        body = client.body()
        if self._intake.takes_long(body):
            self._intake.read_later(api, client, body, partial(self._was_read, api, client, request_id))
        else:
            self._go_on(api, client, *self._intake.read(api, client.headers, body, request_id))

    def _was_read(self, api: Api, client: Client, request_id: str, reading: "asyncio.Future[Reading] | None") -> None:
        """Go on with a request whose body was read in a thread."""
        error: RouterError | None = ClientGone("the client left while its body was read")
        if reading is not None:
            error = attempt(self._place, api, client, request_id, reading)
        if error is not None:
            self._ended(client, api, request_id, error)

    def _place(self, api: Api, client: Client, request_id: str, reading: "asyncio.Future[Reading]") -> None:
        self._go_on(api, client, *self._intake.place(reading.result(), client.headers, request_id))

    def _go_on(self, api: Api, client: Client, facts: RequestFacts, inbound: Inbound) -> None:
        if self._rates is not None:
            self._rates.take(client.header, facts)
        if self._router.fleet.splits(facts):
            facts, inbound = self._dispatcher.split(facts, inbound, partial(self._intake.read, api, client.headers))
        go_on = partial(self._counted, inbound, client)
        if self._counter is None or not self._counter.count(facts, api, inbound.body, client, go_on):
            self._dispatcher.start(facts, inbound, client, self._ended)

    def _counted(self, inbound: Inbound, client: Client, facts: RequestFacts | None) -> None:
        """Go on with a request whose prompt was counted; without facts its client has left."""
        error: RouterError | None = ClientGone("the client left while its prompt was counted")
        if facts is not None:
            error = attempt(self._dispatcher.start, facts, inbound, client, self._ended)
        if error is not None:
            self._ended(client, inbound.path, inbound.request_id, error)

    def _ended(self, client: Client, api: str, request_id: str, error: RouterError | None) -> None:
        """Answer with an error if one is left, and take note of the end."""
        if error is not None:
            self._metrics.failed(error.code)
            if not client.is_started and not isinstance(error, ClientGone):
                headers = [*error_headers(error), (b"x-request-id", request_id.encode("latin-1", "replace"))]
                client.reply(error.status, headers, error_body(error, api))
        self._metrics.ended(api, client.status or ClientGone.status, self._clock() - client.began_s)

    def _is_preflight(self, client: Client) -> bool:
        return self._cors is not None and self._cors.is_preflight(client)

    def _serve_page(self, client: Client) -> None:
        if self._cors is not None and client.error is None and self._cors.is_preflight(client):
            self._cors.reply(client)
            return
        if self._fleet_api.serve(client):
            return
        if client.error is not None:
            raise client.error
        path = client.path.decode("latin-1")
        page = self._pages.get(client.path)
        if client.path.startswith(_STORY):
            page = partial(self._story, client.path.removeprefix(_STORY))
        elif client.path.startswith(_MODEL):
            page = partial(self._model, client.path.removeprefix(_MODEL))
        if page is None:
            raise NotFound(f"no such path: {path[:256]}")
        if client.method not in (b"GET", b"HEAD"):
            raise _not_allowed(path, "GET", "HEAD")
        status, content_type, body = page()
        client.reply(status, [(b"content-type", content_type)], body)

    def _readiness(self) -> tuple[int, bytes]:
        is_draining = self.clients.is_draining
        return workers.readiness_page(self._router, is_draining=is_draining, needs_all=self._needs_all_models)

    def _story(self, quoted_id: bytes) -> tuple[int, bytes, bytes]:
        return 200, b"application/json", workers.story_page(self._router, quoted_id, self._clock())

    def _model(self, quoted_id: bytes) -> tuple[int, bytes, bytes]:
        return _json_page(200, self._models.one(quoted_id))


def _not_allowed(path: str, *allowed: str) -> MethodNotAllowed:
    return MethodNotAllowed(f"{path} takes {' and '.join(allowed)}", param=", ".join(allowed))


def _liveness(dying: Sequence[str]) -> tuple[int, bytes, bytes]:
    if dying:
        return 503, b"text/plain", f"these loops die again and again: {', '.join(dying)}".encode()
    return 200, b"text/plain", b"OK"


def _json_page(status: int, body: bytes) -> tuple[int, bytes, bytes]:
    return status, JSON_HEADERS[0][1], body
