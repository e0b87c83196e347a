// The shell: session, navigation, banner and live state around one page at a time. A page is a file `pages/NAME.js` with
//
//   title                  its name, for the heading of the document and the navigation
//   render(root, context)  fills `root`, whose first heading is an h1; may be async; may return a function that ends it
//
// and its address is #/NAME/REST?QUERY. The context:
//
//   path     parts of REST           query    URLSearchParams of QUERY
//   api      api.js                  live     live.js: on(event, handler)
//   format   format.js               signal   of an AbortController: aborted when the page is left
//   every(s, f)      calls f now and every s seconds while the page is shown and visible
//   attempt(f)       calls f once; what goes wrong, here and in `every`, is said on top of the page until one works
//   go(path, query)  to another address       say(text)  tells a screen reader, without moving the focus
//   query_changed(query)  writes the address's QUERY without rendering the page again

import * as api from "./api.js";
import {ask, el, field, replace} from "./dom.js";
import * as format from "./format.js";
import * as live from "./live.js";

const PAGES = [
  ["overview", "Overview"],
  ["engines", "Engines"],
  ["requests", "Requests"],
  ["explain", "Explain"],
  ["cache", "Response cache"],
  ["batches", "Batches"],
  ["tenants", "Tenants"],
  ["playground", "Playground"],
];

const byId = (id) => document.getElementById(id);
const main = byId("main"), root = byId("page"), banner = byId("banner");
let leave = () => {}, shown = "";

// -- pages ------------------------------------------------------------------------------------------------------------

function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  return {name: name || PAGES[0][0], path: rest.filter(Boolean), query: new URLSearchParams(query)};
}

function hash(path, query) {
  const parts = path.map(encodeURIComponent).join("/");
  const search = new URLSearchParams(Object.entries(Object.fromEntries(new URLSearchParams(query ?? ""))).filter(([, value]) => value !== "")).toString();
  return `#/${parts}${search ? `?${search}` : ""}`;
}

async function show() {
  if (location.hash === "#main") return;
  leave();
  const {name, path, query} = place();
  shown = location.hash;
  const known = PAGES.find(([one]) => one === name);
  for (const link of byId("pages").querySelectorAll("a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const ending = new AbortController(), ends = [];
  let over = false;
  leave = () => { over = true; ending.abort(); for (const end of ends) end(); };
  const holder = el("div"), note = el("div");
  const context = {
    path, query, api, format, signal: ending.signal,
    live: {on: (event, handler) => ends.push(live.on(event, handler))},
    every: (s, work) => ends.push(every(s, attempting(holder, note, work))),
    attempt: (work) => attempting(holder, note, work)(),
    go: (to, more) => { location.hash = hash(to, more); },
    say,
    query_changed: (more) => { history.replaceState(null, "", hash([name, ...path], more)); shown = location.hash; },
  };
  try {
    if (!known) throw new api.ApiError("There is no such page.", 404);
    const page = await import(`./pages/${known[0]}.js`);
    if (over) return;
    document.title = `${page.title} · Kvasir`;
    replace(root, holder);
    const end = await page.render(holder, context);
    if (typeof end === "function") over ? end() : ends.push(end);
  } catch (error) {
    if (over || error.name === "AbortError") return;
    replace(root, el("h1", null, known?.[1] ?? "Not found"), trouble(error));
  }
}

/** What went wrong, as a paragraph. */
function trouble(error) {
  if (!(error instanceof api.ApiError)) console.error(error);
  return el("p", {class: "problem", role: "alert"}, error instanceof api.ApiError ? error.message : "This page failed. The browser's console says more.");
}

function attempting(holder, note, work) {
  return async () => {
    try {
      await work();
      note.remove();
    } catch (error) {
      if (error.name === "AbortError") return;
      replace(note, trouble(error));
      holder.prepend(note);
    }
  };
}

function every(s, work) {
  let busy = false;
  const turn = async () => {
    if (busy || document.hidden) return;
    busy = true;
    await work();
    busy = false;
  };
  const timer = setInterval(turn, s * 1000);
  document.addEventListener("visibilitychange", turn);
  turn();
  return () => { clearInterval(timer); document.removeEventListener("visibilitychange", turn); };
}

function say(text) {
  replace(byId("announce"), text);
}

// -- what is wrong now ------------------------------------------------------------------------------------------------

let told = "";

function wrong(overview) {
  const all = overview.wrong.map((one) => one.text);
  if (overview.stale) all.unshift(overview.as_of_s
    ? `Redis is unreachable: what you see is the last known, of ${format.time(overview.as_of_s)}.`
    : "Redis is unreachable, and nothing was known before.");
  const text = all.join("\n");
  if (text === told) return;
  if (text) say(`${all.length} ${all.length === 1 ? "thing is" : "things are"} wrong. ${all[0]}`);
  else if (told) say("Nothing is wrong any more.");
  told = text;
  banner.hidden = !text;
  if (!text) { replace(banner); return; }
  replace(banner, all.length > 3
    ? el("details", null, el("summary", null, `${all.length} things are wrong: ${all[0]}`), list(all.slice(1)))
    : list(all));
}

const list = (texts) => el("ul", null, texts.map((text) => el("li", null, text)));

// -- session ----------------------------------------------------------------------------------------------------------

async function askForKey(why) {
  byId("logout").hidden = true;
  await ask({
    title: "Log in",
    body: [
      el("p", {class: "muted"}, why ? "The session has ended. " : "", "This needs an admin key: one of ", el("code", null, "auth.admin_keys"), "."),
      el("input", {type: "text", name: "username", value: "admin", autocomplete: "username", hidden: true}),  // for password managers
      field({label: "Admin key", name: "key", type: "password", required: true, autocomplete: "current-password", autofocus: true}),
    ],
    action: "Log in", closable: false,
    submit: async (form) => { await api.logIn(form.get("key")); return true; },
  });
  byId("logout").hidden = false;
  live.restart();
}

byId("logout").addEventListener("click", async () => { await api.logOut(); location.reload(); });

// -- the shell itself -------------------------------------------------------------------------------------------------

const STATES = {live: "Live", waiting: "Connecting …", paused: "Paused"};

function liveState(state) {
  const sign = byId("live");
  sign.className = `live ${state}`;
  if (sign.textContent !== STATES[state]) replace(sign, STATES[state]);
}

function theme() {
  const chosen = byId("theme");
  chosen.value = document.documentElement.dataset.theme ?? "";
  const changed = () => document.dispatchEvent(new Event("themechange"));
  chosen.addEventListener("change", () => {
    if (chosen.value) document.documentElement.dataset.theme = chosen.value;
    else delete document.documentElement.dataset.theme;
    try { localStorage.setItem("kvasir-theme", chosen.value); } catch { /* not remembered */ }
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

async function start() {
  theme();
  replace(byId("pages"), PAGES.map(([name, title]) => el("li", null, el("a", {href: `#/${name}`, "data-page": name}, title))));
  byId("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  liveState("waiting");
  let session;
  try {
    session = await api.begin(askForKey);
  } catch (error) {
    replace(root, el("h1", null, "Kvasir"), trouble(error), el("button", {type: "button", onclick: () => location.reload()}, "Try again"));
    return;
  }
  if (session.state === "closed") {
    replace(root, el("h1", null, "The dashboard is closed"), el("p", null, "This server has tenants and no admin keys. Set ", el("code", null, "[auth] admin_keys"), " to open it."));
    return;
  }
  byId("logout").hidden = session.state === "open";
  live.on("overview", wrong);
  live.start(liveState);
  window.addEventListener("hashchange", async () => {
    if (location.hash === shown) return;
    await show();
    main.focus({preventScroll: true});
    window.scrollTo(0, 0);
  });
  await show();
}

start();
