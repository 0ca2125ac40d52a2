"""From a body to a Reading: what it says, whatever the fleet. It may run in any thread (``offload.py``).

It knows no core and no headers but the content's type. Read next: ``bodies.py`` for what is declared, ``prompts.py``
for how prompts are sized.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from pdrouter.core.request import PAIRED, Task
from pdrouter.core.tokens import TextShape
from pdrouter.proxy.bodies import TASKS, AnyBody, Api, Whole, batch_size, decode, decode_whole
from pdrouter.proxy.bounds import exceeds
from pdrouter.proxy.forms import form_fields
from pdrouter.proxy.prompts import Prompt, read_prompt

MAX_INLINE_OBJECTS = 2048
"""Objects in a body that is read in the event loop; chosen: 3 ms at worst (tests/properties/test_reading.py)."""

_OTHER = Task.OTHER
_JSON = b"application/json"
_FORM_FIELDS = frozenset((b"model", b"stream"))


class ReadingOptions(Struct, frozen=True):
    """Settings of the reading; ``config.py`` says what they mean."""

    inline_bytes: int
    image_tokens: int
    prefix_block_bytes: int


class Reading(Struct, frozen=True):
    """What a body says; a body without a ``prompt`` goes to one engine as it is.

    ``shape`` is that of its text, ``blocks`` are what is compared with other prompts.
    """

    api: Api
    task: Task
    body: bytes
    told: AnyBody | Whole
    shape: TextShape | None
    content_type: bytes
    prompt: Prompt | None = None
    batch: int | None = None
    blocks: Sequence[memoryview] = ()


def takes_long(body: bytes, options: ReadingOptions) -> bool:
    """Whether reading a body would stop the event loop for more than some 5 ms: by its length, or its objects."""
    return len(body) > options.inline_bytes or exceeds(body, b"{", MAX_INLINE_OBJECTS)


def read_body(api: Api, headers: Iterable[tuple[bytes, bytes]], body: bytes, options: ReadingOptions) -> Reading:
    """Read a body once; only declared fields are decoded.

    Raises: InvalidJson, InvalidRequest.
    """
    task = TASKS.get(api, _OTHER)
    if task not in PAIRED:
        content_type = next((value for name, value in headers if name == b"content-type"), _JSON)
        return _read_whole(api, task, content_type, body)
    told = decode(api, body)
    prompt = read_prompt(told, options.image_tokens)
    batch = batch_size(told, prompt.samples)
    shape = TextShape.of(prompt.text) if prompt.text else None
    blocks = prompt.blocks(options.prefix_block_bytes) if batch in (None, 1) else ()
    return Reading(api, task, body, told, shape, _JSON, prompt, batch, blocks)


def _read_whole(api: Api, task: Task, content_type: bytes, body: bytes) -> Reading:
    if content_type.lower().startswith(b"multipart/"):
        fields = form_fields(content_type, body, _FORM_FIELDS)
        told = Whole(fields.get(b"model"), fields.get(b"stream"))
        return Reading(api, task, body, told, None, content_type)
    shape = TextShape.of(body) if task is Task.READ else None
    return Reading(api, task, body, decode_whole(body), shape, content_type)
