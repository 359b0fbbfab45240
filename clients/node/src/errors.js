/** The base class of this package's errors. */
export class TidegateError extends Error {
  get name() {
    return this.constructor.name;
  }
}

/** The server rejected the call, because the call, the token or the settings are wrong. */
export class TidegateRequestError extends TidegateError {
  constructor(message, { serverStatus, field, problem }) {
    super(message);
    this.serverStatus = serverStatus;
    this.field = field;
    this.problem = problem;
    // Express and Fastify respond with this status if nothing handles the error. An entry that
    // cannot be counted, such as a path with `..`, comes from the end client. Other errors, such as
    // a wrong token, are the application's fault.
    const isOfClient = serverStatus === 400 && String(field).startsWith("entries.");
    this.status = isOfClient ? 400 : 500;
    this.statusCode = this.status;
  }
}

/** There is no decision: the server is unreachable, slow, overloaded or not a Tidegate server. */
export class TidegateUnavailableError extends TidegateError {
  constructor(message, options) {
    super(message, options);
    // Express and Fastify respond with this status if nothing handles the error.
    this.status = 503;
    this.statusCode = 503;
  }
}
