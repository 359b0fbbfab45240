import { TidegateRequestError, TidegateUnavailableError } from "./errors.js";
import { holdReservation } from "./reservation.js";
import {
  readRenewed,
  readReserved,
  readSettled,
  readVerdict,
  verdictWithoutDecision,
} from "./verdict.js";

const FAILURE_POLICIES = ["open", "closed", "throw"];
/** The longest delay of setTimeout, which treats longer delays as one millisecond. */
const MAX_TIMEOUT_MS = 2 ** 31 - 1;
/** The longest wait that the server accepts. */
const MAX_WAIT_MS = 60_000;

export class Tidegate {
  #base;
  #headers;
  #timeoutMs;
  #onFailure;
  #fetch;

  constructor({
    url = "http://127.0.0.1:8080",
    token,
    timeoutMs = 1_000,
    onFailure = "throw",
    fetch = globalThis.fetch,
  } = {}) {
    this.#base = baseUrl(url);
    this.#headers = new Headers({ "content-type": "application/json" });
    if (token !== undefined) this.#headers.set("tidegate-token", requireToken(token));
    this.#timeoutMs = requireTimeout(timeoutMs);
    this.#onFailure = requirePolicy(onFailure);
    this.#fetch = fetch;
  }

  async check(entries, options = {}) {
    const body = { ...requestBody(entries, options), wait_ms: options.waitMs };
    return this.#decide("v1/check", body, readVerdict, options);
  }

  async peek(entries, options = {}) {
    return this.#decide("v1/peek", requestBody(entries, options), readVerdict, options);
  }

  async throttle(key, limit, options = {}) {
    const { cost, peek } = options;
    const body = { key: wellFormed("key", key), ...limitFields(limit), cost, peek };
    return this.#decide("v1/throttle", body, readVerdict, options);
  }

  async reserve(entries, options = {}) {
    const body = { ...requestBody(entries, options), ttl: options.ttl, wait_ms: options.waitMs };
    return this.#decide("v1/reserve", body, readReserved, options);
  }

  async settle(reservation, cost, options = {}) {
    return this.#call("v1/settle", { reservation, cost }, readSettled, [200], options);
  }

  async renew(reservation, options = {}) {
    const body = { reservation, ttl: options.ttl };
    return this.#call("v1/renew", body, readRenewed, [200], options);
  }

  async withReservation(entries, options, run) {
    return holdReservation(this, entries, options, run);
  }

  async #decide(path, body, read, options) {
    const policy = requirePolicy(options.onFailure ?? this.#onFailure);
    try {
      return await this.#call(path, body, read, [200, 429, 503], options);
    } catch (error) {
      // An error in the call never admits the request.
      if (policy === "throw" || !(error instanceof TidegateUnavailableError)) throw error;
      return verdictWithoutDecision(policy === "open", error);
    }
  }

  /** Sends one request. `read` parses a response with one of `statuses`. */
  async #call(path, body, read, statuses, options) {
    const { signal } = options;
    // The server may hold back its response for as long as the request waits.
    const timeoutMs = requireTimeout(options.timeoutMs ?? this.#timeoutMs) + requireWait(body.wait_ms);
    signal?.throwIfAborted();
    const url = new URL(path, this.#base);
    const deadline = new Deadline(requireTimeout(timeoutMs), signal);
    const fetch = this.#fetch;
    let status, headers, text;
    try {
      const response = await fetch(url, {
        method: "POST",
        headers: this.#headers,
        body: JSON.stringify(body),
        signal: deadline.signal,
        // A redirect would send the token to another server.
        redirect: "error",
      });
      ({ status, headers } = response);
      text = await response.text();
    } catch (error) {
      signal?.throwIfAborted();
      throw unreachable(this.#base, error, deadline.isOver ? timeoutMs : undefined);
    } finally {
      deadline.clear();
    }
    const document = parse(text);
    const isAnswer = statuses.includes(status) && (status === 200 || isVerdict(document));
    if (isAnswer) return read(status, headers, document);
    throw rejection(status, document);
  }
}

/** Aborts a request after a time, or when the caller aborts. */
class Deadline {
  #controller = new AbortController();
  #timer;
  #caller;
  #abort = () => this.#controller.abort();
  isOver = false;

  constructor(ms, caller) {
    this.#timer = setTimeout(() => {
      this.isOver = true;
      this.#abort();
    }, ms);
    this.#caller = caller;
    caller?.addEventListener("abort", this.#abort);
  }

  get signal() {
    return this.#controller.signal;
  }

  /** Without this method, a caller's long-lived signal would keep every request in memory. */
  clear() {
    clearTimeout(this.#timer);
    this.#caller?.removeEventListener("abort", this.#abort);
  }
}

function requestBody(entries, { cost, raw }) {
  const texts = {};
  for (const [name, value] of Object.entries(entries)) {
    if (value === undefined || value === null) continue;
    texts[name] = wellFormed(`entries.${name}`, value);
  }
  return { entries: texts, cost, raw };
}

/** The server rejects JSON with half of a surrogate pair, which a client can send in a header. */
function wellFormed(name, value) {
  if (typeof value === "string") return value.toWellFormed();
  if (typeof value === "number" || typeof value === "bigint") return String(value);
  throw new TypeError(`${name}: expected a string or a number, got ${typeof value}`);
}

function limitFields(limit) {
  if (typeof limit === "string") return { limits: [limit] };
  if (Array.isArray(limit)) return { limits: limit };
  if (typeof limit === "object" && limit !== null) return limit;
  throw new TypeError('limit: expected a limit such as "20/min", or a list, or its fields');
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function isVerdict(document) {
  return typeof document === "object" && document !== null && "allowed" in document;
}

function rejection(status, document) {
  const detail = document?.detail ?? (typeof document === "string" ? document : "");
  const said = String(detail).slice(0, 300).trim();
  const message = `the server answered ${status}${said === "" ? "" : `: ${said}`}`;
  // 408 and 429 without a verdict are temporary: a timeout, and too many wrong tokens.
  if (status < 400 || status >= 500 || status === 408 || status === 429) {
    return new TidegateUnavailableError(message);
  }
  const details = { serverStatus: status, field: document?.field, problem: document };
  return new TidegateRequestError(message, details);
}

function unreachable(base, error, timeoutMs) {
  if (timeoutMs !== undefined) {
    const message = `no answer from ${base.origin} within ${timeoutMs} ms`;
    return new TidegateUnavailableError(message, { cause: error });
  }
  // fetch's message is only "fetch failed"; the reason is in the cause.
  const why = error.cause?.message || error.cause?.code || error.message;
  return new TidegateUnavailableError(`cannot reach ${base.origin}: ${why}`, { cause: error });
}

function baseUrl(text) {
  const url = new URL(text);
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    throw new TypeError(`url: expected http or https, got ${url.protocol}`);
  }
  if (url.username !== "" || url.password !== "" || url.search !== "" || url.hash !== "") {
    throw new TypeError("url: expected no user, query or fragment; the token is `token`");
  }
  if (!url.pathname.endsWith("/")) url.pathname += "/";
  return url;
}

function requireToken(token) {
  // An empty token usually means that a variable is not set.
  if (typeof token !== "string" || token === "") {
    throw new TypeError("token: expected text; leave it out if the listener has no token");
  }
  return token;
}

function requireTimeout(ms) {
  if (!(ms > 0 && ms <= MAX_TIMEOUT_MS)) {
    throw new RangeError(`timeoutMs: expected 1 to ${MAX_TIMEOUT_MS}, got ${ms}`);
  }
  return ms;
}

function requireWait(ms = 0) {
  if (!Number.isInteger(ms) || ms < 0 || ms > MAX_WAIT_MS) {
    throw new RangeError(`waitMs: expected an integer from 0 to ${MAX_WAIT_MS}, got ${ms}`);
  }
  return ms;
}

function requirePolicy(policy) {
  if (!FAILURE_POLICIES.includes(policy)) {
    throw new TypeError(`onFailure: expected "open", "closed" or "throw", got ${policy}`);
  }
  return policy;
}
