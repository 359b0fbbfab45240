// A Fastify hook that checks each request with Tidegate, and responds to denied requests.

import { setTimeout as sleep } from "node:timers/promises";

import { TidegateRequestError, TidegateUnavailableError } from "./errors.js";
import { problem } from "./problem.js";
import { verdictWithoutDecision } from "./verdict.js";

export function tidegateHook(client, options = {}) {
  const { entries, cost, reserve, skip, onSettleError = warn } = options;
  if (reserve !== undefined && typeof reserve.settle !== "function") {
    throw new TypeError("reserve.settle: expected a function that returns the final cost");
  }
  return async function tidegate(request, reply) {
    if (skip !== undefined && (await skip(request))) return undefined;
    const described = { ...standardEntries(request), ...(await entries?.(request)) };
    const units = typeof cost === "function" ? await cost(request) : cost;
    const call = { cost: units };
    let verdict;
    try {
      verdict =
        reserve === undefined
          ? await client.check(described, call)
          : await client.reserve(described, { ...call, ttl: reserve.ttl });
    } catch (error) {
      return answerFailure(reply, error);
    }
    if (!verdict.allowed) return send(reply, problem(verdict));
    reply.headers(verdict.headers);
    if (verdict.reservation !== undefined) {
      settleAtEnd({ client, verdict, request, reply, reserve, cost: units ?? 1, onSettleError });
    }
    // A queue admits the request after this time.
    if (verdict.delayMs > 0) await sleep(verdict.delayMs);
    return undefined;
  };
}

/** `request.ip` depends on Fastify's setting `trustProxy`. */
function standardEntries(request) {
  return { method: request.method, path: request.url, ip: request.ip || undefined };
}

function answerFailure(reply, error) {
  if (error instanceof TidegateUnavailableError) {
    return send(reply, problem(verdictWithoutDecision(false, error)));
  }
  const isOfClient = error instanceof TidegateRequestError && error.status === 400;
  if (!isOfClient) throw error;
  const document = { title: "Bad Request", status: 400, detail: error.problem.detail };
  return send(reply, {
    status: 400,
    headers: { "content-type": "application/problem+json" },
    body: JSON.stringify(document),
  });
}

function send(reply, { status, headers, body }) {
  // Fastify would add a charset to a string, but a problem document's media type has none.
  return reply.code(status).headers(headers).send(Buffer.from(body));
}

function settleAtEnd({ client, verdict, request, reply, reserve, cost, onSettleError }) {
  // Node's HTTP/2 responses do not have `writableFinished`.
  let isComplete = false;
  const settle = async () => {
    try {
      // If the client disconnects before the response, the reserved cost stays charged. Otherwise,
      // a client could avoid being charged for its failures.
      const final = isComplete ? await reserve.settle(request, reply) : cost;
      await client.settle(verdict.reservation, final);
    } catch (error) {
      onSettleError(error);
    }
  };
  // The client may have disconnected during the decision.
  if (request.raw.destroyed || reply.raw.destroyed) return void settle();
  reply.raw.once("finish", () => (isComplete = true));
  reply.raw.once("close", settle);
}

function warn(error) {
  process.emitWarning(`a reservation was not settled: ${error.message}`, "TidegateWarning");
}
