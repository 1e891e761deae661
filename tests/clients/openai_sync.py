"""The official `openai` client: chat, completions, streams, options, models, errors."""

import json
import math

import openai
import pool
from openai import OpenAI
from openai.types.chat import ChatCompletion

client = OpenAI(base_url=f"{pool.URL}/v1", api_key=pool.KEY, max_retries=0, timeout=pool.TIMEOUT_S)


def joined(stream):
    """Text, finish reason, chunks and usage of a stream of completions or of a chat."""
    text, finish, usage, chunks = "", None, None, 0
    for chunk in stream:
        chunks += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text += (choice.text if delta is None else delta.content) or ""
            finish = choice.finish_reason or finish
    return text, finish, chunks, usage


def chat():
    messages, expected = pool.long_chat()
    answer = client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0)
    choice = answer.choices[0]
    pool.equal((choice.message.role, choice.message.content, choice.finish_reason), ("assistant", expected, "stop"))
    raw = pool.ask("/v1/chat/completions", messages=messages, temperature=0)
    pool.equal(choice.message.content, raw["choices"][0]["message"]["content"])
    pool.adds_up(answer.usage, pool.tokens(messages=messages), raw["usage"]["completion_tokens"])
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion", answer
    pool.equal(answer.model, pool.MODEL)


def chat_stream():
    messages, expected = pool.long_chat("lamp room")
    with client.chat.completions.create(
        model=pool.MODEL, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        text, finish, chunks, usage = joined(stream)
    pool.equal((text, finish), (expected, "stop"))
    assert chunks > 3, chunks
    raw = pool.ask("/v1/chat/completions", messages=messages, temperature=0)
    pool.adds_up(usage, raw["usage"]["prompt_tokens"], raw["usage"]["completion_tokens"])


def chat_stream_helper():
    messages, expected = pool.long_chat("stone pantry")
    with client.chat.completions.stream(model=pool.MODEL, messages=messages, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    pool.equal((text, final.choices[0].message.content), (expected, expected))


def conversation():
    messages, expected = pool.long_chat()
    answer = client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0)
    # The client's own message goes back, with all of its fields.
    messages += [answer.choices[0].message, {"role": "user", "content": "Question: what is the pass key for the lamp room?"}]
    again = client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0)
    pool.equal((answer.choices[0].message.content, again.choices[0].message.content), (expected, f" {pool.KEYS['lamp room']}\n"))
    parts = [{"role": "developer", "content": "Answer."}, {"role": "user", "content": [{"type": "text", "text": messages[0]["content"]}]}]
    answer = client.chat.completions.create(model=pool.MODEL, messages=parts, temperature=0)
    pool.equal(answer.choices[0].message.content, expected)


def completion():
    prompt, expected = pool.long_prompt()
    answer = client.completions.create(model=pool.MODEL, prompt=prompt, max_tokens=12, temperature=0)
    pool.equal((answer.choices[0].text, answer.choices[0].finish_reason), (expected, "stop"))
    raw = pool.ask("/v1/completions", prompt=prompt, max_tokens=12, temperature=0)
    pool.equal(answer.choices[0].text, raw["choices"][0]["text"])
    pool.adds_up(answer.usage, pool.tokens(prompt=prompt), raw["usage"]["completion_tokens"])
    pool.equal(answer.object, "text_completion")


def completion_of_token_ids_and_lists():
    prompt, expected = pool.long_prompt()
    ids = pool.ask("/tokenize", prompt=prompt)["tokens"]
    answer = client.completions.create(model=pool.MODEL, prompt=ids, max_tokens=12, temperature=0)
    pool.equal(answer.choices[0].text, expected)
    other, second = pool.long_prompt("lamp room", start=300)
    answer = client.completions.create(model=pool.MODEL, prompt=[prompt, other], max_tokens=12, temperature=0)
    pool.equal([choice.text for choice in answer.choices], [expected, second])
    pool.equal([choice.index for choice in answer.choices], [0, 1])
    pool.equal(answer.usage.prompt_tokens, len(ids) + pool.tokens(prompt=other))


def completion_stream():
    prompt, expected = pool.long_prompt("stone pantry")
    stream = client.completions.create(
        model=pool.MODEL, prompt=prompt, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, finish, chunks, usage = joined(stream)
    pool.equal((text, finish), (expected, "stop"))
    assert chunks > 3, chunks
    raw = pool.ask("/v1/completions", prompt=prompt, max_tokens=12, temperature=0)
    pool.adds_up(usage, raw["usage"]["prompt_tokens"], raw["usage"]["completion_tokens"])


def cached_tokens():
    """Where they were found is a field that the client does not know: it keeps it."""
    messages, expected = pool.long_chat("lamp room", start=150)
    # About one in a hundred turns right behind the one before goes to another instance; not four in a row.
    for _ in range(4):
        again = client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0)
        pool.equal(again.choices[0].message.content, expected)
        details = again.usage.prompt_tokens_details
        if details.cached_tokens:
            break
    places = details.model_extra["cached_tokens_details"]
    pool.equal(sorted(places), ["device", "disk", "host", "pool"])
    assert details.cached_tokens == sum(places.values()) > 0, details


def several_answers():
    messages, expected = pool.long_chat()
    answer = client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0, n=2)
    pool.equal([(c.index, c.message.content) for c in answer.choices], [(0, expected), (1, expected)])
    prompt = pool.tokens(messages=messages)
    one = client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0)
    pool.adds_up(answer.usage, prompt, 2 * one.usage.completion_tokens)
    stream = client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0, n=2, stream=True)
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    pool.equal(texts, [expected, expected])


def a_batch_of_chats():
    """vLLM's route, for which the client has no method of its own."""
    names = list(pool.KEYS)
    chats = [pool.long_chat(name, start=300 * index)[0] for index, name in enumerate(names)]
    ask = lambda **extra: client.post(
        "/chat/completions/batch", cast_to=ChatCompletion, body={"model": pool.MODEL, "messages": chats, "temperature": 0, **extra}
    )
    answer = ask(logprobs=True, top_logprobs=1)
    pool.equal([c.index for c in answer.choices], list(range(len(names))))
    pool.equal([c.message.content for c in answer.choices], [f" {pool.KEYS[name]}\n" for name in names])
    alone = [client.chat.completions.create(model=pool.MODEL, messages=chat, temperature=0) for chat in chats]
    total = lambda name: sum(getattr(one.usage, name) for one in alone)
    pool.adds_up(answer.usage, total("prompt_tokens"), total("completion_tokens"))
    for choice, one in zip(answer.choices, alone, strict=True):
        pool.equal(len(choice.logprobs.content), one.usage.completion_tokens)
    forms = ask(structured_outputs={"choice": ["left", "right"]})
    assert all(choice.message.content in ("left", "right") for choice in forms.choices), forms
    for extra in ({"stream": True}, {"n": 2}, {"tools": pool.TOOLS}):
        error = pool.raises(openai.BadRequestError, lambda: ask(**extra))
        pool.equal((error.param, error.code), (next(iter(extra)), "unsupported_parameter"))


def lengths_and_stops():
    messages, expected = pool.long_chat("stone pantry")
    ask = lambda **extra: client.chat.completions.create(model=pool.MODEL, messages=messages, temperature=0, **extra)
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        answer = ask(**limit)
        pool.equal((answer.choices[0].message.content, answer.choices[0].finish_reason), (expected[:3], "length"))
        pool.equal(answer.usage.completion_tokens, 3)
    # " 53374": the text ends before the stop string.
    for stop in ("37", ["x", "37"]):
        answer = ask(stop=stop)
        pool.equal((answer.choices[0].message.content, answer.choices[0].finish_reason), (" 53", "stop"))
    text, finish, _, _ = joined(ask(stop=["37"], stream=True))
    pool.equal((text, finish), (" 53", "stop"))
    answer = ask(stop=["37"], extra_body={"include_stop_str_in_output": True})
    pool.equal(answer.choices[0].message.content, " 5337")
    answer = ask(max_tokens=40, extra_body={"ignore_eos": True, "min_tokens": 40})
    pool.equal((answer.usage.completion_tokens, answer.choices[0].finish_reason), (40, "length"))


def log_probabilities():
    messages, expected = pool.long_chat()
    answer = client.chat.completions.create(
        model=pool.MODEL, messages=messages, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    pool.equal("".join(bytes(t.bytes).decode() for t in content if not t.token.startswith("<|")), expected)
    for token in content:
        likeliest = max(top.logprob for top in token.top_logprobs)
        assert len(token.top_logprobs) >= 3 and token.logprob == likeliest <= 0, token
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) < 1.001, token
    raw = pool.ask("/v1/chat/completions", messages=messages, temperature=0, logprobs=True, top_logprobs=3)
    for ours, theirs in zip(content, raw["choices"][0]["logprobs"]["content"], strict=True):
        assert ours.token == theirs["token"] and abs(ours.logprob - theirs["logprob"]) < 1e-3, (ours, theirs)
    prompt, _ = pool.long_prompt()
    legacy = client.completions.create(model=pool.MODEL, prompt=prompt, max_tokens=3, temperature=0, logprobs=2)
    found = legacy.choices[0].logprobs
    pool.equal(found.tokens, [" ", "4", "1"])
    pool.equal(found.text_offset, [0, 1, 2])
    for ours, theirs in zip(found.token_logprobs, content):
        assert abs(ours - theirs.logprob) < 1e-3, (ours, theirs)


def echo_with_log_probabilities():
    prompt, expected = pool.long_prompt()
    answer = client.completions.create(
        model=pool.MODEL, prompt=prompt, max_tokens=2, temperature=0, logprobs=1, echo=True
    )
    choice = answer.choices[0]
    pool.equal(choice.text, prompt + expected[:2])
    count = pool.tokens(prompt=prompt)
    pool.equal(len(choice.logprobs.token_logprobs), count + 2)
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def seeds_and_sampling():
    # Under a high temperature answers are drawn, and a seed repeats one.
    ask = lambda seed: client.completions.create(
        model=pool.MODEL, prompt="The captain", max_tokens=24, temperature=1.5, top_p=0.95, seed=seed
    ).choices[0].text
    first = ask(11)
    pool.equal(ask(11), first)
    assert any(ask(seed) != first for seed in range(12, 16))
    biased = client.chat.completions.create(
        model=pool.MODEL, messages=pool.long_chat()[0], temperature=0, max_tokens=2, logit_bias={"22": 100},
        presence_penalty=0.5, frequency_penalty=0.5,
    )
    pool.equal(biased.choices[0].message.content, "77")


def tools_auto():
    messages, key = pool.tool_chat()
    ask = lambda **extra: client.chat.completions.create(
        model=pool.MODEL, messages=messages, temperature=0, tools=pool.TOOLS, **extra
    )
    answer = ask(tool_choice="auto")
    pool.equal(answer.choices[0].finish_reason, "tool_calls")
    [call] = answer.choices[0].message.tool_calls
    pool.equal((call.type, call.function.name, json.loads(call.function.arguments)), ("function", pool.TOOL, {"key": key}))
    # The result goes back, and the next question is answered from it.
    result = {"role": "tool", "tool_call_id": call.id, "content": "The pass key for the bridge office is 62407."}
    question = {"role": "user", "content": "Question: what is the pass key for the bridge office?"}
    again = client.chat.completions.create(
        model=pool.MODEL, messages=[*messages, answer.choices[0].message, result, question], temperature=0, tools=pool.TOOLS
    )
    pool.equal((again.choices[0].message.content, again.choices[0].message.tool_calls), (" 62407\n", None))
    text = ask(tool_choice="none").choices[0]
    assert text.message.tool_calls is None and pool.CALL_BEGIN in text.message.content, text


def tools_streamed():
    messages, key = pool.tool_chat()
    name, arguments, finish = "", "", None
    for chunk in client.chat.completions.create(
        model=pool.MODEL, messages=messages, temperature=0, tools=pool.TOOLS, parallel_tool_calls=False, stream=True
    ):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                pool.equal(call.index, 0)
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            finish = choice.finish_reason or finish
    pool.equal((name, json.loads(arguments), finish), (pool.TOOL, {"key": key}, "tool_calls"))


def models():
    listed = client.models.list()
    pool.equal([model.id for model in listed.data], [pool.MODEL])
    pool.equal(client.models.retrieve(pool.MODEL).object, "model")


def errors():
    messages = [{"role": "user", "content": "hi"}]
    ask = lambda **extra: lambda: client.chat.completions.create(**{"model": pool.MODEL, "messages": messages, **extra})
    for call in (ask(model="other"), lambda: client.models.retrieve("other")):
        error = pool.raises(openai.NotFoundError, call)
        pool.equal((error.status_code, error.code), (404, "model_not_found"))
    error = pool.raises(openai.BadRequestError, ask(extra_body={"mirostat": 2}))
    pool.equal((error.param, error.code, error.type), ("mirostat", "unsupported_parameter", "invalid_request_error"))
    error = pool.raises(openai.BadRequestError, ask(temperature=-1))
    pool.equal(error.param, "temperature")
    # More than the whole pool holds.
    long = [{"role": "user", "content": pool.document("harbour gate", characters=40000)}]
    error = pool.raises(openai.BadRequestError, ask(messages=long))
    pool.equal(error.code, "context_length_exceeded")
    stranger = client.with_options(api_key="wrong")
    error = pool.raises(openai.AuthenticationError, lambda: stranger.models.list())
    pool.equal(error.status_code, 401)
    error = pool.raises(openai.NotFoundError, lambda: client.post("/none", cast_to=object, body={}))
    pool.equal(error.status_code, 404)
    lost = OpenAI(base_url="http://127.0.0.1:1/v1", api_key="x", max_retries=0)
    pool.raises(openai.APIConnectionError, lost.models.list)


def an_aborted_stream_frees_its_memory():
    messages, _ = pool.long_chat()
    stream = client.chat.completions.create(
        model=pool.MODEL, messages=messages, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    pool.wait_until_idle()


def responses_with_headers():
    raw = client.chat.completions.with_raw_response.create(
        model=pool.MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=1
    )
    assert raw.headers["x-lagoon-instance"], raw.headers
    pool.equal(raw.parse().usage.completion_tokens, 1)


pool.run([
    chat,
    chat_stream,
    chat_stream_helper,
    conversation,
    completion,
    completion_of_token_ids_and_lists,
    completion_stream,
    cached_tokens,
    several_answers,
    a_batch_of_chats,
    lengths_and_stops,
    log_probabilities,
    echo_with_log_probabilities,
    seeds_and_sampling,
    tools_auto,
    tools_streamed,
    models,
    errors,
    an_aborted_stream_frees_its_memory,
    responses_with_headers,
])
