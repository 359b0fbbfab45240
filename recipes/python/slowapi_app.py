"""FastAPI with slowapi: the limits are in the code, and the counts in Tidegate.

    uvicorn slowapi_app:app

slowapi calls its storage synchronously, also in `async` endpoints. Use `def` endpoints, which run
in threads, or the middleware of `fastapi_app.py`.
"""

from __future__ import annotations

import os

from fastapi import FastAPI, Request
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded
from slowapi.util import get_remote_address

import tidegate.limits  # noqa: F401  (makes the scheme `tidegate` known to `limits`)

limiter = Limiter(
    get_remote_address,
    storage_uri=os.environ.get("TIDEGATE_STORAGE", "tidegate://127.0.0.1:8080"),
    strategy="moving-window",
)
app = FastAPI()
app.state.limiter = limiter
app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)  # type: ignore[arg-type]


@app.get("/reports")
@limiter.limit("3/minute")
def reports(request: Request) -> str:
    return "none"
