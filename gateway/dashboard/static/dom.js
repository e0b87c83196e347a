// Builds elements. Every value may be hostile (names of models and tenants are clients' own): text becomes a text node,
// never HTML, and an address may only lead to this server.

const LINK = /^(#|\.{0,2}\/(?!\/)|[a-z][a-z0-9/_-]*$)/i;

/** el("a", {href, class, onclick, "aria-label", hidden: true}, ...children): children are nodes, texts, or lists of
 *  these; null, undefined and false are left out. An attribute that is null, undefined or false is not set. */
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "href" && !LINK.test(value)) throw new Error("an address that leads elsewhere");
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value" && "value" in node) node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** The node, with these children in place of those that it had. */
export function replace(node, ...children) {
  node.textContent = "";
  append(node, children);
  return node;
}

/** The same for figures that come again and again: nothing changes while the focus or a selection is in there. */
export function refresh(node, ...children) {
  const selection = getSelection();
  const busy = node.contains(document.activeElement) || (!selection.isCollapsed && node.contains(selection.anchorNode));
  return busy ? node : replace(node, ...children);
}

/** A table that scrolls by itself on a narrow screen. columns: [{label, value: row => node or text, number: bool,
 *  header: bool (names the row), class}]; `hideCaption` leaves the caption to screen readers. */
export function table({caption, columns, rows, hideCaption = false, empty = "Nothing to show."}) {
  const body = rows.length
    ? rows.map((row) => tableRow(columns, row))
    : el("tr", null, el("td", {colspan: columns.length, class: "muted"}, empty));
  return el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
    el("table", null,
      el("caption", hideCaption ? {class: "unseen"} : null, caption),
      el("thead", null, el("tr", null, columns.map((one) =>
        el("th", {scope: "col", class: classes(one)}, one.label)))),
      el("tbody", null, body)));
}

export function tableRow(columns, row) {
  return el("tr", null, columns.map((one) =>
    el(one.header ? "th" : "td", {scope: one.header ? "row" : null, class: classes(one)}, one.value(row))));
}

function classes(column) {
  return [column.number ? "num" : "", column.class ?? ""].join(" ").trim() || null;
}

/** A labelled field of a form: {label, name, type or options: [[value, text]], value, hint, ...attributes}. */
export function field({label, options, hint, type = "text", value = "", ...more}) {
  const id = `f-${++fields}`;
  const attributes = {id, ...more, "aria-describedby": hint ? `${id}-hint` : null};
  const control = options
    ? el("select", attributes, options.map(([key, text]) => el("option", {value: key}, text)))
    : el(type === "textarea" ? "textarea" : "input", type === "textarea" ? attributes : {...attributes, type});
  control.value = value;
  return el("div", {class: "field"}, el("label", {for: id}, label), control, hint && el("p", {id: `${id}-hint`, class: "hint"}, hint));
}
let fields = 0;

/** A dialog that asks something; resolves to what `submit(form data)` returned, or null when it was closed.
 *  `submit` may throw: its message is shown and the dialog stays. */
export function ask({title, body, action = "OK", danger = false, submit = () => true, closable = true, cancel = closable}) {
  return new Promise((resolve) => {
    const problem = el("p", {class: "problem", role: "alert"});
    const button = el("button", {class: danger ? "danger" : "primary"}, action);
    const form = el("form", {method: "dialog"},
      el("h2", {id: "dialog-title"}, title), body, problem,
      el("div", {class: "actions"},
        cancel && el("button", {type: "button", class: "quiet", onclick: () => dialog.close()}, "Cancel"), button));
    const dialog = el("dialog", {"aria-labelledby": "dialog-title"}, form);
    let result = null;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      button.disabled = true;
      replace(problem);
      try {
        result = await submit(new FormData(form));
        dialog.close();
      } catch (error) {
        replace(problem, error.message);
      } finally {
        button.disabled = false;
      }
    });
    if (!closable) dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      if (!closable && result === null) { dialog.showModal(); return; }  // a browser takes a second Escape for granted
      dialog.remove();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
