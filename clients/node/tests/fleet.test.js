// Two servers that share one Redis.

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { Tidegate } from "tidegate";
import { TidegateStore } from "tidegate/express-rate-limit";

import { freePort, start, startServer } from "./server.js";

const RULES = "  - {name: per-user, key: [user], limits: [10/h]}\n";
const HOUR = 3_600_000;

let clients;

before(async () => {
  const port = await freePort();
  await start("redis-server", ["--port", port, "--save", ""], /Ready to accept connections/);
  const store = `store: {redis: "redis://127.0.0.1:${port}", timeout: 5s}`;
  const more = `${store}\nreservations: {secret: one-secret-of-all-servers}`;
  const servers = [await startServer(RULES, { more }), await startServer(RULES, { more })];
  clients = servers.map(({ url }) => new Tidegate({ url, timeoutMs: 20_000 }));
});

test("any server settles a reservation, once", async () => {
  const [one, other] = clients;
  const { reservation, source } = await one.reserve({ user: "settle" }, { cost: 8 });
  assert.equal(source, "redis");
  assert.equal((await other.check({ user: "settle" }, { cost: 3 })).allowed, false);
  assert.deepEqual(await other.settle(reservation, 1), { settled: 1, released: 7, over: 0 });
  // A repeated call gets the same response.
  assert.deepEqual(await one.settle(reservation, 1), { settled: 1, released: 7, over: 0 });
  await assert.rejects(one.settle(reservation, 2), { serverStatus: 404 });
  assert.equal((await one.check({ user: "settle" }, { cost: 9 })).remaining, 0);
});

test("of 40 parallel requests to two servers exactly the limit passes", async () => {
  const calls = Array.from({ length: 40 }, (_, index) => clients[index % 2].check({ user: "a" }));
  const passed = (await Promise.all(calls)).filter((verdict) => verdict.allowed);
  assert.equal(passed.length, 10);
});

test("stores on two servers share hits, refunds and resets", async () => {
  const [one, other] = clients.map((client) => {
    const store = new TidegateStore(client, { onError: assert.fail });
    store.init({ windowMs: HOUR });
    return store;
  });
  const hits = Array.from({ length: 40 }, (_, index) => [one, other][index % 2].increment("a"));
  const counts = (await Promise.all(hits)).map((info) => info.totalHits).sort((a, b) => a - b);
  assert.deepEqual(counts, Array.from({ length: 40 }, (_, index) => index + 1));
  await Promise.all([one.decrement("a"), other.decrement("a")]);
  assert.equal((await one.get("a")).totalHits, 38);
  await other.resetKey("a");
  assert.equal(await one.get("a"), undefined);
  assert.equal((await one.increment("a")).totalHits, 1);
});
