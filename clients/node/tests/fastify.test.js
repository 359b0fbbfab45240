// The hook with the real Fastify and a real server.

import assert from "node:assert/strict";
import { once } from "node:events";
import http2 from "node:http2";
import { connect } from "node:net";
import { before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import Fastify from "fastify";
import { Tidegate } from "tidegate";
import { tidegateHook } from "tidegate/fastify";

import { startServer, tally } from "./server.js";

const RULES = `
  - {name: secret-rule, when: {path: {route: "/api/**"}}, key: [ip], limits: [3/h]}
  - {name: plans, when: {path: {route: /plans}}, key: [customer], limits: [10/h]}
  - name: queue
    when: {path: {route: /print}}
    limits: [{algorithm: leaky_bucket, capacity: 50, leak: 10/s, queue: true}]
  - {name: failures, when: {path: {route: /login}, method: POST}, key: [ip], limits: [5/h]}
`;

let server, tidegate;

before(async () => {
  server = await startServer(RULES, { more: "reservations: {on_expiry: charge}" });
  tidegate = new Tidegate({ url: server.url, timeoutMs: 10_000 });
});

/** Starts an application with the hook on all routes. */
async function application(t, { client = tidegate, hook, ...settings } = {}) {
  const app = Fastify(settings);
  app.addHook("onRequest", tidegateHook(client, hook));
  app.post("/login", async (request, reply) => {
    const { password, slow } = request.headers;
    if (slow) await sleep(Number(slow));
    return reply.code(password === "right" ? 200 : 401).send("");
  });
  app.all("/*", async () => "hello");
  await app.listen({ port: 0, host: "127.0.0.1" });
  t.after(() => app.close());
  const address = `http://127.0.0.1:${app.server.address().port}`;
  const send = (path, options) => fetch(address + path, options);
  return { app, send };
}

const from = (address) => ({ headers: { "x-forwarded-for": address } });

test("a denial is a problem document with Retry-After and the RateLimit fields", async (t) => {
  const { send } = await application(t);
  const first = await send("/api/a?x=1");
  assert.equal(first.status, 200);
  assert.equal(first.headers.get("ratelimit"), '"3/h";r=2;t=3600');
  assert.equal(first.headers.get("ratelimit-policy"), '"3/h";q=3;w=3600');
  assert.equal(first.headers.get("retry-after"), null);
  await send("//api/%61");
  await send("/API/b/");
  const denied = await send("/api/a");
  assert.equal(denied.status, 429);
  assert.equal(denied.headers.get("content-type"), "application/problem+json");
  assert.equal(denied.headers.get("retry-after"), "3600");
  assert.equal(denied.headers.get("ratelimit"), '"3/h";r=0;t=3600');
  const text = await denied.text();
  assert.doesNotMatch(text, /secret-rule/);
  const document = JSON.parse(text);
  assert.equal(document.status, 429);
  assert.deepEqual(document["violated-policies"], ["3/h"]);
  assert.equal((await send("/other")).status, 200);
});

test("exactly the limit passes in parallel", async (t) => {
  const { send } = await application(t, { trustProxy: true });
  const calls = Array.from({ length: 30 }, () => send("/api/a", from("198.51.100.1")));
  const statuses = (await Promise.all(calls)).map((response) => response.status);
  assert.deepEqual(tally(statuses), { 200: 3, 429: 27 });
});

test("the client's address follows trustProxy", async (t) => {
  const trusting = await application(t, { trustProxy: "127.0.0.1" });
  for (let request = 0; request < 3; request += 1) {
    await trusting.send("/api/a", from("203.0.113.9, 198.51.100.2"));
  }
  // The left address is forged, so the client is the same.
  const forged = await trusting.send("/api/a", from("203.0.113.77, 198.51.100.2"));
  assert.equal(forged.status, 429);
  assert.equal((await trusting.send("/api/a", from("198.51.100.3"))).status, 200);
  // Without trustProxy, the header is ignored. The first requests have exhausted the limit.
  const plain = await application(t);
  assert.equal((await plain.send("/api/a", from("198.51.100.4"))).status, 429);
});

test("entries and a cost can be added", async (t) => {
  const hook = {
    entries: (request) => ({ customer: request.headers["x-customer"] }),
    cost: (request) => Number(request.query.units ?? 1),
  };
  const { send } = await application(t, { hook });
  const headers = { "x-customer": "a" };
  const first = await send("/plans?units=6", { headers });
  assert.equal(first.headers.get("ratelimit"), '"10/h";r=4;t=3600');
  assert.equal((await send("/plans?units=6", { headers })).status, 429);
  const never = await send("/plans?units=11", { headers });
  assert.equal(never.headers.get("retry-after"), null);
  assert.equal((await never.json()).retry_after_ms, null);
  assert.equal((await send("/plans?units=6")).status, 200);
});

test("skip sends no request", async (t) => {
  const dead = new Tidegate({ url: "http://127.0.0.1:9" });
  const hook = { skip: (request) => request.url === "/healthz" };
  const { send } = await application(t, { client: dead, hook });
  assert.equal((await send("/healthz")).status, 200);
  assert.equal((await send("/")).status, 503);
});

test("a request that cannot be counted is answered 400", async (t) => {
  const { app } = await application(t);
  const answer = await raw(app, "GET /api/../x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
  assert.match(answer, /^HTTP\/1\.1 400 /);
  assert.match(answer, /content-type: application\/problem\+json/);
  assert.match(answer, /"status":400/);
});

test("without a decision the answer is 503, unless the client is open", async (t) => {
  const url = "http://127.0.0.1:9";
  const closed = await application(t, { client: new Tidegate({ url }) });
  const denied = await closed.send("/");
  assert.equal(denied.status, 503);
  assert.equal(denied.headers.get("retry-after"), "1");
  assert.equal(denied.headers.get("content-type"), "application/problem+json");
  assert.deepEqual(await denied.json(), {
    title: "Service Unavailable",
    status: 503,
    detail: "the limiter could not decide; retry in 1s",
    retry_after_ms: 1_000,
  });
  const open = await application(t, { client: new Tidegate({ url, onFailure: "open" }) });
  assert.equal((await open.send("/")).status, 200);
  const more = `store: {redis: "redis://127.0.0.1:1", on_failure: closed}`;
  const alone = await startServer("  - {name: a, limits: [1/s]}\n", { more });
  t.after(() => alone.stop());
  const patient = new Tidegate({ url: alone.url, timeoutMs: 10_000 });
  const undecided = await application(t, { client: patient });
  assert.equal((await undecided.send("/")).status, 503);
});

test("a wrong token is an error of the application, not of its client", async (t) => {
  const env = { NODE_TEST_TOKEN: "a-long-random-secret" };
  const listen = "{address: 127.0.0.1:0, token_env: NODE_TEST_TOKEN}";
  const guarded = await startServer("", { listen, env });
  t.after(() => guarded.stop());
  const client = new Tidegate({ url: guarded.url, timeoutMs: 10_000 });
  const { send } = await application(t, { client });
  assert.equal((await send("/")).status, 500);
});

test("a queue delays the request", async (t) => {
  const { send } = await application(t);
  await send("/print");
  const begin = performance.now();
  await Promise.all([send("/print"), send("/print"), send("/print")]);
  // Three requests in a queue that admits one request per 100 ms.
  assert.ok(performance.now() - begin > 150);
});

test("only failures are charged, and exactly 5 of 60 parallel guesses run", async (t) => {
  const reserve = { settle: (request, reply) => (reply.statusCode < 400 ? 0 : 1) };
  const { send } = await application(t, { trustProxy: true, hook: { reserve } });
  const login = (password) => {
    const headers = { ...from("198.51.100.10").headers, password };
    return send("/login", { method: "POST", headers });
  };
  const remaining = async () => {
    const entries = { path: "/login", method: "POST", ip: "198.51.100.10" };
    return (await tidegate.peek(entries)).remaining;
  };
  for (let right = 0; right < 12; right += 1) assert.equal((await login("right")).status, 200);
  // The hook settles after the response.
  for (let attempt = 0; attempt < 400 && (await remaining()) < 4; attempt += 1) await sleep(5);
  const guesses = await Promise.all(Array.from({ length: 60 }, () => login("guess")));
  assert.deepEqual(tally(guesses.map((one) => one.status)), { 401: 5, 429: 55 });
});

test("a client that disconnects does not make its failure free", async (t) => {
  const reserve = { settle: () => 0 };
  const settled = [];
  const client = new Tidegate({
    url: server.url,
    timeoutMs: 10_000,
    fetch: (url, options) => {
      if (url.pathname.endsWith("/settle")) settled.push(JSON.parse(options.body).cost);
      return fetch(url, options);
    },
  });
  const { app } = await application(t, { client, trustProxy: true, hook: { reserve } });
  const socket = connect(app.server.address().port, "127.0.0.1");
  const head = "host: a\r\nx-forwarded-for: 198.51.100.11\r\nslow: 300\r\ncontent-length: 0\r\n";
  socket.write(`POST /login HTTP/1.1\r\n${head}\r\n`);
  const entries = { path: "/login", method: "POST", ip: "198.51.100.11" };
  const remaining = async () => (await tidegate.peek(entries)).remaining;
  while ((await remaining()) === 4) await sleep(5);
  socket.destroy();
  for (let attempt = 0; attempt < 2_000 && settled.length === 0; attempt += 1) await sleep(5);
  assert.deepEqual(settled, [1]);
  assert.equal(await remaining(), 3);
});

test("a client that disconnects during the decision is charged", async (t) => {
  const reserve = { settle: () => 0 };
  const settled = [];
  const slow = new Tidegate({
    url: server.url,
    timeoutMs: 10_000,
    fetch: async (url, options) => {
      const response = await fetch(url, options);
      if (url.pathname.endsWith("/reserve")) await sleep(200);
      if (url.pathname.endsWith("/settle")) settled.push(JSON.parse(options.body).cost);
      return response;
    },
  });
  const { app } = await application(t, { client: slow, trustProxy: true, hook: { reserve } });
  const address = "198.51.100.12";
  const entries = { path: "/login", method: "POST", ip: address };
  const socket = connect(app.server.address().port, "127.0.0.1");
  const head = `host: a\r\nx-forwarded-for: ${address}\r\ncontent-length: 0\r\n`;
  socket.write(`POST /login HTTP/1.1\r\n${head}\r\n`);
  while ((await tidegate.peek(entries)).remaining === 4) await sleep(5);
  socket.destroy();
  for (let attempt = 0; attempt < 400 && settled.length === 0; attempt += 1) await sleep(5);
  assert.deepEqual(settled, [1]);
  assert.equal((await tidegate.peek(entries)).remaining, 3);
});

test("HTTP/2 responses and injected requests are settled", async (t) => {
  const settled = [];
  const reserve = { settle: (request, reply) => settled.push(reply.statusCode) && 0 };
  const hook = { reserve, entries: () => ({ ip: "198.51.100.13" }), onSettleError: assert.fail };
  const { app } = await application(t, { http2: true, hook });
  const session = http2.connect(`http://127.0.0.1:${app.server.address().port}`);
  for (const password of ["right", "wrong"]) {
    const stream = session.request({ ":method": "POST", ":path": "/login", password });
    stream.resume();
    await once(stream, "close");
  }
  // Otherwise, the application would wait for the session when it closes.
  session.destroy();
  const plain = await application(t, { hook });
  await plain.app.inject({ method: "POST", url: "/login", headers: { password: "right" } });
  while (settled.length < 3) await sleep(5);
  assert.deepEqual(settled, [200, 401, 200]);
});

test("reserve needs a function that returns the final cost", () => {
  assert.throws(() => tidegateHook(tidegate, { reserve: {} }), /reserve\.settle: expected/);
});

/** Sends raw bytes that fetch would not send, and returns the response. */
async function raw(app, bytes) {
  const socket = connect(app.server.address().port, "127.0.0.1");
  socket.write(bytes);
  let answer = "";
  for await (const chunk of socket) answer += chunk;
  return answer;
}
