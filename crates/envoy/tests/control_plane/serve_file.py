"""A control plane for rate limits, in Python with grpcio, with mutual TLS.

It sends the resources in a file to every client. The file contains protobuf messages as JSON.
Each file change is a new version. The clients' ACKs and NACKs are written to standard error.
"""

import argparse
import json
import pathlib
import queue
import sys
import threading
import time
from concurrent import futures

import grpc
import messages

parser = argparse.ArgumentParser()
parser.add_argument("--protos", required=True)
parser.add_argument("--generated", required=True)
parser.add_argument("--resources", required=True)
parser.add_argument("--certs", required=True)
parser.add_argument("--port", type=int, default=0)
arguments = parser.parse_args()
messages.generate(arguments.protos, arguments.generated)

from google.protobuf import any_pb2, json_format

from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from ratelimit.config.ratelimit.v3 import rls_conf_pb2


def say(*words):
    print(*words, file=sys.stderr, flush=True)


class State:
    """The current resources, and the streams that subscribe to them."""

    def __init__(self):
        self.lock = threading.Lock()
        self.version = 0
        self.resources = None
        self.streams = []

    def response(self, nonce):
        response = discovery_pb2.DiscoveryResponse(
            version_info=f"python-{self.version}", type_url=messages.TYPE, nonce=nonce
        )
        for resource in self.resources:
            message = json_format.ParseDict(resource, rls_conf_pb2.RateLimitConfig())
            packed = any_pb2.Any()
            packed.Pack(message)
            response.resources.append(packed)
        return response

    def follow(self, path):
        """Reads the file whenever its content changes."""
        last = None
        while True:
            try:
                text = path.read_text()
            except FileNotFoundError:
                text = None
            if text is not None and text != last:
                last = text
                with self.lock:
                    self.version += 1
                    self.resources = json.loads(text)
                    for stream in self.streams:
                        stream.put(True)
            time.sleep(0.02)


class Ads(ads_pb2_grpc.AggregatedDiscoveryServiceServicer):
    def __init__(self, state):
        self.state = state

    def StreamAggregatedResources(self, requests, context):
        events = queue.Queue()
        nonces = 0

        def listen():
            try:
                for request in requests:
                    if request.error_detail.message:
                        say("NACK", request.version_info, request.error_detail.message)
                    elif request.response_nonce:
                        say("ACK", request.version_info, request.response_nonce)
                    else:
                        say("SUBSCRIBE", request.node.id, f"version={request.version_info}")
            except grpc.RpcError:
                pass
            events.put(False)

        threading.Thread(target=listen, daemon=True).start()
        with self.state.lock:
            self.state.streams.append(events)
            if self.state.resources is not None:
                events.put(True)
        while events.get():
            nonces += 1
            with self.state.lock:
                response = self.state.response(f"nonce-{nonces}")
            yield response
        with self.state.lock:
            self.state.streams.remove(events)


def main():
    state = State()
    certs = pathlib.Path(arguments.certs)
    credentials = grpc.ssl_server_credentials(
        [((certs / "tls.key").read_bytes(), (certs / "tls.crt").read_bytes())],
        root_certificates=(certs / "ca.crt").read_bytes(),
        require_client_auth=True,
    )
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    ads_pb2_grpc.add_AggregatedDiscoveryServiceServicer_to_server(Ads(state), server)
    port = server.add_secure_port(f"127.0.0.1:{arguments.port}", credentials)
    server.start()
    say(f"listening port={port}")
    state.follow(pathlib.Path(arguments.resources))


main()
