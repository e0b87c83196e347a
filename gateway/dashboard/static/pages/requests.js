// The latest requests, live and filtered; each opens into its life. There are no prompts here, only counts and hashes.

import {bar, legend} from "../charts.js";
import {el, field, replace, table, tableRow} from "../dom.js";
import {HITS} from "./overview.js";

export const title = "Requests";

const PAGE = 100, MOST = 500;  // rows of one answer, and of the page
const ERRORS = {"": "All", none: "Not failed", any: "Failed"};

export function render(root, context) {
  return context.path.length ? life(root, context) : list(root, context);
}

// -- the list ---------------------------------------------------------------------------------------------------------

async function list(root, {api, live, format, query, query_changed, say, attempt}) {
  const filters = {tenant: "", model: "", hit: "", error: "", ...Object.fromEntries(query)};
  const columns = [
    {label: "Time", header: true, class: "nowrap", value: (row) => el("a", {href: link(row), title: format.fullTime(row.at_s)}, format.time(row.at_s))},
    {label: "Tenant", class: "name", value: (row) => clip(row.tenant)},
    {label: "Model", class: "name", value: (row) => clip(row.model)},
    {label: "Answered by", value: hitTag},
    {label: "Prompt", number: true, value: (row) => format.tokens(row.prompt_tokens)},
    {label: "Cached", number: true, value: (row) => (row.cached_tokens ? format.percent(format.ratio(row.cached_tokens, row.prompt_tokens)) : "")},
    {label: "Answer", number: true, value: (row) => format.tokens(row.completion_tokens)},
    {label: "First token", number: true, value: (row) => format.ms(row.first_token_ms)},
    {label: "Total", number: true, value: (row) => format.ms(row.total_ms)},
    {label: "Cost", number: true, value: (row) => format.money(row.cost)},
    {label: "Engine", class: "name", value: (row) => clip(row.engine)},
    {label: "Status", value: (row) => statusTag(row)},
  ];
  const kept = el("p", {class: "muted small"});
  const fresh = el("button", {type: "button", class: "primary", hidden: true, onclick: () => flush()});
  const follow = el("button", {type: "button", "aria-pressed": "true", onclick: () => {
    const on = follow.getAttribute("aria-pressed") !== "true";
    follow.setAttribute("aria-pressed", String(on));
    if (on) flush();
  }}, "Follow");
  const older = el("button", {type: "button", hidden: true, onclick: () => {
    follow.setAttribute("aria-pressed", "false");  // or they would be trimmed again
    attempt(() => load(shown.at(-1)));
  }}, "Older");
  const form = el("form", {class: "filters", onsubmit: (event) => { event.preventDefault(); changed(); }, onchange: () => changed()},
    field({label: "Tenant", name: "tenant", value: filters.tenant, placeholder: "all"}),
    field({label: "Model", name: "model", value: filters.model, placeholder: "all"}),
    field({label: "Answered by", name: "hit", value: filters.hit, options: [["", "All"], ...Object.entries(HITS).map(([name, [label]]) => [name, label])]}),
    field({label: "Errors", name: "error", value: filters.error, options: Object.entries(ERRORS)}),
    el("div", {class: "row"}, el("button", null, "Filter"), follow));
  const holder = el("div", {class: "card"}, table({caption: "Requests, newest first", columns, rows: [], hideCaption: true}));
  const body = holder.querySelector("tbody"), nothing = body.firstChild;
  replace(root, el("div", {class: "head"}, el("h1", null, title), kept, fresh), form, holder, el("div", null, older));
  let shown = [], waiting = [], asked = 0, missed = false;

  function changed() {
    for (const [name, value] of new FormData(form)) filters[name] = value.trim();
    query_changed(filters);
    attempt(() => load(null));
  }

  async function load(before) {
    const number = ++asked;
    const answer = await api.get("/admin/requests", {...filters, before: before && key(before), limit: PAGE});
    if (number !== asked) return;
    if (!before) { waiting = []; shown = []; missed = false; replace(body, nothing); }
    add(answer.requests, false);
    replace(kept, `The latest ${format.count(answer.kept)} are kept, without their texts.`, answer.stale && " Redis is unreachable: these are the last known.");
    older.hidden = !(answer.more ?? answer.requests.length === PAGE);
    if (!before) { fresh.hidden = true; say(answer.requests.length ? `${body.rows.length} requests shown` : "No request matches"); }
  }

  function add(rows, first) {
    if (!rows.length) return;
    nothing.remove();
    const made = rows.map((row) => tableRow(columns, row));
    first ? body.prepend(...made) : body.append(...made);
    shown = first ? [...rows, ...shown] : [...shown, ...rows];
    if (first && shown.length > MOST) {
      shown.length = MOST;
      while (body.rows.length > MOST) body.lastChild.remove();
      older.hidden = false;
    }
  }

  // What somebody reads or has the focus on does not move away under them.
  function flush() {
    fresh.hidden = true;
    if (missed) { attempt(() => load(null)); return; }
    add(waiting, true);
    waiting = [];
  }

  live.on("requests", (event) => {
    const have = new Set([...waiting, ...shown.slice(0, PAGE)].map(key));
    const rows = event.filter((row) => !have.has(key(row))
      && ["tenant", "model", "hit"].every((name) => !filters[name] || row[name] === filters[name])
      && (!filters.error || (filters.error === "any") === (row.status >= 400)));
    if (!rows.length) return;
    waiting = [...rows, ...waiting].slice(0, MOST);
    offer();
  });
  live.on("reopened", () => { missed = true; offer(); });

  function offer() {
    if (follow.getAttribute("aria-pressed") === "true" && !holder.matches(":hover, :focus-within")) { flush(); return; }
    fresh.hidden = false;
    replace(fresh, missed ? "Show the latest" : `Show ${waiting.length} new`);
  }

  await load(null);
}

const key = (row) => row.row ?? row.id;
const link = (row) => `#/requests/${encodeURIComponent(key(row))}`;
const clip = (text) => el("span", {class: "clip", title: text ?? ""}, text ?? "");

function hitTag(row) {
  if (!row.hit) return row.status >= 400 ? "" : el("span", {class: "muted"}, "–");
  const [label, colour] = HITS[row.hit] ?? [row.hit, "--c-upstream"];
  return el("span", {class: "dot", style: {"--colour": `var(${colour})`}}, label);
}

function statusTag(row) {
  if (row.status >= 500) return el("span", {class: "tag bad"}, row.status, row.error && ` ${row.error}`);
  if (row.status >= 400) return el("span", {class: "tag warn"}, row.status, row.error && ` ${row.error}`);
  return String(row.status);
}

// -- the life of one --------------------------------------------------------------------------------------------------

async function life(root, {api, format, path}) {
  const row = await api.get(`/admin/requests/${encodeURIComponent(path[0])}`);
  const pair = (name, value) => (value === null || value === undefined || value === "" || value === false ? null : [el("dt", null, name), el("dd", null, value)]);
  const share = format.percent(format.ratio(row.cached_tokens, row.prompt_tokens));
  replace(root,
    el("div", {class: "head"},
      el("h1", null, "Request"), el("code", {class: "wrap"}, row.id), hitTag(row), statusTag(row),
      el("div", {class: "row"},
        el("a", {class: "button", href: `#/explain?id=${encodeURIComponent(row.id)}`}, "Explain"),
        el("a", {class: "button", href: "#/requests"}, "All requests"))),
    el("section", {class: "card stack"}, el("h2", null, "Time"), ...stages(row, format)),
    el("div", {class: "grid"},
      el("section", {class: "card"}, el("h2", null, "Request"), el("dl", {class: "pairs"},
        pair("Ended", format.fullTime(row.at_s)), pair("Tenant", row.tenant), pair("Model", row.model),
        pair("Alias", row.target && `${row.target.alias}: ${row.target.policy}, ${row.target.reason}`),
        pair("Endpoint", row.endpoint), pair("Queue", row.lane), pair("Retries", row.retries || null), pair("Finish", row.finish), pair("Error", row.error))),
      el("section", {class: "card"}, el("h2", null, "Tokens and price"), el("dl", {class: "pairs"},
        pair("Prompt", `${format.count(row.prompt_tokens)} tokens`),
        pair("From a cache", row.cached_tokens ? `${format.count(row.cached_tokens)} tokens, ${share}` : "nothing"),
        row.evicted && pair("Lost before", `${format.fullTime(row.evicted.at_s)}, ${row.evicted.id ? `to ${row.evicted.id} of ${row.evicted.tenant || "no tenant"}` : "for whom is not known"}`),
        pair("Predicted", row.receipt && receipt(row.receipt, format)),
        pair("Answer", `${format.count(row.completion_tokens)} tokens`),
        pair("Lease", row.lease), pair("Price", row.cost ? format.money(row.cost) : "not known"))),
      row.lookup && el("section", {class: "card"}, el("h2", null, "Response cache"), el("dl", {class: "pairs"},
        Object.entries(row.lookup).map(([name, value]) => pair(LOOKUP[name] ?? name, name === "age_s" ? value > 0 && format.seconds(value) : name === "entry" && value ? el("code", null, value) : value))))),
    row.route?.length > 0 && route(row, format),
    row.segments?.length > 0 && segments(row, format));
}

const LOOKUP = {outcome: "Outcome", reason: "Why", entry: "Entry", age_s: "Age"};

function receipt({predicted_tokens, cached_tokens}, format) {
  const difference = cached_tokens - predicted_tokens;
  const word = difference === 0 ? "as reported" : `${format.count(Math.abs(difference))} ${difference > 0 ? "fewer than" : "more than"} reported`;
  return `${format.count(predicted_tokens)} tokens, ${word}`;
}

function stages(row, format) {
  const first = row.first_token_ms, queue = Math.min(row.queue_ms ?? 0, row.total_ms), own = Math.min(row.overhead_ms ?? 0, row.total_ms - queue);
  const started = first === null || first === undefined ? null : Math.min(first, row.total_ms);
  const parts = [
    {label: "gateway", value: own, colour: "--c-upstream"},
    {label: "queue", value: queue, colour: "--c-batch"},
    ...(started === null
      ? [{label: "until it ended, without a token", value: row.total_ms - queue - own, colour: "--c-error"}]
      : [{label: "prompt, until the first token", value: Math.max(0, started - queue - own), colour: "--c-prefix"},
         {label: "answer", value: Math.max(0, row.total_ms - Math.max(started, queue + own)), colour: "--c-exact"}]),
  ];
  const each = row.completion_tokens > 1 && started !== null ? `, ${format.ms((row.total_ms - started) / (row.completion_tokens - 1))} for each token` : "";
  return [bar(parts, row.total_ms, {tall: true, write: format.ms}), legend(parts, format.ms),
    el("p", {class: "muted"}, `First token after ${format.ms(first)}, all after ${format.ms(row.total_ms)}${each}.`)];
}

function route(row, format) {
  const chosen = row.route.find((one) => one.chosen), others = row.route.filter((one) => !one.chosen);
  const best = others.reduce((low, one) => (low === null || one.score_ms < low.score_ms ? one : low), null);
  const why = chosen && (best === null ? `${chosen.engine} was the only candidate.`
    : best.score_ms >= chosen.score_ms
      ? `${chosen.engine} was expected to have the first token ${format.ms(best.score_ms - chosen.score_ms)} before ${best.engine}, with ${format.count(chosen.cached_tokens)} tokens of the prompt in its cache.`
      : `${chosen.engine} was chosen though ${best.engine} was expected to be ${format.ms(chosen.score_ms - best.score_ms)} faster: the request waited for its cache, or the other one had no slot.`);
  return el("section", {class: "card stack"}, el("h2", null, "Why this engine"), why && el("p", null, why), table({
    caption: "Candidates", hideCaption: true, rows: row.route,
    columns: [
      {label: "Engine", header: true, value: (one) => [one.engine, one.chosen && el("span", {class: "tag accent"}, "chosen")].flatMap((part) => [part, " "])},
      {label: "Cached tokens", number: true, value: (one) => format.count(one.cached_tokens)},
      {label: "Wait", number: true, value: (one) => format.ms(one.wait_ms)},
      {label: "Score", number: true, value: (one) => format.ms(one.score_ms)},
    ],
  }), el("p", {class: "muted small"}, "The score is the time to the first token that was expected there: the wait, and computing what its cache lacks."));
}

function segments(row, format) {
  const most = Math.max(...row.segments.map((one) => one.tokens), 1);
  return el("section", {class: "card"}, table({
    caption: "Prefix hit by segment", rows: row.segments,
    columns: [
      {label: "Part", header: true, value: (one) => one.part},
      {label: "Message", number: true, value: (one) => one.message ?? ""},
      {label: "Tokens", number: true, value: (one) => format.count(one.tokens)},
      {label: "Cached", number: true, value: (one) => format.count(one.cached_tokens)},
      {label: "Of it cached", class: "wide", value: (one) => bar([
        {label: "cached", value: one.cached_tokens, colour: "--c-prefix"}, {label: "computed", value: one.tokens - one.cached_tokens, colour: "--c-miss"}], most)},
      {label: "Hash", value: (one) => el("code", null, one.hash)},
    ],
  }));
}
