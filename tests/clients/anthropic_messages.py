"""The official `anthropic` client: /v1/messages, with streams, tools, counts and errors."""

import asyncio

import anthropic
import pool
from anthropic import Anthropic, AsyncAnthropic

OPTIONS = {"base_url": pool.URL, "api_key": pool.KEY, "max_retries": 0, "timeout": pool.TIMEOUT_S}
client = Anthropic(**OPTIONS)
FUNCTION = pool.TOOLS[0]["function"]
TOOLS = [{"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}]


# Newer versions of the client have no parameter for it; the API has.
GREEDY = {"temperature": 0}


def ask(messages, **extra):
    return client.messages.create(
        model=pool.MODEL, messages=messages, **{"max_tokens": 12, "extra_body": GREEDY, **extra}
    )


def input_tokens(usage):
    """All tokens of the input: those of the cache are counted apart."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def create():
    messages, expected = pool.long_chat()
    answer = ask(messages)
    pool.equal((answer.type, answer.role, answer.model), ("message", "assistant", pool.MODEL))
    pool.equal([(part.type, part.text) for part in answer.content], [("text", expected)])
    pool.equal((answer.stop_reason, answer.stop_sequence), ("end_turn", None))
    raw = pool.ask("/v1/chat/completions", messages=messages, temperature=0)
    pool.equal(answer.content[0].text, raw["choices"][0]["message"]["content"])
    pool.equal(input_tokens(answer.usage), raw["usage"]["prompt_tokens"])
    pool.equal(answer.usage.output_tokens, raw["usage"]["completion_tokens"])


def options():
    messages, expected = pool.long_chat("stone pantry")
    short = ask(messages, max_tokens=3)
    pool.equal((short.content[0].text, short.stop_reason, short.usage.output_tokens), (expected[:3], "max_tokens", 3))
    stopped = ask(messages, stop_sequences=["37"])
    pool.equal((stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence), (" 53", "stop_sequence", "37"))
    parts = [{"role": "user", "content": [{"type": "text", "text": messages[0]["content"]}]}]
    system = [{"type": "text", "text": "Answer."}]
    pool.equal(ask(parts, system=system).content[0].text, expected)
    pool.equal(ask(parts, system="Answer.", extra_body={"top_k": 1, "top_p": 0.9}, metadata={"user_id": "a"}).content[0].text, expected)


def conversation():
    messages, expected = pool.long_chat()
    answer = ask(messages)
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": "Question: what is the pass key for the lamp room?"},
    ]
    pool.equal(ask(messages).content[0].text, f" {pool.KEYS['lamp room']}\n")


def stream():
    messages, expected = pool.long_chat("lamp room")
    with client.messages.stream(model=pool.MODEL, max_tokens=12, extra_body=GREEDY, messages=messages) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    pool.equal((text, final.content[0].text, final.stop_reason), (expected, expected, "end_turn"))
    whole = ask(messages)
    pool.equal(input_tokens(final.usage), input_tokens(whole.usage))
    pool.equal(final.usage.output_tokens, whole.usage.output_tokens)
    kinds = [event.type for event in ask(messages, stream=True)]
    pool.equal((kinds[0], kinds[1], kinds[-1], kinds[-2]), ("message_start", "content_block_start", "message_stop", "message_delta"))
    pool.equal({"content_block_delta", "content_block_stop"} - set(kinds), set())


def tools():
    messages, key = pool.tool_chat()
    answer = ask(messages, tools=TOOLS, max_tokens=40)
    [call] = [part for part in answer.content if part.type == "tool_use"]
    pool.equal((call.name, call.input, answer.stop_reason), (pool.TOOL, {"key": key}, "tool_use"))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "The pass key for the bridge office is 62407."}
    question = {"type": "text", "text": "Question: what is the pass key for the bridge office?"}
    following = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result, question]}]
    pool.equal(ask(following, tools=TOOLS).content[0].text, " 62407\n")
    with client.messages.stream(
        model=pool.MODEL, max_tokens=40, extra_body=GREEDY, messages=messages, tools=TOOLS, tool_choice={"type": "auto"}
    ) as events:
        final = events.get_final_message()
    [call] = [part for part in final.content if part.type == "tool_use"]
    pool.equal((call.name, call.input), (pool.TOOL, {"key": key}))
    chosen = ask(messages, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=40)
    assert all(part.type == "text" for part in chosen.content), chosen


def count_tokens():
    messages, _ = pool.long_chat()
    pool.equal(client.messages.count_tokens(model=pool.MODEL, messages=messages).input_tokens, pool.tokens(messages=messages))


def asynchronous():
    async def both():
        async with AsyncAnthropic(**OPTIONS) as other:
            chats = [pool.long_chat(name) for name in pool.KEYS]
            answers = await asyncio.gather(*(
                other.messages.create(model=pool.MODEL, max_tokens=12, extra_body=GREEDY, messages=messages)
                for messages, _ in chats
            ))
            pool.equal([a.content[0].text for a in answers], [expected for _, expected in chats])
            messages, expected = chats[0]
            async with other.messages.stream(model=pool.MODEL, max_tokens=12, extra_body=GREEDY, messages=messages) as events:
                pool.equal("".join([text async for text in events.text_stream]), expected)
    asyncio.run(both())


def errors():
    messages = [{"role": "user", "content": "hi"}]
    error = pool.raises(anthropic.NotFoundError, lambda: client.messages.create(model="other", max_tokens=2, messages=messages))
    pool.equal((error.body["type"], error.body["error"]["type"]), ("error", "not_found_error"))
    error = pool.raises(anthropic.BadRequestError, lambda: ask(messages, extra_body={"temperature": -1}))
    pool.equal(error.body["error"]["type"], "invalid_request_error")
    assert "temperature" in error.body["error"]["message"], error
    stranger = client.with_options(api_key="wrong")
    error = pool.raises(
        anthropic.AuthenticationError,
        lambda: stranger.messages.create(model=pool.MODEL, max_tokens=2, messages=messages),
    )
    pool.equal(error.status_code, 401)


pool.run([create, options, conversation, stream, tools, count_tokens, asynchronous, errors])
