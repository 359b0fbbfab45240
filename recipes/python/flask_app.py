"""Flask: limit the requests of each client.

    flask --app flask_app run
"""

from __future__ import annotations

import os

from flask import Flask

import tidegate

client = tidegate.Client(
    os.environ.get("TIDEGATE_URL", "http://127.0.0.1:8080"),
    token=os.environ.get("TIDEGATE_TOKEN"),
    on_failure="open",  # Serve requests while the server is unreachable.
)
app = Flask(__name__)
# Behind a proxy, name its network: trusted_proxies=["10.0.0.0/8"].
app.wsgi_app = tidegate.WsgiMiddleware(  # type: ignore[method-assign]
    app.wsgi_app, client, entries=["path", "ip"]
)


@app.get("/api/orders")
def orders() -> str:
    return "none"
