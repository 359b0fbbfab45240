"""requests: reserve a language model's tokens before a call, and settle the used tokens."""

from __future__ import annotations

from typing import Any, Dict

import requests

import tidegate


def complete(
    client: tidegate.Client, url: str, model: str, prompt: str, max_tokens: int
) -> Dict[str, Any]:
    """Calls the model. Raises `tidegate.Denied` if the budget does not admit the call."""
    # The highest possible cost is reserved, so the budget is never exceeded.
    highest = len(prompt) + max_tokens
    with client.reserve({"model": model}, cost=highest, ttl=120) as reservation:
        reservation.raise_if_denied()
        body = {"model": model, "max_tokens": max_tokens, "prompt": prompt}
        response = requests.post(url, json=body, timeout=100)
        # An exception refunds everything: a failed call has no usage.
        response.raise_for_status()
        answer: Dict[str, Any] = response.json()
        reservation.cost = answer["usage"]["total_tokens"]
    return answer
