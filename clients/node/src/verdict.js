// Parses the server's responses. A response that does not have the documented form is an error, and
// never admits the request.

import { TidegateUnavailableError } from "./errors.js";

/** The response header fields for the end client. */
const RATE_LIMIT_FIELDS = [
  "ratelimit",
  "ratelimit-policy",
  "retry-after",
  "x-ratelimit-limit",
  "x-ratelimit-remaining",
  "x-ratelimit-reset",
];

const isText = (value) => typeof value === "string";
const isFlag = (value) => typeof value === "boolean";
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const or = (other, is) => (value) => value === other || is(value);
const isCountOrNull = or(null, isCount);

/** Parses the verdict in `body`; `status` is the status of the response. */
export function readVerdict(status, headers, body) {
  const read = reader(body);
  const allowed = read("allowed", isFlag);
  if (allowed !== (status === 200)) throw malformed("allowed", body);
  const verdict = {
    allowed,
    reason: read("reason", allowed ? (value) => value === undefined : isText),
    ...readNumbers(read),
    rule: read("rule", or(null, isText)),
    delayMs: read("delay_ms", isCount),
    exactness: read("exactness", isText),
    source: read("source", or(undefined, isText)),
    limits: read("limits", Array.isArray).map(readLimit),
    headers: rateLimitFields(headers),
  };
  return verdict;
}

/** Parses the response of `/v1/reserve`. An allowed request without a token cannot be settled. */
export function readReserved(status, headers, body) {
  const verdict = readVerdict(status, headers, body);
  const read = reader(body);
  if (!verdict.allowed) return verdict;
  verdict.reservation = read("reservation", isText);
  verdict.expiresInMs = read("expires_in_ms", isCount);
  return verdict;
}

export function readSettled(status, headers, body) {
  const read = reader(body);
  return {
    settled: read("settled", isCount),
    released: read("released", isCount),
    over: read("over", isCount),
  };
}

export function readRenewed(status, headers, body) {
  const read = reader(body);
  return {
    reservation: read("reservation", isText),
    expiresInMs: read("expires_in_ms", isCount),
  };
}

/** The verdict according to the client's settings, if the server did not decide. */
export function verdictWithoutDecision(allowed, error) {
  return {
    allowed,
    reason: allowed ? undefined : "store",
    rule: null,
    limit: null,
    remaining: null,
    resetAfterMs: null,
    retryAfterMs: allowed ? 0 : 1_000,
    retryAfterEstimated: !allowed,
    delayMs: 0,
    exactness: "none",
    source: "client",
    limits: [],
    headers: allowed ? {} : { "retry-after": "1" },
    error,
  };
}

function readLimit(body) {
  const read = reader(body);
  return {
    rule: read("rule", or(null, isText)),
    policy: read("policy", isText),
    allowed: read("allowed", isFlag),
    overLimit: read("over_limit", isFlag),
    ...readNumbers(read),
    delayMs: read("delay_ms", isCount),
    shadow: read("shadow", isFlag),
  };
}

function readNumbers(read) {
  return {
    limit: read("limit", isCountOrNull),
    remaining: read("remaining", isCountOrNull),
    resetAfterMs: read("reset_after_ms", isCountOrNull),
    retryAfterMs: read("retry_after_ms", isCountOrNull),
    retryAfterEstimated: read("retry_after_estimated", or(undefined, isFlag)) ?? false,
  };
}

function rateLimitFields(headers) {
  const fields = {};
  for (const name of RATE_LIMIT_FIELDS) {
    const value = headers.get(name);
    if (value !== null) fields[name] = value;
  }
  return fields;
}

function reader(body) {
  const isObject = typeof body === "object" && body !== null && !Array.isArray(body);
  if (!isObject) throw malformed("a JSON object", body);
  return (name, is) => {
    const value = body[name];
    if (!is(value)) throw malformed(name, body);
    return value;
  };
}

function malformed(name, body) {
  const shown = JSON.stringify(body)?.slice(0, 200);
  return new TidegateUnavailableError(
    `the answer is not one of a Tidegate server: ${name} is missing or wrong in ${shown}`,
  );
}
