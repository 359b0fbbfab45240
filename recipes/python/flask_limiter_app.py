"""Flask with flask-limiter: the limits are in the code, and the counts in Tidegate.

    flask --app flask_limiter_app run
"""

from __future__ import annotations

import os

from flask import Flask
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address

import tidegate.limits  # noqa: F401  (makes the scheme `tidegate` known to `limits`)

app = Flask(__name__)
limiter = Limiter(
    get_remote_address,
    app=app,
    storage_uri=os.environ.get("TIDEGATE_STORAGE", "tidegate://127.0.0.1:8080"),
    strategy="moving-window",
    headers_enabled=True,
)


@app.get("/reports")
@limiter.limit("3 per minute")
def reports() -> str:
    return "none"
