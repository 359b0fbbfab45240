// A second process for the concurrency tests: `node worker.js URL KEY CALLS LIMIT [store]`. It
// prints the number of allowed calls.

import { Tidegate } from "tidegate";
import { TidegateStore } from "tidegate/express-rate-limit";

const [url, key, calls, limit, kind] = process.argv.slice(2);
const client = new Tidegate({ url, timeoutMs: 20_000 });
const store = new TidegateStore(client);
store.init({ windowMs: 3_600_000 });

const call =
  kind === "store"
    ? async () => (await store.increment(key)).totalHits <= Number(limit)
    : async () => (await client.check({ user: key })).allowed;
const passed = await Promise.all(Array.from({ length: Number(calls) }, call));
console.log(passed.filter(Boolean).length);
