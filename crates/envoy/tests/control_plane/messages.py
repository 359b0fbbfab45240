"""The protobuf messages and the service of a control plane, generated with grpcio's compiler."""

import pathlib
import sys

import grpc_tools
from grpc_tools import protoc

TYPE = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig"

PROTOS = [
    "envoy/config/core/v3/base.proto",
    "envoy/service/discovery/v3/ads.proto",
    "envoy/service/discovery/v3/discovery.proto",
    "google/rpc/status.proto",
    "ratelimit/config/ratelimit/v3/rls_conf.proto",
]


def generate(protos, folder):
    """Generates modules for the folder `protos` in `folder`, and makes them importable."""
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    bundled = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{protos}", f"-I{bundled}"]
    arguments += [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    if protoc.main(arguments + PROTOS) != 0:
        sys.exit("protoc failed")
    sys.path.insert(0, str(folder))
    # Merge protobuf's package `google` and the generated package `google` into one namespace.
    import google

    google.__path__ = list(google.__path__) + [str(folder / "google")]
