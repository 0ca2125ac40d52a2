"""Formats whose events have names: OpenAI's Responses and Anthropic's Messages, as engines answer them."""

import msgspec

from pdrouter.sim.emulator_replies import Reply
from pdrouter.sim.text import answer_text
from pdrouter.sim.ticket import Ticket

_encode = msgspec.json.Encoder().encode


def named_event(name: str, **fields: object) -> bytes:
    """One SSE event with a name, which is its type too."""
    return f"event: {name}\n".encode() + b"data: " + _encode({"type": name, **fields}) + b"\n\n"


class NamedEvents(Reply):
    """What both formats share: one prompt, one answer."""

    @property
    def _id(self) -> str:
        return self._call.id or self._ticket.rid

    @property
    def _ticket(self) -> Ticket:
        return self._tickets[0]

    @property
    def _text(self) -> str:
        return answer_text(self._ticket.seed, 0, self._ticket.tokens)

    def _usage(self) -> dict[str, object]:
        return {"input_tokens": self._ticket.job.prompt_tokens, "output_tokens": self._ticket.tokens}

    def _extra(self) -> dict[str, object]:
        """Return what this engine adds to an answer."""
        return {}


class ResponsesReply(NamedEvents):
    """``/v1/responses``."""

    def whole(self) -> bytes:
        """Return the response."""
        return _encode(self._response())

    def chunk(self, ticket: Ticket, start: int, end: int) -> bytes:
        """Return the new text as a delta; the item is opened by the first, and all is closed by the last."""
        place: dict[str, object] = {"output_index": 0, "item_id": f"msg_{self._id}"}
        parts = []
        if start == 0:
            parts += [
                self._begin(),
                named_event("response.output_item.added", output_index=0, item=self._item(text=None)),
                named_event("response.content_part.added", **place, content_index=0, part=_text_part("")),
            ]
        if end > start:
            text = answer_text(ticket.seed, start, end)
            parts.append(named_event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=[]))
        if ticket.finish is not None and end == ticket.tokens:
            parts += [
                named_event("response.output_text.done", **place, content_index=0, text=self._text, logprobs=[]),
                named_event("response.content_part.done", **place, content_index=0, part=_text_part(self._text)),
                named_event("response.output_item.done", output_index=0, item=self._item(text=self._text)),
            ]
        return b"".join(parts)

    def tail(self) -> bytes:
        """Return the last event."""
        return named_event("response.completed", response=self._response())

    def _item(self, text: str | None) -> dict[str, object]:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if text is None else "completed",
            "content": [] if text is None else [_text_part(text)],
        }

    def _begin(self) -> bytes:
        response = self._response("in_progress")
        return named_event("response.created", response=response) + named_event(
            "response.in_progress", response=response
        )

    def _response(self, status: str | None = None) -> dict[str, object]:
        """Return the response; ``status`` is that of one that isn't over, or has failed."""
        details = {"input_tokens_details": {"cached_tokens": self._ticket.cached_tokens}}
        total = {"total_tokens": self._ticket.job.prompt_tokens + self._ticket.tokens}
        is_over, is_cut = status is None, self._ticket.finish == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._call.model,
            "status": status or ("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_over and is_cut else None,
            "output": [self._item(self._text)] if is_over else [],
            "usage": None if status == "in_progress" else self._usage() | total | details,
        } | self._extra()


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


class MessagesReply(NamedEvents):
    """``/v1/messages``, Anthropic's format."""

    def whole(self) -> bytes:
        """Return the message."""
        content = [{"type": "text", "text": self._text}]
        return _encode(
            self._message(content) | {"stop_reason": self._stop_reason, "usage": self._usage()} | self._extra()
        )

    def chunk(self, ticket: Ticket, start: int, end: int) -> bytes:
        """Return the new text as a delta, with the events that open and close its block."""
        parts = []
        if start == 0:
            parts += [
                self._begin(),
                named_event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            ]
        if end > start:
            delta = {"type": "text_delta", "text": answer_text(ticket.seed, start, end)}
            parts.append(named_event("content_block_delta", index=0, delta=delta))
        if ticket.finish is not None and end == ticket.tokens:
            parts += [
                named_event("content_block_stop", index=0),
                named_event("message_delta", delta={"stop_reason": self._stop_reason}, usage=self._end_usage()),
            ]
        return b"".join(parts)

    def tail(self) -> bytes:
        """Return the last event."""
        return named_event("message_stop")

    def _begin(self) -> bytes:
        message = self._message([]) | {"usage": self._usage() | {"output_tokens": 0}}
        return named_event("message_start", message=message)

    def _end_usage(self) -> dict[str, object]:
        """Return what the last delta tells of usage."""
        return self._usage()

    @property
    def _stop_reason(self) -> str:
        return "max_tokens" if self._ticket.finish == "length" else "end_turn"

    def _message(self, content: list[dict[str, str]]) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._call.model,
            "stop_reason": None,
            "stop_sequence": None,
        }
