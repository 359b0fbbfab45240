// The HTTP response to a denied request: a problem document (RFC 9457), as sent by Tidegate's
// reverse proxy. It does not contain rule names, because they could reveal information to clients.

/** The maximum number of policies in the RateLimit fields, and thus in the document. */
const MAX_POLICIES = 8;

const UNITS = [
  ["d", 86_400],
  ["h", 3_600],
  ["min", 60],
  ["s", 1],
];

export function problem(verdict) {
  if (verdict.allowed) throw new TypeError("problem: the verdict allows the request");
  const isUndecided = verdict.reason === "store";
  const status = isUndecided ? 503 : 429;
  const title = isUndecided ? "Service Unavailable" : "Too Many Requests";
  const document = { title, status, detail: detail(verdict) };
  const policies = violatedPolicies(verdict);
  if (policies.length > 0) document["violated-policies"] = policies;
  document.retry_after_ms = verdict.retryAfterMs;
  return {
    status,
    headers: { ...verdict.headers, "content-type": "application/problem+json" },
    body: JSON.stringify(document),
  };
}

function detail(verdict) {
  const wait = verdict.retryAfterMs;
  const again = wait === null ? "retrying will not succeed" : `retry in ${readable(wait)}`;
  if (verdict.reason === "store") return `the limiter could not decide; ${again}`;
  if (verdict.reason === "blocked") return `blocked; ${again}`;
  const denying = enforced(verdict).filter((limit) => !limit.allowed);
  const longest = denying.reduce((a, b) => (waitOf(b) > waitOf(a) ? b : a), denying[0]);
  if (longest === undefined) return `limit exceeded; ${again}`;
  return wait === null
    ? `the cost of the request is more than ${longest.policy} can admit at once; ${again}`
    : `${longest.policy} exceeded; ${again}`;
}

/** The policy names in the RateLimit fields. Repeated names are numbered. */
function violatedPolicies(verdict) {
  const seen = new Map();
  const names = [];
  for (const { policy, allowed } of enforced(verdict)) {
    const number = (seen.get(policy) ?? 0) + 1;
    seen.set(policy, number);
    if (!allowed) names.push(number === 1 ? policy : `${policy}:${number}`);
  }
  return names.slice(0, MAX_POLICIES);
}

function enforced(verdict) {
  return verdict.limits.filter((limit) => !limit.shadow);
}

function waitOf(limit) {
  return limit.retryAfterMs ?? Infinity;
}

/** Rounds a wait time up to whole seconds, or to whole milliseconds if it is below a second. */
function readable(ms) {
  if (ms < 1_000) return `${Math.ceil(ms)}ms`;
  const seconds = Math.ceil(ms / 1_000);
  const [unit, length] = UNITS.find(([, length]) => seconds % length === 0);
  return `${seconds / length}${unit}`;
}
