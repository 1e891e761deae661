"""LangChain's with_structured_output and enforced tool calls: the answer is held to a schema by a grammar."""

from typing import Literal

import openai
import pool
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

chat = ChatOpenAI(
    base_url=f"{pool.URL}/v1", api_key=pool.KEY, model=pool.MODEL, temperature=0, max_retries=0, max_tokens=200,
    logit_bias={int(id): bias for id, bias in pool.no_white_space().items()},
)


class Report(BaseModel):
    """A report about a gate."""

    gate: Literal["open", "shut"]
    checked: bool
    keys: list[Literal["a", "b"]]


@tool
def open_gate(gate: Literal["harbour", "mill"]) -> str:
    """Opens a gate."""
    return gate


def messages():
    return [HumanMessage(pool.long_chat()[0][0]["content"])]


def is_report(report):
    assert isinstance(report, Report), report
    assert report.gate in ("open", "shut") and isinstance(report.checked, bool), report


def json_schema():
    is_report(chat.with_structured_output(Report, method="json_schema", strict=True).invoke(messages()))


def json_schema_streamed():
    is_report(list(chat.with_structured_output(Report, method="json_schema").stream(messages()))[-1])


def function_calling():
    is_report(chat.with_structured_output(Report, method="function_calling").invoke(messages()))


def json_mode():
    try:
        answer = chat.with_structured_output(None, method="json_mode", include_raw=True).invoke(messages())
    except openai.LengthFinishReasonError as error:
        # Any object: this model's may have no end.
        text = error.completion.choices[0].message.content
        assert text.lstrip().startswith("{"), text
    else:
        assert isinstance(answer["parsed"], dict), answer


def enforced_tools():
    for choice in ("any", "open_gate"):
        [call] = chat.bind_tools([open_gate], tool_choice=choice).invoke(messages()).tool_calls
        assert call["name"] == "open_gate" and call["args"]["gate"] in ("harbour", "mill"), call


pool.run([json_schema, json_schema_streamed, function_calling, json_mode, enforced_tools])
