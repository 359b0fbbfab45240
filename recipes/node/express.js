// Express: two limiters shared by several processes, and a limit on failed logins.

import express from "express";
import { rateLimit } from "express-rate-limit";
import { Tidegate, problem } from "tidegate";
import { TidegateStore } from "tidegate/express-rate-limit";

const tidegate = new Tidegate({
  url: process.env.TIDEGATE_URL,
  timeoutMs: Number(process.env.TIDEGATE_TIMEOUT_MS ?? 500),
});
const app = express();
// The number of proxies in front of this application. `req.ip` is then the client's address.
app.set("trust proxy", 1);

// 1. express-rate-limit counts in Tidegate. No rules file is needed.
const limits = { windowMs: 60_000, standardHeaders: "draft-8", legacyHeaders: false };
app.use("/pages", rateLimit({ ...limits, limit: 10, store: new TidegateStore(tidegate) }));

// 2. Tidegate's rules file limits the API.
app.use("/api", async (req, res, next) => {
  const entries = { path: req.originalUrl, ip: req.ip, customer: req.get("x-customer") };
  const verdict = await tidegate.check(entries);
  if (!verdict.allowed) return answer(res, problem(verdict));
  res.set(verdict.headers);
  next();
});

// 3. A login is reserved before the password is compared, and costs 1 only if it fails.
app.post("/login", async (req, res) => {
  const entries = { path: "/login", method: "POST", ip: req.ip };
  const failures = { settle: (isRight) => (isRight ? 0 : 1) };
  const login = await tidegate.withReservation(entries, failures, () => isRight(req));
  if (!login.allowed) return answer(res, problem(login.verdict));
  res.status(login.value ? 200 : 401).send(login.value ? "welcome\n" : "wrong password\n");
});

app.get(["/pages", "/api/orders"], (req, res) => res.send("hello\n"));

async function isRight(req) {
  return req.get("password") === "open sesame";
}

function answer(res, { status, headers, body }) {
  res.status(status).set(headers).send(body);
}

const server = app.listen(process.env.PORT ?? 3000, "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
