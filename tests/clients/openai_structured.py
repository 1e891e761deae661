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


pool.run([json_schema, parsed, json_object, tool_choice, asynchronous, errors])
