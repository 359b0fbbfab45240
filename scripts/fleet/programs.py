"""Starts programs on reserved ports of this machine, and waits until they are ready."""

import atexit
import contextlib
import glob
import shutil
import socket
import subprocess
import sys
import time
import urllib.request


def spawn(*command):
    """Starts a program, and kills it when this program ends."""
    if not shutil.which(command[0]):
        sys.exit(f"{command[0]} is not installed; run scripts/setup")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    return process


def faketime(**settings):
    """The environment of a program with a different wall clock. `settings` are libfaketime's
    variables."""
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    if not found:
        sys.exit("libfaketime is not installed; run scripts/setup")
    return {
        "LD_PRELOAD": found[0],
        **settings,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def in_environment(environment, *command):
    """Returns the command line that starts `command` with these environment variables."""
    return ("env", *(f"{name}={value}" for name, value in environment.items()), *command)


def fetch(port, path, body=None):
    """Returns the response, even if the status is an error, such as 429."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body)
    try:
        return urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as response:
        return response


def accepts_connections(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


port_reservations = []  # sockets that stay open until the program ends


def reserve_port():
    """Reserves a port until this program ends. The system assigns it to no other socket; a server
    that sets `SO_REUSEADDR` can listen on it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    port_reservations.append(reservation)
    return reservation.getsockname()[1]


def eventually(what, attempt, timeout=30.0):
    """Waits until `attempt` returns a true value. Exits at the timeout, with `what` or, if it is a
    function, its result."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if attempt():
            return
        time.sleep(0.02)
    sys.exit(f"timed out after {timeout:.0f} s: {what() if callable(what) else what}")
