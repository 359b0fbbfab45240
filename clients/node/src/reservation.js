// Runs a function with a reservation, and settles the reservation afterwards.

import { setTimeout as sleep } from "node:timers/promises";

import { TidegateRequestError, TidegateUnavailableError } from "./errors.js";

/** The delays before the retries of a settlement. A repeated settlement takes effect only once. */
const SETTLE_RETRIES_MS = [50, 250];

export async function holdReservation(client, entries, options, run) {
  const { settle, cost = 1, signal, onSettleError = warn } = options;
  if (typeof settle !== "function") {
    throw new TypeError("settle: expected a function that returns the final cost of a result");
  }
  const verdict = await client.reserve(entries, options);
  if (!verdict.allowed) return { allowed: false, verdict };
  const held = new HeldReservation(client, verdict, options);
  let value;
  try {
    // A queue admits the request after this time.
    if (verdict.delayMs > 0) await sleep(verdict.delayMs, undefined, { signal });
    value = await run({ verdict, signal });
  } catch (error) {
    await held.end(0, onSettleError);
    throw error;
  }
  let finalCost;
  try {
    finalCost = requireCost(await settle(value));
  } catch (error) {
    // The cost is unknown, so the reserved cost stays charged.
    await held.end(cost, onSettleError);
    throw error;
  }
  return { allowed: true, value, verdict, settled: await held.end(finalCost, onSettleError) };
}

/** A reservation that is renewed until it ends. */
class HeldReservation {
  #client;
  #token;
  #ttl;
  #stop = new AbortController();
  #renewals = Promise.resolve();

  constructor(client, { reservation, expiresInMs }, { ttl, renew = true }) {
    this.#client = client;
    // If the client admitted the request without the server, there is no reservation.
    this.#token = reservation;
    this.#ttl = ttl;
    if (reservation !== undefined && renew) this.#renewals = this.#renewLoop(expiresInMs);
  }

  async #renewLoop(expiresInMs) {
    let expiresAt = Date.now() + expiresInMs;
    while (!this.#stop.signal.aborted) {
      const wait = Math.max((expiresAt - Date.now()) / 2, 100);
      try {
        await sleep(wait, undefined, { signal: this.#stop.signal, ref: false });
        const renewed = await this.#client.renew(this.#token, { ttl: this.#ttl });
        this.#token = renewed.reservation;
        expiresAt = Date.now() + renewed.expiresInMs;
      } catch (error) {
        // After a failure, the next attempt follows after half of the remaining time.
        if (!(error instanceof TidegateUnavailableError) || Date.now() > expiresAt) return;
      }
    }
  }

  /** Settles at `cost`. Returns `undefined` if there is nothing to settle, or after a failure. */
  async end(cost, onSettleError) {
    this.#stop.abort();
    await this.#renewals;
    if (this.#token === undefined) return undefined;
    for (let attempt = 0; ; attempt += 1) {
      try {
        return await this.#client.settle(this.#token, cost);
      } catch (error) {
        // An earlier attempt took effect, but its response was lost.
        const isSettled =
          attempt > 0 && error instanceof TidegateRequestError && error.serverStatus === 404;
        if (isSettled) return undefined;
        if (!(error instanceof TidegateUnavailableError) || attempt >= SETTLE_RETRIES_MS.length) {
          onSettleError(error);
          return undefined;
        }
        await sleep(SETTLE_RETRIES_MS[attempt]);
      }
    }
  }
}

function requireCost(cost) {
  if (Number.isSafeInteger(cost) && cost >= 0) return cost;
  throw new RangeError(`settle: expected a whole number from 0, got ${cost}`);
}

function warn(error) {
  process.emitWarning(`a reservation was not settled: ${error.message}`, "TidegateWarning");
}
