export { Tidegate } from "./client.js";
export { TidegateError, TidegateRequestError, TidegateUnavailableError } from "./errors.js";
export { problem } from "./problem.js";
