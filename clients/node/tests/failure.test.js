// The client's behaviour without a decision: servers that are dead, slow, or not Tidegate.

import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync, readdirSync } from "node:fs";
import { createServer } from "node:http";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { Tidegate, TidegateUnavailableError, problem } from "tidegate";

import { startServer } from "./server.js";

/** Starts a server with the handler `answer`, and returns a client for it. */
async function pretending(t, answer, options = {}) {
  const server = createServer(answer).listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  const url = `http://127.0.0.1:${server.address().port}`;
  return new Tidegate({ url, timeoutMs: 10_000, ...options });
}

/** Suspends a process. A thread that is running on another core continues for a moment. */
async function suspend(child) {
  child.kill("SIGSTOP");
  const tasks = `/proc/${child.pid}/task`;
  const isStopped = (task) => /\) T [^)]*$/.test(readFileSync(`${tasks}/${task}/stat`, "utf8"));
  while (!readdirSync(tasks).every(isStopped)) await sleep(5);
}

const VERDICT = {
  allowed: true,
  rule: null,
  limit: null,
  remaining: null,
  reset_after_ms: null,
  retry_after_ms: 0,
  delay_ms: 0,
  exactness: "exact",
  limits: [],
};
const LIMIT = {
  rule: "a",
  policy: "1/s",
  allowed: true,
  over_limit: false,
  limit: 1,
  remaining: 0,
  reset_after_ms: 1,
  retry_after_ms: 0,
  delay_ms: 0,
  shadow: false,
};

test("malformed answers are never admissions", async (t) => {
  const answers = [
    [200, ""],
    [200, "hello"],
    [200, "null"],
    [200, "[]"],
    [200, "true"],
    [200, "{}"],
    [200, '{"allowed":'],
    [200, { ...VERDICT, allowed: "yes" }],
    [200, { ...VERDICT, allowed: 1 }],
    [200, { ...VERDICT, allowed: false, reason: "limit" }],
    [429, VERDICT],
    [503, VERDICT],
    [429, { ...VERDICT, allowed: false }],
    [200, { ...VERDICT, remaining: "9" }],
    [200, { ...VERDICT, remaining: -1 }],
    [200, { ...VERDICT, remaining: 1.5 }],
    [200, { ...VERDICT, remaining: undefined }],
    [200, { ...VERDICT, delay_ms: null }],
    [200, { ...VERDICT, limits: {} }],
    [200, { ...VERDICT, limits: [null] }],
    [200, { ...VERDICT, limits: [{ ...LIMIT, policy: 1 }] }],
    [204, ""],
    [500, "oops"],
    [502, "<html>Bad Gateway</html>"],
    [503, { title: "busy", status: 503, detail: "too many reservations" }],
    [429, { title: "Too Many Requests", status: 429, detail: "too many wrong tokens" }],
  ];
  let next;
  const client = await pretending(t, (request, response) => {
    const [status, body] = next;
    response.writeHead(status).end(typeof body === "string" ? body : JSON.stringify(body));
  });
  for (next of answers) {
    const said = JSON.stringify(next);
    await assert.rejects(client.check({}), TidegateUnavailableError, said);
    const closed = await client.check({}, { onFailure: "closed" });
    assert.equal(closed.allowed, false, said);
  }
  next = [200, { ...VERDICT, limits: [LIMIT], future: "a field of a later server" }];
  assert.equal((await client.check({})).limits[0].policy, "1/s");
  // A reservation without a token could not be settled.
  await assert.rejects(client.reserve({}), /reservation is missing or wrong/);
  await assert.rejects(client.settle("a", 1), /settled is missing or wrong/);
  await assert.rejects(client.renew("a"), /reservation is missing or wrong/);
});

test("a redirect is not followed, because it would send the token elsewhere", async (t) => {
  const paths = [];
  const client = await pretending(t, (request, response) => {
    paths.push(request.url);
    response.writeHead(307, { location: "/elsewhere" }).end();
  });
  await assert.rejects(client.check({}), TidegateUnavailableError);
  assert.deepEqual(paths, ["/v1/check"]);
});

test("the time limit includes the body", async (t) => {
  const client = await pretending(t, (request, response) => response.write('{"allowed":'), {
    timeoutMs: 100,
  });
  const begin = performance.now();
  await assert.rejects(client.check({}), /no answer from http.* within 100 ms/);
  assert.ok(performance.now() - begin < 5_000);
});

test("a connection that ends early is a failure", async (t) => {
  const client = await pretending(t, (request) => request.socket.destroy());
  await assert.rejects(client.check({}), TidegateUnavailableError);
});

test("a base path is kept", async () => {
  const urls = [];
  const fetch = async (url) => {
    urls.push(String(url));
    return new Response(JSON.stringify(VERDICT));
  };
  await new Tidegate({ url: "http://a.example/limits", fetch }).check({});
  await new Tidegate({ url: "https://a.example", fetch }).check({});
  assert.deepEqual(urls, ["http://a.example/limits/v1/check", "https://a.example/v1/check"]);
});

test("onFailure decides while a server is dead, and the server decides again after", async () => {
  const rules = "  - {name: one, key: [user], limits: [2/h]}\n";
  const first = await startServer(rules);
  const client = new Tidegate({ url: first.url, timeoutMs: 10_000 });
  assert.equal((await client.check({ user: "a" })).remaining, 1);

  await first.stop("SIGKILL");
  await assert.rejects(client.check({ user: "a" }), TidegateUnavailableError);
  const open = await client.check({ user: "a" }, { onFailure: "open" });
  assert.deepEqual(
    [open.allowed, open.source, open.exactness, open.headers],
    [true, "client", "none", {}],
  );
  assert.ok(open.error instanceof TidegateUnavailableError);
  const closed = await client.check({ user: "a" }, { onFailure: "closed" });
  assert.deepEqual(
    [closed.allowed, closed.reason, closed.retryAfterMs, closed.source],
    [false, "store", 1_000, "client"],
  );
  const { status, headers, body } = problem(closed);
  assert.deepEqual([status, headers["retry-after"]], [503, "1"]);
  assert.equal(JSON.parse(body).detail, "the limiter could not decide; retry in 1s");

  // With `onFailure: "open"`, the function still runs, and there is nothing to settle.
  const options = { onFailure: "open", settle: () => 1, onSettleError: assert.fail };
  const result = await client.withReservation({ user: "a" }, options, () => "value");
  assert.deepEqual([result.value, result.settled], ["value", undefined]);

  const second = await startServer(rules, { listen: first.address });
  assert.equal((await client.check({ user: "a" })).source, undefined);
  await second.stop();
});

test("a frozen server is a failure after the time limit", async () => {
  const server = await startServer();
  const client = new Tidegate({ url: server.url, timeoutMs: 200, onFailure: "open" });
  const patient = { timeoutMs: 10_000 };
  assert.equal((await client.throttle("a", "5/h", patient)).source, undefined);
  await suspend(server.child);
  const calls = Array.from({ length: 20 }, () => client.throttle("a", "5/h"));
  const sources = (await Promise.all(calls)).map((verdict) => verdict.source);
  assert.deepEqual(new Set(sources), new Set(["client"]));
  server.child.kill("SIGCONT");
  assert.notEqual((await client.throttle("b", "5/h", patient)).source, "client");
  await server.stop();
});

test("a server that is killed under load causes only the documented error", async () => {
  const server = await startServer();
  const client = new Tidegate({ url: server.url, timeoutMs: 10_000 });
  const failures = [];
  const loops = Array.from({ length: 20 }, async (_, index) => {
    for (;;) {
      try {
        await client.throttle(`load:${index}`, "1000000/h");
      } catch (error) {
        failures.push(error);
        return;
      }
    }
  });
  await client.throttle("load", "1000000/h");
  await server.stop("SIGKILL");
  await Promise.all(loops);
  assert.equal(failures.length, 20);
  for (const error of failures) assert.ok(error instanceof TidegateUnavailableError, `${error}`);
});

test("a settlement is repeated until the server answers, and a failure is reported", async () => {
  const rules = "  - {name: one, key: [user], limits: [9/h]}\n";
  const server = await startServer(rules);
  let failing = 0;
  const client = new Tidegate({
    url: server.url,
    timeoutMs: 10_000,
    fetch: async (url, options) => {
      if (url.pathname.endsWith("/settle") && failing-- > 0) throw new TypeError("fetch failed");
      return fetch(url, options);
    },
  });
  const errors = [];
  const options = { settle: () => 1, onSettleError: (error) => errors.push(error) };
  failing = 2;
  const settled = await client.withReservation({ user: "a" }, options, () => 1);
  assert.equal(settled.settled.settled, 1);
  failing = 3;
  const failed = await client.withReservation({ user: "a" }, options, () => "value");
  assert.deepEqual([failed.value, failed.settled], ["value", undefined]);
  assert.equal(errors.length, 1);
  assert.match(errors[0].message, /cannot reach/);
  await server.stop();
});
