// Requests to the admin API of this server.
//
// The token is kept in this tab's session storage: a reload of the page keeps it, other tabs, other
// sites and later sessions do not see it. It is no cookie, so no other page can use it.

const STORED = "tidegate-token";
const PATIENCE_MS = 15_000;

let token = sessionStorage.getItem(STORED);
let onLogout = () => {};

// A response that is not a success, or none. `status` is 0 if the server cannot be reached.
export class ApiError extends Error {
  constructor(status, detail, problem = {}) {
    super(detail);
    this.status = status;
    this.problem = problem;
  }
}

// Whether the server understood the request and will not do it: something is off, full or unknown.
export const isRefusal = (error) => error instanceof ApiError && [404, 409].includes(error.status);

export const hasToken = () => token !== null;

export function setLogoutHandler(handler) {
  onLogout = handler;
}

export function setToken(value) {
  token = value;
  sessionStorage.setItem(STORED, value);
}

export function forgetToken() {
  token = null;
  sessionStorage.removeItem(STORED);
}

// A header is a string of bytes; a token may have any characters.
function authorization(value) {
  return `Bearer ${String.fromCharCode(...new TextEncoder().encode(value))}`;
}

export async function request(method, path, body) {
  const sent = token;
  const headers = {};
  if (sent !== null) headers.authorization = authorization(sent);
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      // A redirect would send the token elsewhere.
      redirect: "error",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
  } catch {
    throw new ApiError(
      0,
      "the server cannot be reached; is it running, and the tunnel to it open?",
    );
  }
  const document = await response.json().catch(() => ({}));
  if (response.ok) return document;
  if (response.status === 401 && sent !== null && token === sent) {
    // Every further request would count as a wrong guess and lock this address out.
    forgetToken();
    onLogout("The server does not accept this token. Check it, and log in again.");
  }
  const after = Number(response.headers.get("retry-after")) || undefined;
  throw new ApiError(response.status, document.detail ?? `the server answered ${response.status}`, {
    ...document,
    after,
  });
}

// Reads a document. A parameter whose value is a list is repeated, and one without a value is left
// out.
export function get(path, parameters = {}) {
  const given = Object.entries(parameters).flatMap(([name, value]) =>
    [value]
      .flat()
      .filter(
        (value) =>
          (value !== undefined && value !== null && value !== "") ||
          Array.isArray(parameters[name]),
      )
      .map((value) => `${name}=${encodeURIComponent(value)}`),
  );
  return request("GET", given.length ? `${path}?${given.join("&")}` : path);
}

// The path of a rule's key: each value is one segment. Browsers remove the segments `.` and `..`
// from a path even if they are escaped, and the request would be about another key.
export function keyPath(kind, rule, key) {
  const segments = [rule, ...key];
  if (segments.some((segment) => segment === "." || segment === "..")) {
    throw new ApiError(
      400,
      'browsers cannot send "." or ".." in a path; use the command line: tidegate inspect',
    );
  }
  return `v1/${kind}/${segments.map(encodeURIComponent).join("/")}`;
}
