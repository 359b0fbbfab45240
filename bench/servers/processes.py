"""Starts servers on free loopback ports, reads their CPU time, and stops them."""

import os
import signal
import socket
import subprocess
import time

TICK = 1 / os.sysconf("SC_CLK_TCK")
START_SECONDS = 10


port_reservations = []  # sockets that stay open until the program ends


def reserve_port():
    """Reserves a port until this program ends. The system assigns it to no other socket; a server
    that sets `SO_REUSEADDR` can listen on it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    port_reservations.append(reservation)
    return reservation.getsockname()[1]


def accepts_connections(port):
    """Returns whether a program accepts connections on `port`."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False


class Server:
    """A server process, which is stopped at the end of a `with` block."""

    def __init__(self, name, command, ports, environment=None):
        self.name, self.command, self.ports = name, command, ports
        self.environment = {**os.environ, **(environment or {})}

    def __enter__(self):
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self.environment,
            process_group=0,
        )
        deadline = time.monotonic() + START_SECONDS
        while not all(accepts_connections(port) for port in self.ports):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                errors = self.process.stderr.read().decode(errors="replace")
                raise SystemExit(f"{self.name} did not start: {' '.join(self.command)}\n{errors}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Sends SIGTERM, and SIGKILL if the process is still running after 5 seconds."""
        for send in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                return
            os.killpg(self.process.pid, send)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                pass

    def cpu_seconds(self):
        """Returns the process's user and system time."""
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK

    def resident_bytes(self):
        """Returns the process's resident memory."""
        with open(f"/proc/{self.process.pid}/status") as status:
            line = next(line for line in status if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024
