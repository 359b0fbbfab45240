// The store with the real middleware express-rate-limit, Express and a real server.

import assert from "node:assert/strict";
import { once } from "node:events";
import { before, describe, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import express from "express";
import { rateLimit } from "express-rate-limit";
import { Tidegate } from "tidegate";
import { TidegateStore } from "tidegate/express-rate-limit";

import { startServer, tally } from "./server.js";

const HOUR = 3_600_000;
let server, tidegate;

before(async () => {
  server = await startServer();
  tidegate = new Tidegate({ url: server.url, timeoutMs: 10_000 });
});

let prefixes = 0;

function newStore(options = {}, windowMs = HOUR) {
  prefixes += 1;
  const fresh = { prefix: `test-${prefixes}:`, onError: assert.fail, ...options };
  const store = new TidegateStore(tidegate, fresh);
  store.init({ windowMs });
  return store;
}

/** Starts an application, and returns a function that sends requests to it. */
async function application(t, limiter, handler = (req, res) => res.send("hello")) {
  const app = express();
  app.use(limiter);
  app.get("/", handler);
  // Express logs errors unless a handler handles them.
  app.use((error, req, res, next) => res.status(error.status ?? 500).send(error.message));
  const listening = app.listen(0, "127.0.0.1");
  await once(listening, "listening");
  t.after(() => {
    listening.closeAllConnections();
    listening.close();
  });
  return (path = "/") => fetch(`http://127.0.0.1:${listening.address().port}${path}`);
}

describe("the store", () => {
  test("counts hits without a limit, and reports the end of the window", async () => {
    const store = newStore();
    assert.equal(await store.get("a"), undefined);
    const first = await store.increment("a");
    assert.equal(first.totalHits, 1);
    const left = first.resetTime - Date.now();
    assert.ok(left > HOUR - 60_000 && left <= HOUR, `${left}`);
    for (let hit = 2; hit <= 30; hit += 1) {
      assert.equal((await store.increment("a")).totalHits, hit);
    }
    assert.equal((await store.get("a")).totalHits, 30);
    assert.equal((await store.get("a")).totalHits, 30);
    assert.equal((await store.increment("b")).totalHits, 1);
  });

  test("a window begins with the first hit and ends after windowMs", async () => {
    const windowMs = 2_000;
    const store = newStore({}, windowMs);
    const begin = Date.now();
    await store.increment("a");
    const { totalHits, resetTime } = await store.increment("a");
    assert.equal(totalHits, 2);
    assert.ok(resetTime.getTime() >= begin && resetTime.getTime() <= Date.now() + windowMs);
    await sleep(windowMs + 20);
    assert.equal(await store.get("a"), undefined);
    assert.equal((await store.increment("a")).totalHits, 1);
  });

  test("decrement refunds a hit, never below zero, and keeps the window", async () => {
    const store = newStore();
    await store.increment("a");
    const { resetTime } = await store.increment("a");
    await store.decrement("a");
    const info = await store.get("a");
    assert.equal(info.totalHits, 1);
    assert.ok(Math.abs(info.resetTime - resetTime) < 1_000);
    for (let more = 0; more < 5; more += 1) await store.decrement("a");
    assert.equal((await store.get("a")).totalHits, 0);
    assert.equal((await store.increment("a")).totalHits, 1);
    await store.decrement("unused");
    assert.equal((await store.increment("unused")).totalHits, 1);
  });

  test("a refund in the next window admits nothing there", async () => {
    const store = newStore({}, 500);
    // The window ends between the two calls of a refund, and the next window has a hit.
    const late = new Tidegate({
      url: server.url,
      timeoutMs: 10_000,
      fetch: async (url, options) => {
        if (JSON.parse(options.body).cost > 1) {
          await sleep(550);
          await store.increment("a");
        }
        return fetch(url, options);
      },
    });
    const other = new TidegateStore(late, { prefix: store.prefix, onError: assert.fail });
    other.init({ windowMs: 500 });
    await store.increment("a");
    await store.increment("a");
    await other.decrement("a");
    const info = await store.get("a");
    // On a slow machine, this window may also have ended.
    assert.ok(info === undefined || info.totalHits === 1, JSON.stringify(info));
  });

  test("resetKey begins a new window", async () => {
    const store = newStore();
    await store.increment("a");
    await store.increment("a");
    await store.decrement("a");
    await store.resetKey("a");
    assert.equal(await store.get("a"), undefined);
    assert.equal((await store.increment("a")).totalHits, 1);
    await store.resetKey("unused");
  });

  test("long keys, and keys with any characters, have separate counts", async () => {
    const store = newStore();
    const long = "x".repeat(5_000);
    for (const key of [long, `${long}y`, "ä€😀", "a b\n", "", "\u0000"]) {
      assert.equal((await store.increment(key)).totalHits, 1, key);
      assert.equal((await store.increment(key)).totalHits, 2, key);
    }
  });

  test("an invalid window is an error in every call", async () => {
    for (const windowMs of [0, -1, 1.5, NaN, Infinity, "60000"]) {
      const store = new TidegateStore(tidegate);
      assert.throws(() => store.init({ windowMs }), /windowMs: expected 1 to/);
      await assert.rejects(store.increment("a"), /windowMs is not valid/);
    }
  });

  test("decrement reports an error and does not throw it", async () => {
    const errors = [];
    const dead = new Tidegate({ url: "http://127.0.0.1:9" });
    const store = new TidegateStore(dead, { onError: (error) => errors.push(error) });
    await store.decrement("a");
    assert.equal(errors.length, 1);
    await assert.rejects(store.increment("a"), { status: 503 });
    await assert.rejects(store.resetKey("a"), { status: 503 });
    await assert.rejects(store.get("a"), { status: 503 });
  });

  test("the settings onFailure of the client do not turn a failure into a count", async () => {
    const dead = new Tidegate({ url: "http://127.0.0.1:9", onFailure: "open" });
    await assert.rejects(new TidegateStore(dead).increment("a"), { status: 503 });
  });
});

describe("on a server without Redis", () => {
  /** Redis is unreachable from the start. */
  const withPolicy = async (policy, t) => {
    const more = `store: {redis: "redis://127.0.0.1:1", on_failure: ${policy}}`;
    const alone = await startServer("", { more });
    t.after(() => alone.stop());
    const store = new TidegateStore(new Tidegate({ url: alone.url, timeoutMs: 10_000 }));
    store.init({ windowMs: HOUR });
    return store;
  };

  test("on_failure: local enforces the share of the server", async (t) => {
    const store = await withPolicy("local", t);
    // The share is a half, so a hit weighs two.
    const counts = [];
    for (let hit = 0; hit < 3; hit += 1) counts.push((await store.increment("a")).totalHits);
    assert.deepEqual(counts.map((count) => Math.ceil(count / 2)), [1, 2, 3], `${counts}`);
    assert.ok(counts[2] >= 6, `${counts}`);
  });

  test("on_failure: open admits, and closed is an error", async (t) => {
    const open = await withPolicy("open", t);
    assert.deepEqual(await open.increment("a"), { totalHits: 1, resetTime: undefined });
    const closed = await withPolicy("closed", t);
    await assert.rejects(closed.increment("a"), { status: 503 });
  });
});

describe("the middleware", () => {
  const quiet = { standardHeaders: "draft-8", legacyHeaders: true, windowMs: HOUR };

  test("passes exactly the limit, in parallel", async (t) => {
    const get = await application(t, rateLimit({ ...quiet, limit: 7, store: newStore() }));
    const responses = await Promise.all(Array.from({ length: 25 }, () => get()));
    const statuses = tally(responses.map((response) => response.status));
    assert.deepEqual(statuses, { 200: 7, 429: 18 });
    const denied = await get();
    assert.equal(denied.status, 429);
    assert.equal(denied.headers.get("x-ratelimit-remaining"), "0");
    assert.match(denied.headers.get("retry-after"), /^3[56]\d\d$/);
    assert.match(denied.headers.get("ratelimit"), /r=0; t=3[56]\d\d/);
  });

  test("several applications share the counts", async (t) => {
    const limiter = () => rateLimit({ ...quiet, limit: 3, store: newStore({ prefix: "shared:" }) });
    const one = await application(t, limiter());
    const other = await application(t, limiter());
    const statuses = [];
    for (const get of [one, other, one, other, one]) statuses.push((await get()).status);
    assert.deepEqual(statuses, [200, 200, 200, 429, 429]);
  });

  test("the limit may be a function", async (t) => {
    const limit = (req) => (req.query.plan === "large" ? 4 : 2);
    const keyGenerator = (req) => String(req.query.plan);
    const store = newStore();
    const get = await application(t, rateLimit({ ...quiet, limit, keyGenerator, store }));
    const statuses = async (path) => {
      const all = [];
      for (let hit = 0; hit < 5; hit += 1) all.push((await get(path)).status);
      return tally(all);
    };
    assert.deepEqual(await statuses("/?plan=large"), { 200: 4, 429: 1 });
    assert.deepEqual(await statuses("/?plan=small"), { 200: 2, 429: 3 });
  });

  test("skipSuccessfulRequests counts failures only", async (t) => {
    const store = newStore();
    const settings = { ...quiet, limit: 3, store, skipSuccessfulRequests: true };
    const answer = (req, res) => res.status(req.query.fail ? 401 : 200).send("");
    const get = await application(t, rateLimit(settings), answer);
    for (let request = 0; request < 10; request += 1) {
      assert.equal((await get()).status, 200);
      await settled(store, 0);
    }
    const failed = [];
    for (let request = 0; request < 5; request += 1) failed.push((await get("/?fail=1")).status);
    assert.deepEqual(failed, [401, 401, 401, 429, 429]);
  });

  test("skipFailedRequests counts successes only", async (t) => {
    const store = newStore();
    const settings = { ...quiet, limit: 2, store, skipFailedRequests: true };
    const answer = (req, res) => res.status(req.query.fail ? 500 : 200).send("");
    const get = await application(t, rateLimit(settings), answer);
    for (let request = 0; request < 5; request += 1) {
      assert.equal((await get("/?fail=1")).status, 500);
      await settled(store, 0);
    }
    assert.deepEqual([(await get()).status, (await get()).status], [200, 200]);
    assert.equal((await get()).status, 429);
  });

  /** Waits until the middleware has refunded its hit, after the response. */
  async function settled(store, expected) {
    for (let attempt = 0; attempt < 400; attempt += 1) {
      // The key is the address of the client.
      if ((await store.get("127.0.0.1"))?.totalHits === expected) return;
      await sleep(5);
    }
    assert.fail("the hit was not refunded");
  }

  test("getKey and resetKey of the middleware", async (t) => {
    const limiter = rateLimit({ ...quiet, limit: 1, store: newStore() });
    const get = await application(t, limiter);
    assert.deepEqual([(await get()).status, (await get()).status], [200, 429]);
    assert.equal((await limiter.getKey("127.0.0.1")).totalHits, 2);
    await limiter.resetKey("127.0.0.1");
    assert.equal((await get()).status, 200);
  });

  test("without a server the answer is 503, or 200 with passOnStoreError", async (t) => {
    const dead = () => new TidegateStore(new Tidegate({ url: "http://127.0.0.1:9" }));
    const closed = await application(t, rateLimit({ ...quiet, store: dead() }));
    assert.equal((await closed()).status, 503);
    const logged = [];
    const logger = { error: (error) => logged.push(error), warn: assert.fail };
    const settings = { ...quiet, store: dead(), passOnStoreError: true, logger };
    const open = await application(t, rateLimit(settings));
    assert.equal((await open()).status, 200);
    assert.equal(logged.length, 1);
  });
});
