// Requests to this server's own /admin, with the session's cookie and, where something changes, its token.

const BASE = new URL("../", import.meta.url);  // wherever a proxy has put this server

/** `message` is for people; `status` 0 is a server that did not answer. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let csrf = null;
let askForKey = null;  // one dialog, however many requests need it

/** Where a path of this server is. */
export const address = (path) => new URL(path.replace(/^\//, ""), BASE);

/** `path` begins with /, `query` leaves out what is empty. Returns JSON. Asks for the key when a session is needed. */
export const get = (path, query, options) => request("GET", path, {query, ...options});
export const post = (path, body = {}, options) => request("POST", path, {body, ...options});
export const patch = (path, body, options) => request("PATCH", path, {body, ...options});
export const del = (path, query, options) => request("DELETE", path, {query, ...options});

async function request(method, path, options) {
  const answer = await send(method, path, options);
  return answer.status === 204 ? null : answer.json();
}

/** The answer itself, once its status is good: for streams. */
export async function send(method, path, {query, body, signal, headers} = {}) {
  const url = address(path);
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  for (;;) {
    const answer = await once(method, url, body, signal, headers);
    if (answer.ok) return answer;
    const problem = await words(answer);
    if (answer.status !== 401 || headers?.Authorization || !askForKey) throw problem;
    await askForKey(problem.message);
  }
}

async function once(method, url, body, signal, headers) {
  try {
    return await fetch(url, {
      method, signal, credentials: "same-origin", cache: "no-store",
      headers: {
        Accept: "application/json",
        ...(body === undefined ? {} : {"Content-Type": "application/json"}),
        ...(method === "GET" || !csrf ? {} : {"x-kvasir-csrf": csrf}),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway does not answer.", 0);
  }
}

async function words(answer) {
  let message = `The gateway answered with ${answer.status}.`;
  try {
    message = (await answer.json()).error.message || message;
  } catch { /* no JSON: a proxy's page */ }
  return new ApiError(message, answer.status);
}

/** Asks whether there is a session; `log_in` is called when one is needed, and resolves once there is. */
export async function begin(log_in) {
  let running = null;
  askForKey = (why) => (running ??= log_in(why).finally(() => (running = null)));
  const found = await session();
  if (found.state === "none") await askForKey("");
  return found;
}

/** Asks for the key, unless that is being done. */
export const needKey = () => askForKey?.("ended");

export async function session() {
  const answer = await once("GET", address("/admin/session"));
  if (!answer.ok) throw await words(answer);
  const found = await answer.json();
  csrf = found.csrf;
  return found;
}

export async function logIn(key) {
  const answer = await once("POST", address("/admin/session"), {key});
  if (!answer.ok) throw await words(answer);
  csrf = (await answer.json()).csrf;
}

export async function logOut() {
  await once("DELETE", address("/admin/session"));
  csrf = null;
}
