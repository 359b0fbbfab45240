"""Redis or Valkey as a standalone server, with Sentinels, and as a cluster.

`store` is the `store` section of the rules file.
"""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
import time

from programs import eventually, in_environment, reserve_port, spawn

REDIS = "redis-server"
VALKEY = "valkey-server"


class Standalone:
    """A standalone server."""

    def __init__(self, folder, program=REDIS):
        self.folder, self.program = folder, program
        self.port = reserve_port()
        self.store = {"redis": f"redis://127.0.0.1:{self.port}"}

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def start(self):
        self.process = server(self.program, self.folder, self.port)

    def cli(self, *words):
        return redis_cli(self.port, *words)

    def deciding(self):
        """The ports of the servers that make decisions."""
        return [self.port]


class Proxied(Standalone):
    """A standalone server behind a TCP proxy, which can delay data and reset connections."""

    def __init__(self, folder, program=REDIS):
        super().__init__(folder, program)
        self.proxy = Proxy(self.port)
        self.store = {"redis": f"redis://127.0.0.1:{self.proxy.port}"}

    def __exit__(self, *cause):
        super().__exit__(*cause)
        self.proxy.close()


class ShiftedClock(Standalone):
    """A standalone server whose wall clock can be set while it runs."""

    def start(self):
        self.clock = Clock(self.folder)
        self.process = server(
            self.program, self.folder, self.port, environment=self.clock.environment
        )


class Clock:
    """A program's wall clock, which can be set while the program runs."""

    def __init__(self, folder, seconds=0):
        self.file, library = os.path.join(folder, "clock"), os.path.join(folder, "clock.so")
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
        self.shift(seconds)
        self.environment = {"LD_PRELOAD": library, "SHIFTED_CLOCK": self.file}

    def shift(self, seconds):
        """Sets the clock to `seconds` ahead of this machine's clock."""
        # The file must be overwritten in place, because the program has mapped it into memory.
        with open(self.file, "r+b" if os.path.exists(self.file) else "wb") as out:
            out.write(struct.pack("=q", seconds))


class Sentinels:
    """A primary, a replica, and three Sentinels."""

    REPLICA = {}  # the environment of the replica

    def __init__(self, folder, program=REDIS):
        self.folder, self.program = folder, program
        self.ports = [reserve_port() for _ in range(5)]
        names = [f"redis://127.0.0.1:{port}" for port in self.ports[2:]]
        self.store = {"redis": {"sentinel": names, "primary": "tide"}}

    def __enter__(self):
        primary, replica = self.ports[:2]
        self.process = server(self.program, self.folder, primary)
        follower = server(
            self.program,
            self.folder,
            replica,
            "--replicaof",
            "127.0.0.1",
            str(primary),
            environment=self.REPLICA,
        )
        self.processes = [self.process, follower]
        eventually(
            "the replica is in sync",
            lambda: "master_link_status:up" in redis_cli(replica, "INFO", "replication"),
        )
        for port in self.ports[2:]:
            file = os.path.join(self.folder, f"sentinel{port}.conf")
            with open(file, "w") as out:
                out.write(
                    f"port {port}\nbind 127.0.0.1\nsentinel monitor tide 127.0.0.1 {primary} 2\n"
                )
                out.write(
                    "sentinel down-after-milliseconds tide 1000\n"
                    "sentinel failover-timeout tide 5000\n"
                )
            self.processes.append(spawn(self.program, file, "--sentinel"))
        for port in self.ports[2:]:
            eventually(
                "the Sentinels know each other",
                lambda: "slaves=1,sentinels=3" in redis_cli(port, "INFO", "sentinel"),
            )
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def sentinels(self):
        """The processes of the three Sentinels."""
        return self.processes[2:5]

    def primary_port(self):
        """Returns the primary's port, according to the first Sentinel."""
        return redis_cli(self.ports[2], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "tide").split()[-1]


class SentinelsAndUnknownServer(Sentinels):
    """`Sentinels`, and another server that accepts writes but that the Sentinels do not know."""

    def __enter__(self):
        super().__enter__()
        self.unknown_server = reserve_port()
        self.processes.append(server(self.program, self.folder, self.unknown_server))
        return self


class SentinelsWithSlowClock(Sentinels):
    """`Sentinels`, with a replica whose clock is ten minutes behind."""

    def __enter__(self):
        self.REPLICA = Clock(self.folder, -600).environment
        return super().__enter__()


class Cluster:
    """Three primaries, each with a replica."""

    OPTIONS = [
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        "1000",
        "--repl-diskless-sync-delay",
        "0",
        "--cluster-replica-validity-factor",
        "0",
    ]

    def __init__(self, folder, program=REDIS):
        self.folder, self.program = folder, program
        self.ports = [reserve_port() for _ in range(6)]
        self.store = {"redis": {"cluster": [f"redis://127.0.0.1:{port}" for port in self.ports]}}

    def __enter__(self):
        self.processes = {}
        for port in self.ports:
            nodes = [
                "--cluster-port",
                str(reserve_port()),
                "--cluster-config-file",
                f"nodes{port}.conf",
            ]
            self.processes[port] = server(self.program, self.folder, port, *self.OPTIONS, *nodes)
        addresses = [f"127.0.0.1:{port}" for port in self.ports]
        command = [
            "redis-cli",
            "--cluster",
            "create",
            *addresses,
            "--cluster-replicas",
            "1",
            "--cluster-yes",
        ]
        created = subprocess.run(command, capture_output=True, text=True)
        assert created.returncode == 0, created.stdout
        for port in self.ports:
            eventually("every node has joined the cluster", lambda: self.is_known_to(port))
            eventually("the replicas are in sync", lambda: follows(port))
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def is_known_to(self, port):
        nodes = redis_cli(port, "CLUSTER", "NODES")
        return (
            "cluster_state:ok" in redis_cli(port, "CLUSTER", "INFO")
            and nodes.count("connected") >= 6
        )

    def primaries(self, node):
        lines = redis_cli(node, "CLUSTER", "NODES").splitlines()
        found = [
            line.split() for line in lines if "master" in line.split()[2] and len(line.split()) > 8
        ]
        return [(int(line[1].split("@")[0].rsplit(":", 1)[1]), line[0]) for line in found]

    def deciding(self):
        """The ports of the primaries, which make the decisions."""
        return [port for port, _ in self.primaries(self.ports[0])]


class Namespaces:
    """A cluster of six nodes, each in its own network namespace. This way, a node can be separated
    from the other nodes and still be reached by its clients. Needs root and `ip`."""

    PORT = 7000

    def __init__(self, folder, program=REDIS):
        self.folder, self.program = folder, program
        self.name = f"tg{os.getpid() % 10_000}"
        network = f"10.213.{os.getpid() % 250}"
        self.gateway = f"{network}.1"
        self.hosts = [f"{network}.{10 + number}" for number in range(6)]
        self.store = {"redis": {"cluster": [f"redis://{host}:{self.PORT}" for host in self.hosts]}}
        self.processes = []

    def __enter__(self):
        ip("link", "add", f"{self.name}br", "type", "bridge")
        ip("addr", "add", f"{self.gateway}/24", "dev", f"{self.name}br")
        ip("link", "set", f"{self.name}br", "up")
        for number, host in enumerate(self.hosts):
            space = self.space(number)
            ip("netns", "add", space)
            ip("link", "add", f"{space}v", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"{space}v", "master", f"{self.name}br", "up")
            ip("-n", space, "addr", "add", f"{host}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            quiet = [
                "--save",
                "",
                "--appendonly",
                "no",
                "--dir",
                self.folder,
                "--protected-mode",
                "no",
                "--bind",
                host,
            ]
            nodes = ["--cluster-config-file", f"nodes{number}.conf", "--port", str(self.PORT)]
            command = ["ip", "netns", "exec", space, self.program, *quiet, *Cluster.OPTIONS, *nodes]
            self.processes.append(spawn(*command))
        for host in self.hosts:
            eventually("the node responds", lambda: "PONG" in self.cli(host, "PING"))
        addresses = [f"{host}:{self.PORT}" for host in self.hosts]
        command = [
            "redis-cli",
            "--cluster",
            "create",
            *addresses,
            "--cluster-replicas",
            "1",
            "--cluster-yes",
        ]
        created = subprocess.run(command, capture_output=True, text=True)
        assert created.returncode == 0, created.stdout
        for host in self.hosts:
            eventually(
                "the cluster is ok", lambda: "cluster_state:ok" in self.cli(host, "CLUSTER", "INFO")
            )
            eventually(
                "the replicas are in sync",
                lambda: is_following(self.cli(host, "INFO", "replication")),
            )
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        for number in range(len(self.hosts)):
            ip("netns", "del", self.space(number))
        ip("link", "del", f"{self.name}br")

    def space(self, number):
        return f"{self.name}n{number}"

    def cli(self, host, *words):
        command = ["redis-cli", "-h", host, "-p", str(self.PORT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def cut_off(self, number):
        """Drops the packets from this node to the other nodes, so that neither side gets
        replies."""
        for other, host in enumerate(self.hosts):
            if other != number:
                ip("-n", self.space(number), "route", "add", "blackhole", f"{host}/32")

    def owners(self, node):
        """Returns the hosts that own slots, according to the host `node`."""
        lines = [line.split() for line in self.cli(node, "CLUSTER", "NODES").splitlines()]
        return [line[1].split(":")[0] for line in lines if len(line) > 8 and "master" in line[2]]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def is_following(replication):
    return "role:master" in replication or "master_link_status:up" in replication


def follows(port):
    """Returns whether this node is a primary, or a replica in sync with its primary."""
    return is_following(redis_cli(port, "INFO", "replication"))


class Proxy:
    """A TCP proxy to a port on this machine, which can delay data and reset connections."""

    def __init__(self, to):
        self.to, self.delay, self.open = to, 0.0, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.to))
                except OSError:
                    client.close()
                    continue
                self.open += [client, server]
                for one, other, late in [(client, server, True), (server, client, False)]:
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self.pump, args=(one, other, late), daemon=True).start()

    def pump(self, one, other, late):
        with contextlib.suppress(OSError):
            while received := one.recv(65536):
                if late and self.delay:
                    time.sleep(self.delay)
                other.sendall(received)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def reset(self):
        for end in self.open:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                end.shutdown(socket.SHUT_RDWR)
        self.open = []

    def close(self):
        self.listener.close()
        self.reset()


def server(program, folder, port, *options, environment=None):
    quiet = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
    process = spawn(
        *in_environment(environment or {}, program, "--port", str(port), *quiet, *options)
    )
    eventually(f"{program} responds", lambda: "PONG" in redis_cli(port, "PING"))
    return process


def redis_cli(port, *words):
    return subprocess.run(
        ["redis-cli", "-p", str(port), *words], capture_output=True, text=True, check=False
    ).stdout
