"""Starts the front ends of examples/, each with its example's configuration.

A front end starts in two variants. In the variant *limited* it asks Tidegate about each request.
The variant *alone* has the same configuration without the lines that ask Tidegate. In both
variants, the ports are free ports, and the application is the benchmark's upstream."""

import os
import pathlib
import re

from processes import Server, reserve_port
from proxy_bench import cpu_of

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
LISTENERS = ("http", "grpc", "resp", "spop", "admin")

# The limit of the rule for the path of the load, which the load does not reach.
AMPLE = "{algorithm: gcra, rate: 1000000/s, burst: 1000000}"
AMPLE_PER_YEAR = "4294967295"


class Programs:
    """The paths of the programs."""

    def __init__(self, tidegate, envoy, traefik):
        self.tidegate, self.envoy, self.traefik = tidegate, envoy, traefik


class Setting:
    """What a front end is started with: the programs, a folder for its files, the upstream's port,
    and the Tidegate server. Without a server, the front end runs alone."""

    def __init__(self, programs, folder, upstream, tidegate):
        self.programs, self.folder, self.tidegate = programs, folder, tidegate
        self.upstream = f"127.0.0.1:{upstream}"

    def is_alone(self):
        return self.tidegate is None

    def address(self, listener):
        """Returns the address of Tidegate's listener. Alone, no line uses the address."""
        port = reserve_port() if self.is_alone() else self.tidegate.listeners[listener]
        return f"127.0.0.1:{port}"

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w") as file:
            file.write(text)
        return path


class FrontEndServer(Server):
    """A front end. Its CPU time includes that of its worker processes."""

    def cpu_seconds(self):
        pid = self.process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return sum(cpu_of(process) for process in [pid, *children.read().split()])


def edited(text, changes):
    """Replaces each key of `changes` with its value. Raises SystemExit if a key is not in the text,
    because the example was then changed and the benchmark must be adapted."""
    for old, new in changes.items():
        if old not in text:
            raise SystemExit(f"front_ends.py: the example has no {old!r} to replace")
        text = text.replace(old, new)
    return text


def without(text, *starts):
    """Removes each line that begins with an element of `starts`, apart from its indentation. Also
    removes the block of the line: the lines below that are indented further, and a closing brace."""
    for start in starts:
        kept, depth, found = [], None, False
        for line in text.splitlines():
            indent = len(line) - len(line.lstrip())
            if depth is not None and line.strip():
                if indent > depth:
                    continue
                depth, closes = None, indent == depth and line.strip() == "}"
                if closes:
                    continue
            if depth is None and line.lstrip().startswith(start):
                depth, found = indent, True
            else:
                kept.append(line)
        if not found:
            raise SystemExit(f"front_ends.py: the example has no line {start!r} to remove")
        text = "\n".join(kept) + "\n"
    return text


def read(example):
    return (EXAMPLES / example).read_text()


def start_tidegate(programs, folder, front_end):
    """Starts a Tidegate server with the rules of the front end's example, in which only the limit
    for the path of the load is raised."""
    ports = {listener: reserve_port() for listener in LISTENERS}
    addresses = ", ".join(f"{name}: '127.0.0.1:{port}'" for name, port in ports.items())
    rules = front_end.rules(folder)
    config = os.path.join(folder, f"tidegate-{ports['admin']}.yaml")
    with open(config, "w") as file:
        file.write(f"listen: {{{addresses}}}\n{rules}")
    command = [programs.tidegate, "serve", "--config", config, "--log", "error"]
    server = Server("tidegate", command, list(ports.values()))
    server.listeners = ports
    return server


def rules_of(example):
    """Returns the rules of a file in examples/ with an ample limit for each customer."""
    text = without(read(example), "listen:")
    limit = r"(key: \[customer\].*\n    limits: )\[1/s.*\]"
    ample, count = re.subn(limit, rf"\g<1>[{AMPLE}]", text, count=1)
    if count != 1:
        raise SystemExit(f"front_ends.py: {example} has no limit for each customer")
    return ample


def envoy_rules(folder):
    """Returns the configuration of examples/envoy. The window of logins is a year, so that it does
    not end during the run."""
    limits = os.path.join(folder, "shop.yaml")
    changes = {
        "unit: day, requests_per_unit: 1000": f"unit: year, requests_per_unit: {AMPLE_PER_YEAR}",
        "unit: hour, requests_per_unit: 5": "unit: year, requests_per_unit: 5",
    }
    with open(limits, "w") as file:
        file.write(edited(read("envoy/shop.yaml"), changes))
    return edited(read("envoy/tidegate.yaml"), {"examples/envoy/shop.yaml": limits})


def start_haproxy(setting):
    port = reserve_port()
    changes = {
        "bind 127.0.0.1:8000": f"bind 127.0.0.1:{port}",
        "bind 127.0.0.1:8001": f"bind 127.0.0.1:{reserve_port()}",
        "server application 127.0.0.1:8001": f"server application {setting.upstream}",
        "127.0.0.1:8084": setting.address("spop"),
        # The paths in the example are relative to the repository.
        "config examples/haproxy/spoe.conf": f"config {setting.folder}/spoe.conf",
    }
    config = edited(read("haproxy/haproxy.cfg"), changes)
    if setting.is_alone():
        config = without(
            config,
            "filter spoe",
            "http-request return status 431",
            "http-request deny",
            "http-after-response",
            "backend tidegate",
        )
    spoe = edited(read("haproxy/spoe.conf"), {"examples/": f"{EXAMPLES}/"})
    setting.write("spoe.conf", spoe)
    path = setting.write("haproxy.cfg", config)
    return FrontEndServer("HAProxy", ["haproxy", "-db", "-f", path], [port])


# In the examples, nginx opens a connection to the application for each request. The other front
# ends pool these connections, so nginx does so here.
NGINX_POOL = """\
proxy_pass http://application;
            proxy_http_version 1.1;
            proxy_set_header Connection "";"""


def start_nginx(setting):
    config = read("nginx/nginx.conf")
    if setting.is_alone():
        config = without(
            config,
            "upstream tidegate",
            "auth_request",
            "location @denied",
            "location = /tidegate",
            "location @open",
            "add_header RateLimit",
            "error_page 403",
        )
        # Only `auth_request_set` defines these variables.
        config = edited(config, {' rule="$tidegate_rule" key="$tidegate_key"': ""})
    else:
        config = edited(config, {"127.0.0.1:8080": setting.address("http")})
    return nginx(setting, "nginx", config)


def start_nginx_lua(setting):
    config = edited(read("nginx-lua/nginx.conf"), {'"examples/': f'"{EXAMPLES}/'})
    if setting.is_alone():
        config = without(config, "access_by_lua_block")
    else:
        port = str(setting.tidegate.listeners["resp"])
        config = edited(config, {'limit("127.0.0.1", 6380': f'limit("127.0.0.1", {port}'})
    return nginx(setting, "nginx with Lua", config)


def start_nginx_njs(setting):
    config = edited(read("nginx-njs/nginx.conf"), {'"examples/': f'"{EXAMPLES}/'})
    if setting.is_alone():
        alone = {"js_content tidegate.limit;": "proxy_pass http://127.0.0.1:8001;"}
        config = edited(config, alone)
    else:
        config = edited(config, {"127.0.0.1:8080": setting.address("http")})
    return nginx(setting, "nginx with njs", config)


def nginx(setting, name, config):
    port = reserve_port()
    upstream = f"upstream application {{ server {setting.upstream}; keepalive 32; }}"
    changes = {
        "listen 127.0.0.1:8000": f"listen 127.0.0.1:{port}",
        "listen 127.0.0.1:8001": f"listen 127.0.0.1:{reserve_port()}",
        "proxy_pass http://127.0.0.1:8001;": NGINX_POOL,
        "\nhttp {\n": f"\nhttp {{\n    {upstream}\n",
    }
    path = setting.write("nginx.conf", edited(config, changes))
    # The workers run as another user, who reads the Lua file and the temporary folders.
    os.chmod(setting.folder, 0o755)
    return FrontEndServer(name, ["nginx", "-p", setting.folder, "-c", path], [port])


def start_caddy(setting):
    port = reserve_port()
    changes = {
        "http://127.0.0.1:8000": f"http://127.0.0.1:{port}",
        'respond "Here you are\n"': f"reverse_proxy {setting.upstream}",
    }
    config = edited(read("caddy/Caddyfile"), changes)
    if setting.is_alone():
        config = without(
            config, "request_header -RateLimit", "forward_auth", "@limited", "header @limited"
        )
    else:
        config = edited(config, {"127.0.0.1:8080": setting.address("http")})
    path = setting.write("Caddyfile", config)
    # Caddy stores its data in these folders.
    folders = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), setting.folder)
    command = ["caddy", "run", "--adapter", "caddyfile", "--config", path]
    return FrontEndServer("Caddy", command, [port], folders)


def start_traefik(setting):
    port = reserve_port()
    changes = {"127.0.0.1:8001": setting.upstream, "127.0.0.1:8080": setting.address("http")}
    dynamic = edited(read("traefik/dynamic.yaml"), changes)
    if setting.is_alone():
        dynamic = without(dynamic, "middlewares:")
    changes = {
        "127.0.0.1:8000": f"127.0.0.1:{port}",
        "examples/traefik/dynamic.yaml": setting.write("dynamic.yaml", dynamic),
    }
    path = setting.write("traefik.yaml", edited(read("traefik/traefik.yaml"), changes))
    return FrontEndServer("Traefik", [setting.programs.traefik, f"--configFile={path}"], [port])


def start_ext_authz_grpc(setting):
    return ext_authz(setting, "8000")


def start_ext_authz_http(setting):
    return ext_authz(setting, "8002")


def ext_authz(setting, listener):
    """Starts Envoy with both listeners of the example. `listener` is the one that is measured."""
    config = read("envoy-ext-authz/envoy.yaml")
    if setting.is_alone():
        config = without(
            config, "- name: envoy.filters.http.ext_authz", "typed_per_filter_config:"
        )
    else:
        config = edited(config, {"http://127.0.0.1:8080": f"http://{setting.address('http')}"})
    listeners = {"tidegate-grpc": "grpc", "tidegate-http": "http"}
    return envoy(setting, config, listener, listeners)


def start_rate_limit_service(setting):
    config = read("envoy/envoy.yaml")
    if setting.is_alone():
        config = without(config, "- name: envoy.filters.http.ratelimit", "rate_limits:")
    return envoy(setting, config, "8000", {"tidegate": "grpc"})


def envoy(setting, config, listener, listeners):
    """Starts Envoy. `listener` is the port in the example that is measured. `listeners` contains
    Tidegate's listener for each cluster."""
    ports = {port: str(reserve_port()) for port in ("8000", "8001", "8002")}
    addresses = {cluster: setting.address(name) for cluster, name in listeners.items()}
    for cluster, address in {**addresses, "application": setting.upstream}.items():
        endpoint = rf"(cluster_name: {cluster}\n +endpoints: .*port_value: )\d+"
        config, count = re.subn(endpoint, rf"\g<1>{address.rpartition(':')[2]}", config)
        if count != 1:
            raise SystemExit(f"front_ends.py: the example has no cluster {cluster!r}")
    at = "address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}\n"
    config = edited(config, {at.format(old): at.format(new) for old, new in ports.items()})
    path = setting.write("envoy.yaml", config)
    # Without hot restart, several Envoys run on one machine.
    command = [setting.programs.envoy, "-c", path, "--disable-hot-restart", "--log-level", "error"]
    return FrontEndServer("Envoy", command, [int(ports[listener])])


class FrontEnd:
    """A front end and its way to ask Tidegate. `rules(folder)` returns the rules of its example,
    which admit `logins` logins."""

    def __init__(self, name, start, rules, logins=10):
        self.name, self.start, self.rules, self.logins = name, start, rules, logins


def quickstart(_folder):
    return rules_of("quickstart.yaml")


def authorization(_folder):
    return rules_of("envoy-ext-authz/tidegate.yaml")


FRONT_ENDS = [
    FrontEnd("HAProxy, SPOE", start_haproxy, lambda _: rules_of("haproxy/tidegate.yaml")),
    FrontEnd("nginx, `auth_request`", start_nginx, quickstart),
    FrontEnd("nginx, Lua, Redis protocol", start_nginx_lua, quickstart),
    FrontEnd("nginx, njs, HTTP", start_nginx_njs, quickstart),
    FrontEnd("Caddy, `forward_auth`", start_caddy, quickstart),
    FrontEnd("Traefik, `ForwardAuth`", start_traefik, quickstart),
    FrontEnd("Envoy, `ext_authz`, gRPC", start_ext_authz_grpc, authorization),
    FrontEnd("Envoy, `ext_authz`, HTTP", start_ext_authz_http, authorization),
    FrontEnd("Envoy, rate limit service, gRPC", start_rate_limit_service, envoy_rules, logins=5),
]
