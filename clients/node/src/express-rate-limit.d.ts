import type { ClientRateLimitInfo, Store } from "express-rate-limit";

import type { Tidegate } from "./index.js";

export interface TidegateStoreOptions {
  /** A prefix for each key. Limiters that count the same keys need different prefixes. */
  prefix?: string;
  /** Called if a hit could not be refunded. Default: a process warning. */
  onError?: (error: Error) => void;
}

/** A store for express-rate-limit that counts in Tidegate. */
export class TidegateStore implements Store {
  constructor(client: Tidegate, options?: TidegateStoreOptions);
  localKeys: false;
  prefix: string;
  init(options: { windowMs: number }): void;
  get(key: string): Promise<ClientRateLimitInfo | undefined>;
  increment(key: string): Promise<ClientRateLimitInfo>;
  decrement(key: string): Promise<void>;
  resetKey(key: string): Promise<void>;
}
