"""Programs on free ports of this machine, and patience."""

import atexit
import contextlib
import glob
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

PORTS = (12_000, 32_000)  # below those that connections are given


def spawn(*command):
    """Starts a program, which ends with this one at the latest."""
    if not shutil.which(command[0]):
        sys.exit(f"{command[0]} is not installed; run scripts/setup")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    return process


def faketime(**settings):
    """The environment of a program whose wall clock is not that of this machine; `settings` are those of libfaketime."""
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    if not found:
        sys.exit("libfaketime is not installed; run scripts/setup")
    return {"LD_PRELOAD": found[0], **settings, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}


def in_environment(environment, *command):
    """The command line that starts `command` with these variables."""
    return ("env", *(f"{name}={value}" for name, value in environment.items()), *command)


def fetch(port, path, body=None):
    """The whole answer: its headers, and `read()`. A denial is an answer too."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body)
    try:
        return urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as answer:
        return answer


def answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def free_port():
    """A port that is free now, and that the system gives nobody who asks it for any: who listens on it next is who we start."""
    while True:
        port = random.randrange(*PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def eventually(what, attempt, patience=30.0):
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if attempt():
            return
        time.sleep(0.02)
    sys.exit(f"timed out after {patience:.0f} s: {what}")
