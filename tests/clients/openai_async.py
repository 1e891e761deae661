"""The official `openai` client's asynchronous half: requests and streams side by side, one cancelled."""

import asyncio
import json

import openai
import pool
from openai import AsyncOpenAI

NAMES = list(pool.KEYS)


def client():
    return AsyncOpenAI(base_url=f"{pool.URL}/v1", api_key=pool.KEY, max_retries=0, timeout=pool.TIMEOUT_S)


async def text_of(stream):
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    return text, usage


async def chats():
    async with client() as openai_client:
        chats = [pool.long_chat(name, start) for name in NAMES for start in (0, 700)]
        answers = await asyncio.gather(*(
            openai_client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0)
            for messages, _ in chats
        ))
    pool.equal([a.choices[0].message.content for a in answers], [expected for _, expected in chats])
    for answer, (messages, _) in zip(answers, chats):
        raw = pool.ask("/v1/chat/completions", messages=messages, temperature=0)
        pool.equal(answer.choices[0].message.content, raw["choices"][0]["message"]["content"])
        pool.adds_up(answer.usage, raw["usage"]["prompt_tokens"], raw["usage"]["completion_tokens"])


async def streams():
    async with client() as openai_client:
        async def one(name):
            messages, expected = pool.long_chat(name)
            stream = await openai_client.chat.completions.create(
                model=pool.MODEL, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
            )
            text, usage = await text_of(stream)
            pool.equal(text, expected)
            pool.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        await asyncio.gather(*map(one, NAMES))


async def completions():
    async with client() as openai_client:
        prompts = [pool.long_prompt(name) for name in NAMES]
        answers = await asyncio.gather(*(
            openai_client.completions.create(model=pool.MODEL, prompt=prompt, max_tokens=12, temperature=0)
            for prompt, _ in prompts
        ))
    pool.equal([a.choices[0].text for a in answers], [expected for _, expected in prompts])


async def tools():
    messages, key = pool.tool_chat()
    async with client() as openai_client:
        answer = await openai_client.chat.completions.create(
            model=pool.MODEL, messages=messages, temperature=0, tools=pool.TOOLS
        )
    [call] = answer.choices[0].message.tool_calls
    pool.equal((call.function.name, json.loads(call.function.arguments)), (pool.TOOL, {"key": key}))


async def a_cancelled_request_frees_its_memory():
    messages, expected = pool.long_chat()
    async with client() as openai_client:
        request = asyncio.create_task(openai_client.chat.completions.create(
            model=pool.MODEL, messages=messages, max_tokens=1500, extra_body={"ignore_eos": True}
        ))
        await asyncio.sleep(0.1)
        request.cancel()
        try:
            await request
            raise AssertionError("the request had ended")
        except asyncio.CancelledError:
            pass
        await asyncio.to_thread(pool.wait_until_idle)
        answer = await openai_client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0)
        pool.equal(answer.choices[0].message.content, expected)


async def errors():
    async with client() as openai_client:
        try:
            await openai_client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
            raise AssertionError("no error")
        except openai.NotFoundError as error:
            pool.equal(error.code, "model_not_found")
        models = [model.id async for model in openai_client.models.list()]
        pool.equal(models, [pool.MODEL])


def sync(check):
    def run():
        asyncio.run(check())
    run.__name__ = check.__name__
    return run


pool.run([sync(check) for check in (
    chats, streams, completions, tools, a_cancelled_request_frees_its_memory, errors,
)])
