// Runs the recipes as readers would, with the real frameworks and a real server.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, describe, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { Tidegate } from "tidegate";

import { repository, start, startServer, tally } from "./server.js";

const NODE = join(repository, "recipes/node");
const GO = join(repository, "recipes/go");
const LISTENING = /listening on (http:\S+)/;

/** The rules file of the recipes, without its listeners. */
const [, MORE, RULES] = /^listen:.*\n([^]*?)^rules:\n([^]*)$/m.exec(
  readFileSync(join(NODE, "rules.yaml"), "utf8"),
);

/** Starts a server and a recipe, and returns a function that sends requests to the recipe. */
async function recipe(t, program, args, cwd) {
  const server = await startServer(RULES, { more: MORE });
  // A machine that runs many tests at once is slow.
  const env = { TIDEGATE_URL: server.url, TIDEGATE_TIMEOUT_MS: "20000", PORT: "0" };
  const running = await start(program, args, LISTENING, { cwd, env });
  t.after(() => Promise.all([server.stop(), running.stop()]));
  const get = (path, headers = {}, method = "GET") =>
    fetch(running.match[1] + path, { method, headers });
  return { server, get };
}

async function statuses(count, send) {
  const responses = await Promise.all(Array.from({ length: count }, (_, index) => send(index)));
  return tally(responses.map((response) => response.status));
}

async function limitsTheApi(get) {
  assert.deepEqual(await statuses(8, () => get("/api/orders")), { 200: 5, 429: 3 });
  const customer = { "x-customer": "a" };
  const first = await get("/api/orders", customer);
  assert.equal(await first.text(), "hello\n");
  assert.equal(first.headers.get("ratelimit-policy"), '"20/min";q=20;w=60');
  assert.deepEqual(await statuses(29, () => get("/api/orders", customer)), { 200: 19, 429: 10 });
  const denied = await get("/api/orders", customer);
  assert.match(denied.headers.get("content-type"), /^application\/problem\+json/);
  assert.match(denied.headers.get("retry-after"), /^\d+$/);
  assert.equal((await denied.json()).status, 429);
  // A customer name that is too long to be counted must not be admitted uncounted.
  assert.equal((await get("/api/orders", { "x-customer": "x".repeat(5_000) })).status, 400);
}

async function limitsFailedLogins({ url }, get) {
  const right = { password: "open sesame" };
  assert.deepEqual(await statuses(5, () => get("/login", right, "POST")), { 200: 5 });
  // Fastify settles after the response.
  const tidegate = new Tidegate({ url, timeoutMs: 20_000 });
  const login = { path: "/login", method: "POST", ip: "127.0.0.1" };
  while ((await tidegate.peek(login)).remaining < 4) await sleep(5);
  const guess = (index) => get("/login", { password: `guess ${index}` }, "POST");
  let guesses = await statuses(60, guess);
  assert.deepEqual(guesses, { 401: 5, 429: 55 });
  guesses = await get("/login", right, "POST");
  assert.equal(guesses.status, 429);
}

describe("recipes/node/express.js", () => {
  test("limits pages, an API and failed logins", async (t) => {
    const { server, get } = await recipe(t, process.execPath, ["express.js"], NODE);
    assert.deepEqual(await statuses(14, () => get("/pages")), { 200: 10, 429: 4 });
    await limitsTheApi(get);
    await limitsFailedLogins(server, get);
    await server.stop();
    assert.equal((await get("/api/orders")).status, 503);
    assert.equal((await get("/pages")).status, 503);
  });
});

describe("recipes/node/fastify.js", () => {
  test("limits an API and failed logins", async (t) => {
    const { server, get } = await recipe(t, process.execPath, ["fastify.js"], NODE);
    await limitsTheApi(get);
    await limitsFailedLogins(server, get);
    await server.stop();
    assert.equal((await get("/api/orders")).status, 503);
  });
});

describe("recipes/go", () => {
  const folder = mkdtempSync(join(tmpdir(), "tidegate-go-"));
  const program = join(folder, "recipe");
  after(() => rmSync(folder, { recursive: true }));

  test("limits an API and failed logins", async (t) => {
    execFileSync("go", ["build", "-o", program, "."], { cwd: GO });
    const { server, get } = await recipe(t, program, [], GO);
    await limitsTheApi(get);
    await limitsFailedLogins(server, get);
    await server.stop();
    assert.equal((await get("/api/orders")).status, 200, "without a decision, requests pass");
    assert.equal((await get("/login", {}, "POST")).status, 503);
  });
});
