"""Redis or Valkey, alone, under Sentinels and as a cluster. `store` is what the rules file says of each."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time

from programs import eventually, free_port, spawn

REDIS = "redis-server"
VALKEY = "valkey-server"


class Standalone:
    """One server."""

    def __init__(self, folder, program=REDIS):
        self.folder, self.program = folder, program
        self.port = free_port()
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
        """The ports of those who decide."""
        return [self.port]


class Proxied(Standalone):
    """One server, and a proxy before it that can be slow or break connections off."""

    def __init__(self, folder, program=REDIS):
        super().__init__(folder, program)
        self.proxy = Proxy(self.port)
        self.store = {"redis": f"redis://127.0.0.1:{self.proxy.port}"}

    def __exit__(self, *cause):
        super().__exit__(*cause)
        self.proxy.close()


class Sentinels:
    """A primary, a replica, and three Sentinels."""

    def __init__(self, folder, program=REDIS):
        self.folder, self.program = folder, program
        self.ports = [free_port() for _ in range(5)]
        names = [f"redis://127.0.0.1:{port}" for port in self.ports[2:]]
        self.store = {"redis": {"sentinel": names, "primary": "tide"}}

    def __enter__(self):
        primary, replica = self.ports[:2]
        self.process = server(self.program, self.folder, primary)
        self.processes = [self.process, server(self.program, self.folder, replica, "--replicaof", "127.0.0.1", str(primary))]
        eventually("the replica follows", lambda: "master_link_status:up" in redis_cli(replica, "INFO", "replication"))
        for port in self.ports[2:]:
            file = os.path.join(self.folder, f"sentinel{port}.conf")
            with open(file, "w") as out:
                out.write(f"port {port}\nbind 127.0.0.1\nsentinel monitor tide 127.0.0.1 {primary} 2\n")
                out.write("sentinel down-after-milliseconds tide 1000\nsentinel failover-timeout tide 5000\n")
            self.processes.append(spawn(self.program, file, "--sentinel"))
        for port in self.ports[2:]:
            eventually("the Sentinels know each other", lambda: "slaves=1,sentinels=3" in redis_cli(port, "INFO", "sentinel"))
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def named(self):
        return redis_cli(self.ports[2], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "tide").split()[-1]


class Cluster:
    """Three primaries, each with a replica."""

    OPTIONS = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0",
               "--cluster-replica-validity-factor", "0"]

    def __init__(self, folder, program=REDIS):
        self.folder, self.program = folder, program
        self.ports = [free_port() for _ in range(6)]
        self.store = {"redis": {"cluster": [f"redis://127.0.0.1:{port}" for port in self.ports]}}

    def __enter__(self):
        self.processes = {}
        for port in self.ports:
            nodes = ["--cluster-port", str(free_port()), "--cluster-config-file", f"nodes{port}.conf"]
            self.processes[port] = server(self.program, self.folder, port, *self.OPTIONS, *nodes)
        addresses = [f"127.0.0.1:{port}" for port in self.ports]
        command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", "1", "--cluster-yes"]
        created = subprocess.run(command, capture_output=True, text=True)
        assert created.returncode == 0, created.stdout
        for port in self.ports:
            eventually("every node knows the cluster", lambda: self.is_known_to(port))
            eventually("replicas follow", lambda: follows(port))
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def is_known_to(self, port):
        nodes = redis_cli(port, "CLUSTER", "NODES")
        return "cluster_state:ok" in redis_cli(port, "CLUSTER", "INFO") and nodes.count("connected") >= 6

    def primaries(self, asked):
        lines = redis_cli(asked, "CLUSTER", "NODES").splitlines()
        found = [line.split() for line in lines if "master" in line.split()[2] and len(line.split()) > 8]
        return [(int(line[1].split("@")[0].rsplit(":", 1)[1]), line[0]) for line in found]

    def deciding(self):
        """The ports of those who decide."""
        return [port for port, _ in self.primaries(self.ports[0])]


def follows(port):
    """Whether this node is no replica, or one that follows."""
    replication = redis_cli(port, "INFO", "replication")
    return "role:master" in replication or "master_link_status:up" in replication


class Proxy:
    """TCP to a port of this machine, late or not at all if it is told so."""

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
            while octets := one.recv(65536):
                if late and self.delay:
                    time.sleep(self.delay)
                other.sendall(octets)
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


def server(program, folder, port, *options):
    quiet = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
    process = spawn(program, "--port", str(port), *quiet, *options)
    eventually(f"{program} answers", lambda: "PONG" in redis_cli(port, "PING"))
    return process


def redis_cli(port, *words):
    return subprocess.run(["redis-cli", "-p", str(port), *words], capture_output=True, text=True, check=False).stdout
