// One stream of server-sent events for all pages. It ends while the page is hidden, and begins again by itself.

import {address, needKey, session} from "./api.js";

const LONGEST_MS = 30_000;
const listeners = new Map();  // name of an event -> functions
let source = null, timer = null, wait_ms = 1000, opened = false, show = () => {};

/** `handler(data)` for each event of that name, until the function that it returns is called. `reopened` is our own: what
 *  came in between was missed. */
export function on(name, handler) {
  if (!listeners.has(name)) {
    listeners.set(name, new Set());
    source?.addEventListener(name, hear);
  }
  listeners.get(name).add(handler);
  return () => listeners.get(name).delete(handler);
}

/** `state`: called with "live", "waiting" (for the connection) or "paused". */
export function start(state) {
  show = state;
  document.addEventListener("visibilitychange", () => (document.hidden ? stop("paused") : open()));
  window.addEventListener("pagehide", () => stop("paused"));
  open();
}

export function restart() {
  stop("waiting");
  open();
}

function open() {
  if (source || document.hidden) return;
  clearTimeout(timer);
  source = new EventSource(address("/admin/live"));
  for (const name of listeners.keys()) source.addEventListener(name, hear);
  source.onopen = () => {
    wait_ms = 1000;
    show("live");
    if (opened) tell("reopened", null);
    opened = true;
  };
  source.onerror = lost;
}

function hear(event) {
  let data;
  try {
    data = JSON.parse(event.data);
  } catch {
    return;
  }
  tell(event.type, data);
}

function tell(name, data) {
  for (const handler of [...(listeners.get(name) ?? [])]) handler(data);
}

// EventSource itself gives up after an answer that is no stream, such as a 401 or a 503.
async function lost() {
  stop("waiting");
  timer = setTimeout(async () => {
    wait_ms = Math.min(wait_ms * 2, LONGEST_MS);
    try {
      const {state} = await session();
      if (state === "none") await needKey();
      open();
    } catch {
      lost();
    }
  }, wait_ms * (0.75 + Math.random() / 2));
}

function stop(state) {
  clearTimeout(timer);
  source?.close();
  source = null;
  show(state);
}
