"""Replies of vLLM's endpoints that generate: what differs from SGLang's, and the Responses and Messages formats."""

from collections.abc import Mapping, Sequence

import msgspec

from pdrouter.sim.call import Api, Call
from pdrouter.sim.emulator_replies import DONE, ChatReply, CompletionReply, OpenAiReply, Reply
from pdrouter.sim.text import answer_text
from pdrouter.sim.ticket import Ticket

_encode = msgspec.json.Encoder().encode


class _VllmReply(OpenAiReply):
    """What vLLM adds to OpenAI's formats. A batch tells the handover of one prompt only, as vLLM does."""

    chunk_end = ""
    is_end_joined = True
    tells_cached_tokens = True

    def _extra(self) -> dict[str, object]:
        return {
            "service_tier": None,
            "system_fingerprint": None,
            "prompt_logprobs": None,
            "kv_transfer_params": handover(self._call, self._tickets),
        }

    def _choice_extra(self) -> dict[str, object]:
        return {"stop_reason": None, "token_ids": None}

    def _message_extra(self) -> dict[str, object]:
        return {
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        }

    def _usage(self) -> dict[str, object]:
        usage = super()._usage()
        return usage if self.tells_cached_tokens else usage | {"prompt_tokens_details": None}


class VllmChatReply(_VllmReply, ChatReply):
    """``/v1/chat/completions``."""


class VllmCompletionReply(_VllmReply, CompletionReply):
    """``/v1/completions``."""


def handover(call: Call, tickets: Sequence[Ticket]) -> dict[str, object] | None:
    """Return an answer's ``kv_transfer_params``: of several samples the last one's, of several prompts the first's."""
    samples = [ticket for ticket, part in zip(tickets, call.parts, strict=True) if part.prompt is call.parts[0].prompt]
    return samples[-1].handover


class _NamedEvents(Reply):
    """Formats whose events have names."""

    def _event(self, name: str, **fields: object) -> bytes:
        return f"event: {name}\n".encode() + b"data: " + _encode({"type": name, **fields}) + b"\n\n"

    @property
    def _ticket(self) -> Ticket:
        return self._tickets[0]

    @property
    def _text(self) -> str:
        return answer_text(self._ticket.seed, 0, self._ticket.tokens)

    def _usage(self) -> dict[str, object]:
        return {"input_tokens": self._ticket.job.prompt_tokens, "output_tokens": self._ticket.tokens}


class ResponsesReply(_NamedEvents):
    """``/v1/responses``."""

    def whole(self) -> bytes:
        """Return the response."""
        return _encode(self._response(is_over=True))

    def chunk(self, ticket: Ticket, start: int, end: int) -> bytes:
        """Return the new text as a delta; the item is opened by the first, and all is closed by the last."""
        place: dict[str, object] = {"output_index": 0, "item_id": f"msg_{self._call.id}"}
        parts = []
        if start == 0:
            parts += [
                self._event("response.created", response=self._response(is_over=False)),
                self._event("response.in_progress", response=self._response(is_over=False)),
                self._event("response.output_item.added", output_index=0, item=self._item(text=None)),
                self._event("response.content_part.added", **place, content_index=0, part=_text_part("")),
            ]
        if end > start:
            text = answer_text(ticket.seed, start, end)
            parts.append(self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=[]))
        if ticket.finish is not None and end == ticket.tokens:
            parts += [
                self._event("response.output_text.done", **place, content_index=0, text=self._text, logprobs=[]),
                self._event("response.content_part.done", **place, content_index=0, part=_text_part(self._text)),
                self._event("response.output_item.done", output_index=0, item=self._item(text=self._text)),
            ]
        return b"".join(parts)

    def tail(self) -> bytes:
        """Return the last event."""
        return self._event("response.completed", response=self._response(is_over=True))

    def _item(self, text: str | None) -> dict[str, object]:
        return {
            "id": f"msg_{self._call.id}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if text is None else "completed",
            "content": [] if text is None else [_text_part(text)],
        }

    def _response(self, *, is_over: bool) -> dict[str, object]:
        details = {"input_tokens_details": {"cached_tokens": self._ticket.cached_tokens}}
        total = {"total_tokens": self._ticket.job.prompt_tokens + self._ticket.tokens}
        is_cut = self._ticket.finish == "length"
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._created,
            "model": self._call.model,
            "status": ("incomplete" if is_cut else "completed") if is_over else "in_progress",
            "incomplete_details": {"reason": "max_output_tokens"} if is_over and is_cut else None,
            "output": [self._item(self._text)] if is_over else [],
            "usage": self._usage() | total | details if is_over else None,
            "kv_transfer_params": handover(self._call, self._tickets),
        }


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


class MessagesReply(_NamedEvents):
    """``/v1/messages``, Anthropic's format."""

    def whole(self) -> bytes:
        """Return the message."""
        content = [{"type": "text", "text": self._text}]
        return _encode(
            self._message(content)
            | {"stop_reason": self._stop_reason, "usage": self._usage()}
            | {"kv_transfer_params": handover(self._call, self._tickets)}
        )

    def chunk(self, ticket: Ticket, start: int, end: int) -> bytes:
        """Return the new text as a delta, with the events that open and close its block."""
        parts = []
        if start == 0:
            message = self._message([]) | {"usage": self._usage() | {"output_tokens": 0}}
            parts += [
                self._event("message_start", message=message),
                self._event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            ]
        if end > start:
            delta = {"type": "text_delta", "text": answer_text(ticket.seed, start, end)}
            parts.append(self._event("content_block_delta", index=0, delta=delta))
        if ticket.finish is not None and end == ticket.tokens:
            parts += [
                self._event("content_block_stop", index=0),
                self._event("message_delta", delta={"stop_reason": self._stop_reason}, usage=self._usage()),
            ]
        return b"".join(parts)

    def tail(self) -> bytes:
        """Return the last event, and the mark that vLLM sends after it."""
        return self._event("message_stop") + DONE

    @property
    def _stop_reason(self) -> str:
        return "max_tokens" if self._ticket.finish == "length" else "end_turn"

    def _message(self, content: list[dict[str, str]]) -> dict[str, object]:
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._call.model,
            "stop_reason": None,
            "stop_sequence": None,
        }


_REPLIES: Mapping[Api, type[Reply]] = {
    Api.CHAT: VllmChatReply,
    Api.COMPLETION: VllmCompletionReply,
    Api.RESPONSES: ResponsesReply,
    Api.MESSAGES: MessagesReply,
}


def make_reply(call: Call, tickets: Sequence[Ticket], *, tells_cached_tokens: bool) -> Reply:
    """Format of the endpoint that was called."""
    reply = _REPLIES[call.api](call, tickets, has_prompt_logprobs=True)
    if isinstance(reply, _VllmReply):
        reply.tells_cached_tokens = tells_cached_tokens
    return reply
