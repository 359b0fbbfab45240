// Fastify: Tidegate's rules file limits an API, and failed logins.

import Fastify from "fastify";
import { Tidegate } from "tidegate";
import { tidegateHook } from "tidegate/fastify";

const tidegate = new Tidegate({
  url: process.env.TIDEGATE_URL,
  timeoutMs: Number(process.env.TIDEGATE_TIMEOUT_MS ?? 500),
});
// The networks of the proxies in front of this application. `request.ip` is then the client's
// address.
const app = Fastify({ trustProxy: "127.0.0.1" });

app.register(async (api) => {
  const customer = (request) => ({ customer: request.headers["x-customer"] });
  api.addHook("onRequest", tidegateHook(tidegate, { entries: customer }));
  api.get("/api/orders", async () => "hello\n");
});

// A login is reserved before the handler runs, and costs 1 only if it fails.
const settle = (request, reply) => (reply.statusCode < 400 ? 0 : 1);
const onRequest = tidegateHook(tidegate, { reserve: { settle } });
app.post("/login", { onRequest }, async (request, reply) => {
  if (request.headers.password === "open sesame") return "welcome\n";
  return reply.code(401).send("wrong password\n");
});

const address = await app.listen({ port: Number(process.env.PORT ?? 3000), host: "127.0.0.1" });
console.log(`listening on ${address}`);
