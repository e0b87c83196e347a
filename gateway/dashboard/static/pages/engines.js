// A card for each engine and replica: is its index believed, what is in its cache, what does it do; replicas are added,
// drained and removed. Below them the upstreams.

import {bar, legend} from "../charts.js";
import {ask, el, field, refresh, replace, table} from "../dom.js";

export const title = "Engines and replicas";

const EVERY_S = 5;
const STATES = {ready: ["ready", "good"], connecting: ["connecting", "warn"], draining: ["draining", "warn"], lost: ["unreachable", "bad"]};
const TRUST = {exact: "good"};
const KINDS = ["vllm", "sglang", "tensorrt-llm"];

export function render(root, {api, format, every, say}) {
  const cards = new Map();  // name of an engine -> its card
  const holder = el("div", {class: "grid engines"}), unusable = el("div"), upstreams = el("div"), summary = el("p", {class: "muted small"});
  const none = el("p", {class: "notice"}, "There is no engine and no replica: requests go to upstreams only.");
  const least = el("button", {type: "button", hidden: true, onclick: () => drainLeast()}, "Drain the least useful");
  replace(root,
    el("div", {class: "head"}, el("h1", null, title), summary,
      el("div", {class: "row"}, least, el("button", {type: "button", class: "primary", onclick: () => add()}, "Add a replica"))),
    none, holder, unusable, upstreams);

  async function load() {
    const [stats, fleet] = await Promise.all([api.get("/admin/stats"), api.get("/admin/replicas")]);
    const names = new Set(stats.engines.map((one) => one.name));
    for (const [name, card] of cards) if (!names.has(name)) { card.node.remove(); cards.delete(name); }
    for (const engine of stats.engines) {
      if (!cards.has(engine.name)) { cards.set(engine.name, newCard(engine.name)); holder.append(cards.get(engine.name).node); }
      show(cards.get(engine.name), engine);
    }
    none.hidden = names.size > 0;
    least.hidden = stats.engines.filter((one) => one.replica && one.state === "ready").length < 2;
    const {online, batch} = stats.queues;
    replace(summary, `${format.count(online.waiting)} online and ${format.count(batch.waiting)} batch requests wait for an engine`);
    const lacking = fleet.replicas.filter((one) => one.state === "unusable");
    refresh(unusable, lacking.length > 0 && el("div", {class: "card"}, table({
      caption: "Added by another gateway, and of no use to this one", rows: lacking,
      columns: [{label: "Replica", header: true, value: (one) => one.name}, {label: "Why", class: "break", value: (one) => one.reason}],
    })));
    showUpstreams(stats.upstreams ?? {});
  }

  function newCard(name) {
    const body = el("div", {class: "stack"}), tags = el("span", {class: "row"}), actions = el("div", {class: "actions"});
    const id = `engine-${++made}`;
    return {body, tags, actions, state: null, node: el("section", {class: "card stack", "aria-labelledby": id},
      el("div", {class: "head"}, el("h2", {id, class: "wrap"}, name), tags), body, actions)};
  }

  function show(card, engine) {
    const {blocks, replica, receipts} = engine, [word, tone] = STATES[engine.state] ?? [engine.state, "warn"];
    const index = replica?.index ?? {};
    replace(card.tags, el("span", {class: `tag ${tone}`}, word), el("span", {class: "tag"}, replica ? replica.kind : "bundled"));
    const parts = [
      {label: "in use", value: blocks.live, colour: "--c-exact"},
      {label: "cached", value: blocks.cached, colour: "--c-prefix"},
      {label: "free", value: blocks.free, colour: "--c-bypass"},
    ];
    const pair = (name, ...value) => [el("dt", null, name), el("dd", null, value)];
    refresh(card.body,
      replica?.reason && el("p", {class: "problem"}, replica.reason),
      blocks.total > 0 && el("div", {class: "stack tight"},
        bar(parts, blocks.total, {tall: true}),
        legend(parts),
        el("p", {class: "small muted"}, `of ${format.count(blocks.total)} blocks with ${format.count(blocks.tokens_per_block)} tokens each; leases keep ${format.count(blocks.leased)}`)),
      engine.incarnation && el("dl", {class: "pairs"},
        pair("Model", engine.model ?? "–"),
        pair("Index", ...trust(engine, index)),
        pair("Running", `${format.count(engine.running)}, ${format.count(engine.batch.running)} of them batch`),
        pair("Waiting", `${format.count(engine.waiting)}, ${format.count(engine.batch.waiting)} of them batch`),
        pair("Prefill backlog", `${format.tokens(engine.prefill_backlog)} tokens`),
        pair("Speed", `${format.tokens(Math.round(engine.prefill_tokens_per_s))} prompt tokens/s, ${format.tokens(Math.round(engine.decode_tokens_per_s))} written tokens/s`),
        engine.utilisation && pair("Use of the machine", `${format.percent(engine.utilisation.mfu)} of its FLOPs (MFU), ${format.percent(engine.utilisation.mbu)} of its memory bandwidth (MBU), while it computes`),
        pair("Evictions", engine.evictions === null ? "not told" : `${format.count(engine.evictions)} blocks`),
        pair("Predicted hits", receiptText(receipts, format)),
        ...Object.entries(engine.tiers ?? {}).map(([name, tier]) => pair(tierName(name), tierText(name, tier, engine, format)))));
    const state = replica ? `${engine.state} ${replica.configured}` : "";
    if (card.state !== state) {
      card.state = state;
      replace(card.actions, replica && actions(replica, engine.state));
    }
  }

  function trust(engine, index) {
    if (!engine.replica) return [engine.state === "ready" ? "exact: it tells every change itself" : "not asked while it is not ready"];
    if (!index.trust) return ["nothing is known of it"];
    return [el("span", {class: `tag ${TRUST[index.trust] ?? "warn"}`}, index.trust), ` ${format.count(index.blocks)} blocks known`, index.reason && `; ${index.reason}`];
  }

  function actions(replica, state) {
    const server = replica.server, path = `/admin/replicas/${encodeURIComponent(server)}`;
    return [
      state === "draining"
        ? el("button", {type: "button", onclick: () => act(() => api.post(`${path}/drain`, {}, {query: {undo: "true"}}), `${server} gets requests again.`)}, "Stop draining")
        : el("button", {type: "button", onclick: () => confirm(`Drain ${server}?`, "It gets no new requests. What runs there ends as usual, and leases move to others.", "Drain", () => api.post(`${path}/drain`))}, "Drain"),
      !replica.configured && el("button", {type: "button", class: "danger", onclick: () => remove(server, path)}, "Remove"),
    ];
  }

  async function act(work, done) {
    try {
      await work();
      say(done);
    } catch (error) {
      await ask({title: "It was not done", body: el("p", null, error.message), action: "Close", cancel: false});
    }
    await load();
  }

  async function confirm(question, text, action, work) {
    if (await ask({title: question, body: el("p", null, text), action, submit: work})) say(`${action}: done.`);
    await load();
  }

  async function remove(server, path) {
    const box = el("input", {type: "checkbox", name: "force", value: "true", id: "force"});
    if (await ask({
      title: `Remove ${server}?`, action: "Remove", danger: true,
      body: [el("p", null, "It gets no new requests, and is forgotten when nothing runs there any more."),
        el("label", {class: "row", for: "force"}, box, "At once: what runs there ends with an error")],
      submit: (form) => api.del(path, {force: form.get("force") ?? ""}),
    })) say(`${server} is removed.`);
    await load();
  }

  async function drainLeast() {
    const done = await ask({
      title: "Drain the least useful replica?", action: "Drain",
      body: el("p", null, "The one whose cache saved the fewest tokens lately, where another replica has its model."),
      submit: () => api.post("/admin/replicas/drain"),
    });
    if (done) say(`${done.name} drains.`);
    await load();
  }

  async function add() {
    const done = await ask({
      title: "Add a replica", action: "Add",
      body: [
        field({label: "Name", name: "name", required: true, autofocus: true}),
        field({label: "Kind", name: "kind", options: KINDS.map((kind) => [kind, kind]), value: KINDS[0]}),
        field({label: "URL", name: "url", type: "url", required: true, placeholder: "http://vllm-2:8000"}),
        field({label: "Model", name: "model", hint: "Name that clients use, if not the server's own."}),
        field({label: "Variable of its key", name: "api_key_env", hint: "An environment variable of the gateways; begins with REPLICA_."}),
      ],
      submit: (form) => api.post("/admin/replicas", Object.fromEntries([...form].filter(([, value]) => value !== ""))),
    });
    if (done) say(`${done.name} is added.`);
    await load();
  }

  function showUpstreams(all) {
    const rows = Object.entries(all);
    refresh(upstreams, rows.length > 0 && el("div", {class: "card"}, table({
      caption: "Upstreams", rows,
      columns: [
        {label: "Name", header: true, value: ([name]) => name},
        {label: "State", value: ([, one]) => (one.breaker === "closed" ? el("span", {class: "tag good"}, "up") : el("span", {class: "tag bad"}, one.breaker === "open" ? "fails" : "is tried again"))},
        {label: "API", value: ([, one]) => one.dialect},
        {label: "Requests", number: true, value: ([, one]) => format.tokens(one.requests)},
        {label: "In flight", number: true, value: ([, one]) => format.count(one.in_flight)},
        {label: "Waiting", number: true, value: ([, one]) => format.count(one.waiting + one.batch_waiting)},
        {label: "Errors", number: true, value: ([, one]) => format.count(Object.values(one.errors).reduce((sum, each) => sum + each, 0))},
      ],
    })));
  }

  every(EVERY_S, load);
}

let made = 0;

function receiptText(receipts, format) {
  if (!receipts?.receipts) return "none yet";
  const {exact, predicted_tokens, cached_tokens, distrusted} = receipts;
  const right = `${format.percent(exact / receipts.receipts)} right: ${format.tokens(predicted_tokens)} tokens predicted, ${format.tokens(cached_tokens)} reported`;
  return distrusted ? `${right}; index dropped ${format.count(distrusted)} times` : right;
}

const tierName = (name) => ({device: "In device memory", host: "In host memory", disk: "On disk"})[name] ?? name;

function tierText(name, tier, engine, format) {
  const leased = engine.leases?.blocks?.[name] ?? 0;
  const parts = [{label: "used", value: tier.bytes, colour: "--c-prefix"}];
  return [`${format.bytes(tier.bytes)} of ${format.bytes(tier.capacity_bytes)}${leased ? `, ${format.count(leased)} blocks leased` : ""}${tier.evictions ? `, ${format.count(tier.evictions)} evicted` : ""}`,
    bar(parts, tier.capacity_bytes, {write: format.bytes})];
}
