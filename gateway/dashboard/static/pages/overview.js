// What was saved, how requests were answered, how long they took: over an hour (live), a day or a month.

import {bar, chart} from "../charts.js";
import {el, refresh, replace, table} from "../dom.js";

export const title = "Overview";

const SPANS = {hour: "Hour", day: "Day", month: "Month"};
export const HITS = {
  exact: ["Exact", "--c-exact"], shared: ["Shared", "--c-shared"], semantic: ["Semantic", "--c-semantic"],
  prefix: ["Prefix", "--c-prefix"], miss: ["Miss", "--c-miss"], bypass: ["Not to be cached", "--c-bypass"],
};
const SAVERS = {
  prefix: ["Prefix of an engine", "--c-prefix", "KV blocks that were not computed again"],
  upstream: ["Prefix of an upstream", "--c-upstream", "tokens that a provider read from its cache"],
  exact: ["Remembered answer", "--c-exact", "the same request again, or at the same time"],
  semantic: ["Same meaning", "--c-semantic", "another question with the same answer"],
  batch: ["Batch", "--c-batch", "the lower price of batches"],
};

export function render(root, {api, live, format, query, query_changed, every, attempt}) {
  let span = query.get("span") in SPANS ? query.get("span") : "hour";
  const buttons = Object.entries(SPANS).map(([name, label]) =>
    el("button", {type: "button", "data-span": name, onclick: () => choose(name)}, label));
  const figures = el("dl", {class: "figures"}), saved = el("div", {class: "card"}), answered = el("div", {class: "card stack"});
  const charts = {
    tokens: chart({title: "Prompt tokens", stacked: true, write: format.tokens, series: [
      {label: "from a cache", colour: "--c-prefix"}, {label: "computed", colour: "--c-miss"}]}),
    hits: chart({title: "How requests were answered", stacked: true, write: format.tokens,
      series: Object.values(HITS).map(([label, colour]) => ({label, colour}))}),
    first: chart({title: "Time to first token", write: format.ms, series: [
      {label: "p50", colour: "--c-prefix", fill: true}, {label: "p99", colour: "--c-second"}]}),
    inter: chart({title: "Time between tokens", write: format.ms, series: [
      {label: "p50", colour: "--c-prefix", fill: true}, {label: "p99", colour: "--c-second"}]}),
    traffic: chart({title: "Requests and errors", write: format.tokens, series: [
      {label: "requests", colour: "--c-exact", fill: true}, {label: "errors", colour: "--c-error"}]}),
    written: chart({title: "Completion tokens", write: format.tokens, series: [
      {label: "tokens", colour: "--c-semantic", fill: true}]}),
  };
  const start = el("p", {class: "notice", hidden: true}, "No request yet in this time. Point the SDK of an app at ", el("code", null, String(api.address("/v1"))), ", or try the ", el("a", {href: "#/playground"}, "playground"), ".");
  const since = el("p", {class: "muted small"});
  replace(root,
    el("div", {class: "head"}, el("h1", null, title), since,
      el("div", {class: "segments", role: "group", "aria-label": "Span"}, buttons)),
    start, figures, el("div", {class: "grid"}, saved, answered),
    el("div", {class: "grid"}, Object.values(charts).map((one) => one.node)));

  function choose(name) {
    span = name;
    query_changed({span: name === "hour" ? "" : name});
    attempt(load);
  }

  async function load() {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.span === span));
    const wanted = span, overview = await api.get("/admin/overview", {span});
    if (wanted === span) show(overview);
  }

  function show({totals, series, from_s, to_s, step_s, gateways, stale, as_of_s}) {
    replace(since, `${format.time(from_s)} to ${format.time(to_s)}`, gateways > 1 && `, ${gateways} gateways`, stale && as_of_s && `, last known of ${format.time(as_of_s)}`);
    start.hidden = totals.requests > 0 || totals.errors > 0 || stale;
    showFigures(totals);
    showSaved(totals);
    showAnswered(totals);
    const t = series.t;
    charts.tokens.set(t, [series.cached_tokens, series.prompt_tokens.map((all, at) => Math.max(0, all - series.cached_tokens[at]))], step_s);
    charts.hits.set(t, Object.keys(HITS).map((name) => series.hits[name] ?? t.map(() => 0)), step_s);
    charts.first.set(t, [series.first_token_p50_ms, series.first_token_p99_ms], step_s);
    charts.inter.set(t, [series.inter_token_p50_ms, series.inter_token_p99_ms], step_s);
    charts.traffic.set(t, [series.requests, series.errors], step_s);
    charts.written.set(t, [series.completion_tokens], step_s);
  }

  // Breaks between the two only.
  const shares = ({p90, p99}) => [["p90", p90], ["p99", p99]].map((one, at) => [at ? " " : "", el("span", {class: "nowrap"}, `${one[0]} ${format.ms(one[1])}${at ? "" : ","}`)]);

  function showFigures(totals) {
    const all = Object.values(totals.saved), sum = (name) => all.reduce((total, one) => total + (one[name] ?? 0), 0);
    const figure = (label, value, note, main) => el("div", main ? {class: "main"} : null, el("dt", null, label), el("dd", null, value), el("dd", null, note));
    const first = totals.first_token_ms ?? {}, inter = totals.inter_token_ms ?? {};
    refresh(figures,
      figure("Tokens saved", format.tokens(sum("tokens")), "of prompts and answers", true),
      figure("Time saved", format.ms(sum("ms")), "of computing", true),
      figure("Money saved", format.money(addMoney(all.map((one) => one.money))), `spent ${format.money(totals.cost)}`, true),
      figure("Prompt from a cache", format.percent(format.ratio(totals.cached_tokens, totals.prompt_tokens)), `${format.tokens(totals.cached_tokens)} of ${format.tokens(totals.prompt_tokens)}`),
      figure("Requests", format.tokens(totals.requests), totals.errors ? `${format.count(totals.errors)} failed` : "none failed"),
      figure("First token", format.ms(first.p50), shares(first)),
      figure("Between tokens", format.ms(inter.p50), shares(inter)));
  }

  function showSaved({saved: savers}) {
    const most = Math.max(1, ...Object.values(savers).map((one) => one.tokens));
    refresh(saved, table({
      caption: "Saved by", rows: Object.keys(SAVERS).filter((name) => savers[name]),
      columns: [
        {label: "Cache", header: true, value: (name) => el("span", {title: SAVERS[name][2]}, SAVERS[name][0])},
        {label: "Requests", number: true, value: (name) => format.tokens(savers[name].requests)},
        {label: "Tokens", number: true, value: (name) => [format.tokens(savers[name].tokens),
          bar([{label: "tokens", value: savers[name].tokens, colour: SAVERS[name][1]}], most)]},
        {label: "Time", number: true, value: (name) => format.ms(savers[name].ms)},
        {label: "Money", number: true, value: (name) => format.money(savers[name].money)},
      ],
    }));
  }

  function showAnswered({hits}) {
    const parts = Object.entries(HITS).map(([name, [label, colour]]) => ({label, colour, name, value: hits[name] ?? 0}));
    const all = parts.reduce((total, one) => total + one.value, 0);
    refresh(answered, table({
      caption: "Answered by", rows: parts,
      columns: [
        {label: "What", header: true, value: (one) => el("a", {href: `#/requests?hit=${one.name}`}, one.label)},
        {label: "Requests", number: true, value: (one) => format.tokens(one.value)},
        {label: "Share", number: true, value: (one) => format.percent(format.ratio(one.value, all))},
      ],
    }), bar(parts, all, {tall: true}));
  }

  live.on("overview", (overview) => { if (span === "hour") show(overview); });
  every(60, load);
  return () => { for (const one of Object.values(charts)) one.end(); };
}

/** [{"USD": "0.1"}, null, ...] -> {"USD": "0.1"}: what is known. */
export function addMoney(all) {
  const sums = {};
  for (const one of all) for (const [currency, amount] of Object.entries(one ?? {})) sums[currency] = (sums[currency] ?? 0) + Number(amount);
  return sums;
}
