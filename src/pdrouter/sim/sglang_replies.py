"""Replies of SGLang's endpoints that generate, failures inside a stream too, which differ by version.

Source: SGLang 0.5.6 to 0.5.23, ``entrypoints/openai/serving_chat.py``, ``serving_completions.py``,
``serving_responses.py``, ``entrypoints/anthropic/serving.py``; seen on 0.5.23.
"""

import time
from collections.abc import Mapping, Sequence

import msgspec

from pdrouter.sim.call import Api, Call
from pdrouter.sim.emulator_events import MessagesReply, ResponsesReply, named_event
from pdrouter.sim.emulator_replies import DONE, ChatReply, CompletionReply, OpenAiReply, Reply, event, logprob
from pdrouter.sim.emulator_settings import EmulatorSettings, EngineError
from pdrouter.sim.sglang_failures import messages_error, response_error, stream_error
from pdrouter.sim.text import answer_text, token_id, token_text
from pdrouter.sim.ticket import Ticket

_encode = msgspec.json.Encoder().encode


class GenerateReply(Reply):
    """``/generate``: the text so far in every event, and ``meta_info``."""

    ends_with_failure = False

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

    def failure(self, ticket: Ticket, error: EngineError) -> bytes | None:  # noqa: ARG002 (the ticket's own)
        """Return an ordinary chunk whose finish reason is the failure; the other prompts of a batch go on."""
        return self.chunk(ticket, 0, ticket.sent_tokens)

    def _answer(self, ticket: Ticket, tokens: int) -> dict[str, object]:
        seed = ticket.seed
        ids = [token_id(seed, i) for i in range(tokens)]
        meta: dict[str, object] = {
            "id": ticket.rid,
            "finish_reason": _finish_reason(ticket) if ticket.error or tokens == ticket.tokens else None,
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
            meta["output_token_logprobs"] = [[logprob(i), i, None] for i in ids]
        return {"text": answer_text(seed, 0, tokens), "output_ids": ids, "meta_info": meta}

    def _prompt_logprobs(self, ticket: Ticket) -> list[list[object]]:
        if not self._has_prompt_logprobs:
            return []
        start = self._call.logprob_start
        ids = [token_id(ticket.digest, i) for i in range(start, ticket.job.prompt_tokens)]
        entries: list[list[object]] = [[logprob(i), i, None] for i in ids]
        if entries and start == 0:
            entries[0][0] = None
        return entries


def _finish_reason(ticket: Ticket) -> dict[str, object] | None:
    if ticket.error is not None:
        return _abort(ticket.error.message, ticket.error.status)
    if ticket.finish is None:
        return None
    if ticket.finish == "length":
        return {"type": "length", "length": ticket.tokens}
    if ticket.finish == "stop":
        return {"type": "stop", "matched": token_id(ticket.seed, ticket.tokens)}
    return _abort("Abort by request", None)


def _abort(message: str, status: int | None) -> dict[str, object]:
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}


class _Failing(OpenAiReply):
    """Failures of a chat or a completion: an error event since 0.5.10, before a chunk with the finish reason abort."""

    streams_errors = True

    def failure(self, ticket: Ticket, error: EngineError) -> bytes | None:
        """Return the end of the stream."""
        if self.streams_errors:
            return stream_error(error) + DONE
        opening = "" if ticket.sent_tokens else self._opening(ticket)
        ticket.finish = "abort"
        return (opening + self._closing(ticket)).encode() + DONE


class SglangChatReply(_Failing, ChatReply):
    """``/v1/chat/completions``."""


class SglangCompletionReply(_Failing, CompletionReply):
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
            told += [(token_text(seed, i), logprob(token_id(seed, i))) for i in range(ticket.job.prompt_tokens)]
            told[0] = (told[0][0], None)
        told += [(token_text(ticket.seed, i), logprob(token_id(ticket.seed, i))) for i in range(start, end)]
        has_top = self._call.top_logprobs > 0
        return {
            "text_offset": [-1] * len(told),
            "token_logprobs": [logprob for _, logprob in told],
            "tokens": [text for text, _ in told],
            "top_logprobs": [None if value is None else {text: value} for text, value in told] if has_top else [],
        }


class SglangResponsesReply(ResponsesReply):
    """``/v1/responses``. Its last event is named by the status."""

    def tail(self) -> bytes:
        """Return the last event."""
        response = self._response()
        return named_event(f"response.{response['status']}", response=response)

    def failure(self, ticket: Ticket, error: EngineError) -> bytes | None:
        """Return the events that end the stream; usage is told, though nothing was written."""
        opening = b"" if ticket.sent_tokens else self._begin()
        response = self._response("failed") | response_error(error.message)
        return opening + named_event("response.failed", response=response)


class SglangMessagesReply(MessagesReply):
    """``/v1/messages``."""

    def failure(self, ticket: Ticket, error: EngineError) -> bytes | None:
        """Return the events that end the stream."""
        opening = named_event("content_block_stop", index=0) if ticket.sent_tokens else self._begin()
        return opening + messages_error(error) + self.tail()

    def _end_usage(self) -> dict[str, object]:
        return {"output_tokens": self._ticket.tokens}


_REPLIES: Mapping[Api, type[Reply]] = {
    Api.GENERATE: GenerateReply,
    Api.CHAT: SglangChatReply,
    Api.COMPLETION: SglangCompletionReply,
    Api.RESPONSES: SglangResponsesReply,
    Api.MESSAGES: SglangMessagesReply,
}


def make_reply(call: Call, tickets: Sequence[Ticket], settings: EmulatorSettings) -> Reply:
    """Format of the endpoint that was called; only a decode side leaves the prompt's logprobs out."""
    reply = _REPLIES[call.api](call, tickets, has_prompt_logprobs=settings.role != "decode")
    if isinstance(reply, _Failing):
        reply.streams_errors = settings.sglang.streams_errors
    return reply
