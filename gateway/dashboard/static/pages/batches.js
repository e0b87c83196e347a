// Batch jobs of all tenants, with progress, errors and their end.

import {bar} from "../charts.js";
import {ask, el, replace, table} from "../dom.js";

export const title = "Batches";

const EVERY_S = 5;
const OPEN = new Set(["validating", "in_progress", "finalizing", "cancelling"]);
const TAGS = {completed: "good", failed: "bad", expired: "bad", cancelling: "warn", cancelled: "warn", in_progress: "accent", finalizing: "accent"};
const PARTS = [["succeeded", "--c-prefix"], ["failed", "--c-error"], ["expired", "--c-batch"], ["cancelled", "--c-upstream"]];

export function render(root, {api, format, query, every, say}) {
  const after = query.get("after") ?? "";
  const list = el("div", {class: "card"}), more = el("p", {class: "row"});
  replace(root, el("h1", null, title), list, more);
  let newest = [], text = "";

  async function load() {
    const page = await api.get("/admin/batches", {after});
    if (JSON.stringify(page) === text) return;  // a table that is new takes the focus away
    text = JSON.stringify(page);
    newest = page.batches;
    const focus = document.activeElement?.dataset?.cancel;
    replace(list, table({caption: "Batches, newest first", columns, rows: newest, hideCaption: true, empty: "There are no batches."}));
    if (focus) list.querySelector(`[data-cancel="${CSS.escape(focus)}"]`)?.focus();
    replace(more,
      after && el("a", {href: "#/batches"}, "Newest"),
      page.has_more && el("a", {href: `#/batches?after=${encodeURIComponent(newest.at(-1).id)}`}, "Older"));
  }

  async function cancel(job) {
    const done = await ask({
      title: "Cancel this batch?", action: "Cancel the batch", danger: true,
      body: el("p", null, el("code", {class: "wrap"}, job.id), ` of ${job.tenant}: ${format.count(job.counts.processing)} requests have no answer yet. Those that run are still answered.`),
      submit: () => api.post(`/admin/batches/${encodeURIComponent(job.id)}/cancel`),
    });
    if (done) { say("The batch is being cancelled."); await load(); }
  }

  const columns = [
    {label: "Batch", header: true, class: "break", value: (job) => [el("code", null, job.id), el("br"), el("span", {class: "muted small"}, job.endpoint)]},
    {label: "Tenant", class: "break", value: (job) => job.tenant},
    {label: "Model", class: "break", value: (job) => job.model || "–"},
    {label: "State", value: (job) => el("span", {class: `tag ${TAGS[job.status] ?? ""}`}, job.status.replace("_", " "))},
    {label: "Progress", class: "wide", value: ({counts}) => {
      const done = counts.total - counts.processing;
      return [`${format.count(done)} of ${format.count(counts.total)}`, counts.failed + counts.expired > 0 && el("span", {class: "muted"}, `, ${format.count(counts.failed + counts.expired)} failed`),
        bar(PARTS.map(([name, colour]) => ({label: name, value: counts[name], colour})), counts.total)];
    }},
    {label: "Errors", number: true, value: (job) => (job.errors ? el("span", {class: "tag bad"}, format.count(job.errors)) : "0")},
    {label: "Prompt", number: true, value: (job) => format.tokens(job.prompt_tokens)},
    {label: "Cached", number: true, value: (job) => format.percent(format.ratio(job.cached_tokens, job.prompt_tokens))},
    {label: "Answers", number: true, value: (job) => format.tokens(job.completion_tokens)},
    {label: "Since", number: true, value: (job) => el("span", {title: format.fullTime(job.created_s)}, format.time(job.created_s))},
    {label: "Took", number: true, value: (job) => (job.ended_s ? format.seconds(job.ended_s - job.created_s) : "–")},
    {label: el("span", {class: "unseen"}, "Cancel"), value: (job) => OPEN.has(job.status) && job.status !== "cancelling" &&
      el("button", {type: "button", class: "danger", "data-cancel": job.id, "aria-label": `Cancel ${job.id}`, onclick: () => cancel(job)}, "Cancel")},
  ];
  every(EVERY_S, load);
}
