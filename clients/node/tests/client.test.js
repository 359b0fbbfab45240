import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { before, describe, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import {
  Tidegate,
  TidegateError,
  TidegateRequestError,
  TidegateUnavailableError,
  problem,
} from "tidegate";

import { startServer } from "./server.js";

const RULES = `
  - {name: api, when: {path: {route: "/api/**"}}, key: [customer], limits: [3/h]}
  - {name: tokens, when: {path: {route: /chat}}, key: [user], limits: [1000/h]}
  - name: queue
    when: {path: {route: /print}}
    limits: [{algorithm: leaky_bucket, capacity: 5, leak: 10/s, queue: true}]
  - name: reports
    when: {path: {route: /report}}
    key: [customer]
    limits: [{algorithm: concurrency, limit: 1, lease: 30s, wait: 10s}]
  - {name: twice, when: {path: {route: /twice}}, limits: [1/h, 2/h]}
`;
const MORE = "reservations: {max_ttl: 1min}";

let server, tidegate;

before(async () => {
  server = await startServer(RULES, { more: MORE });
  tidegate = new Tidegate({ url: server.url, timeoutMs: 10_000 });
});

describe("waiting", () => {
  test("a request waits for a slot, for longer than the timeout", async () => {
    const client = new Tidegate({ url: server.url, timeoutMs: 300 });
    const entries = { path: "/report", customer: "waiting" };
    const first = await client.reserve(entries);
    assert.equal(first.allowed, true);
    assert.equal((await client.check(entries)).allowed, false);
    const waiting = client.check(entries, { waitMs: 10_000 });
    await sleep(600);
    await client.settle(first.reservation, 0);
    assert.equal((await waiting).allowed, true);
  });

  test("the wait is an integer from 0 to a minute", async () => {
    for (const waitMs of [-1, 0.5, 60_001, "1s"]) {
      await assert.rejects(tidegate.check({ path: "/" }, { waitMs }), {
        name: "RangeError",
        message: /^waitMs: expected an integer from 0 to 60000/,
      });
    }
  });
});

describe("check and peek", () => {
  test("check charges until the limit is exhausted", async () => {
    const entries = { path: "/api/a", customer: "check" };
    for (const remaining of [2, 1, 0]) {
      const verdict = await tidegate.check(entries);
      assert.equal(verdict.allowed, true);
      assert.equal(verdict.reason, undefined);
      assert.equal(verdict.remaining, remaining);
    }
    const denied = await tidegate.check(entries);
    assert.equal(denied.allowed, false);
    assert.equal(denied.reason, "limit");
    assert.equal(denied.rule, "api");
    assert.equal(denied.limit, 3);
    assert.equal(denied.exactness, "exact");
    assert.equal(denied.retryAfterEstimated, false);
    assert.ok(denied.retryAfterMs > 3_590_000 && denied.retryAfterMs <= 3_600_000);
    assert.match(denied.headers.ratelimit, /^"3\/h";r=0;t=3600$/);
    assert.match(denied.headers["ratelimit-policy"], /^"3\/h";q=3;w=3600$/);
    assert.equal(denied.headers["retry-after"], "3600");
    const [limit] = denied.limits;
    assert.equal(limit.policy, "3/h");
    assert.equal(limit.overLimit, false);
  });

  test("a cost is charged at once or not at all", async () => {
    const entries = { path: "/api/a", customer: "cost" };
    assert.equal((await tidegate.check(entries, { cost: 2 })).remaining, 1);
    assert.equal((await tidegate.check(entries, { cost: 2 })).allowed, false);
    assert.equal((await tidegate.check(entries, { cost: 1 })).remaining, 0);
    assert.equal((await tidegate.check(entries, { cost: 9 })).retryAfterMs, null);
  });

  test("peek charges nothing", async () => {
    const entries = { path: "/api/a", customer: "peek" };
    await tidegate.peek(entries);
    assert.equal((await tidegate.peek(entries)).remaining, 2);
  });

  test("entries without a value are left out, and numbers are sent as strings", async () => {
    const before = await tidegate.check({ path: "/api/a", customer: 42 });
    const after = await tidegate.check({ path: "/api/a", customer: "42", other: undefined });
    assert.equal(after.remaining, before.remaining - 1);
    const none = await tidegate.check({ path: "/api/a", customer: undefined });
    assert.deepEqual(none.limits, []);
    await assert.rejects(tidegate.check({ customer: {} }), /entries\.customer: expected a string/);
  });

  test("half of a surrogate pair is a value as any other", async () => {
    assert.equal((await tidegate.check({ path: "/api/a", customer: "\ud800" })).allowed, true);
  });

  test("raw entries are not normalised", async () => {
    const entries = { path: "api/raw", customer: "raw" };
    assert.equal((await tidegate.check(entries)).rule, "api");
    assert.equal((await tidegate.check(entries, { raw: true })).rule, null);
  });

  test("a queue says how long to wait", async () => {
    const print = () => tidegate.check({ path: "/print" });
    const delays = [await print(), await print(), await print()].map((one) => one.delayMs);
    assert.ok(delays[2] > 100, `${delays}`);
  });
});

describe("throttle", () => {
  test("takes a shorthand, a list or the fields of a limit", async () => {
    const shorthand = await tidegate.throttle("a", "5/h");
    assert.equal(shorthand.remaining, 4);
    const list = await tidegate.throttle("b", ["5/h", { algorithm: "gcra", rate: "9/s" }]);
    assert.equal(list.limits.length, 2);
    const fields = await tidegate.throttle("c", { algorithm: "gcra", rate: "9/s", burst: 4 });
    assert.equal(fields.limit, 5);
    await assert.rejects(tidegate.throttle("d"), /limit: expected a limit/);
  });

  test("peeks, and takes a cost", async () => {
    assert.equal((await tidegate.throttle("e", "5/h", { cost: 2 })).remaining, 3);
    assert.equal((await tidegate.throttle("e", "5/h", { peek: true })).remaining, 2);
    assert.equal((await tidegate.throttle("e", "5/h", { cost: 3 })).remaining, 0);
    assert.equal((await tidegate.throttle("e", "5/h")).allowed, false);
  });

  test("a mistake in a limit names the field", async () => {
    const call = tidegate.throttle("f", "5 per hour", { onFailure: "open" });
    await assert.rejects(call, (error) => {
      assert.ok(error instanceof TidegateRequestError && error instanceof TidegateError);
      assert.equal(error.name, "TidegateRequestError");
      assert.equal(error.serverStatus, 400);
      assert.equal(error.status, 500);
      assert.equal(error.field, "limits[0]");
      return true;
    });
  });
});

describe("reservations", () => {
  test("settle gives back the rest, once", async () => {
    const entries = { path: "/chat", user: "settle" };
    const reserved = await tidegate.reserve(entries, { cost: 600, ttl: "30s" });
    assert.equal(reserved.remaining, 400);
    assert.equal(reserved.expiresInMs, 30_000);
    assert.equal((await tidegate.reserve(entries, { cost: 600 })).allowed, false);
    const settled = await tidegate.settle(reserved.reservation, 100);
    assert.deepEqual(settled, { settled: 100, released: 500, over: 0 });
    await assert.rejects(tidegate.settle(reserved.reservation, 100), { serverStatus: 404 });
    assert.equal((await tidegate.peek(entries)).remaining, 899);
  });

  test("renew returns a token that settles", async () => {
    const reserved = await tidegate.reserve({ path: "/chat", user: "renew" }, { ttl: "5s" });
    const renewed = await tidegate.renew(reserved.reservation, { ttl: "40s" });
    assert.equal(renewed.expiresInMs, 40_000);
    assert.equal((await tidegate.settle(renewed.reservation, 0)).released, 1);
  });

  test("a forged or malformed reservation is an error with the field", async () => {
    const wrongToken = { serverStatus: 400, field: "reservation" };
    await assert.rejects(tidegate.settle("forged", 1), wrongToken);
    await assert.rejects(tidegate.renew("forged"), wrongToken);
    await assert.rejects(tidegate.settle("forged", -1), TidegateRequestError);
    const wrong = tidegate.reserve({ path: "/chat", user: "ttl" }, { ttl: "2 weeks ago" });
    await assert.rejects(wrong, { field: "ttl" });
  });
});

describe("withReservation", () => {
  const remaining = async (entries) => (await tidegate.peek(entries)).remaining + 1;

  test("settles at the cost of the result", async () => {
    const entries = { path: "/chat", user: "with" };
    const options = { cost: 500, settle: (answer) => answer.tokens };
    const result = await tidegate.withReservation(entries, options, async ({ verdict }) => {
      assert.equal(verdict.remaining, 500);
      return { tokens: 123 };
    });
    assert.equal(result.allowed, true);
    assert.deepEqual(result.value, { tokens: 123 });
    assert.deepEqual(result.settled, { settled: 123, released: 377, over: 0 });
    assert.equal(await remaining(entries), 877);
  });

  test("cancels if the function throws, and throws the same error", async () => {
    const entries = { path: "/chat", user: "throws" };
    const failure = new Error("no model");
    const call = tidegate.withReservation(entries, { cost: 500, settle: () => 1 }, () => {
      throw failure;
    });
    await assert.rejects(call, (error) => error === failure);
    assert.equal(await remaining(entries), 1_000);
  });

  test("does not run the function if the request is denied", async () => {
    const entries = { path: "/chat", user: "denied" };
    let runs = 0;
    const options = { cost: 1_001, settle: () => 0 };
    const result = await tidegate.withReservation(entries, options, () => (runs += 1));
    assert.equal(result.allowed, false);
    assert.equal(result.verdict.retryAfterMs, null);
    assert.equal(runs, 0);
  });

  test("charges what was reserved if the final cost is not a cost", async () => {
    const entries = { path: "/chat", user: "nonsense" };
    const fails = () => Promise.reject(new Error("no usage"));
    for (const settle of [() => NaN, () => -1, () => undefined, fails]) {
      const call = tidegate.withReservation(entries, { cost: 100, settle }, () => 1);
      await assert.rejects(call);
    }
    assert.equal(await remaining(entries), 600);
    const noSettle = tidegate.withReservation(entries, {}, () => 1);
    await assert.rejects(noSettle, /settle: expected a function/);
  });

  test("renews while the function runs", async () => {
    const entries = { path: "/chat", user: "long" };
    const options = { cost: 500, ttl: "2s", settle: () => 200 };
    const run = () => sleep(4_500);
    const renewed = tidegate.withReservation(entries, options, run);
    const failures = [];
    const onSettleError = (error) => failures.push(error);
    const single = { ...options, renew: false, onSettleError };
    const expired = tidegate.withReservation({ path: "/chat", user: "short" }, single, run);
    assert.equal((await renewed).settled.settled, 200);
    assert.equal((await expired).settled, undefined);
    assert.equal(failures.length, 1);
    assert.equal(failures[0].serverStatus, 404);
  });

  test("a lost answer to a settlement does not settle twice", async () => {
    const entries = { path: "/chat", user: "lost" };
    let lost = 0;
    const losing = new Tidegate({
      url: server.url,
      timeoutMs: 10_000,
      fetch: async (url, options) => {
        const response = await fetch(url, options);
        if (!url.pathname.endsWith("/settle") || lost > 0) return response;
        lost += 1;
        throw new TypeError("fetch failed");
      },
    });
    const options = { cost: 500, settle: () => 200, onSettleError: assert.fail };
    const result = await losing.withReservation(entries, options, () => "done");
    assert.equal(result.value, "done");
    assert.equal(lost, 1);
    assert.equal(await remaining(entries), 800);
  });
});

describe("the token", () => {
  test("is sent, and a wrong one is an error even with onFailure: open", async () => {
    const env = { NODE_TEST_TOKEN: "a-long-random-secret" };
    const more = "";
    const listen = "{address: 127.0.0.1:0, token_env: NODE_TEST_TOKEN}";
    const { url, stop } = await startServer("", { listen, more, env });
    const right = new Tidegate({ url, token: env.NODE_TEST_TOKEN, timeoutMs: 10_000 });
    assert.equal((await right.throttle("a", "1/h")).allowed, true);
    for (const token of ["wrong", undefined]) {
      const wrong = new Tidegate({ url, token, timeoutMs: 10_000, onFailure: "open" });
      const call = wrong.throttle("a", "1/h");
      await assert.rejects(call, { name: "TidegateRequestError", serverStatus: 401, status: 500 });
    }
    await stop();
  });
});

test("settings are checked at once", () => {
  assert.throws(() => new Tidegate({ url: "127.0.0.1:8080" }), /Invalid URL/);
  assert.throws(() => new Tidegate({ url: "redis://a" }), /url: expected http/);
  assert.throws(() => new Tidegate({ url: "http://user:secret@a" }), /url: expected no user/);
  assert.throws(() => new Tidegate({ token: "" }), /token: expected text/);
  assert.throws(() => new Tidegate({ token: "a\nb" }), TypeError);
  assert.throws(() => new Tidegate({ timeoutMs: 0 }), /timeoutMs: expected 1/);
  assert.throws(() => new Tidegate({ timeoutMs: 2 ** 31 }), /timeoutMs: expected 1/);
  assert.throws(() => new Tidegate({ onFailure: "opne" }), /onFailure: expected/);
});

test("a signal ends a call with its reason, whatever onFailure says", async () => {
  const silent = createServer(() => {}).listen(0, "127.0.0.1");
  await once(silent, "listening");
  const url = `http://127.0.0.1:${silent.address().port}`;
  const client = new Tidegate({ url, timeoutMs: 10_000, onFailure: "open" });
  const controller = new AbortController();
  const call = client.check({}, { signal: controller.signal });
  setTimeout(() => controller.abort(new Error("the client left")), 20);
  await assert.rejects(call, /the client left/);
  await assert.rejects(client.check({}, { signal: controller.signal }), /the client left/);
  silent.closeAllConnections();
  silent.close();
});

test("problem describes a denial without the names of rules", async () => {
  await tidegate.check({ path: "/twice" });
  const denied = await tidegate.check({ path: "/twice" });
  const { status, headers, body } = problem(denied);
  assert.equal(status, 429);
  assert.equal(headers["content-type"], "application/problem+json");
  assert.equal(headers["retry-after"], "3600");
  const { retry_after_ms: wait, ...document } = JSON.parse(body);
  assert.deepEqual(document, {
    title: "Too Many Requests",
    status: 429,
    detail: "1/h exceeded; retry in 1h",
    "violated-policies": ["1/h"],
  });
  assert.ok(wait > 3_590_000);
  const never = problem(await tidegate.check({ path: "/twice" }, { cost: 3 }));
  assert.match(JSON.parse(never.body).detail, /^the cost of the request is more than/);
  assert.equal(JSON.parse(never.body).retry_after_ms, null);
  assert.equal(never.headers["retry-after"], undefined);
  assert.throws(() => problem({ allowed: true }), /allows the request/);
});

test("an unavailable server is an error of its own", async () => {
  const client = new Tidegate({ url: "http://127.0.0.1:9" });
  await assert.rejects(client.check({}), (error) => {
    assert.ok(error instanceof TidegateUnavailableError);
    assert.equal(error.status, 503);
    assert.match(error.message, /^cannot reach http:\/\/127\.0\.0\.1:9: /);
    return true;
  });
});
