// Sends requests to the admin API of this server.
//
// The token is kept in the session storage of this tab. It survives a page reload, but other tabs,
// other sites and later sessions cannot read it. The token is not a cookie, so the browser never
// sends it on behalf of another page.

const STORED = "tidegate-token";
const PATIENCE_MS = 15_000;

let token = sessionStorage.getItem(STORED);
let onLogout = () => {};

// The error for an unsuccessful request. `status` is 0 if there was no response because the server
// cannot be reached.
export class ApiError extends Error {
  constructor(status, detail, problem = {}) {
    super(detail);
    this.status = status;
    this.problem = problem;
  }
}

// Returns whether the server understood the request and refused it, because a feature is off, a
// store is full or a name is unknown.
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

// Returns the value of the `Authorization` header. A header consists of bytes, and the token may
// contain any characters, so the token is encoded as UTF-8.
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
      // Do not follow redirects, because a redirect could send the token to another host.
      redirect: "error",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
  } catch {
    throw new ApiError(
      0,
      "the server cannot be reached; check that it is running, and that the tunnel to it is open",
    );
  }
  const document = await response.json().catch(() => ({}));
  if (response.ok) return document;
  if (response.status === 401 && sent !== null && token === sent) {
    // Discard the token, because each further request with an invalid token would count as a wrong
    // guess and could lock out this address.
    forgetToken();
    onLogout("The server does not accept this token. Check it, and log in again.");
  }
  const after = Number(response.headers.get("retry-after")) || undefined;
  throw new ApiError(
    response.status,
    document.detail ?? `the server responded with status ${response.status}`,
    { ...document, after },
  );
}

// Reads a document. If a parameter's value is a list, the parameter is repeated. A parameter
// without a value is omitted.
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

// Returns the path of a rule's key. Each of the key's values is one path segment. Browsers remove
// the segments `.` and `..` from a path even if they are escaped, so a request with such a value
// would name another key.
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
