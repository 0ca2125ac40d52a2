"""Replies of SGLang's inference endpoints, and what OpenAI's have in common: progress of prompts in, JSON and SSE out.

Generated text is plain ASCII words and spaces, so the streamed chunks are put together from ready pieces.
"""

import time
from collections.abc import Sequence

import msgspec

from pdrouter.sim.call import Api, Call
from pdrouter.sim.text import answer_text, token_id, token_text
from pdrouter.sim.ticket import Ticket

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One SSE event."""
    return b"data: " + _encode(value) + b"\n\n"


class Reply:
    """Format of one endpoint, for one request."""

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


class GenerateReply(Reply):
    """``/generate``: the text so far in every event, and ``meta_info``."""

    def whole(self) -> bytes:
        """Return one object, or a list for a batch."""
        answers = [self._answer(ticket, ticket.tokens) for ticket in self._tickets]
        return _encode(answers if self._call.is_batch else answers[0])

    def chunk(self, ticket: Ticket, start: int, end: int) -> bytes:  # noqa: ARG002 (text is cumulative)
        """Return one event with all of the text so far; ``index`` tells which prompt of a batch."""
        answer = self._answer(ticket, end)
        if self._call.is_batch:
            answer["index"] = ticket.index
        return event(answer)

    def _answer(self, ticket: Ticket, tokens: int) -> dict[str, object]:
        seed = ticket.seed
        ids = [token_id(seed, i) for i in range(tokens)]
        meta: dict[str, object] = {
            "id": ticket.rid,
            "finish_reason": _finish_reason(ticket) if tokens == ticket.tokens else None,
            "prompt_tokens": ticket.job.prompt_tokens,
            "weight_version": "default",
            "total_retractions": ticket.job.preemptions,
            "completion_tokens": tokens,
            "cached_tokens": ticket.cached_tokens,
            "dp_rank": ticket.rank,
            "e2e_latency": time.monotonic() - ticket.created_s,
        }
        if self._call.has_logprobs:
            meta["input_token_logprobs"] = self._prompt_logprobs(ticket)
            meta["output_token_logprobs"] = [[_logprob(i), i, None] for i in ids]
        return {"text": answer_text(seed, 0, tokens), "output_ids": ids, "meta_info": meta}

    def _prompt_logprobs(self, ticket: Ticket) -> list[list[object]]:
        if not self._has_prompt_logprobs:
            return []
        start = self._call.logprob_start
        ids = [token_id(ticket.digest, i) for i in range(start, ticket.job.prompt_tokens)]
        entries: list[list[object]] = [[_logprob(i), i, None] for i in ids]
        if entries and start == 0:
            entries[0][0] = None
        return entries


def _finish_reason(ticket: Ticket) -> dict[str, object] | None:
    if ticket.finish is None:
        return None
    if ticket.finish == "length":
        return {"type": "length", "length": ticket.tokens}
    if ticket.finish == "stop":
        return {"type": "stop", "matched": token_id(ticket.seed, ticket.tokens)}
    return {"type": "abort", "message": "Abort by request", "status_code": None, "err_type": None}


def _logprob(token: int) -> float:
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
                    "logprob": _logprob(token_id(ticket.seed, i)),
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
            "token_logprobs": [_logprob(token_id(ticket.seed, i)) for i in indices],
            "top_logprobs": [],
            "text_offset": [4 * i for i in indices],
        }


class SglangCompletionReply(CompletionReply):
    """``/v1/completions`` as SGLang has it: with ``echo`` and ``logprobs`` the prompt's tokens come first.

    A decode engine repeats the text, and doesn't have the logprobs. Source: SGLang 0.5.23, ``serving_completions.py``
    and ``openai/utils.py`` (offsets are -1); ``scheduler_components/output_streamer.py`` (decode sends no input
    logprobs); seen on 0.5.23.
    """

    def _text(self, ticket: Ticket, start: int, end: int) -> str:
        echo = "" if start else self._call.parts[ticket.index].echo
        return echo + super()._text(ticket, start, end)

    def _logprobs(self, ticket: Ticket, start: int, end: int) -> dict[str, object]:
        told: list[tuple[str, float | None]] = []
        if start == 0 and self._call.echo_logprobs and self._has_prompt_logprobs:
            seed = ticket.digest
            told += [(token_text(seed, i), _logprob(token_id(seed, i))) for i in range(ticket.job.prompt_tokens)]
            told[0] = (told[0][0], None)
        told += [(token_text(ticket.seed, i), _logprob(token_id(ticket.seed, i))) for i in range(start, end)]
        has_top = self._call.top_logprobs > 0
        return {
            "text_offset": [-1] * len(told),
            "token_logprobs": [logprob for _, logprob in told],
            "tokens": [text for text, _ in told],
            "top_logprobs": [None if value is None else {text: value} for text, value in told] if has_top else [],
        }


def chunk_ends(start: int, end: int, interval: int) -> list[int]:
    """Token counts at which SGLang writes to a stream: 1, 1 + interval, ..., and the last."""
    first = 1 if start == 0 else start + interval - (start - 1) % interval
    ends = list(range(first, end, interval))
    ends.append(end)
    return ends


def make_reply(call: Call, tickets: Sequence[Ticket], *, has_prompt_logprobs: bool) -> Reply:
    """Format of the endpoint that was called."""
    kinds: dict[Api, type[Reply]] = {
        Api.GENERATE: GenerateReply,
        Api.CHAT: ChatReply,
        Api.COMPLETION: SglangCompletionReply,
    }
    return kinds[call.api](call, tickets, has_prompt_logprobs=has_prompt_logprobs)
