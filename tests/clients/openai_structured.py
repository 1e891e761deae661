"""The official `openai` client: response_format, strict tools, enforced tool calls."""

import asyncio
import json
from enum import Enum

import openai
import pool
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

OPTIONS = {"base_url": f"{pool.URL}/v1", "api_key": pool.KEY, "max_retries": 0, "timeout": pool.TIMEOUT_S}
client = OpenAI(**OPTIONS)
DENSE = pool.no_white_space()


class State(str, Enum):
    OPEN = "open"
    SHUT = "shut"


class Report(BaseModel):
    gate: State
    checked: bool
    places: list[State]


SCHEMA = {
    "type": "object",
    "properties": {"gate": {"enum": ["open", "shut"]}, "checked": {"type": "boolean"}},
    "required": ["gate", "checked"],
    "additionalProperties": False,
}
FUNCTION = {"name": "report", "description": "Reports.", "parameters": SCHEMA, "strict": True}


def ask(**extra):
    messages, _ = pool.long_chat()
    return client.chat.completions.create(
        model=pool.MODEL, messages=messages, **{"temperature": 0, "max_tokens": 200, "logit_bias": DENSE, **extra}
    )


def is_valid(text):
    value = json.loads(text)
    assert set(value) == {"gate", "checked"} and value["gate"] in ("open", "shut"), value
    assert isinstance(value["checked"], bool), value


def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA, "strict": True}}
    answer = ask(response_format=form)
    pool.equal(answer.choices[0].finish_reason, "stop")
    is_valid(answer.choices[0].message.content)
    text = "".join(c.delta.content or "" for chunk in ask(response_format=form, stream=True) for c in chunk.choices)
    pool.equal(text, answer.choices[0].message.content)
    # Drawn at random, too.
    for seed in range(3):
        is_valid(ask(response_format=form, temperature=1.5, seed=seed).choices[0].message.content)


def parsed():
    messages, _ = pool.long_chat("lamp room")
    answer = client.chat.completions.parse(
        model=pool.MODEL, messages=messages, temperature=0, max_tokens=200, logit_bias=DENSE, response_format=Report
    )
    report = answer.choices[0].message.parsed
    assert isinstance(report, Report) and isinstance(report.gate, State), answer


def json_object():
    # Only white space may precede the object; the model's own end may be far.
    answer = ask(response_format={"type": "json_object"})
    text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text.lstrip().startswith("{"), text
    assert finish == "length" or isinstance(json.loads(text), dict), answer


def tool_choice():
    tools = [{"type": "function", "function": FUNCTION}]
    named = {"type": "function", "function": {"name": "report"}}
    for choice in ("required", named):
        message = ask(tools=tools, tool_choice=choice).choices[0].message
        [call] = message.tool_calls[:1]
        pool.equal(call.function.name, "report")
        is_valid(call.function.arguments)
    arguments, name = "", ""
    for chunk in ask(tools=tools, tool_choice=named, stream=True):
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            name, arguments = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    pool.equal(name, "report")
    is_valid(arguments)


class Gate(BaseModel):
    """Reports a gate."""

    gate: State
    checked: bool


def streams_of_helpers():
    """The client collects and parses what is streamed."""
    options = {"model": pool.MODEL, "temperature": 0, "max_tokens": 200, "logit_bias": DENSE}
    messages, _ = pool.long_chat()
    with client.chat.completions.stream(**options, messages=messages, response_format=Gate) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    assert isinstance(final.choices[0].message.parsed, Gate), final
    tool = {"tools": [openai.pydantic_function_tool(Gate)], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**options, messages=messages, **tool) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds, kinds
    [call] = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Gate), final
    whole = client.chat.completions.parse(**options, messages=messages, **tool)
    pool.equal(whole.choices[0].message.tool_calls[0].function.parsed_arguments, call.function.parsed_arguments)


def responses_parsed():
    # Responses have no biases: white space between parts may be long.
    options = {"model": pool.MODEL, "input": pool.long_chat("lamp room")[0][0]["content"], "temperature": 0, "max_output_tokens": 600}
    answer = client.responses.parse(**options, text_format=Gate)
    assert isinstance(answer.output_parsed, Gate), answer
    with client.responses.stream(**options, text_format=Gate) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert "response.output_text.done" in kinds and "response.completed" in kinds, kinds
    pool.equal(final.output_parsed, answer.output_parsed)


def asynchronous():
    async def one():
        async with AsyncOpenAI(**OPTIONS) as other:
            messages, _ = pool.long_chat("stone pantry")
            answer = await other.chat.completions.parse(
                model=pool.MODEL, messages=messages, temperature=0, max_tokens=200, logit_bias=DENSE, response_format=Report
            )
            assert isinstance(answer.choices[0].message.parsed, Report), answer
    asyncio.run(one())


def errors():
    # A schema that no grammar can be made of is refused.
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": {"$ref": "http://example.com/x"}}}
    error = pool.raises(openai.BadRequestError, lambda: ask(response_format=form))
    assert "response_format" in (error.param or ""), error


pool.run([json_schema, parsed, json_object, tool_choice, streams_of_helpers, responses_parsed, asynchronous, errors])
