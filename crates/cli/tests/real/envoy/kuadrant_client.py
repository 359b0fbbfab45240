"""Calls Kuadrant's rate limit service, in Python with grpcio.

It writes the results of the calls to standard output, as JSON.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from concurrent import futures

parser = argparse.ArgumentParser()
parser.add_argument("--protos", required=True)
parser.add_argument("--generated", required=True)
parser.add_argument("--address", required=True)
arguments = parser.parse_args()

import grpc
import grpc_tools

generated = pathlib.Path(arguments.generated)
generated.mkdir(exist_ok=True)
protos = [
    "envoy/config/core/v3/base.proto",
    "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
    "envoy/service/ratelimit/v3/rls.proto",
    "envoy/type/v3/ratelimit_unit.proto",
    "kuadrant/service/ratelimit/v1/kuadrantrls.proto",
]
bundled = pathlib.Path(grpc_tools.__file__).parent / "_proto"
subprocess.run(
    [sys.executable, "-m", "grpc_tools.protoc", f"-I{arguments.protos}", f"-I{bundled}"]
    + [f"--python_out={generated}", f"--grpc_python_out={generated}"]
    + protos,
    check=True,
)
sys.path.insert(0, str(generated))
from google.protobuf import duration_pb2

from envoy.extensions.common.ratelimit.v3 import ratelimit_pb2
from envoy.service.ratelimit.v3 import rls_pb2
from kuadrant.service.ratelimit.v1 import kuadrantrls_pb2, kuadrantrls_pb2_grpc

channel = grpc.insecure_channel(arguments.address)
service = kuadrantrls_pb2_grpc.RateLimitServiceStub(channel)
Code = rls_pb2.RateLimitResponse.Code

entry = ratelimit_pb2.RateLimitDescriptor.Entry(key="user", value="alice")
of_user = dict(domain="llm", descriptors=[ratelimit_pb2.RateLimitDescriptor(entries=[entry])])


def check():
    answer = service.CheckRateLimit(rls_pb2.RateLimitRequest(**of_user), timeout=5)
    return Code.Name(answer.overall_code)


def report(hits):
    request = rls_pb2.RateLimitRequest(hits_addend=hits, **of_user)
    return Code.Name(service.Report(request, timeout=5).overall_code)


def reserve(amount, seconds=30):
    ttl = duration_pb2.Duration(seconds=seconds)
    request = kuadrantrls_pb2.ReserveRequest(amount=amount, ttl=ttl, **of_user)
    return service.Reserve(request, timeout=5)


def commit(reservation, amount):
    request = kuadrantrls_pb2.CommitRequest(
        reservation_id=reservation, actual_amount=amount, **of_user
    )
    return service.Commit(request, timeout=5).reservation_released


with futures.ThreadPoolExecutor(50) as pool:
    reserved = list(pool.map(lambda _: reserve(10), range(50)))
held = [answer.reservation_id for answer in reserved if answer.code == Code.OK]
results = {
    "held": len(held),
    "denied": sum(answer.code == Code.OVER_LIMIT for answer in reserved),
    "full": check(),
    "released": sum(commit(reservation, 4) for reservation in held),
    "again": sum(commit(reservation, 4) for reservation in held),
    "unknown": commit("unknown", 1),
    "check": check(),
    "report": report(58),
    # 40 were committed, 1 and 58 were reported: one hit is left.
    "last": Code.Name(reserve(1).code),
    "over": Code.Name(reserve(1).code),
}
print(json.dumps(results))
