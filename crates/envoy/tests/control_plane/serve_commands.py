"""A control plane in Python with grpcio, which a test controls message by message.

Each line of standard input is a command for a stream, and each line of standard output is an event
of a stream, both in JSON. Streams are numbered in the order in which clients open them.

    {"stream": 1, "respond": {"version": "1", "nonce": "a", "type_url": "…", "resources": [...]}}
    {"stream": 1, "end": "UNAVAILABLE"}
    {"stream": 1, "end": null}

    {"port": 12345}
    {"stream": 1, "request": {...}}
    {"stream": 1, "rejected": "no such field"}

A resource has the fields of an envoyproxy/ratelimit file, and a name.
"""

import argparse
import json
import queue
import sys
import threading
from concurrent import futures

import grpc
import messages

parser = argparse.ArgumentParser()
parser.add_argument("--protos", required=True)
parser.add_argument("--generated", required=True)
arguments = parser.parse_args()
messages.generate(arguments.protos, arguments.generated)

from google.protobuf import json_format

from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from ratelimit.config.ratelimit.v3 import rls_conf_pb2

output = threading.Lock()


def emit(**event):
    with output:
        print(json.dumps(event), flush=True)


def with_unit_names(descriptors):
    """Converts the units of a file to the names or numbers of the protobuf enum."""
    for descriptor in descriptors:
        limit = descriptor.get("rate_limit") or {}
        if unit := limit.get("unit"):
            limit["unit"] = int(unit) if unit.isdigit() else unit.upper()
        with_unit_names(descriptor.get("descriptors") or [])


def response(fields):
    found = discovery_pb2.DiscoveryResponse(
        version_info=fields["version"],
        nonce=fields["nonce"],
        type_url=fields["type_url"],
    )
    for resource in fields["resources"]:
        with_unit_names(resource["descriptors"])
        config = json_format.ParseDict(resource, rls_conf_pb2.RateLimitConfig())
        found.resources.add().Pack(config)
    return found


class Ads(ads_pb2_grpc.AggregatedDiscoveryServiceServicer):
    def __init__(self):
        self.lock = threading.Lock()
        self.commands = []

    def StreamAggregatedResources(self, requests, context):
        with self.lock:
            commands = queue.Queue()
            self.commands.append(commands)
            number = len(self.commands)
        # The client has closed the stream, or its connection is lost.
        context.add_callback(lambda: commands.put({"end": None}))
        threading.Thread(target=self.read, args=(number, requests), daemon=True).start()
        while "respond" in (command := commands.get()):
            try:
                yield response(command["respond"])
            except json_format.ParseError as error:
                emit(stream=number, rejected=str(error))
        if command["end"]:
            context.abort(grpc.StatusCode[command["end"]], "a command ends the stream")

    def read(self, number, requests):
        try:
            for request in requests:
                fields = json_format.MessageToDict(request, preserving_proto_field_name=True)
                emit(stream=number, request=fields)
        except grpc.RpcError:
            # The stream has ended.
            pass

    def command(self, stream, command):
        with self.lock:
            self.commands[stream - 1].put(command)


def main():
    ads = Ads()
    # Each open stream occupies a thread.
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    ads_pb2_grpc.add_AggregatedDiscoveryServiceServicer_to_server(ads, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    emit(port=port)
    for line in sys.stdin:
        command = json.loads(line)
        ads.command(command.pop("stream"), command)


main()
