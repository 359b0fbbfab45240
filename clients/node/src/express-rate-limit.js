// A store for express-rate-limit. The store counts and the middleware compares, so the store does
// not know the limit.
//
// Each key has one fixed window on the server, which never denies. Hits cost 1 unit and refunds
// cost `REFUND` units, so that one counter contains both numbers:
//
//     units = hits + refunds * REFUND
//
// With a single counter, both numbers are read together, and have the same window.

import { createHash } from "node:crypto";

import { TidegateError, TidegateUnavailableError } from "./errors.js";

/** The server's maximum limit. */
const LIMIT = 999_999_999_999_999;
const REFUND = 1_000_000_000;
/** The server accepts keys of 1 to 1,023 bytes. */
const MAX_KEY_BYTES = 1_023;
const MAX_WINDOW_MS = 10 * 365 * 86_400_000;
const DEFAULT_WINDOW_MS = 60_000;

export class TidegateStore {
  /** Tells express-rate-limit that other processes count the same keys. */
  localKeys = false;
  #client;
  #onError;
  #windowMs = DEFAULT_WINDOW_MS;

  constructor(client, { prefix = "rl:", onError = warn } = {}) {
    this.#client = client;
    this.prefix = prefix;
    this.#onError = onError;
  }

  init({ windowMs }) {
    this.#windowMs = undefined;
    if (!Number.isSafeInteger(windowMs) || windowMs < 1 || windowMs > MAX_WINDOW_MS) {
      throw new RangeError(`windowMs: expected 1 to ${MAX_WINDOW_MS}, got ${windowMs}`);
    }
    this.#windowMs = windowMs;
  }

  async get(key) {
    const count = await this.#peek(key);
    return count.isUnused ? undefined : info(count);
  }

  async increment(key) {
    const { totalHits, resetTime } = info(await this.#charge(key, 1));
    // A concurrent refund may not have been undone yet. This hit counts in any case.
    return { totalHits: Math.max(totalHits, 1), resetTime };
  }

  /**
   * Refunds one hit. The middleware calls this after the response and does not handle an error,
   * which would end the process, so errors go to `onError`.
   */
  async decrement(key) {
    try {
      await this.#refund(key);
    } catch (error) {
      this.#onError(error);
    }
  }

  async resetKey(key) {
    // A state of another algorithm replaces the window. This state expires after a millisecond.
    const limit = { algorithm: "gcra", rate: "1/1ms" };
    await this.#client.throttle(this.#serverKey(key), limit, { onFailure: "throw" });
  }

  async #refund(key) {
    const before = await this.#peek(key);
    if (before.hits <= before.refunds) return;
    const after = await this.#charge(key, REFUND);
    const isNextWindow = after.resetAfterMs > before.resetAfterMs;
    // The window has ended, or another refund was faster. One more hit undoes this refund.
    if (isNextWindow || after.hits < after.refunds) await this.#charge(key, 1);
  }

  async #charge(key, cost) {
    const verdict = await this.#throttle(key, { cost });
    if (!verdict.allowed) {
      throw new TidegateError("the store takes back at most 999,999 hits of a key in a window");
    }
    return countOf(verdict, verdict.limit - verdict.remaining);
  }

  async #peek(key) {
    const verdict = await this.#throttle(key, { peek: true });
    // A peek returns the units that would remain after one more hit.
    return countOf(verdict, Math.max(verdict.limit - verdict.remaining - 1, 0));
  }

  async #throttle(key, options) {
    if (this.#windowMs === undefined) throw new RangeError("windowMs is not valid for this store");
    const window = {
      algorithm: "fixed_window",
      limit: LIMIT,
      window: `${this.#windowMs}ms`,
      anchor: "first_request",
    };
    // The middleware's option `passOnStoreError` determines what happens after a failure.
    const verdict = await this.#client.throttle(this.#serverKey(key), window, {
      ...options,
      onFailure: "throw",
    });
    if (verdict.reason === "store") {
      throw new TidegateUnavailableError("the server could not decide: its store is unavailable");
    }
    return verdict;
  }

  #serverKey(key) {
    const whole = this.prefix + key;
    if (Buffer.byteLength(whole) <= MAX_KEY_BYTES) return whole;
    return `${this.prefix}sha256:${createHash("sha256").update(key).digest("hex")}`;
  }
}

function countOf(verdict, units) {
  const { limit, resetAfterMs } = verdict;
  // While Redis is unreachable, `on_failure: open` admits without counting.
  if (limit === null) return { hits: 1, refunds: 0, share: 1, isUnused: false };
  return {
    hits: units % REFUND,
    refunds: Math.floor(units / REFUND),
    // While Redis is unreachable, a server enforces its share of every limit. The limit here is
    // not the real one, so each hit costs more units instead.
    share: LIMIT / limit,
    isUnused: units === 0,
    resetAfterMs,
  };
}

function info({ hits, refunds, share, resetAfterMs }) {
  // The server rounds its share of the limit down, so `share` is slightly too large.
  const weighted = Math.ceil(Math.max(hits - refunds, 0) * share - 0.001);
  return {
    totalHits: Math.max(weighted, 0),
    resetTime: resetAfterMs === undefined ? undefined : new Date(Date.now() + resetAfterMs),
  };
}

function warn(error) {
  process.emitWarning(`a hit was not refunded: ${error.message}`, "TidegateWarning");
}
