"""The official `openai` client: /v1/embeddings."""

import asyncio
import math

import openai
import pool
from openai import AsyncOpenAI, OpenAI

OPTIONS = {"base_url": f"{pool.URL}/v1", "api_key": pool.KEY, "max_retries": 0, "timeout": pool.TIMEOUT_S}
client = OpenAI(**OPTIONS)
TEXTS = ["The captain moved the crates.", "The captain moved the boxes.", "3 4 5 6 7"]


def norm(vector):
    return math.sqrt(sum(x * x for x in vector))


def close(left, right):
    pool.equal(len(left), len(right))
    assert max(abs(a - b) for a, b in zip(left, right)) < 1e-3, (left[:4], right[:4])


def create():
    # The client asks for base64 and decodes it.
    answer = client.embeddings.create(model=pool.MODEL, input=TEXTS)
    pool.equal((answer.object, [item.index for item in answer.data]), ("list", [0, 1, 2]))
    vectors = [item.embedding for item in answer.data]
    for vector in vectors:
        assert abs(norm(vector) - 1) < 1e-3, norm(vector)
    tokens = sum(pool.tokens(prompt=text) for text in TEXTS)
    pool.equal((answer.usage.prompt_tokens, answer.usage.total_tokens), (tokens, tokens))
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    assert dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[2]), "texts that are alike are nearer"
    raw = pool.ask("/v1/embeddings", input=TEXTS[0])
    close(vectors[0], raw["data"][0]["embedding"])
    floats = client.embeddings.create(model=pool.MODEL, input=TEXTS[0], encoding_format="float")
    close(vectors[0], floats.data[0].embedding)
    ids = pool.ask("/tokenize", prompt=TEXTS[0])["tokens"]
    close(vectors[0], client.embeddings.create(model=pool.MODEL, input=ids).data[0].embedding)
    close(vectors[0], client.embeddings.create(model=pool.MODEL, input=[ids]).data[0].embedding)


def dimensions():
    whole = client.embeddings.create(model=pool.MODEL, input=TEXTS[0]).data[0].embedding
    short = client.embeddings.create(model=pool.MODEL, input=TEXTS[0], dimensions=16).data[0].embedding
    cut = whole[:16]
    close(short, [x / norm(cut) for x in cut])


def asynchronous():
    async def all_texts():
        async with AsyncOpenAI(**OPTIONS) as other:
            one = await asyncio.gather(*(other.embeddings.create(model=pool.MODEL, input=text) for text in TEXTS))
            together = await other.embeddings.create(model=pool.MODEL, input=TEXTS)
            for alone, beside in zip(one, together.data):
                close(alone.data[0].embedding, beside.embedding)
    asyncio.run(all_texts())


def errors():
    wrong = lambda **extra: lambda: client.embeddings.create(**{"model": pool.MODEL, "input": "hi", **extra})
    pool.raises(openai.NotFoundError, wrong(model="other"))
    pool.equal(pool.raises(openai.BadRequestError, wrong(dimensions=100000)).param, "dimensions")
    pool.equal(pool.raises(openai.BadRequestError, wrong(input=[])).param, "input")


# A text's embedding is computed where it arrives.
pool.run([create, dimensions, asynchronous, errors], borrows=False)
