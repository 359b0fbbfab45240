// Only compiled, not run: checks that the declarations accept the documented usage.

import express from "express";
import { rateLimit } from "express-rate-limit";
import Fastify from "fastify";
import {
  Tidegate,
  TidegateRequestError,
  TidegateUnavailableError,
  problem,
  type ReservationResult,
  type Verdict,
} from "tidegate";
import { TidegateStore } from "tidegate/express-rate-limit";
import { tidegateHook } from "tidegate/fastify";

const tidegate = new Tidegate({ url: "http://127.0.0.1:8080", token: "a", onFailure: "open" });
const signal = AbortSignal.timeout(1_000);

export async function decisions(): Promise<string> {
  const entries = { ip: "::1", n: 1, no: undefined };
  const verdict: Verdict = await tidegate.check(entries, { cost: 2, signal });
  await tidegate.peek({}, { raw: true, onFailure: "closed" });
  await tidegate.throttle("a", ["1/s", { algorithm: "gcra", rate: "9/s" }], { peek: true });
  const { reservation } = await tidegate.reserve({}, { ttl: "30s" });
  if (reservation !== undefined) {
    const renewed = await tidegate.renew(reservation, { ttl: "30s" });
    await tidegate.settle(renewed.reservation, 1);
  }
  // @ts-expect-error A policy is one of three strings.
  new Tidegate({ onFailure: "opne" });
  // @ts-expect-error A limit is required.
  await tidegate.throttle("a");
  return verdict.allowed ? "" : problem(verdict).body;
}

export async function reservations(): Promise<number | undefined> {
  const result: ReservationResult<number[]> = await tidegate.withReservation(
    { user: "a" },
    { cost: 10, ttl: "1min", settle: (value) => value.length },
    () => [1, 2],
  );
  return result.allowed ? result.value.length : undefined;
}

export function failures(error: unknown): number | undefined {
  if (error instanceof TidegateUnavailableError) return error.status;
  return error instanceof TidegateRequestError ? error.serverStatus : undefined;
}

const app = express();
app.use(rateLimit({ store: new TidegateStore(tidegate, { prefix: "a:" }), limit: 1 }));
const fastify = Fastify();
const settle = (_: unknown, reply: { statusCode: number }) => (reply.statusCode < 400 ? 0 : 1);
fastify.addHook("onRequest", tidegateHook(tidegate, { entries: (request) => ({ a: request.id }) }));
fastify.get("/", { onRequest: tidegateHook(tidegate, { reserve: { settle } }) }, async () => "");
