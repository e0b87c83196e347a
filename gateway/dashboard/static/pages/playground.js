// A chat with any model, as a tenant: beside each answer what a cache had of it, how long it took and what it cost. The
// tenant's key stays in this page: it is not stored, and goes nowhere but to this server.

import {bar} from "../charts.js";
import {el, field, replace} from "../dom.js";

export const title = "Playground";

const ANSWERED = {exact: "Remembered answer", shared: "Shared generation", semantic: "Same meaning"};
const PRICE_TRIES = 5;  // the row of a request is written a moment after its answer

export async function render(root, {api, format, query, signal, say}) {
  const open = (await api.session()).state === "open";
  const models = el("datalist", {id: "models"});
  const settings = el("form", {class: "card stack", autocomplete: "off", onsubmit: (event) => event.preventDefault()},
    el("div", {class: "grid"},
      field({label: "Tenant's key", name: "key", type: "password", autocomplete: "off", hint: "Needed where there are tenants. It stays in this page."}),
      field({label: "Model", name: "model", list: "models", required: true, value: query.get("model") ?? ""})), models,
    el("details", null, el("summary", null, "Options"), el("div", {class: "stack options"},
      field({label: "System prompt", name: "system", type: "textarea"}),
      el("div", {class: "grid"},
        field({label: "Most tokens of an answer", name: "max_tokens", type: "number", min: 1, max: 100000, value: 256}),
        field({label: "Temperature", name: "temperature", type: "number", min: 0, max: 2, step: "0.1", value: 0})))));
  const log = el("div", {class: "stack", role: "log", "aria-label": "Conversation"});
  const text = field({label: "Message", name: "text", type: "textarea", required: true, hint: "Ctrl+Enter sends."});
  const problem = el("p", {class: "problem", role: "alert"});
  const send = el("button", {class: "primary"}, "Send");
  const stop = el("button", {type: "button", disabled: true, onclick: () => running?.abort()}, "Stop");
  const fresh = el("button", {type: "button", class: "quiet", onclick: restart}, "New chat");
  const composer = el("form", {class: "card stack", onsubmit: submit}, text, problem, el("div", {class: "row"}, send, stop, fresh));
  const input = text.querySelector("textarea");
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) composer.requestSubmit();
  });
  let turns = [], running = null, loaded = null;

  const of = (name) => settings.elements[name].value.trim();
  const bearer = () => ({Authorization: `Bearer ${of("key") || "none"}`});

  async function load() {
    if (loaded === of("key")) return;
    loaded = of("key");
    try {
      const {data} = await api.get("/v1/models", null, {signal, headers: bearer()});
      replace(models, data.map((one) => el("option", {value: one.id})));
      const {model} = settings.elements;  // which is left alone while somebody writes into it
      if (!of("model") && data.length && document.activeElement !== model) model.value = data[0].id;
      replace(problem);
    } catch (error) {
      if (error.name !== "AbortError" && loaded) replace(problem, error.message);
    }
  }

  function restart() {
    running?.abort();
    turns = [];
    replace(log);
    replace(problem);
    input.focus();
  }

  async function submit(event) {
    event.preventDefault();
    if (running || !input.value.trim() || !settings.reportValidity()) return;
    replace(problem);
    const asked = {role: "user", content: input.value};
    const said = el("div", {class: "said"}), facts = el("dl", {class: "pairs small"});
    const answer = el("article", {class: "card answer", "aria-label": "Answer", "aria-busy": "true"}, said, facts);
    log.append(el("article", {class: "notice said", "aria-label": "Message"}, asked.content), answer);
    input.value = "";
    running = new AbortController();
    busy(true);
    const heard = {text: "", thought: "", usage: null, first_ms: null, began_ms: performance.now()};
    try {
      await ask([...turns, asked], heard, said, AbortSignal.any([signal, running.signal]));
    } catch (error) {
      if (signal.aborted) return;
      heard.stopped = error.name === "AbortError";
      if (!heard.stopped) said.append(el("p", {class: "problem"}, error.message));
    }
    heard.total_ms = performance.now() - heard.began_ms;
    if (heard.text) turns.push(asked, {role: "assistant", content: heard.text});
    else if (!heard.headers) { answer.previousSibling.remove(); answer.remove(); input.value = asked.content; }
    answer.setAttribute("aria-busy", "false");
    replace(problem, heard.headers || heard.stopped ? null : said.lastChild?.textContent);
    running = null;
    busy(false);
    if (!heard.headers) return;
    say(heard.stopped ? "Stopped." : "The answer is complete.");
    show(facts, heard, null);
    const row = await find(heard.headers.get("x-request-id"));
    if (row) show(facts, heard, row);
  }

  function busy(now) {
    send.disabled = now;
    stop.disabled = !now;
    if (!now) input.focus({preventScroll: true});
  }

  async function ask(messages, heard, said, until) {
    const system = of("system") ? [{role: "system", content: of("system")}] : [];
    const body = {model: of("model"), messages: [...system, ...messages], stream: true, stream_options: {include_usage: true}};
    for (const name of ["max_tokens", "temperature"]) if (of(name)) body[name] = Number(of(name));
    const response = await api.send("POST", "/v1/chat/completions", {body, signal: until, headers: {...bearer(), Accept: "text/event-stream"}});
    heard.headers = response.headers;
    const thought = el("span", {class: "muted"}), written = document.createTextNode("");
    replace(said, thought, written);
    for await (const data of events(response.body)) {
      if (data.error) throw new Error(data.error.message);
      heard.usage = data.usage ?? heard.usage;
      const delta = data.choices?.[0]?.delta ?? {};
      if (!delta.content && !delta.reasoning_content) continue;
      heard.first_ms ??= performance.now() - heard.began_ms;
      thought.append(delta.reasoning_content ?? "");
      written.appendData(delta.content ?? "");
      heard.text += delta.content ?? "";
    }
  }

  /** The request as the gateway counted it; null where it cannot be had. */
  async function find(id) {
    for (let turn = 1; turn <= PRICE_TRIES && !signal.aborted; turn += 1) {
      try {
        return await api.get(`/admin/requests/${encodeURIComponent(id)}`, null, {signal});
      } catch {
        await new Promise((done) => setTimeout(done, 300 * turn));
      }
    }
    return null;
  }

  function show(facts, {headers, usage, first_ms, total_ms, stopped}, row) {
    const cached = row?.cached_tokens ?? usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const prompt = row?.prompt_tokens ?? usage?.prompt_tokens;
    const hit = headers.get("x-kvasir-cache"), id = headers.get("x-request-id");
    const parts = [{label: "from a cache", value: cached, colour: "--c-prefix"}, {label: "computed", value: (prompt ?? 0) - cached, colour: "--c-miss"}];
    const pairs = [
      ["Answered by", ANSWERED[hit] ?? headers.get("x-kvasir-engine") ?? "an upstream"],
      ["Prompt", [`${format.count(prompt)} tokens, ${format.count(cached)} of them cached`, prompt && bar(parts, prompt)]],
      ["Answer", `${format.count(row?.completion_tokens ?? usage?.completion_tokens)} tokens${stopped ? ", stopped" : ""}`],
      ["First token", format.ms(first_ms)],
      ["Whole answer", format.ms(total_ms)],
      ["Price", row ? format.money(row.cost) : "…"],
    ];
    replace(facts, pairs.map(([name, value]) => [el("dt", null, name), el("dd", null, value)]),
      row && [el("dt", null, "More"), el("dd", null, el("a", {href: `#/requests/${encodeURIComponent(id)}`}, "This request"), ", ", el("a", {href: `#/explain?id=${encodeURIComponent(id)}`}, "explain"))]);
  }

  settings.elements.key.addEventListener("change", load);
  replace(root, el("h1", null, title), settings, log, composer);
  if (open) load();  // a server without tenants needs no key
}

/** The JSON of each `data:` line of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();  // not every browser iterates over a stream
  for (let rest = ""; ;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:") && line.slice(5).trim() !== "[DONE]") yield JSON.parse(line.slice(5));
  }
}
