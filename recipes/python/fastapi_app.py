"""FastAPI: limit the requests of each client, and the failed logins of each account.

    uvicorn fastapi_app:app
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import AsyncIterator, Dict

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import tidegate

client = tidegate.AsyncClient(
    os.environ.get("TIDEGATE_URL", "http://127.0.0.1:8080"),
    token=os.environ.get("TIDEGATE_TOKEN"),
)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with client:
        yield


app = FastAPI(lifespan=lifespan)
# Behind a proxy, name its network: trusted_proxies=["10.0.0.0/8"].
app.add_middleware(tidegate.AsgiMiddleware, client=client, entries=["path", "ip"])


class Login(BaseModel):
    account: str
    password: str


@app.get("/api/orders")
async def orders() -> Dict[str, str]:
    return {"orders": "none"}


@app.post("/login")
async def login(login: Login) -> Dict[str, str]:
    # Parallel guesses cannot exceed the limit, because each one holds a unit while it is checked.
    async with client.reserve({"account": login.account}, ttl=10) as attempt:
        if not attempt.allowed:
            wait = attempt.verdict.headers.get("retry-after", "3600")
            raise HTTPException(429, "too many failed logins", {"Retry-After": wait})
        if login.password == "correct horse":
            attempt.cost = 0  # Only failures count.
            return {"welcome": login.account}
    raise HTTPException(401, "wrong password")
