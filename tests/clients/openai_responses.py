"""The official `openai` client: /v1/responses, with streams, tools, and answers to earlier responses."""

import asyncio
import json

import openai
import pool
from openai import AsyncOpenAI, OpenAI

OPTIONS = {"base_url": f"{pool.URL}/v1", "api_key": pool.KEY, "max_retries": 0, "timeout": pool.TIMEOUT_S}
client = OpenAI(**OPTIONS)
# The API's tools have no `function` inside.
TOOLS = [{"type": "function", "strict": False, **pool.TOOLS[0]["function"]}]


def text_input(name="harbour gate"):
    messages, expected = pool.long_chat(name)
    return messages[0]["content"], messages, expected


def create():
    text, messages, expected = text_input()
    answer = client.responses.create(model=pool.MODEL, input=text, temperature=0)
    pool.equal((answer.object, answer.status, answer.output_text), ("response", "completed", expected))
    [message] = answer.output
    pool.equal((message.type, message.role, message.status), ("message", "assistant", "completed"))
    pool.equal([part.type for part in message.content], ["output_text"])
    usage = answer.usage
    pool.equal(usage.input_tokens, pool.tokens(messages=messages))
    pool.equal(usage.total_tokens, usage.input_tokens + usage.output_tokens)
    assert usage.output_tokens > 3 and usage.input_tokens_details.cached_tokens >= 0, usage
    raw = pool.ask("/v1/chat/completions", messages=messages, temperature=0)
    pool.equal(answer.output_text, raw["choices"][0]["message"]["content"])
    items = client.responses.create(
        model=pool.MODEL,
        input=[{"role": "user", "content": [{"type": "input_text", "text": text}]}],
        instructions="Answer.",
        temperature=0,
    )
    pool.equal((items.output_text, items.instructions), (expected, "Answer."))


def limits():
    text, _, expected = text_input("stone pantry")
    # The API's least limit is 16 tokens; the model would go on.
    answer = client.responses.create(model=pool.MODEL, input=text, temperature=2, top_p=1, max_output_tokens=16)
    assert answer.status in ("completed", "incomplete"), answer
    if answer.status == "incomplete":
        pool.equal(answer.incomplete_details.reason, "max_output_tokens")
    assert answer.usage.output_tokens <= 16, answer.usage


def stream():
    text, _, expected = text_input("lamp room")
    deltas, kinds, last, numbers = "", [], None, []
    with client.responses.create(model=pool.MODEL, input=text, temperature=0, stream=True) as events:
        for event in events:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                deltas += event.delta
            if event.type == "response.completed":
                last = event.response
    pool.equal((deltas, last.output_text, last.status), (expected, expected, "completed"))
    pool.equal(numbers, list(range(len(numbers))))
    for kind in (
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ):
        assert kind in kinds, (kind, kinds)
    pool.equal((kinds[0], kinds[-1]), ("response.created", "response.completed"))
    with client.responses.stream(model=pool.MODEL, input=text, temperature=0) as events:
        final = events.until_done().get_final_response()
    pool.equal(final.output_text, expected)


def previous_response():
    text, messages, expected = text_input()
    first = client.responses.create(model=pool.MODEL, input=text, temperature=0)
    second = client.responses.create(
        model=pool.MODEL, input="Question: what is the pass key for the lamp room?", temperature=0,
        previous_response_id=first.id,
    )
    pool.equal((first.output_text, second.output_text), (expected, f" {pool.KEYS['lamp room']}\n"))
    pool.equal(second.previous_response_id, first.id)
    assert second.usage.input_tokens > first.usage.input_tokens, second.usage
    error = pool.raises(
        openai.APIStatusError,
        lambda: client.responses.create(model=pool.MODEL, input="hi", previous_response_id="resp_none"),
    )
    assert error.status_code in (400, 404), error


def tools():
    messages, key = pool.tool_chat()
    text = messages[0]["content"]
    answer = client.responses.create(model=pool.MODEL, input=text, temperature=0, tools=TOOLS)
    [call] = [item for item in answer.output if item.type == "function_call"]
    pool.equal((call.name, json.loads(call.arguments), call.status), (pool.TOOL, {"key": key}, "completed"))
    assert call.call_id, call
    following = [
        {"role": "user", "content": text},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "The pass key for the bridge office is 62407."},
        {"role": "user", "content": "Question: what is the pass key for the bridge office?"},
    ]
    again = client.responses.create(model=pool.MODEL, input=following, temperature=0, tools=TOOLS)
    pool.equal(again.output_text, " 62407\n")
    kinds, arguments = [], None
    for event in client.responses.create(model=pool.MODEL, input=text, temperature=0, tools=TOOLS, stream=True):
        kinds.append(event.type)
        if event.type == "response.function_call_arguments.done":
            arguments = json.loads(event.arguments)
    pool.equal(arguments, {"key": key})
    assert "response.function_call_arguments.delta" in kinds, kinds


def asynchronous():
    async def both():
        async with AsyncOpenAI(**OPTIONS) as other:
            inputs = [text_input(name) for name in pool.KEYS]
            answers = await asyncio.gather(*(
                other.responses.create(model=pool.MODEL, input=text, temperature=0) for text, _, _ in inputs
            ))
            pool.equal([a.output_text for a in answers], [expected for _, _, expected in inputs])
    asyncio.run(both())


def errors():
    error = pool.raises(openai.NotFoundError, lambda: client.responses.create(model="other", input="hi"))
    pool.equal(error.code, "model_not_found")
    wrong = lambda: client.responses.create(model=pool.MODEL, input="hi", temperature=-1)
    pool.equal(pool.raises(openai.BadRequestError, wrong).param, "temperature")


pool.run([create, limits, stream, previous_response, tools, asynchronous, errors])
