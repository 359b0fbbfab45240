import type { FastifyReply, FastifyRequest } from "fastify";

import type { Entries, Tidegate } from "./index.js";

export interface TidegateHookOptions {
  /** Returns entries that are added to `method`, `path` and `ip`, or that replace them. */
  entries?: (request: FastifyRequest) => Entries | Promise<Entries>;
  /** The units to charge. Default: 1. */
  cost?: number | ((request: FastifyRequest) => number | Promise<number>);
  /** Returns true for requests that are not checked. */
  skip?: (request: FastifyRequest) => boolean | Promise<boolean>;
  /** Reserves the cost, and settles it after the response. */
  reserve?: {
    /** The time until the reservation expires. Default: `60s`. */
    ttl?: string;
    /** Returns the final cost; 0 refunds everything. */
    settle: (request: FastifyRequest, reply: FastifyReply) => number | Promise<number>;
  };
  /** Called if a reservation could not be settled. Default: a process warning. */
  onSettleError?: (error: Error) => void;
}

/** Returns a hook for `onRequest`, `preValidation` or `preHandler`. */
export function tidegateHook(
  client: Tidegate,
  options?: TidegateHookOptions,
): (request: FastifyRequest, reply: FastifyReply) => Promise<unknown>;
