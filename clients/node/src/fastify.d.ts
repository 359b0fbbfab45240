import type { FastifyReply, FastifyRequest } from "fastify";

import type { Entries, Tidegate } from "./index.js";

export interface TidegateHookOptions {
  /** Returns entries in addition to `method`, `path` and `ip`, or in place of them. */
  entries?: (request: FastifyRequest) => Entries | Promise<Entries>;
  /** The units to charge. Default: 1. */
  cost?: number | ((request: FastifyRequest) => number | Promise<number>);
  /** Returns true for requests about which the server is not asked. */
  skip?: (request: FastifyRequest) => boolean | Promise<boolean>;
  /** Reserves the cost, and settles it after the response. */
  reserve?: {
    /** The time until the reservation expires. Default: `60s`. */
    ttl?: string;
    /** Returns the final cost; 0 refunds everything. */
    settle: (request: FastifyRequest, reply: FastifyReply) => number | Promise<number>;
  };
  /** Is called if a reservation could not be settled. Default: a warning of the process. */
  onSettleError?: (error: Error) => void;
}

/** Returns a hook for `onRequest`, `preValidation` or `preHandler`. */
export function tidegateHook(
  client: Tidegate,
  options?: TidegateHookOptions,
): (request: FastifyRequest, reply: FastifyReply) => Promise<unknown>;
