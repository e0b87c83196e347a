// Tenants of the file and those made at run time: limits, budgets, models, use, and keys, each of which is shown once.

import {ask, el, field, refresh, replace, table} from "../dom.js";

export const title = "Tenants";

const EVERY_S = 10, DAY_S = 86_400;
const LIMITS = [
  ["requests_per_minute", "Requests a minute"], ["tokens_per_minute", "Tokens a minute"],
  ["input_tokens_per_minute", "Prompt tokens a minute"], ["output_tokens_per_minute", "Answer tokens a minute"],
  ["max_in_flight", "Requests at a time"],
];
const WEIGHT = ["weight", "Weight"];
const PERIODS = [["month", "A month (UTC)"], ["day", "A day (UTC)"]];
const HARD = [["true", "Requests are refused"], ["false", "A header and a metric tell"]];
const MODES = [["", "As for all"], ["on", "on"], ["ask", "ask"], ["off", "off"]];

export function render(root, {api, format, every, attempt, signal, say}) {
  const note = el("p", {class: "notice", role: "status", hidden: true}), list = el("div"), keys = el("div");
  const makeTenant = el("button", {type: "button", onclick: () => edit(null)}, "Make a tenant");
  const makeKey = el("button", {type: "button", class: "primary", onclick: () => issue()}, "Make a key");
  replace(root, el("div", {class: "head"}, el("h1", null, title), el("div", {class: "row"}, makeTenant, makeKey)), note,
    el("div", {class: "card"}, list), el("div", {class: "card stack"}, keys,
      el("p", {class: "muted small"}, "Keys of the file are not listed.")));
  let names = [];

  // -- what is there --------------------------------------------------------------------------------------------------

  async function load(put = refresh) {
    const today = new Date().toISOString().slice(0, 10);  // the ledger's days are of UTC
    const ledger = (by, from) => api.get("/admin/ledger", {group_by: by, from, to: today}, {signal})
      .then(({rows}) => new Map(rows.map((row) => [row[by], row])), (error) => (error.name === "AbortError" ? Promise.reject(error) : null));
    const first = `${today.slice(0, 8)}01`;
    const [found, made, day, month, keyMonth] = await Promise.all([api.get("/admin/tenants", null, {signal}), api.get("/admin/keys", null, {signal}),
      ledger("tenant", today), ledger("tenant", first), ledger("key", first)]);
    names = found.tenants.map((one) => one.name);
    const wrong = [(found.stale || made.stale) && "Redis is unreachable: these are the tenants and keys that were last known, and none can be changed.",
      !(day && month && keyMonth) && "The ledger is not to be had now, so that use is not shown."].filter(Boolean).join(" ");
    if (note.textContent !== wrong) replace(note, wrong);
    note.hidden = !wrong;
    const counts = new Map();
    for (const key of made.keys) counts.set(key.tenant, (counts.get(key.tenant) ?? 0) + 1);
    const use = (book, name) => {
      if (!book) return "–";
      const {requests = 0, used = {}} = book.get(name) ?? {};
      const sum = (used.prompt_tokens ?? 0) + (used.completion_tokens ?? 0);
      return [`${format.tokens(requests)} requests`, el("br"), `${format.tokens(sum)} tokens`, used.cost && [el("br"), format.money(used.cost)]];
    };
    put(list, table({
      caption: "Tenants", rows: found.tenants, empty: "There are no tenants.",
      columns: [
        {label: "Name", header: true, class: "break", value: (one) => one.name},
        {label: "From", value: (one) => el("span", {class: `tag ${one.source === "file" ? "" : "accent"}`}, one.source === "file" ? "file" : "run time")},
        {label: "Limits", class: "wide", value: limits},
        {label: "Models", class: "break", value: (one) => models(one)},
        {label: "Today", number: true, value: (one) => use(day, one.name)},
        {label: "This month", number: true, value: (one) => use(month, one.name)},
        {label: "Keys made here", number: true, value: (one) => format.count(counts.get(one.name) ?? 0)},
        {label: el("span", {class: "unseen"}, "Change"), value: (one) => el("div", {class: "row"},
          el("button", {type: "button", "aria-label": `Make a key for ${one.name}`, onclick: () => issue(one.name)}, "Key"),
          one.source !== "file" && [
            el("button", {type: "button", "aria-label": `Change ${one.name}`, onclick: () => edit(one)}, "Change"),
            el("button", {type: "button", class: "danger", "aria-label": `Remove ${one.name}`, onclick: () => remove(one, counts.get(one.name))}, "Remove")])},
      ],
    }));
    put(keys, table({
      caption: "Keys made here", rows: made.keys, empty: "No key was made here.",
      columns: [
        {label: "Name", header: true, class: "break", value: (key) => [key.name, el("br"), el("code", {class: "muted small"}, key.id)]},
        {label: "Tenant", class: "break", value: (key) => key.tenant},
        {label: "Limits", class: "wide", value: (key) => limits(key, "as its tenant")},
        {label: "Models", class: "break", value: (key) => models(key)},
        {label: "This month", number: true, value: (key) => use(keyMonth, key.id)},
        {label: "Since", number: true, value: (key) => el("span", {title: format.fullTime(key.created_s)}, format.time(key.created_s))},
        {label: "Until", number: true, value: (key) => (key.expired ? el("span", {class: "tag bad"}, "expired") : key.expires_s === null ? "no end" : format.fullTime(key.expires_s))},
        {label: el("span", {class: "unseen"}, "Change"), value: (key) => el("div", {class: "row"},
          el("button", {type: "button", "aria-label": `Change the key ${key.name}`, onclick: () => editKey(key)}, "Change"),
          el("button", {type: "button", class: "danger", "aria-label": `Delete the key ${key.name}`, onclick: () => drop(key)}, "Delete"))},
      ],
    }));
  }

  const models = (one) => (one.models?.length ? el("ul", {class: "plain"}, one.models.map((name) => el("li", null, name))) : "all");

  function limits(one, none = "as for all") {
    const own = [...LIMITS, WEIGHT].filter(([name]) => one[name] !== undefined).map(([name, label]) => `${label}: ${one[name] === 0 ? "no limit" : format.count(one[name])}`);
    if (one.response_cache !== undefined) own.push(`Response cache: ${one.response_cache}`);
    const state = one.budget_state;
    if (state) {
      const money = (amount) => format.money({[state.currency]: amount});
      const over = Number(state.used) - Number(state.limit);
      const left = over > 0 ? `${money(over)} over` : `${money(state.left)} left`;
      const text = `Budget: ${left} of ${money(state.limit)}`;
      own.push(Number(state.left) <= state.limit / 10 ? el("span", {class: "tag bad"}, text) : text,
        `until ${format.fullTime(state.reset_s)}${state.hard ? "" : ", not enforced"}`);
    }
    return own.length ? el("ul", {class: "plain small"}, own.map((text) => el("li", null, text))) : none;
  }

  // -- what changes it ------------------------------------------------------------------------------------------------

  async function changed(text, button) {
    say(text);
    await attempt(() => load(replace));
    if (!root.contains(document.activeElement)) button.focus();  // the one that had the focus is gone
  }

  const amounts = (one, more = []) => [
    el("div", {class: "grid small"}, [...LIMITS, ...more].map(([name, label]) =>
      field({label, name, type: "number", min: name === "weight" ? 0.01 : 0, step: name === "weight" ? "any" : 1, value: one?.[name] ?? ""}))),
    el("div", {class: "grid small"},
      field({label: "Budget", name: "budget", type: "number", min: 0.000001, max: 1_000_000, step: "any", value: one?.budget ?? "", hint: "Money in the currency of the prices."}),
      field({label: "Budget for", name: "budget_period", options: PERIODS, value: one?.budget_period ?? "month"})),
    field({label: "Once it is spent", name: "budget_hard", options: HARD, value: String(one?.budget_hard ?? true)}),
  ];

  /** The body of a change; what is not set is null. */
  function read(form, more = []) {
    const body = {models: lines(form.get("models"))};
    for (const [name] of [...LIMITS, ["budget"], ...more]) body[name] = form.get(name) === "" ? null : Number(form.get(name));
    const has = body.budget !== null;
    return {...body, budget_period: has ? form.get("budget_period") : null, budget_hard: has ? form.get("budget_hard") === "true" : null};
  }

  const set = (body) => Object.fromEntries(Object.entries(body).filter(([, value]) => value !== null));

  const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

  async function edit(one) {
    const done = await ask({
      title: one ? `Change ${one.name}` : "Make a tenant", action: one ? "Change" : "Make",
      body: [
        !one && field({label: "Name", name: "name", required: true, maxlength: 64, autocomplete: "off", spellcheck: "false", hint: "Letters, digits, dots, dashes and underscores."}),
        amounts(one, [WEIGHT]),
        el("p", {class: "muted small"}, "What is empty is as for all tenants; 0 is no limit."),
        field({label: "Response cache", name: "response_cache", options: MODES, value: one?.response_cache ?? ""}),
        field({label: "Models", name: "models", type: "textarea", value: one?.models?.join("\n") ?? "", hint: "A name or pattern, such as gpt-*, on each line; none is all."}),
      ],
      submit: async (form) => {
        const body = {...read(form, [WEIGHT]), response_cache: form.get("response_cache") || null};
        if (one) return api.patch(`/admin/tenants/${encodeURIComponent(one.name)}`, body);
        return api.post("/admin/tenants", {name: form.get("name").trim(), ...set(body)});
      },
    });
    if (done) await changed(`The tenant ${done.name} was ${one ? "changed" : "made"}.`, makeTenant);
  }

  async function remove(one, many = 0) {
    const done = await ask({
      title: "Remove this tenant?", action: "Remove", danger: true,
      body: el("p", {class: "wrap"}, `${one.name} and its ${format.count(many)} keys: requests with them are refused. Its use stays in the ledger.`),
      submit: () => api.del(`/admin/tenants/${encodeURIComponent(one.name)}`),
    });
    if (done) await changed(`The tenant ${one.name} was removed.`, makeTenant);
  }

  async function issue(tenant = names[0]) {
    const made = await ask({
      title: "Make a key", action: "Make",
      body: [
        field({label: "Tenant", name: "tenant", options: names.map((name) => [name, name]), value: tenant ?? ""}),
        field({label: "Name", name: "name", required: true, maxlength: 256, autocomplete: "off", hint: "What the key is for."}),
        field({label: "Days until it ends", name: "days", type: "number", min: 1, max: 36_500, hint: "Empty: no end."}),
        keyFields(null),
      ],
      submit: (form) => api.post("/admin/keys", {
        tenant: form.get("tenant"), name: form.get("name"), ...set(read(form)),
        ...(form.get("days") && {expires_s: Math.round(Date.now() / 1000) + Number(form.get("days")) * DAY_S}),
      }),
    });
    if (!made) return;
    await showOnce(made);
    await changed(`A key for ${made.tenant} was made.`, makeKey);
  }

  const keyFields = (key) => [
    amounts(key),
    el("p", {class: "muted small"}, "Of this key alone, beside those of its tenant; what is empty has no limit."),
    field({label: "Models", name: "models", type: "textarea", value: key?.models?.join("\n") ?? "", hint: "As of a tenant: one on each line; none is all that the tenant may use."}),
  ];

  async function editKey(key) {
    const done = await ask({
      title: `Change the key ${key.name}`, action: "Change",
      body: [field({label: "Name", name: "name", required: true, maxlength: 256, autocomplete: "off", value: key.name}), keyFields(key)],
      submit: (form) => api.patch(`/admin/keys/${encodeURIComponent(key.id)}`, {name: form.get("name"), ...read(form)}),
    });
    if (done) await changed("The key was changed.", makeKey);
  }

  function showOnce(made) {
    const told = el("p", {class: "small", role: "status"});
    const shown = field({label: "The key", name: "made", value: made.key, readonly: true, autocomplete: "off", spellcheck: "false", class: "mono", hint: "It is shown only now: of it the gateway keeps a hash."});
    const copy = async () => {
      shown.querySelector("input").select();
      try {
        await navigator.clipboard.writeText(made.key);
        replace(told, "Copied.");
      } catch {  // not over plain HTTP from another machine
        replace(told, document.execCommand("copy") ? "Copied." : "The browser does not allow it: the key is selected, copy it yourself.");
      }
    };
    return ask({
      title: "The key was made", action: "Done", closable: false,
      body: [el("p", {class: "wrap"}, `${made.name}, for ${made.tenant}.`), shown, el("div", {class: "row"}, el("button", {type: "button", onclick: copy}, "Copy"), told)],
    });
  }

  async function drop(key) {
    const done = await ask({
      title: "Delete this key?", action: "Delete", danger: true,
      body: el("p", {class: "wrap"}, `${key.name}, of ${key.tenant}: requests with it are refused from then on.`),
      submit: () => api.del(`/admin/keys/${encodeURIComponent(key.id)}`),
    });
    if (done) await changed("The key was deleted.", makeKey);
  }

  every(EVERY_S, () => load());
}
