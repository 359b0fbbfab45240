"""Runs the OpenAI and Anthropic SDKs and LiteLLM through Tidegate's proxy, and checks every charged
token."""

from __future__ import annotations

import asyncio
from typing import Any, Dict, Iterator, List

import anthropic
import litellm
import openai
import pytest

import litellm_tokens
import tidegate
from conftest import Gateway

PROMPT = "the number of tokens is 37"
# The usage of a request: six words of input and 37 tokens of output.
TOKENS = 6 + 37


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """LiteLLM calls its callbacks on the first event loop, so all tests share one event loop."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def of_openai(gateway: Gateway, test: str, **headers: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{gateway.url}/v1",
        api_key="sk-1",
        max_retries=0,
        default_headers={"x-test": test, **headers},
    )


def of_anthropic(gateway: Gateway, test: str, **headers: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=gateway.url,
        api_key="sk-1",
        max_retries=0,
        default_headers={"x-test": test, **headers},
    )


def assert_charged(gateway: Gateway, test: str, tokens: int) -> None:
    assert gateway.model.counter.used[test] == tokens
    assert gateway.charged(test) == tokens


MESSAGES: Any = [{"role": "user", "content": PROMPT}]


def test_openai_chat(gateway: Gateway) -> None:
    client = of_openai(gateway, "chat")
    answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=500)
    assert answer.usage is not None and answer.usage.total_tokens == TOKENS
    assert_charged(gateway, "chat", TOKENS)


def test_openai_chat_stream(gateway: Gateway) -> None:
    client = of_openai(gateway, "chat-stream")
    stream = client.chat.completions.create(
        model="m",
        messages=MESSAGES,
        max_completion_tokens=500,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len("".join(texts).split()) == 37
    assert_charged(gateway, "chat-stream", TOKENS)


def test_openai_chat_stream_without_usage(gateway: Gateway) -> None:
    client = of_openai(gateway, "no-usage")
    stream = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=500, stream=True
    )
    assert len(list(stream)) == 39
    # The response does not contain the usage, so the reservation stays charged.
    assert gateway.charged("no-usage") == 500


def test_openai_responses(gateway: Gateway) -> None:
    client = of_openai(gateway, "responses")
    answer = client.responses.create(model="m", input=PROMPT, max_output_tokens=500)
    assert len(answer.output_text.split()) == 37
    assert_charged(gateway, "responses", TOKENS)


def test_openai_responses_stream(gateway: Gateway) -> None:
    client = of_openai(gateway, "responses-stream")
    stream = client.responses.create(
        model="m", input=PROMPT, max_output_tokens=500, stream=True
    )
    assert len(list(stream)) == 39
    assert_charged(gateway, "responses-stream", TOKENS)


def test_anthropic_messages(gateway: Gateway) -> None:
    client = of_anthropic(gateway, "messages")
    answer = client.messages.create(model="claude-sonnet-4-5", messages=MESSAGES, max_tokens=500)
    assert answer.usage.output_tokens == 37
    assert_charged(gateway, "messages", TOKENS)


def test_anthropic_messages_stream(gateway: Gateway) -> None:
    client = of_anthropic(gateway, "messages-stream")
    with client.messages.stream(
        model="claude-sonnet-4-5", messages=MESSAGES, max_tokens=500
    ) as stream:
        assert len("".join(stream.text_stream).split()) == 37
    assert_charged(gateway, "messages-stream", TOKENS)


def test_a_stream_that_the_client_cuts_is_charged_for_what_was_seen(gateway: Gateway) -> None:
    client = of_anthropic(gateway, "cut")
    messages: Any = [{"role": "user", "content": "the number of tokens is 30000"}]
    with client.messages.stream(
        model="claude-sonnet-4-5", messages=messages, max_tokens=40000
    ) as stream:
        for _, _text in zip(range(10), stream.text_stream):
            pass
    for _ in range(100):
        charged = gateway.charged("cut")
        if charged < 40000:
            break
    # The cost is six tokens of input, and at least the ten words of output that the client has
    # received.
    assert 16 <= charged < 40000, charged


def test_openai_is_denied_in_its_own_format(gateway: Gateway) -> None:
    client = of_openai(gateway, "openai-denied", **{"x-limit": "yes"})
    with pytest.raises(openai.RateLimitError) as denied:
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=2000)
    assert denied.value.code == "rate_limit_exceeded"
    assert "retrying will not succeed" in denied.value.message
    assert denied.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.BadRequestError, match="/max_tokens must be an integer"):
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=-1)


def test_anthropic_is_denied_in_its_own_format(gateway: Gateway) -> None:
    client = of_anthropic(gateway, "anthropic-denied", **{"x-limit": "yes"})
    with pytest.raises(anthropic.RateLimitError) as denied:
        client.messages.create(model="claude-sonnet-4-5", messages=MESSAGES, max_tokens=2000)
    body: Any = denied.value.body
    assert body["error"]["type"] == "rate_limit_error"


async def complete(gateway: Gateway, model: str, test: str, **options: Any) -> str:
    """Calls LiteLLM. Returns the text."""
    base = gateway.url if model.startswith("anthropic/") else f"{gateway.url}/v1"
    headers = {"x-test": test, **options.pop("headers", {})}
    answer = await litellm.acompletion(
        model=model,
        messages=MESSAGES,
        api_base=base,
        api_key="sk-1",
        num_retries=0,
        max_retries=0,
        extra_headers=headers,
        **options,
    )
    if not options.get("stream"):
        return str(answer.choices[0].message.content)
    texts: List[str] = []
    async for chunk in answer:
        texts += [choice.delta.content or "" for choice in chunk.choices]
    return "".join(texts)


@pytest.mark.parametrize("model", ["openai/m", "anthropic/claude-sonnet-4-5"])
@pytest.mark.parametrize("stream", [False, True])
def test_litellm(
    gateway: Gateway, loop: asyncio.AbstractEventLoop, model: str, stream: bool
) -> None:
    test = f"litellm-{model.split('/')[0]}-{stream}"
    options: Dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    options = options if stream else {}
    text = loop.run_until_complete(complete(gateway, model, test, max_tokens=500, **options))
    assert len(text.split()) == 37
    assert_charged(gateway, test, TOKENS)


@pytest.mark.parametrize("stream", [False, True])
def test_50_concurrent_calls_of_litellm_never_exceed_the_limit(
    gateway: Gateway, loop: asyncio.AbstractEventLoop, stream: bool
) -> None:
    test = f"concurrent-{stream}"
    options: Dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    options = {"max_tokens": 100, "headers": {"x-limit": "yes"}, **(options if stream else {})}

    async def calls() -> List[Any]:
        calls = [complete(gateway, "openai/m", test, **options) for _ in range(50)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = loop.run_until_complete(calls())
    denied = [result for result in results if isinstance(result, litellm.exceptions.RateLimitError)]
    served = [result for result in results if isinstance(result, str)]
    assert len(denied) + len(served) == 50, results
    assert 5 <= len(served) <= 1000 // TOKENS
    counter = gateway.model.counter
    assert counter.used[test] == len(served) * TOKENS
    # At any time, the sum of the used tokens and the tokens that open requests could still use must
    # be within the limit.
    assert counter.peak[test] <= 1000


@pytest.mark.parametrize("stream", [False, True])
def test_50_concurrent_calls_with_a_callback_never_exceed_the_limit(
    gateway: Gateway, loop: asyncio.AbstractEventLoop, stream: bool
) -> None:
    """LiteLLM without the proxy: the recipe reserves tokens, and its callback settles the
    reservation."""
    test = f"callback-{stream}"

    async def calls() -> List[Any]:
        async with tidegate.AsyncClient(gateway.api_url) as client:
            limiter = litellm_tokens.TokenLimiter(client)

            async def call() -> str:
                answer = await limiter.acompletion(
                    {"model": test},
                    model="openai/m",
                    messages=MESSAGES,
                    max_tokens=100,
                    stream=stream,
                    api_base=f"{gateway.model.url}/v1",
                    api_key="sk-1",
                    max_retries=0,
                    extra_headers={"x-test": test},
                )
                if not stream:
                    return str(answer.choices[0].message.content)
                texts = []
                async for chunk in answer:
                    texts += [choice.delta.content or "" for choice in chunk.choices]
                return "".join(texts)

            results = await asyncio.gather(*[call() for _ in range(50)], return_exceptions=True)
            await asyncio.wait_for(limiter.settled(), 30)
            state = await client.peek({"model": test})
            # A peek reports the same remaining tokens as a check, which costs 1.
            assert state.remaining == 999 - gateway.model.counter.used[test], state
            return results

    results = loop.run_until_complete(calls())
    denied = [result for result in results if isinstance(result, tidegate.Denied)]
    served = [result for result in results if isinstance(result, str)]
    assert len(denied) + len(served) == 50, results
    assert 5 <= len(served) <= 1000 // TOKENS
    counter = gateway.model.counter
    assert counter.used[test] == len(served) * TOKENS
    assert counter.peak[test] <= 1000
