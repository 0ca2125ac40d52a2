"""The OpenAPI document of the router's own API, made of the paths, structs and errors that the router itself uses.

It knows no router: the document is the same for all. What an engine answers is passed on and not described here.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache

import msgspec
from msgspec import Struct

from pdrouter import __version__, errors
from pdrouter.config import EndpointSettings
from pdrouter.core.story import Stories
from pdrouter.errors import (
    ClientGone,
    ConnectFailed,
    CrossSite,
    ExpectationFailed,
    HeadTooLarge,
    HostNotAllowed,
    HttpVersionNotSupported,
    InvalidHttp,
    InvalidJson,
    InvalidRequest,
    InvariantViolation,
    KeyNeeded,
    MethodNotAllowed,
    ModelNotFound,
    NoReadyPair,
    NotFound,
    NotImplementedHere,
    NotSupported,
    PayloadTooLarge,
    PoolExhausted,
    RouterError,
    SenderTimeout,
    TargetTooLong,
    Unauthorized,
    UnknownRequest,
    UpstreamClosed,
    UpstreamProtocol,
    UpstreamTimeout,
)
from pdrouter.proxy import pages
from pdrouter.proxy.bodies import TASKS, Api, body_type
from pdrouter.proxy.fleet_api import WORKER_NOT_FOUND, code_of
from pdrouter.proxy.pages import AnthropicError, ErrorReply, Refusal
from pdrouter.proxy.replies import ANTHROPIC

Part = dict[str, object]
"""A piece of the document."""

Errors = Collection[type[RouterError]]

_ABOUT = """\
Paths that the router serves itself, and those whose requests it passes on to engines: their bodies go through as they
are, and of them only what the router reads is described; so do engines' answers and errors.

`code` in an error is stable. Bytes from which no path can be read are refused in OpenAI's shape, as are connections
beyond the limit; any other path is `not_found`."""

_FRONT = (
    InvalidHttp,
    MethodNotAllowed,
    SenderTimeout,
    PayloadTooLarge,
    TargetTooLong,
    ExpectationFailed,
    HeadTooLarge,
    InvariantViolation,
    NotImplementedHere,
    HttpVersionNotSupported,
)
"""What any path may answer."""

_CHANGE = (Unauthorized, CrossSite, HostNotAllowed, KeyNeeded, InvalidRequest)
_BODY = (*_CHANGE, InvalidJson)
_ASK = (NoReadyPair, NotSupported, PoolExhausted, ConnectFailed, UpstreamClosed, UpstreamProtocol, UpstreamTimeout)
_ELSEWHERE = (NotFound, UnknownRequest, ClientGone, CrossSite, HostNotAllowed, KeyNeeded)
"""What no inference path answers; with ClientGone nobody is there to read it."""

_CODES: Mapping[type[Struct], Callable[[type[RouterError]], str]] = {
    ErrorReply: lambda kind: kind.code,
    Refusal: code_of,
}
"""How each shape writes codes."""

_WITH_KEY: Sequence[Part] = ({}, {"key": ()}, {"x_api_key": ()})
_SECRET: Mapping[str, object] = {"type": "string", "format": "password"}
_NO_MORE: Mapping[str, Part] = {}

_FORMS = frozenset((Api.TRANSCRIPTIONS, Api.TRANSLATIONS, Api.IMAGE_EDITS, Api.IMAGE_VARIATIONS))

_HEADERS: Mapping[str, tuple[str, Part]] = {
    "x-request-id": ("The request's id, of up to 256 characters; other headers may be configured.", {"type": "string"}),
    "x-request-timeout-ms": ("Milliseconds for all of the request.", {"type": "integer", "minimum": 1}),
    "x-data-parallel-rank": ("The rank to use.", {"type": "integer", "minimum": 0, "maximum": 999_999_999}),
}


@cache
def page() -> bytes:
    """Return ``GET /openapi.json``."""
    return msgspec.json.encode(document())


def document() -> Part:
    """Return the document, of OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdrouter", "version": __version__, "description": _ABOUT},
        "paths": _read_only() | _fleet() | {api.value: {"post": _inference(api)} for api in Api},
        "components": {
            "schemas": _schemas(),
            "responses": _responses(),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Needed with api_key."},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
    }


def _schemas() -> Part:
    structs = {body_type(api) for api in Api} | {Stories}
    structs |= {value for value in vars(pages).values() if isinstance(value, type) and issubclass(value, Struct)}
    by_name = sorted(structs - {Struct, EndpointSettings}, key=lambda struct: struct.__name__)
    _, schemas = msgspec.json.schema_components(
        by_name, schema_hook=lambda _: dict(_SECRET), ref_template="#/components/schemas/{name}"
    )
    del schemas["NewWorker"]["properties"]["api_key_file"]  # the settings' only
    fields = schemas["NewWorker"]["properties"] | {"draining": {"type": ["boolean", "null"]}}
    del fields["worker_type"]
    changed = {"description": "What is to be changed of an endpoint; draining: whether it gets nothing new."}
    schemas["ChangedWorker"] = changed | {"type": "object", "properties": fields, "additionalProperties": False}
    return schemas


def _responses() -> Part:
    """Return what many paths answer: any path of the router's own, and each inference path by status."""
    front = {shape: sorted({code(kind) for kind in _FRONT}) for shape, code in _CODES.items()}
    told: Part = {shape.__name__: _reply("Refused.", _failure(shape, codes)) for shape, codes in front.items()}
    for shape in (ErrorReply, AnthropicError):
        for status, codes in _by_status([(kind.status, kind.code) for kind in _inference_errors()]).items():
            either = {"application/json": {"schema": {"anyOf": [_failure(shape, codes), {}]}}, "*/*": {}}
            told[shape.__name__ + status] = {
                "description": f"{', '.join(codes)}; or the engine's own.",
                "content": either,
            }
    return told


def _inference_errors() -> list[type[RouterError]]:
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RouterError)]
    return [kind for kind in kinds if kind not in _ELSEWHERE]


# The paths.


def _read_only() -> Part:
    not_ready = {"503": _reply("Too few models can be served, or the router stops.", _ref(pages.NotReady))}
    dying = {"503": _reply("A loop of the control plane can't be kept alive.", {"type": "string"}, "text/plain")}
    unknown = {"404": _failed(ErrorReply, [UnknownRequest.code])}
    story = _get("All that is known of a request's lives.", _ref(Stories), unknown)
    return {
        "/v1/models": {"get": _get("The models that are served.", _ref(pages.Models))},
        "/v1/models/{model_id}": {
            "get": _get("One model.", _ref(pages.Model), {"404": _failed(ErrorReply, [ModelNotFound.code])}),
            "parameters": [_parameter("model_id", "path")],
        },
        "/get_loads": {"get": _get("The load of every endpoint.", _ref(pages.Loads))},
        "/debug/fleet": {"get": _get("Every rank's load, as reported, held and judged.", _ref(pages.Fleet))},
        "/debug/story/{request_id}": {"get": story, "parameters": [_parameter("request_id", "path")]},
        "/readiness": {"get": _get("Whether models can be served, and which.", _ref(pages.Ready), not_ready)},
        "/health": {"get": _get("Whether the router runs.", {"type": "string"}, media="text/plain")},
        "/liveness": {"get": _get("Whether the router runs.", {"type": "string"}, dying, media="text/plain")},
        "/ping": {"get": _get("Whether the router runs.", {"type": "string"}, media="text/plain")},
        "/version": {"get": _get("The router's version.", _ref(pages.Version))},
        "/metrics": {"get": _get("Metrics for Prometheus.", {"type": "string"}, media="text/plain")},
        "/openapi.json": {"get": _get("This document.", {"type": "object"})},
    }


def _fleet() -> Part:
    location: Part = {"headers": {"location": {"required": True, "schema": {"type": "string"}}}}
    accepted = {"202": _reply("It takes effect soon.", _ref(pages.Accepted)) | location}
    flushes = {
        "200": _reply("All were flushed.", _ref(pages.Flushed)),
        "206": _reply("Some weren't.", _ref(pages.Flushed)),
    }
    engines = {status: _reply("The engine's own answer.", {}) for status in ("200", "4XX", "5XX")}
    generates = {"200": _reply("A pair did, or a regular endpoint.", _ref(pages.Generating))}
    url = _parameter("url", "query")
    role = _parameter("worker_type", "query") | {"required": False}
    by_query = _operation("Add an endpoint.", accepted, _CHANGE)
    new, changed = _body(_ref(pages.NewWorker)), _body({"$ref": "#/components/schemas/ChangedWorker"})
    one = {"200": _reply("Done.", _ref(pages.Worker))}
    return {
        "/workers": {
            "get": _get("All endpoints.", _ref(pages.Workers)),
            "post": _operation("Add an endpoint.", accepted, _BODY) | new,
        },
        "/workers/{worker_id}": {
            "parameters": [_parameter("worker_id", "path")],
            "get": _operation("One endpoint.", one, is_known=False),
            "put": _operation("Change an endpoint.", accepted, _BODY, is_known=False) | changed,
            "delete": _operation("Drain an endpoint and let it go.", accepted, _CHANGE, is_known=False),
        },
        "/add_worker": {"post": by_query | {"parameters": [url, role]}},
        "/remove_worker": {
            "post": _operation("Let an endpoint go.", accepted, _CHANGE, is_known=False) | {"parameters": [url]}
        },
        "/list_workers": {"get": _operation("All URLs.", {"200": _reply("Done.", _ref(pages.Urls))})},
        "/flush_cache": {"post": _operation("Flush the caches of all engines.", flushes, _CHANGE)},
        "/server_info": {"get": _operation("What an engine says.", engines, _ASK)},
        "/get_server_info": {"get": _operation("What an engine says.", engines, _ASK)},
        "/health_generate": {"get": _operation("Whether engines generate a token.", generates, _ASK)},
        "/model_info": {"get": _operation("What an engine says of its model.", engines, _ASK)},
        "/get_model_info": {"get": _operation("What an engine says of its model.", engines, _ASK)},
    }


def _inference(api: Api) -> Part:
    """Return the operation of an inference path, where an engine may answer anything."""
    shape = AnthropicError if api in ANTHROPIC else ErrorReply
    engines = {"description": "The engine's own answer.", "content": {"*/*": {}}}
    failed = {str(kind.status): _shared(shape.__name__ + str(kind.status)) for kind in _inference_errors()}
    form = "multipart/form-data" if api in _FORMS else "application/json"
    return {
        "summary": "Generate." if api in TASKS else "Pass on to one engine.",
        "parameters": [
            {"name": name, "in": "header", "description": text, "schema": schema}
            for name, (text, schema) in _HEADERS.items()
        ],
        **_body(_ref(body_type(api)), form),
        "responses": {"200": engines, "4XX": engines, "5XX": engines, **failed},
        "security": _WITH_KEY,
    }


# Their parts.


def _get(
    summary: str,
    schema: Part,
    more: Mapping[str, Part] = _NO_MORE,
    *,
    media: str = "application/json",
) -> Part:
    """Return the operation of a read-only page, whose errors have OpenAI's shape."""
    return {
        "summary": summary,
        "responses": {"200": _reply("Done.", schema, media), **more, "default": _shared("ErrorReply")},
    }


def _operation(summary: str, replies: Mapping[str, Part], kinds: Errors = (), *, is_known: bool = True) -> Part:
    """Return an operation of the workers API, whose errors have its own shape; ``is_known``: whoever is asked for."""
    coded = [(kind.status, code_of(kind)) for kind in kinds] + ([] if is_known else [(404, WORKER_NOT_FOUND)])
    failed = {status: _failed(Refusal, codes) for status, codes in _by_status(coded).items()}
    responses = {**replies, **failed, "default": _shared("Refusal")}
    is_locked = Unauthorized in kinds
    return {"summary": summary, "responses": responses} | ({"security": _WITH_KEY} if is_locked else {})


def _failed(shape: type[Struct], codes: list[str]) -> Part:
    return _reply(", ".join(codes), _failure(shape, codes))


def _shared(name: str) -> Part:
    return {"$ref": f"#/components/responses/{name}"}


def _by_status(coded: Iterable[tuple[int, str]]) -> Mapping[str, list[str]]:
    """Return the codes of each status, once each."""
    codes: dict[str, list[str]] = {}
    for status, code in sorted(set(coded)):
        codes.setdefault(str(status), []).append(code)
    return codes


def _failure(shape: type[Struct], codes: list[str]) -> Part:
    """Return the schema of an error of a shape with one of these codes."""
    code: Part = {"properties": {"code": {"enum": codes}}}
    return {"allOf": [_ref(shape), code if shape is Refusal else {"properties": {"error": code}}]}


def _ref(struct: type[Struct]) -> Part:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def _reply(description: str, schema: Part, media: str = "application/json") -> Part:
    return {"description": description, "content": {media: {"schema": schema}}}


def _body(schema: Part, media: str = "application/json") -> Part:
    return {"requestBody": {"required": True, "content": {media: {"schema": schema}}}}


def _parameter(name: str, place: str) -> Part:
    return {"name": name, "in": place, "required": True, "schema": {"type": "string"}}
