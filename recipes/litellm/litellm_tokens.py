"""LiteLLM: reserve the tokens of a call before it is sent, and settle its usage in a callback.

Tidegate's proxy does the same for every SDK without any code: see docs/llm.md.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any, Dict

import litellm
from litellm.integrations.custom_logger import CustomLogger

import tidegate


class TokenLimiter:
    """Calls LiteLLM within a limit of tokens."""

    def __init__(self, client: tidegate.AsyncClient, ttl: float = 120) -> None:
        self._client = client
        self._ttl = ttl
        self._open: Dict[str, tidegate.AsyncReservation] = {}
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        # LiteLLM ignores a second callback of the same class, so all limiters share one.
        if SETTLE not in litellm.callbacks:
            litellm.callbacks.append(SETTLE)

    async def acompletion(self, entries: Dict[str, str], **options: Any) -> Any:
        """Calls `litellm.acompletion`. Raises `tidegate.Denied` if the limit does not admit the
        call."""
        # Four bytes of the input count as a token, and the output has at most `max_tokens`.
        most = len(json.dumps(options["messages"])) // 4 + 1 + int(options["max_tokens"])
        reservation = await self._client.reserve(entries, cost=most, ttl=self._ttl)
        reservation.raise_if_denied()
        call = uuid.uuid4().hex
        self._open[call] = reservation
        self._is_settled.clear()
        SETTLE.limiters[call] = self
        if options.get("stream"):
            # Without this option, OpenAI's streams do not contain the usage.
            options.setdefault("stream_options", {"include_usage": True})
        metadata = {**options.pop("metadata", {}), "tidegate_call": call}
        try:
            return await litellm.acompletion(metadata=metadata, **options)
        except BaseException:
            await self.settle(call, 0)
            raise

    async def settle(self, call: str, tokens: int) -> None:
        """Charges the tokens used by a call."""
        SETTLE.limiters.pop(call, None)
        reservation = self._open.pop(call, None)
        if reservation is not None:
            await reservation.settle(tokens)
        if not self._open:
            self._is_settled.set()

    async def settled(self) -> None:
        """Waits until every finished call is settled."""
        await self._is_settled.wait()


class SettleCallback(CustomLogger):
    """Settles a call when LiteLLM reports that its response, or its stream, has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.limiters: Dict[str, TokenLimiter] = {}

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        metadata = kwargs["litellm_params"].get("metadata") or {}
        call = metadata.get("tidegate_call", "")
        limiter = self.limiters.get(call)
        if limiter is not None:
            await limiter.settle(call, response_obj.usage.total_tokens)


SETTLE = SettleCallback()
