// Why a prompt was computed again: of one request, or of two that are pasted. Both as segments side by side, the place
// where they stop being equal, what that costs in a day, and what to do about it.

import {bar} from "../charts.js";
import {el, field, replace, table} from "../dom.js";

export const title = "Explain";

const ENDPOINTS = [["", "Told by the bodies"], ...["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"].map((one) => [one, one])];

export function render(root, {api, format, query, query_changed, attempt, signal, say}) {
  const problem = el("p", {class: "problem", role: "alert"}), result = el("div", {class: "stack"}), nightly = el("div", {class: "card stack"});
  const byId = el("form", {class: "row card", onsubmit: (event) => { event.preventDefault(); explainOne(); }},
    field({label: "Id of a request", name: "id", required: true, value: query.get("id") ?? "", autocomplete: "off", spellcheck: "false"}),
    el("button", {class: "primary"}, "Explain"));
  const pasted = el("form", {class: "card stack", onsubmit: (event) => { event.preventDefault(); explainTwo(); }},
    el("div", {class: "grid"},
      field({label: "An earlier request", name: "a", type: "textarea", required: true, spellcheck: "false", hint: "Its body, as JSON."}),
      field({label: "A later request", name: "b", type: "textarea", required: true, spellcheck: "false", hint: "Should have found what the earlier one left."})),
    el("div", {class: "filters"},
      field({label: "Sent to", name: "endpoint", options: ENDPOINTS}),
      field({label: "Tenant of the earlier", name: "tenant_a", autocomplete: "off"}),
      field({label: "Tenant of the later", name: "tenant_b", autocomplete: "off"}),
      el("div", null, el("button", {class: "primary"}, "Compare"))));
  replace(root, el("h1", null, title), byId,
    el("details", {open: query.has("compare")}, el("summary", null, "Compare two requests"), pasted), problem, result, nightly);

  function explainOne() {
    const id = byId.elements.id.value.trim();
    query_changed({id});
    return run({id});
  }

  function explainTwo() {
    const form = Object.fromEntries(new FormData(pasted)), body = {};
    for (const name of ["endpoint", "tenant_a", "tenant_b"]) if (form[name].trim()) body[name] = form[name].trim();
    for (const name of ["a", "b"]) {
      try {
        body[name] = JSON.parse(form[name]);
      } catch (error) {
        replace(problem, `The ${name === "a" ? "earlier" : "later"} request is not JSON: ${error.message}`);
        pasted.elements[name].focus();
        return undefined;
      }
    }
    return run(body);
  }

  async function run(body) {
    replace(problem);
    replace(result, el("p", {class: "muted"}, "Comparing …"));
    try {
      show(await api.post("/admin/explain", body, {signal}));
    } catch (error) {
      replace(result);
      if (error.name !== "AbortError") replace(problem, error.message);
    }
  }

  function show(found) {
    const {verdict, text, advice, a, b, differs, per_day: day} = found;
    const rows = Array.from({length: Math.max(a?.length ?? 0, b?.length ?? 0)}, (_, at) => ({at, a: a?.[at], b: b?.[at]}));
    const figure = (label, value, note) => el("div", null, el("dt", null, label), el("dd", null, value), note && el("dd", null, note));
    replace(result,
      el("section", {class: "card stack", "aria-label": "Verdict"},
        el("div", {class: "row"}, el("span", {class: "tag accent"}, verdict.replaceAll("_", " ").replaceAll("-", " ")), el("strong", null, text)),
        advice && el("p", {class: "notice"}, el("strong", null, "What to do: "), advice),
        found.before && el("p", {class: "small"}, "Compared with the earlier request ", el("a", {href: `#/requests/${encodeURIComponent(found.before)}`}, el("code", {class: "wrap"}, found.before)))),
      el("dl", {class: "figures"},
        figure("Equal", format.tokens(found.equal_tokens), "tokens from the beginning"),
        figure("Computed again", format.tokens(found.computed_again_tokens), "tokens behind that place"),
        day && figure("A day", format.tokens(day.requests), "such requests at this rate"),
        day && figure("Tokens a day", format.tokens(day.tokens), "computed again"),
        day && figure("Cost a day", format.money(day.money), day.ms === undefined ? "of these tokens" : `${format.ms(day.ms)} of computing`)),
      differs && whereTheyPart(differs),
      rows.length > 0 && segments(rows, differs));
    say(text);
  }

  function whereTheyPart({segment, message, char, token, a, b}) {
    const place = [["segment", segment], ["message", message], ["character", char], ["token", token]].filter(([, value]) => value !== null && value !== undefined);
    return el("section", {class: "card stack", "aria-labelledby": "parting"},
      el("h2", {id: "parting"}, "Where they stop being equal"),
      el("p", {class: "muted"}, place.map(([name, value]) => `${name} ${format.count(value)}`).join(", ")),
      (a !== null || b !== null) && el("div", {class: "grid"}, [["Earlier", a], ["Later", b]].map(([name, excerpt]) =>
        el("div", {class: "stack"}, el("h3", null, name), excerpt === null ? el("p", {class: "muted"}, "Nothing here.") : el("pre", {tabindex: "0", "aria-label": `${name}: excerpt`}, excerpt)))));
  }

  function segments(rows, differs) {
    const most = Math.max(1, ...rows.flatMap(({a, b}) => [a?.tokens ?? 0, b?.tokens ?? 0]));
    const at = differs?.segment ?? rows.length;
    const side = (own, row) => (own ? [format.count(own.tokens), own.tokens > 0 && bar([{label: row.at < at ? "equal" : "not equal", value: own.tokens, colour: row.at < at ? "--c-prefix" : "--c-miss"}], most)] : "–");
    const state = (row) => (row.at < at ? el("span", {class: "tag good"}, "equal") : row.at === at ? el("span", {class: "tag bad"}, "differs here") : el("span", {class: "tag"}, "computed again"));
    return el("div", {class: "card"}, table({
      caption: "Both prompts, segment by segment", rows,
      columns: [
        {label: "Segment", header: true, value: (row) => format.count(row.at)},
        {label: "Part", class: "break", value: ({a, b}) => part(b ?? a)},
        {label: "Earlier", number: true, class: "side", value: (row) => side(row.a, row)},
        {label: "Later", number: true, class: "side", value: (row) => side(row.b, row)},
        {label: "State", value: state},
      ],
    }));
  }

  const part = (own) => `${own.role ?? own.part}${own.message === null || own.message === undefined ? "" : `, message ${own.message}`}`;

  // -- misses that one change would have saved ------------------------------------------------------------------------

  async function loadNightly() {
    const found = await api.get("/admin/explain/nightly", null, {signal});
    const days = [found, ...found.days];
    const chosen = field({label: "Day", name: "day", options: days.map(({day}, at) => [String(at), at ? day : "Now"]), value: "0", onchange: (event) => misses(days[event.target.value])});
    const holder = el("div", {class: "stack tight"});
    replace(nightly, el("div", {class: "head"}, el("h2", null, "Misses that one change would have saved"), chosen), holder);
    misses(found);

    function misses({day, requests, from_s, to_s, tenants}) {
      const rows = Object.entries(tenants).flatMap(([tenant, own]) => own.map((one) => ({tenant, ...one})));
      replace(holder, table({
        caption: `Misses that one change would have saved, ${day}`, hideCaption: true, rows, empty: "There are none.",
        columns: [
          {label: "Tenant", header: true, class: "break", value: (one) => one.tenant},
          {label: "Cause", class: "break", value: (one) => [el("span", {class: "tag accent"}, one.cause.replaceAll("_", " ")), " ", one.text, one.advice && el("p", {class: "muted small"}, one.advice)]},
          {label: "Requests", number: true, value: (one) => format.count(one.requests)},
          {label: "Tokens again", number: true, value: (one) => format.tokens(one.tokens)},
          {label: "Cost", number: true, value: (one) => format.money(one.money)},
          {label: "Example", value: (one) => el("a", {href: `#/explain?id=${encodeURIComponent(one.example.at(-1))}`, "aria-label": `Explain a request of ${one.tenant}: ${one.cause.replaceAll("_", " ")}`}, "Explain")},
        ],
      }), el("p", {class: "muted small"}, requests
        ? `From ${format.count(requests)} requests, ${format.fullTime(from_s)} to ${format.fullTime(to_s)}: the latest 2,000 at most; where a process has more than 50 a second, a sample of them.`
        : "No requests are known."));
    }
  }

  if (query.get("id")) explainOne();
  attempt(loadNightly);
}
