/** Values that describe a request. Values that are `undefined` or `null` are left out. */
export type Entries = Record<string, string | number | bigint | null | undefined>;

/** What a call does if the server does not respond. */
export type FailurePolicy = "open" | "closed" | "throw";

export interface TidegateOptions {
  /** The address of `listen.http`. Default: `http://127.0.0.1:8080`. */
  url?: string;
  /** The token of `listen.http`. */
  token?: string;
  /** The timeout for a whole call, in milliseconds. Default: 1000. */
  timeoutMs?: number;
  /** Default: `throw`. */
  onFailure?: FailurePolicy;
  /** Default: Node's `fetch`. */
  fetch?: typeof globalThis.fetch;
}

export interface CallOptions {
  /** Aborts the call. The call then rejects with the signal's reason. */
  signal?: AbortSignal;
  /** Replaces the client's `timeoutMs`. */
  timeoutMs?: number;
}

export interface DecisionOptions extends CallOptions {
  /** The units to charge. Default: 1. */
  cost?: number;
  /** Replaces the client's `onFailure`. */
  onFailure?: FailurePolicy;
}

export interface PeekOptions extends DecisionOptions {
  /** `true` disables the normalisation of entries. */
  raw?: boolean;
}

export interface CheckOptions extends PeekOptions {
  /**
   * The maximum wait for a slot of a `concurrency` limit with `wait`, in milliseconds. It is added
   * to `timeoutMs`. Default: 0.
   */
  waitMs?: number;
}

export interface ThrottleOptions extends DecisionOptions {
  /** `true` reads the state without charging. */
  peek?: boolean;
}

export interface ReserveOptions extends CheckOptions {
  /** The time until the reservation expires, such as `30s`. Default: `60s`. */
  ttl?: string;
}

export interface RenewOptions extends CallOptions {
  /** The new time until the reservation expires. Default: `60s`. */
  ttl?: string;
}

/** A limit: a short form such as `20/min`, the fields of the rules file, or several limits. */
export type Limit = string | LimitFields | Array<string | LimitFields>;

export interface LimitFields {
  algorithm?:
    | "gcra"
    | "token_bucket"
    | "leaky_bucket"
    | "fixed_window"
    | "sliding_window_log"
    | "sliding_window_counter"
    | "concurrency";
  [field: string]: unknown;
}

/** One limit of a verdict. */
export interface LimitVerdict {
  /** `null` if the limit is part of the call. */
  rule: string | null;
  /** A short form of the limit, such as `20/min`. */
  policy: string;
  allowed: boolean;
  /** Whether the request is over the limit but admitted within the `soft` allowance. */
  overLimit: boolean;
  limit: number | null;
  remaining: number | null;
  resetAfterMs: number | null;
  retryAfterMs: number | null;
  retryAfterEstimated: boolean;
  delayMs: number;
  shadow: boolean;
}

/** A decision. The fields have the same meaning as in the response of `/v1/check`. */
export interface Verdict {
  allowed: boolean;
  /** Why the request is denied. */
  reason?: "limit" | "blocked" | "store";
  rule: string | null;
  limit: number | null;
  remaining: number | null;
  resetAfterMs: number | null;
  /** Milliseconds until the same request would be allowed: 0 if it is, `null` for never. */
  retryAfterMs: number | null;
  retryAfterEstimated: boolean;
  /** How long the caller must delay an allowed request. Above 0 only for a queued limit. */
  delayMs: number;
  exactness: "exact" | "local" | "none";
  /** `client` if the server did not decide and `onFailure` was applied. */
  source?: "redis" | "cache" | "local" | "policy" | "client";
  limits: LimitVerdict[];
  /** `ratelimit`, `ratelimit-policy`, `retry-after` and `x-ratelimit-*`, for the end client. */
  headers: Record<string, string>;
  /** Why the server did not decide. Present only if `source` is `client`. */
  error?: TidegateUnavailableError;
}

export interface ReservedVerdict extends Verdict {
  /** The token of the reservation. Absent if the request is denied or `source` is `client`. */
  reservation?: string;
  expiresInMs?: number;
}

export interface Settled {
  /** The units that stay charged. */
  settled: number;
  /** Unused units that were refunded; 0 if any rule keeps them. */
  released: number;
  /** The charged units beyond the reserved units. */
  over: number;
}

export interface Renewed {
  /** The token that replaces the old one. */
  reservation: string;
  expiresInMs: number;
}

export interface WithReservationOptions<T> extends ReserveOptions {
  /** Returns the final cost, given the function's result. */
  settle: (value: T) => number | Promise<number>;
  /** Whether the reservation is renewed while the function runs. Default: `true`. */
  renew?: boolean;
  /** Called if the reservation could not be settled. Default: a process warning. */
  onSettleError?: (error: Error) => void;
}

/** The argument that `withReservation` passes to the function. */
export interface Running {
  verdict: ReservedVerdict;
  signal?: AbortSignal;
}

export type ReservationResult<T> =
  | { allowed: false; verdict: ReservedVerdict }
  | {
      allowed: true;
      verdict: ReservedVerdict;
      value: T;
      /** `undefined` if there was nothing to settle, or if the settlement failed. */
      settled: Settled | undefined;
    };

/** A client of a Tidegate server. It is stateless, so one client serves a whole process. */
export class Tidegate {
  constructor(options?: TidegateOptions);
  /** Decides a request by the server's rules, and charges its cost if it is allowed. */
  check(entries: Entries, options?: CheckOptions): Promise<Verdict>;
  /** Decides a request by the server's rules without charging it. */
  peek(entries: Entries, options?: PeekOptions): Promise<Verdict>;
  /** Decides a request by a limit that is part of the call. */
  throttle(key: string, limit: Limit, options?: ThrottleOptions): Promise<Verdict>;
  /** Charges a cost that is corrected later by `settle`. */
  reserve(entries: Entries, options?: ReserveOptions): Promise<ReservedVerdict>;
  /** Settles a reservation at its final cost. A cost of 0 cancels it. */
  settle(reservation: string, cost: number, options?: CallOptions): Promise<Settled>;
  /** Extends a reservation. */
  renew(reservation: string, options?: RenewOptions): Promise<Renewed>;
  /**
   * Reserves, runs the function if the request is allowed, and settles at the final cost.
   * If the function throws, the reservation is cancelled and the error is thrown.
   */
  withReservation<T>(
    entries: Entries,
    options: WithReservationOptions<T>,
    run: (running: Running) => T | Promise<T>,
  ): Promise<ReservationResult<T>>;
}

/** The base class of this package's errors. */
export class TidegateError extends Error {}

/** The server rejected the call, because the call, the token or the settings are wrong. */
export class TidegateRequestError extends TidegateError {
  constructor(
    message: string,
    details: { serverStatus: number; field?: string | undefined; problem?: unknown },
  );
  /** The status of the server's response. */
  serverStatus: number;
  /** 400 if the server rejects the value of an entry; otherwise 500. Express uses it. */
  status: 400 | 500;
  /** The same number, for Fastify. */
  statusCode: 400 | 500;
  /** The invalid field. */
  field: string | undefined;
  /** The server's problem document. */
  problem: unknown;
}

/** There is no decision: the server is unreachable, slow, overloaded or not a Tidegate server. */
export class TidegateUnavailableError extends TidegateError {
  status: 503;
  statusCode: 503;
}

/** An HTTP response. */
export interface ProblemResponse {
  /** 429, or 503 if the server could not decide. */
  status: 429 | 503;
  headers: Record<string, string>;
  /** A problem document (RFC 9457) as JSON. */
  body: string;
}

/** Returns the HTTP response to a request that `verdict` denies. */
export function problem(verdict: Verdict): ProblemResponse;
