"""LangChain (langchain-openai): invoke, stream, batch, bind_tools, token usage, asynchronous calls."""

import asyncio

import pool
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

OPTIONS = {"base_url": f"{pool.URL}/v1", "api_key": pool.KEY, "model": pool.MODEL, "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**OPTIONS)


@tool
def open_gate(key: str) -> str:
    """Opens a gate."""
    return f"opened with {key}"


def question(name="harbour gate", start=0):
    messages, expected = pool.long_chat(name, start)
    return [HumanMessage(messages[0]["content"])], messages, expected


def invoke():
    messages, plain, expected = question()
    answer = chat.invoke(messages)
    pool.equal(answer.content, expected)
    raw = pool.ask("/v1/chat/completions", messages=plain, temperature=0)
    pool.equal(answer.content, raw["choices"][0]["message"]["content"])
    usage = answer.usage_metadata
    pool.equal((usage["input_tokens"], usage["output_tokens"]), (raw["usage"]["prompt_tokens"], raw["usage"]["completion_tokens"]))
    pool.equal(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])
    pool.equal(answer.response_metadata["finish_reason"], "stop")


def invoke_with_options():
    messages, _, expected = question("stone pantry")
    pool.equal(chat.bind(stop=["37"]).invoke(messages).content, " 53")
    pool.equal(chat.bind(max_tokens=3).invoke(messages).content, expected[:3])
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(messages)
    assert len(answer.response_metadata["logprobs"]["content"]) >= 6, answer.response_metadata
    system = [SystemMessage("Answer."), *messages]
    pool.equal(chat.invoke(system).content, expected)


def stream():
    messages, _, expected = question("lamp room")
    chunks = list(ChatOpenAI(**OPTIONS, stream_usage=True).stream(messages))
    pool.equal("".join(chunk.content for chunk in chunks), expected)
    assert sum(bool(chunk.content) for chunk in chunks) > 3, chunks
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    usage = whole.usage_metadata
    pool.equal(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])


def batch():
    questions = [question(name, start) for name in pool.KEYS for start in (0, 500)]
    answers = chat.batch([messages for messages, _, _ in questions], config={"max_concurrency": 4})
    pool.equal([answer.content for answer in answers], [expected for _, _, expected in questions])


def asynchronous():
    async def both():
        messages, _, expected = question()
        pool.equal((await chat.ainvoke(messages)).content, expected)
        pool.equal("".join([chunk.content async for chunk in chat.astream(messages)]), expected)
    asyncio.run(both())


def completions():
    prompt, expected = pool.long_prompt("lamp room")
    model = OpenAI(**OPTIONS, max_tokens=12)
    pool.equal(model.invoke(prompt), expected)
    pool.equal("".join(model.stream(prompt)), expected)


def bind_tools():
    messages, key = pool.tool_chat()
    messages = [HumanMessage(messages[0]["content"])]
    model = chat.bind_tools([open_gate])
    answer = model.invoke(messages)
    [call] = answer.tool_calls
    pool.equal((call["name"], call["args"]), ("open_gate", {"key": key}))
    result = open_gate.invoke(call)
    assert isinstance(result, ToolMessage) and result.content == f"opened with {key}", result
    following = HumanMessage("The pass key for the bridge office is 62407.\nQuestion: what is the pass key for the bridge office?")
    again = model.invoke([*messages, answer, result, following])
    assert isinstance(again, AIMessage) and not again.tool_calls, again
    pool.equal(again.content, " 62407\n")
    whole = None
    for chunk in model.stream(messages):
        whole = chunk if whole is None else whole + chunk
    pool.equal([(c["name"], c["args"]) for c in whole.tool_calls], [("open_gate", {"key": key})])


pool.run([invoke, invoke_with_options, stream, batch, asynchronous, completions, bind_tools])
