import assert from "node:assert/strict";
import { before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { Tidegate } from "tidegate";
import { TidegateStore } from "tidegate/express-rate-limit";

import { run, startServer } from "./server.js";

const WORKER = fileURLToPath(new URL("worker.js", import.meta.url));
const RULES = `
  - {name: per-user, key: [user], limits: [150/h]}
  - {name: failures, key: [account], limits: [5/h]}
`;

let server;

before(async () => {
  server = await startServer(RULES);
});

for (const kind of ["check", "store"]) {
  test(`two processes together pass exactly the limit: ${kind}`, async () => {
    const worker = () => run(process.execPath, [WORKER, server.url, kind, "200", "150", kind]);
    const [one, other] = await Promise.all([worker(), worker()]);
    assert.equal(Number(one) + Number(other), 150, `${one} and ${other}`);
  });
}

test("of 60 parallel guesses exactly 5 run, and right passwords are free", async () => {
  const tidegate = new Tidegate({ url: server.url, timeoutMs: 20_000 });
  let guesses = 0;
  const settle = (isRight) => (isRight ? 0 : 1);
  const guess = () =>
    tidegate.withReservation({ account: "a" }, { settle }, () => {
      guesses += 1;
      return false;
    });
  for (let login = 0; login < 20; login += 1) {
    await tidegate.withReservation({ account: "a" }, { settle }, () => true);
  }
  const results = await Promise.all(Array.from({ length: 60 }, guess));
  assert.equal(guesses, 5);
  assert.equal(results.filter((result) => result.allowed).length, 5);
});

test("parallel hits and refunds of a store add up", async () => {
  const store = new TidegateStore(new Tidegate({ url: server.url, timeoutMs: 20_000 }), {
    onError: assert.fail,
  });
  store.init({ windowMs: 3_600_000 });
  const calls = Array.from({ length: 100 }, async (_, index) => {
    const { totalHits } = await store.increment("sum");
    assert.ok(totalHits >= 1 && totalHits <= 100);
    if (index % 2 === 0) await store.decrement("sum");
  });
  await Promise.all(calls);
  assert.equal((await store.get("sum")).totalHits, 50);
  // Refunds beyond the number of hits are undone, so that they do not admit any requests.
  await Promise.all(Array.from({ length: 80 }, () => store.decrement("sum")));
  assert.equal((await store.get("sum")).totalHits, 0);
  assert.equal((await store.increment("sum")).totalHits, 1);
  assert.equal((await store.increment("sum")).totalHits, 2);
});
