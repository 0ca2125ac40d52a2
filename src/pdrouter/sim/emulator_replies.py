"""Replies of inference endpoints, and what OpenAI's have in common: progress of prompts in, JSON and SSE out.

Generated text is plain ASCII words and spaces, so the streamed chunks are put together from ready pieces.
"""

import time
from collections.abc import Sequence

import msgspec

from pdrouter.sim.call import Call
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.text import answer_text, token_id, token_text
from pdrouter.sim.ticket import Ticket

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One SSE event."""
    return b"data: " + _encode(value) + b"\n\n"


class Reply:
    """Format of one endpoint, for one request.

    ``ends_with_failure``: where one prompt of several fails, so does the whole stream.
    """

    ends_with_failure = True

    def __init__(self, call: Call, tickets: Sequence[Ticket], *, has_prompt_logprobs: bool) -> None:
        self._call = call
        self._tickets = tickets
        self._has_prompt_logprobs = has_prompt_logprobs
        self._created = int(time.time())

    def whole(self) -> bytes:
        """Return the reply to a request that isn't streamed."""
        raise NotImplementedError

    def chunk(self, ticket: Ticket, start: int, end: int) -> bytes:
        """Return events for the tokens ``start`` up to ``end`` of a prompt, and its end if that is all of it."""
        raise NotImplementedError

    def tail(self) -> bytes:
        """Return the events that end a stream."""
        return DONE

    def failure(self, ticket: Ticket, error: EngineError) -> bytes | None:  # noqa: ARG002 (of engines with a status)
        """Return what a stream tells of a prompt that failed; None: a status if it has not begun, else an event."""
        return None


def logprob(token: int) -> float:
    """Return the made-up logprob of a token."""
    return -(token % 97 + 1) / 64


class OpenAiReply(Reply):
    """What chat and text completions share.

    ``chunk_end`` stands behind the choices of every event; ``is_end_joined``: the last text and the finish reason
    come in one event.
    """

    object_name = ""
    chunk_name = ""
    chunk_end = ',"usage":null'
    is_end_joined = False

    def __init__(self, call: Call, tickets: Sequence[Ticket], *, has_prompt_logprobs: bool) -> None:
        super().__init__(call, tickets, has_prompt_logprobs=has_prompt_logprobs)
        self.id = call.id or tickets[0].rid
        head = f'"id":{_encode(self.id).decode()},"object":"{self.chunk_name}","created":{self._created}'
        self._head = f'data: {{{head},"model":{_encode(call.model).decode()},"choices":['

    def whole(self) -> bytes:
        """Return the completion with all choices and usage."""
        return _encode(
            {
                "id": self.id,
                "object": self.object_name,
                "created": self._created,
                "model": self._call.model,
                "choices": [self._choice(ticket) for ticket in self._tickets],
                "usage": self._usage(),
            }
            | self._extra()
        )

    def chunk(self, ticket: Ticket, start: int, end: int) -> bytes:
        """Return the new text; the first is led by the role, the last followed by the finish reason."""
        parts = []
        if start == 0:
            parts.append(self._opening(ticket))
        is_end = ticket.finish is not None and end == ticket.tokens
        is_joined = is_end and end > start and self.is_end_joined
        if end > start:
            parts.append(self._delta(ticket, start, end, f'"{ticket.finish}"' if is_joined else "null"))
        if is_end and not is_joined:
            parts.append(self._closing(ticket))
        return "".join(parts).encode()

    def tail(self) -> bytes:
        """Usage, if asked for, and the end."""
        if not self._call.include_usage:
            return DONE
        usage = _encode(self._usage()).decode()
        return f'{self._head}],"usage":{usage}}}\n\n'.encode() + DONE

    def _event(self, index: int, content: str, finish: str) -> str:
        return f'{self._head}{{"index":{index},{content},"finish_reason":{finish}}}]{self.chunk_end}}}\n\n'

    def _extra(self) -> dict[str, object]:
        """Return what this engine adds to a whole answer."""
        return {"metadata": {"weight_version": "default"}}

    def _choice_extra(self) -> dict[str, object]:
        """Return what this engine adds to a choice."""
        return {"matched_stop": None}

    def _message_extra(self) -> dict[str, object]:
        """Return what this engine adds to a chat message."""
        return {"reasoning_content": None, "tool_calls": None}

    def _opening(self, ticket: Ticket) -> str:
        raise NotImplementedError

    def _delta(self, ticket: Ticket, start: int, end: int, finish: str) -> str:
        raise NotImplementedError

    def _closing(self, ticket: Ticket) -> str:
        raise NotImplementedError

    def _choice(self, ticket: Ticket) -> dict[str, object]:
        raise NotImplementedError

    def _usage(self) -> dict[str, object]:
        # One prompt with n choices counts once, as OpenAI has it.
        prompts = {
            ticket.index - part.choice: ticket for ticket, part in zip(self._tickets, self._call.parts, strict=True)
        }
        prompt = sum(ticket.job.prompt_tokens for ticket in prompts.values())
        completion = sum(ticket.tokens for ticket in self._tickets)
        cached = sum(ticket.cached_tokens for ticket in prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class ChatReply(OpenAiReply):
    """``/v1/chat/completions``."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _opening(self, ticket: Ticket) -> str:
        return self._event(ticket.index, '"delta":{"role":"assistant","content":""},"logprobs":null', "null")

    def _delta(self, ticket: Ticket, start: int, end: int, finish: str) -> str:
        text = answer_text(ticket.seed, start, end)
        logprobs = "null"
        if self._call.has_logprobs:
            logprobs = _encode(self._logprobs(ticket, start, end)).decode()
        return self._event(ticket.index, f'"delta":{{"content":"{text}"}},"logprobs":{logprobs}', finish)

    def _closing(self, ticket: Ticket) -> str:
        return self._event(ticket.index, '"delta":{},"logprobs":null', f'"{ticket.finish}"')

    def _choice(self, ticket: Ticket) -> dict[str, object]:
        logprobs = self._logprobs(ticket, 0, ticket.tokens) if self._call.has_logprobs else None
        return {
            "index": ticket.index,
            "message": {
                "role": "assistant",
                "content": answer_text(ticket.seed, 0, ticket.tokens),
                **self._message_extra(),
            },
            "logprobs": logprobs,
            "finish_reason": ticket.finish,
            **self._choice_extra(),
        }

    def _logprobs(self, ticket: Ticket, start: int, end: int) -> dict[str, object]:
        content = []
        for i in range(start, end):
            text = token_text(ticket.seed, i)
            content.append(
                {
                    "token": text,
                    "bytes": list(text.encode()),
                    "logprob": logprob(token_id(ticket.seed, i)),
                    "top_logprobs": [],
                }
            )
        return {"content": content}


class CompletionReply(OpenAiReply):
    """``/v1/completions``."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def _opening(self, ticket: Ticket) -> str:  # noqa: ARG002 (text completions have no opening event)
        return ""

    def _delta(self, ticket: Ticket, start: int, end: int, finish: str) -> str:
        text = _encode(self._text(ticket, start, end)).decode()
        logprobs = "null"
        if self._call.has_logprobs:
            logprobs = _encode(self._logprobs(ticket, start, end)).decode()
        return self._event(ticket.index, f'"text":{text},"logprobs":{logprobs}', finish)

    def _closing(self, ticket: Ticket) -> str:
        return self._event(ticket.index, '"text":"","logprobs":null', f'"{ticket.finish}"')

    def _choice(self, ticket: Ticket) -> dict[str, object]:
        return {
            "index": ticket.index,
            "text": self._text(ticket, 0, ticket.tokens),
            "logprobs": self._logprobs(ticket, 0, ticket.tokens) if self._call.has_logprobs else None,
            "finish_reason": ticket.finish,
            **self._choice_extra(),
        }

    def _text(self, ticket: Ticket, start: int, end: int) -> str:
        return answer_text(ticket.seed, start, end)

    def _logprobs(self, ticket: Ticket, start: int, end: int) -> dict[str, object]:
        indices = range(start, end)
        return {
            "tokens": [token_text(ticket.seed, i) for i in indices],
            "token_logprobs": [logprob(token_id(ticket.seed, i)) for i in indices],
            "top_logprobs": [],
            "text_offset": [4 * i for i in indices],
        }


def chunk_ends(start: int, end: int, interval: int) -> list[int]:
    """Token counts at which SGLang writes to a stream: 1, 1 + interval, ..., and the last."""
    first = 1 if start == 0 else start + interval - (start - 1) % interval
    ends = list(range(first, end, interval))
    ends.append(end)
    return ends
