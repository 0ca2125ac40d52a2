"""Requests over real emulators: both legs, ranks, batches, logprobs, what the engines receive and what comes back."""

import json
from typing import Any

import pytest
import structlog.testing

from pdrouter.config import PolicyName, RankPolicyName
from pdrouter.sim.emulator import expected_text, render_chat
from tests.lab import CHAT, COMPLETIONS, GENERATE, Lab, Reply, chat, fault, gather, make_lab

POLICIES = PolicyName.__args__  # type: ignore[attr-defined]
RANK_POLICIES = RankPolicyName.__args__  # type: ignore[attr-defined]


def chat_text(reply: Reply) -> str:
    """Return the answer, whole or put together from a stream."""
    if reply.headers["content-type"] == "application/json":
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in reply.events if e["choices"])


def answer_to(text: str, tokens: int) -> str:
    """Return what an engine answers to this chat."""
    return expected_text(render_chat([{"role": "user", "content": text}]), tokens)


def ranks(lab: Lab) -> tuple[list[int], list[int]]:
    """Return the ranks that served, prefill and decode."""
    prefills = [r.rank for e in lab.prefills for r in e.received]
    return prefills, [r.rank for e in lab.decodes for r in e.received]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_chat(is_stream: bool) -> None:
    """A chat comes back right, with right usage; both legs ran on one room and the ledger is zero."""
    async with make_lab(decode=2, prefill=2) as lab:
        body = chat("tell me", 20, stream=is_stream, stream_options={"include_usage": True})
        reply = await lab.post(CHAT, body)
        assert (reply.status, chat_text(reply)) == (200, answer_to("tell me", 20))
        usage = reply.events[-1]["usage"] if is_stream else reply.json()["usage"]
        prompt_tokens = -(-len(render_chat([{"role": "user", "content": "tell me"}])) // 4)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 20)
        prefill, decode = ([r for e in side for r in e.received] for side in (lab.prefills, lab.decodes))
        assert (len(prefill), len(decode)) == (1, 1)
        assert prefill[0].room == decode[0].room is not None
        assert decode[0].prefill_rank == prefill[0].rank
        assert prefill[0].rid == decode[0].rid
        await lab.settled()


async def test_completions() -> None:
    """Text completions, by text and by token ids."""
    async with make_lab() as lab:
        for prompt in ("once upon a time", [5, 6, 7, 8]):
            reply = await lab.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 6})
            assert reply.json()["choices"][0]["text"] == expected_text(prompt, 6)
        await lab.settled()


async def test_generate() -> None:
    """SGLang's own path, by text and by token ids, streamed and whole."""
    async with make_lab() as lab:
        for field, prompt in (("text", "once upon a time"), ("input_ids", [5, 6, 7, 8])):
            body = {field: prompt, "sampling_params": {"max_new_tokens": 6}}
            whole = await lab.post(GENERATE, body)
            streamed = await lab.post(GENERATE, body | {"stream": True})
            assert whole.json()["text"] == streamed.events[-1]["text"] == expected_text(prompt, 6)
        await lab.settled()


async def test_the_shortest_answers() -> None:
    """An answer of one token ends at once, and right."""
    async with make_lab() as lab:
        for tokens in (1, 2):
            for is_stream in (False, True):
                reply = await lab.post(CHAT, chat("short", tokens, stream=is_stream))
                assert chat_text(reply) == answer_to("short", tokens)
                await lab.settled()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_list_prompts(is_stream: bool) -> None:
    """A list of prompts is one request with a room for each."""
    prompts = ["one", "two and more", "three"]
    async with make_lab() as lab:
        body = {"prompt": prompts, "max_tokens": 5, "stream": is_stream}
        reply = await lab.post(COMPLETIONS, body)
        texts = dict.fromkeys(range(3), "")
        for event in reply.events if is_stream else [reply.json()]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {i: expected_text(prompt, 5) for i, prompt in enumerate(prompts)}
        assert len({r.room for r in lab.decodes[0].received}) == 3
        await lab.settled()


@pytest.mark.parametrize("field", ["text", "input_ids"])
async def test_generate_batches(field: str) -> None:
    """/generate takes lists of texts and of token ids."""
    prompts: list[Any] = ["one", "two"] if field == "text" else [[1, 2, 3], [4, 5]]
    async with make_lab() as lab:
        reply = await lab.post(GENERATE, {field: prompts, "sampling_params": {"max_new_tokens": 4}})
        assert [sample["text"] for sample in reply.json()] == [expected_text(prompt, 4) for prompt in prompts]
        await lab.settled()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_two_samples_of_one_prompt(is_stream: bool) -> None:
    """With n = 2 there are two answers, to two requests with a room each; an emulator answers them alike."""
    async with make_lab() as lab:
        reply = await lab.post(CHAT, chat("twice", 4, n=2, stream=is_stream))
        texts = ["", ""]
        for event in reply.events if is_stream else [reply.json()]:
            for choice in event["choices"]:
                texts[choice["index"]] += (choice["delta"] if is_stream else choice["message"]).get("content") or ""
        prompt = render_chat([{"role": "user", "content": "twice"}])
        assert texts == [expected_text(prompt, 4)] * 2
        assert len({r.room for r in lab.prefills[0].received}) == 2
        assert lab.decodes[0].snapshot().errors == {}
        await lab.settled()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_batch", [False, True])
async def test_logprobs_are_merged(is_stream: bool, is_batch: bool) -> None:
    """The prompt's logprobs, which only the prefill side has, stand before the answer's."""
    texts: Any = ["a prompt of some words", "another"] if is_batch else "a prompt of some words"
    body = {"text": texts, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True, "logprob_start_len": 0}
    async with make_lab() as lab, make_lab(0, 0, 1) as plain:
        merged = await lab.post(GENERATE, body | {"stream": is_stream})
        whole = (await plain.post(GENERATE, body)).json()
        expected = dict(enumerate(whole if is_batch else [whole]))
        if is_stream:
            got = {event.get("index", 0): event for event in merged.events}
        else:
            got = dict(enumerate(merged.json() if is_batch else [merged.json()]))
        assert got.keys() == expected.keys()
        for index, sample in expected.items():
            for field in ("input_token_logprobs", "output_token_logprobs"):
                assert got[index]["meta_info"][field] == sample["meta_info"][field]
            assert got[index]["text"] == sample["text"]
        await lab.settled()


@pytest.mark.parametrize("prompt", ["a prompt of some words", [1, 2, 3], ["one", "two \u00e9"], [[1, 2, 3], [4]]])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_echoed_logprobs_are_merged(is_stream: bool, prompt: object) -> None:
    """A completion that echoes its prompt has the logprobs of both, as a regular engine tells them."""
    body = {"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 2}
    async with make_lab() as lab, make_lab(0, 0, 1) as plain:
        whole = (await plain.post(COMPLETIONS, body)).json()["choices"]
        reply = await lab.post(COMPLETIONS, body | {"stream": is_stream})
        choices = [c for event in (reply.events if is_stream else [reply.json()]) for c in event["choices"]]
        for expected in whole:
            parts = [choice for choice in choices if choice["index"] == expected["index"]]
            assert "".join(part["text"] for part in parts) == expected["text"]
            lists = [part["logprobs"] for part in parts if part["logprobs"]]
            for field, values in expected["logprobs"].items():
                assert [value for told in lists for value in told[field]] == values
        assert all(len(choice["logprobs"]["tokens"]) > 3 for choice in whole)
        await lab.settled()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_chat_logprobs(is_stream: bool) -> None:
    """Logprobs of a chat come from the decode side and pass through."""
    async with make_lab() as lab:
        reply = await lab.post(CHAT, chat("x", 3, logprobs=True, stream=is_stream))
        choices = [e["choices"][0] for e in (reply.events if is_stream else [reply.json()]) if e["choices"]]
        tokens = [t["token"] for c in choices for t in (c["logprobs"] or {"content": []})["content"]]
        assert "".join(tokens) == answer_to("x", 3)


async def test_a_body_of_a_megabyte() -> None:
    """A large body passes whole: the engine's answer, a function of all of it, is right."""
    text = "word " * 200_000
    async with make_lab(engine={"kv_capacity_tokens": 1_000_000, "speed": 2000.0}) as lab:
        reply = await lab.post(CHAT, chat(text, 4))
        assert chat_text(reply) == answer_to(text, 4)
        await lab.settled()


async def test_engines_that_are_full() -> None:
    """Requests beyond the engines' room for KV wait there, and are answered whole and right."""
    settings = {"speed": 50.0, "waits_for_decode": True, "kv_capacity_tokens": 4000}
    async with make_lab(engine=settings) as lab:
        texts = [f"{'word ' * 800}{i}" for i in range(16)]
        replies = await gather(*(lab.post(CHAT, chat(text, 100, stream=True)) for text in texts))
        assert [chat_text(reply) for reply in replies] == [answer_to(text, 100) for text in texts]
        await lab.settled()


async def test_text_of_any_kind() -> None:
    """Escapes and scripts of all kinds reach the engine as they were, escaped by the client or not."""
    async with make_lab() as lab:
        for text in ("日本語のテキスト", '\\u0000 \\ " \t', "🙂" * 50, "\u2028"):
            for is_ascii in (True, False):
                raw = json.dumps(chat(text, 4), ensure_ascii=is_ascii).encode()
                assert chat_text(await lab.post(CHAT, raw)) == answer_to(text, 4)


@pytest.mark.parametrize("rank_fields", ["auto", "routed", "legacy", "header"])
@pytest.mark.parametrize("version", ["0.5.5", "0.5.23"])
async def test_rank_fields(rank_fields: str, version: str) -> None:
    """Each spelling of ranks reaches an engine that knows it; auto suits both versions."""
    if rank_fields == "routed" and version == "0.5.5":
        pytest.skip("an old engine doesn't know the new names")
    if rank_fields == "header" and version == "0.5.5":
        pytest.skip("an old engine can't be told the prefill rank beside the header")
    flags: dict[str, Any] = {"rank_fields": rank_fields, "rank_policy": "round_robin"}
    async with make_lab(engine={"server_version": version, "dp_size": 4}, **flags) as lab:
        replies = await gather(*(lab.post(CHAT, chat(f"rank {i}")) for i in range(8)))
        assert [reply.status for reply in replies] == [200] * 8
        for reply in replies:
            for side, emulator in (("prefill", lab.prefills[0]), ("decode", lab.decodes[0])):
                rank = int(reply.headers[f"x-pdrouter-{side}"].rpartition("rank=")[2])
                (received,) = [r for r in emulator.received if r.rid == reply.json()["id"]]
                assert received.rank == rank
        assert [sorted(side) for side in ranks(lab)] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2
        await lab.settled()


@pytest.mark.parametrize("flags", [{"rank_fields": "none"}, {"rank_policy": "engine"}])
async def test_ranks_left_to_the_engine(flags: dict[str, Any]) -> None:
    """Without a rank of ours the engines choose, and find each other; the headers say so."""
    async with make_lab(engine={"dp_size": 4}, **flags) as lab:
        replies = await gather(*(lab.post(CHAT, chat(f"free {i}")) for i in range(8)))
        assert [reply.status for reply in replies] == [200] * 8
        assert {r.prefill_rank for r in lab.decodes[0].received} == {None}
        assert {reply.headers["x-pdrouter-decode"].rpartition("; ")[2] for reply in replies} == {"rank=engine"}
        await lab.settled()


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_serves(policy: str) -> None:
    """Each policy serves every request, and keeps none of its load."""
    async with make_lab(2, 2, policy=policy) as lab:
        replies = await gather(*(lab.post(CHAT, chat(f"policy {i}")) for i in range(16)))
        assert [chat_text(reply) for reply in replies] == [answer_to(f"policy {i}", 8) for i in range(16)]
        await lab.settled()


@pytest.mark.parametrize("rank_policy", RANK_POLICIES)
async def test_every_rank_policy_serves(rank_policy: str) -> None:
    """Each rank policy serves every request; those that balance use all ranks alike."""
    async with make_lab(
        engine={"dp_size": 4, "speed": 0.1}, rank_policy=rank_policy
    ) as lab:  # none ends before all began
        replies = await gather(*(lab.post(CHAT, chat(f"rank {i:02}")) for i in range(16)))
        assert [reply.status for reply in replies] == [200] * 16
        if rank_policy in ("minimum_tokens", "round_robin"):
            assert [sorted(side) for side in ranks(lab)] == [[r for r in range(4) for _ in range(4)]] * 2
        await lab.settled()


async def test_the_clients_rank() -> None:
    """A rank that the client names is honoured, on the leg that it names it for."""
    async with make_lab(engine={"dp_size": 4}) as lab:
        for fields, expected in (
            ({"routed_dp_rank": 3}, (3, 3)),
            ({"routed_dp_rank": 1, "disagg_prefill_dp_rank": 2}, (2, 1)),
            ({"data_parallel_rank": 2}, (2, 2)),
            ({"data_parallel_rank": 2, "decode_dp_rank": 0}, (2, 0)),
        ):
            assert (await lab.post(CHAT, chat("x", **fields))).status == 200
            assert tuple(side[-1] for side in ranks(lab)) == expected


async def test_the_clients_own_fields() -> None:
    """The client's room is replaced, its rid kept as a prefix, and unknown fields go through."""
    async with make_lab() as lab:
        for _ in range(2):
            body = chat("x", bootstrap_room=7, bootstrap_host="nowhere", bootstrap_port=1, rid="mine", unknown=[1, {}])
            assert (await lab.post(CHAT, body)).status == 200
        assert all(r.rid.startswith("mine-") and r.room != 7 for e in lab.emulators for r in e.received)
        await lab.settled()


async def test_an_engines_own_refusal_is_passed_on() -> None:
    """What both engines refuse comes back in their words."""
    async with make_lab() as lab:
        reply = await lab.post(CHAT, chat("x", 0))
        assert (reply.status, reply.json()["object"], reply.json()["type"]) == (400, "error", "BadRequestError")
        await lab.settled()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.invariant("I7")
@pytest.mark.invariant("I8")
async def test_engine_errors_keep_status_and_body(side: str) -> None:
    """An engine's error is the client's, value for value; each engine was tried once for each request."""
    async with make_lab() as lab:
        faulty = lab.prefills[0] if side == "prefill" else lab.decodes[0]
        for status in (400, 401, 404, 408, 413, 422, 429, 500, 502, 503, 504):
            body = {"detail": f"{side} says {status}", "nested": {"x": 1}}
            await fault(faulty, "status", status=status, body=body, times=2)
            for is_stream in (False, True):
                reply = await lab.post(CHAT, chat("x", stream=is_stream), {"x-request-id": "told"})
                assert (reply.status, reply.json()) == (status, body)
                assert reply.headers["x-request-id"] == "told"
                assert reply.headers["content-type"] == "application/json"
            assert not faulty.faults.rules
            assert faulty.snapshot().total_requests == 0
            await lab.settled()


async def test_every_decision_is_told_at_debug_level() -> None:
    """Request id, pair, ranks, loads seen and the rule that fired; nothing of it at info."""
    for level, lines in (("debug", 1), ("info", 0)):
        async with make_lab(1, 1, log_level=level, policy="minimum_tokens") as lab:
            with structlog.testing.capture_logs() as told:
                await lab.post(CHAT, chat("log", 4), {"x-request-id": "told"})
            decided = [line for line in told if line["event"] == "decided"]
            assert len(decided) == lines
            for line in decided:
                assert line["request_id"] == "told"
                assert lab.prefills[0].url[7:] in line["prefill"]
                assert "fewest tokens" in line["decode_why"]
                assert "rank 0=" in line["prefill_why"]
