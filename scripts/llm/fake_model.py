"""A fake model server with the APIs of OpenAI and Anthropic, which counts tokens exactly.

A prompt is a number: the model generates this number of tokens, but at most the request's maximum.
Each word of the input is a token, and half of the input comes from the cache.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Iterator, List, Optional, Tuple

Json = Dict[str, Any]


@dataclass
class Usage:
    """The numbers of tokens in a request."""

    input: int
    cached: int
    output: int

    @property
    def total(self) -> int:
        return self.input + self.cached + self.output


class Counter:
    """The number of tokens used by requests, and the peak of the number of tokens that they could
    have used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._possible: Dict[str, int] = {}
        self.used: Dict[str, int] = {}
        self.peak: Dict[str, int] = {}
        self.requests: Dict[str, int] = {}

    def begin(self, key: str, most: int) -> None:
        with self._lock:
            self._add(key, most)
            self.requests[key] = self.requests.get(key, 0) + 1

    def end(self, key: str, most: int, used: int) -> None:
        with self._lock:
            self._add(key, used - most)
            self.used[key] = self.used.get(key, 0) + used

    def _add(self, key: str, tokens: int) -> None:
        possible = self._possible.get(key, 0) + tokens
        self._possible[key] = possible
        self.peak[key] = max(self.peak.get(key, 0), possible)


class QuietServer(ThreadingHTTPServer):
    """A server that does not report disconnected clients."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class FakeModel:
    """The server, on a free port."""

    def __init__(self) -> None:
        self.counter = Counter()
        counter = self.counter

        class Handler(ModelHandler):
            pass

        Handler.counter = counter
        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class ModelHandler(BaseHTTPRequestHandler):
    """Handles one request after another."""

    protocol_version = "HTTP/1.1"
    counter: Counter

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body: Json = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "via" in self.headers:
            assert self.headers["accept-encoding"] == "identity"
        if self.path.endswith("/probe"):
            self._send({"usage": {"prompt_tokens": 0, "completion_tokens": 0}})
            return
        key = self.headers.get("x-test", "")
        prompt, most = prompt_of(body)
        words = prompt.split()
        wanted = int(words[-1])
        cached = len(words) // 2
        usage = Usage(len(words) - cached, cached, min(wanted, most))
        self.counter.begin(key, len(words) + most)
        if self.path.endswith("/chat/completions"):
            document, events = chat(body, usage)
        elif self.path.endswith("/responses"):
            document, events = responses(usage)
        else:
            document, events = messages(usage)
        # Count the tokens before the response ends, because the proxy settles the charge at the end
        # of the response.
        if not body.get("stream"):
            self.counter.end(key, len(words) + most, usage.total)
            self._send(document)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        chunks = [f"event: {event['type']}\n" if "type" in event else "" for event in events]
        for name, event in zip(chunks[:-1], events[:-1]):
            self._chunk(f"{name}data: {json.dumps(event)}\n\n")
        self.counter.end(key, len(words) + most, usage.total)
        self._chunk(f"{chunks[-1]}data: {json.dumps(events[-1])}\n\n")
        if self.path.endswith("/chat/completions"):
            self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, document: Json) -> None:
        body = json.dumps(document, indent=1).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


def prompt_of(body: Json) -> Tuple[str, int]:
    """Returns a request's prompt and its maximum number of output tokens."""
    prompt = body["input"] if "input" in body else body["messages"][-1]["content"]
    if not isinstance(prompt, str):
        last = prompt[-1]
        content = last.get("content", last.get("text"))
        prompt = content if isinstance(content, str) else content[-1]["text"]
    limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    most = [body[name] for name in limits if body.get(name) is not None]
    return prompt, most[0] if most else 4096


def words_of(usage: Usage) -> Iterator[str]:
    return (f"word{at} " for at in range(usage.output))


def chat(body: Json, usage: Usage) -> Tuple[Json, List[Json]]:
    tokens = {
        "prompt_tokens": usage.input + usage.cached,
        "completion_tokens": usage.output,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    common = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    message = {"role": "assistant", "content": "".join(words_of(usage))}
    document = {
        **common,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": tokens,
    }

    def chunk(delta: Json, finish: Optional[str] = None) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {**common, "object": "chat.completion.chunk", "choices": [choice]}

    events = [chunk({"role": "assistant", "content": ""})]
    events += [chunk({"content": word}) for word in words_of(usage)]
    events.append(chunk({}, "stop"))
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**common, "object": "chat.completion.chunk", "choices": [], "usage": tokens})
    return document, events


def responses(usage: Usage) -> Tuple[Json, List[Json]]:
    tokens = {
        "input_tokens": usage.input + usage.cached,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total,
    }
    text = {"type": "output_text", "text": "".join(words_of(usage)), "annotations": []}
    message = {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [text],
    }
    document = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "fake",
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": tokens,
    }
    created = {**document, "status": "in_progress", "output": [], "usage": None}
    events: List[Json] = [{"type": "response.created", "sequence_number": 0, "response": created}]
    for at, word in enumerate(words_of(usage), 1):
        delta = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": word}
        events.append({"type": "response.output_text.delta", "sequence_number": at, **delta})
    last = {"sequence_number": len(events), "response": document}
    events.append({"type": "response.completed", **last})
    return document, events


def messages(usage: Usage) -> Tuple[Json, List[Json]]:
    tokens = {
        "input_tokens": usage.input,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }
    common = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "stop_sequence": None,
    }
    content = [{"type": "text", "text": "".join(words_of(usage))}]
    document = {**common, "content": content, "stop_reason": "end_turn", "usage": tokens}
    first: Json = {**common, "content": [], "stop_reason": None, "usage": {**tokens, "output_tokens": 1}}
    events: List[Json] = [
        {"type": "message_start", "message": first},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    for word in words_of(usage):
        delta = {"type": "text_delta", "text": word}
        events.append({"type": "content_block_delta", "index": 0, "delta": delta})
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    events += [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": usage.output}},
        {"type": "message_stop"},
    ]
    return document, events
