"""Replies of TensorRT-LLM's endpoints: what differs from SGLang's, and what a context leg's answer tells the other."""

from collections.abc import Sequence

from pdrouter.sim.call import Api, Call
from pdrouter.sim.emulator_replies import ChatReply, CompletionReply, OpenAiReply, Reply
from pdrouter.sim.ticket import Ticket
from pdrouter.sim.trtllm.params import ContextLeg
from pdrouter.sim.trtllm.tokens import ids_of


class _TrtllmReply(OpenAiReply):
    """A context leg's answer also has the ids of the prompt, in a list of lists where prompts may be several."""

    chunk_end = ""
    is_end_joined = True
    prompt_token_ids: object = None

    def _extra(self) -> dict[str, object]:
        return {"prompt_token_ids": self.prompt_token_ids}

    def _choice_extra(self) -> dict[str, object]:
        handover = self._tickets[0].handover
        return {"stop_reason": None, "disaggregated_params": handover, "avg_decoded_tokens_per_iter": None}

    def _message_extra(self) -> dict[str, object]:
        return {"reasoning_content": None, "reasoning": None, "tool_calls": []}


class _TrtllmChatReply(_TrtllmReply, ChatReply):
    """``/v1/chat/completions``."""


class _TrtllmCompletionReply(_TrtllmReply, CompletionReply):
    """``/v1/completions``."""


def make_reply(call: Call, tickets: Sequence[Ticket], bytes_per_token: int) -> Reply:
    """Format of the endpoint that was called."""
    kind = _TrtllmChatReply if call.api is Api.CHAT else _TrtllmCompletionReply
    reply: _TrtllmReply = kind(call, tickets, has_prompt_logprobs=True)
    leg = call.parts[0].handoff
    if isinstance(leg, ContextLeg):
        ids = ids_of(leg.source, bytes_per_token)
        reply.prompt_token_ids = ids if call.api is Api.CHAT else [ids]
    return reply
