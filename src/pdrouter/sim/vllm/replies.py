"""Replies of vLLM's endpoints that generate: what differs from SGLang's."""

from collections.abc import Mapping, Sequence

from pdrouter.sim.call import Api, Call
from pdrouter.sim.emulator_events import MessagesReply, ResponsesReply
from pdrouter.sim.emulator_replies import DONE, ChatReply, CompletionReply, OpenAiReply, Reply
from pdrouter.sim.ticket import Ticket


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


class VllmResponsesReply(ResponsesReply):
    """``/v1/responses``."""

    def _extra(self) -> dict[str, object]:
        return {"kv_transfer_params": handover(self._call, self._tickets)}


class VllmMessagesReply(MessagesReply):
    """``/v1/messages``, with a mark behind its last event."""

    def tail(self) -> bytes:
        """Return the last event, and the mark that vLLM sends after it."""
        return super().tail() + DONE

    def _extra(self) -> dict[str, object]:
        return {"kv_transfer_params": handover(self._call, self._tickets)}


_REPLIES: Mapping[Api, type[Reply]] = {
    Api.CHAT: VllmChatReply,
    Api.COMPLETION: VllmCompletionReply,
    Api.RESPONSES: VllmResponsesReply,
    Api.MESSAGES: VllmMessagesReply,
}


def make_reply(call: Call, tickets: Sequence[Ticket], *, tells_cached_tokens: bool) -> Reply:
    """Format of the endpoint that was called."""
    reply = _REPLIES[call.api](call, tickets, has_prompt_logprobs=True)
    if isinstance(reply, _VllmReply):
        reply.tells_cached_tokens = tells_cached_tokens
    return reply
