// The response cache: what is remembered by owner and model, search and removal; and how far the semantic cache, which
// answers by meaning, keeps to its bound.

import {ask, el, field, replace, table} from "../dom.js";

export const title = "Response cache";

const EVERY_S = 10, PAGE = 50;
const AGES = [["", "Any age"], ["60", "A minute"], ["3600", "An hour"], ["86400", "A day"], ["604800", "A week"]];
const WHY = {
  off: "the cache is off", "not-asked": "not asked for", random: "not deterministic", sampling: "not deterministic", tools: "has tools",
};

export function render(root, {api, format, query, query_changed, every, signal, say}) {
  const figures = el("dl", {class: "figures"}), owners = el("div", {class: "card"}), semantic = el("div", {class: "stack"});
  const found = el("div", {class: "stack"}), problem = el("p", {class: "problem", role: "alert"});
  const more = el("button", {type: "button", hidden: true, onclick: () => search(true)}, "More");
  const filters = el("form", {class: "filters", onsubmit: (event) => { event.preventDefault(); search(false); }},
    field({label: "Tenant", name: "tenant", value: query.get("tenant") ?? ""}),
    field({label: "Namespace", name: "namespace", value: query.get("namespace") ?? ""}),
    field({label: "Model", name: "model", value: query.get("model") ?? ""}),
    field({label: "Id, or its beginning", name: "id", value: query.get("id") ?? "", pattern: "[0-9a-f]{1,32}"}),
    field({label: "Older than", name: "older_than_s", options: AGES, value: query.get("older_than_s") ?? ""}),
    field({label: "Younger than", name: "younger_than_s", options: AGES, value: query.get("younger_than_s") ?? ""}),
    el("div", {class: "row"}, el("button", {class: "primary"}, "Search"),
      el("button", {type: "button", class: "danger", onclick: remove}, "Remove …")));
  replace(root, el("h1", null, title), figures, owners,
    el("section", {class: "card stack", "aria-labelledby": "answers"}, el("h2", {id: "answers"}, "Answers"), filters, problem, found, el("div", null, more)),
    semantic);
  let rows = [], next = null;

  // -- what is there --------------------------------------------------------------------------------------------------

  async function load() {
    const [kept, stats, ledger] = await Promise.all([
      api.get("/admin/cache/stats", null, {signal}), api.get("/admin/stats", null, {signal}),
      api.get("/admin/ledger", {group_by: "tenant,model"}, {signal})]);
    const cache = stats.response_cache, outcomes = cache.outcomes;
    const hits = ["exact", "shared", "semantic"].map((name) => outcomes[name] ?? 0);
    const all = Object.values(outcomes).reduce((sum, one) => sum + one, 0);
    const figure = (label, value, note) => el("div", null, el("dt", null, label), el("dd", null, value), el("dd", null, note));
    replace(figures,
      figure("Answers", format.count(kept.total.entries), `${format.bytes(kept.total.bytes)}, the oldest ${format.seconds(kept.total.oldest_s)}`),
      figure("Hit rate", format.percent(format.ratio(hits[0] + hits[1] + hits[2], all)), `of ${format.tokens(all)} requests since the start`),
      figure("The same again", format.count(hits[0]), "exact hits"),
      figure("At the same time", format.count(hits[1]), `shared; ${format.count(cache.in_flight)} in flight`),
      figure("Same meaning", format.count(hits[2]), "semantic hits"),
      figure("Not looked up", format.count(Object.values(cache.bypassed).reduce((sum, one) => sum + one, 0)), most(cache.bypassed)));
    showOwners(kept.rows, new Map(ledger.rows.map((row) => [JSON.stringify([row.tenant, row.model]), row])));
    showSemantic(cache.semantic);
  }

  function most(counts) {
    const [name] = Object.entries(counts).filter(([, count]) => count).sort((a, b) => b[1] - a[1])[0] ?? [];
    return name ? `mostly: ${WHY[name] ?? name}` : "none";
  }

  function showOwners(kept, ledger) {
    const hits = (row) => ledger.get(JSON.stringify([row.tenant, row.model]))?.saved;
    replace(owners, table({
      caption: "What is remembered, and what it saved in 30 days", rows: kept, empty: "Nothing is remembered.",
      columns: [
        {label: "Owner", header: true, class: "break", value: (row) => row.tenant ?? [row.namespace, el("span", {class: "muted"}, " (namespace)")]},
        {label: "Model", class: "break", value: (row) => row.model},
        {label: "Answers", number: true, value: (row) => el("a", {href: address(row)}, format.count(row.entries))},
        {label: "Size", number: true, value: (row) => format.bytes(row.bytes)},
        {label: "Oldest", number: true, value: (row) => format.seconds(row.oldest_s)},
        {label: "Exact hits", number: true, value: (row) => format.count(hits(row)?.exact?.requests)},
        {label: "Semantic hits", number: true, value: (row) => format.count(hits(row)?.semantic?.requests)},
        {label: "Saved", number: true, value: (row) => format.money(hits(row)?.exact?.money)},
      ],
    }));
  }

  const address = ({tenant, namespace, model}) => `#/cache?${new URLSearchParams({...(tenant ? {tenant} : {namespace}), model})}`;

  // -- search and removal ---------------------------------------------------------------------------------------------

  const chosen = () => Object.fromEntries([...new FormData(filters)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value));

  async function search(further) {
    replace(problem);
    if (!filters.reportValidity()) return;
    query_changed(chosen());
    try {
      const page = await api.get("/admin/cache", {...chosen(), limit: PAGE, after: further ? next : ""}, {signal});
      rows = further ? [...rows, ...page.data] : page.data;
      next = page.next;
    } catch (error) {
      if (error.name !== "AbortError") replace(problem, error.message);
      return;
    }
    replace(found, answers(rows, "Answers found, the latest first"));
    more.hidden = !next;
    say(`${format.count(rows.length)}${next ? " or more" : ""} answers.`);
  }

  const answers = (some, caption) => table({
    caption, rows: some, hideCaption: true, empty: "No answer is remembered that fits.",
    columns: [
      {label: "Id", header: true, value: (one) => el("button", {type: "button", class: "text mono", title: one.id, onclick: () => open(one)}, one.id.slice(0, 12))},
      {label: "Owner", class: "break", value: (one) => one.tenant ?? `${one.namespace} (namespace)`},
      {label: "Model", class: "break", value: (one) => one.model},
      {label: "Age", number: true, value: (one) => format.seconds(Math.round(one.age_s))},
      {label: "Ends", number: true, value: (one) => el("span", {title: format.fullTime(one.expires_s)}, format.time(one.expires_s))},
      {label: "Size", number: true, value: (one) => format.bytes(one.bytes)},
    ],
  });

  async function open(one) {
    let answer = one, text = "What answers say is shown where auth.admin_content is set.";
    try {
      answer = await api.get(`/admin/cache/${one.id}`, null, {signal});
      answer = await api.get(`/admin/cache/${one.id}`, {content: "true"}, {signal});
      text = null;
    } catch (error) {
      if (error.status !== 403) text = error.message;
    }
    const pairs = [
      ["Id", el("code", {class: "wrap"}, one.id)], ["Owner", one.tenant ?? one.namespace], ["Model", one.model],
      ["Made", format.fullTime(one.created_s)], ["Ends", format.fullTime(one.expires_s)],
      ["Tokens", `${format.count(answer.prompt_tokens)} of the prompt, ${format.count(answer.completion_tokens)} of the answer`],
    ];
    const remove_it = await ask({
      title: "Remembered answer", action: "Remove …", danger: true,
      body: [el("dl", {class: "pairs"}, pairs.map(([name, value]) => [el("dt", null, name), el("dd", null, value)])),
        text === null ? el("pre", {tabindex: "0"}, answer.text) : el("p", {class: "muted small"}, text)],
    });
    if (remove_it) await confirmed({id: one.id});
  }

  function remove() {
    if (filters.reportValidity()) confirmed(chosen());
  }

  /** Shows what would be removed, and removes it when that is confirmed. */
  async function confirmed(choice) {
    replace(problem);
    const body = Object.fromEntries(Object.entries(choice).map(([name, value]) => [name, name.endsWith("_s") ? Number(value) : value]));
    if (!Object.keys(body).length) body.everything = true;
    try {
      const dry = await api.post("/admin/cache/invalidate", body);
      const removed = await ask({
        title: dry.would_remove === 1 ? "Remove 1 answer?" : `Remove ${format.count(dry.would_remove)} answers?`, action: "Remove", danger: true,
        body: [body.everything && el("p", null, "Nothing is chosen: these are all answers of all tenants."),
          el("p", null, `${format.bytes(dry.bytes)} in all.`, dry.would_remove > dry.latest.length ? ` The latest ${dry.latest.length}:` : ""),
          el("ul", {class: "plain small"}, dry.latest.map((one) => el("li", {class: "wrap"}, el("code", null, one.id.slice(0, 12)), ` ${one.tenant ?? one.namespace}, ${one.model}, ${format.seconds(Math.round(one.age_s))} old`)))],
        submit: () => api.post("/admin/cache/invalidate", {...body, confirm: dry.confirm}),
      });
      if (!removed) return;
      await Promise.all([load(), search(false)]);
      say(`${format.count(removed.removed)} answers were removed.`);
    } catch (error) {
      if (error.name !== "AbortError") replace(problem, error.message);
    }
  }

  // -- by meaning -----------------------------------------------------------------------------------------------------

  const share = (value) => (value < 0.1 ? `${(value * 100).toFixed(2)} %` : format.percent(value));

  function showSemantic({outcomes, spaces, last_wrong: wrong = []}) {
    const owner = (one) => one.owner.replace(/^\w+:/, "");
    replace(semantic, el("section", {class: "card stack", "aria-labelledby": "meaning"},
      el("h2", {id: "meaning"}, "By meaning"),
      outcomes ? el("p", {class: "muted"}, Object.entries(outcomes).sort((a, b) => b[1] - a[1]).map(([name, count]) => `${name} ${format.count(count)}`).join(", ") || "No request was looked up yet.")
        : el("p", {class: "muted"}, "The semantic cache is off."),
      spaces?.length > 0 && table({
        caption: "Wrong answers against the bound, by owner and model", rows: spaces, hideCaption: true,
        columns: [
          {label: "Owner", header: true, class: "break", value: owner},
          {label: "Model", class: "break", value: (one) => one.model},
          {label: "State", value: (one) => (one.closed ? el("span", {class: "tag warn", title: "Nothing is a hit until there are more requests"}, "closed") : el("span", {class: "tag good"}, "open"))},
          {label: "Questions", number: true, value: (one) => format.count(one.entries)},
          {label: "Requests", number: true, value: (one) => format.count(one.requests)},
          {label: "Hits", number: true, value: (one) => format.count(one.hits)},
          {label: "Audits", number: true, value: (one) => format.count(one.audits)},
          {label: "Wrong hits (95 %)", number: true, value: (one) => (one.audits ? `${share(one.wrong_share)} (${share(one.wrong_share_low)} to ${share(one.wrong_share_high)})` : "no audit yet")},
          {label: "Wrong of all", number: true, value: (one) => (one.audits ? share(one.wrong_requests) : "–")},
          {label: "Bound", number: true, value: (one) => share(one.bound)},
          {label: "Bar", number: true, value: (one) => el("span", {title: "The least probability that is a hit"}, one.bar.toFixed(3))},
        ],
      }),
      wrong.length > 0 && table({
        caption: "The last hits that an audit found wrong", rows: wrong.sort((a, b) => b.at_s - a.at_s),
        columns: [
          {label: "When", header: true, value: (one) => el("span", {title: format.fullTime(one.at_s)}, format.time(one.at_s))},
          {label: "Owner", class: "break", value: owner},
          {label: "Model", class: "break", value: (one) => one.model},
          {label: "Similarity", number: true, value: (one) => one.similarity.toFixed(3)},
          {label: "Probability", number: true, value: (one) => one.probability.toFixed(3)},
          {label: "Asked", class: "break", value: (one) => one.question ?? el("span", {class: "muted"}, "not shown")},
          {label: "Answered as", class: "break", value: (one) => one.answered_as ?? el("span", {class: "muted"}, "not shown")},
        ],
      })));
  }

  every(EVERY_S, load);
  search(false);
}
