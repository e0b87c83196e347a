// Charts over time, drawn by uPlot, with a legend of our own and the same figures as a table.

import {el, refresh, replace, table} from "./dom.js";
import * as format from "./format.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A chart, as {node, set(times, values), end}.
 *
 *  series  [{label, colour: name of a CSS variable, fill}], in the order of `values` (lists with numbers or null)
 *  write   a number as text;  stacked  whether each stands on those before it;  unit_s  distance of two points */
export function chart({title, series, write, stacked = false, note = ""}) {
  const plot = el("div", {class: "plot", role: "img", "aria-label": `${title}: a chart; the same figures are in the table below it.`});
  const keys = el("ul", {class: "keys"});
  const rows = el("div"), details = el("details", null, el("summary", {class: "small"}, "As a table"), rows);
  const node = el("figure", {class: "card chart"},
    el("figcaption", null, el("h2", null, title), note && el("span", {class: "small muted"}, note)), keys, plot, details);
  let times = [], values = series.map(() => []), step_s = 60, drawn = null;

  const legend = (index) => replace(keys, series.map((one, at) => el("li", null,
    el("i", {style: {"--colour": `var(${one.colour})`}}), one.label, " ",
    index === null ? null : el("b", null, write(values[at][index])))),
  index === null ? null : el("li", null, format.step(times[index], step_s)));

  const pointed = ({cursor: {idx}}) => legend(idx === null || idx === undefined ? null : Math.min(idx, times.length - 1));

  function data() {
    if (!stacked) return [times, ...values];
    const sums = [];
    values.forEach((own, at) => sums.push(own.map((value, index) => (value ?? 0) + (at ? sums[at - 1][index] : 0))));
    // A step has the width of its time: the last one ends where the next would begin.
    return [[...times, times.at(-1) + step_s], ...sums.map((own) => [...own, own.at(-1)])];
  }

  function draw() {
    drawn?.destroy();
    const text = css("--muted"), line = css("--line");
    const axis = {stroke: text, font: "12px system-ui, sans-serif", grid: {stroke: line, width: 1}, ticks: {show: false}};
    const bands = stacked ? series.slice(1).map((_, at) => ({series: [at + 2, at + 1]})) : [];
    drawn = new uPlot({
      width: Math.max(plot.clientWidth, 100), height: plot.clientHeight || 184, padding: [8, 16, 0, 0], bands,
      cursor: {y: false, drag: {x: false, y: false}, points: {show: !stacked}},
      legend: {show: false},
      scales: {x: {time: true}, y: {range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1]}},
      axes: [
        {...axis, space: 70, size: 24, values: (_, at) => at.map((second) => format.step(second, step_s))},
        {...axis, size: 58, space: 36, values: (_, at) => at.map((value) => (value === null ? "" : write(value)))},
      ],
      series: [{}, ...series.map((one) => {
        const colour = css(one.colour);
        return {
          label: one.label, stroke: colour, width: stacked ? 1 : 1.8, spanGaps: false, points: stacked ? {show: false} : {show: true, size: 4, fill: colour, filter: alone},
          fill: stacked ? `${colour}b0` : one.fill ? `${colour}22` : undefined,
          paths: stacked ? uPlot.paths.stepped({align: 1}) : undefined,
        };
      })],
      hooks: {setCursor: [pointed]},
    }, data(), plot);
    legend(null);
  }

  function fillTable() {
    if (!details.open) return;
    const columns = [
      {label: "Time", header: true, value: (at) => format.step(times[at], step_s)},
      ...series.map((one, index) => ({label: one.label, number: true, value: (at) => write(values[index][at])})),
    ];
    const full = times.map((_, at) => at).filter((at) => values.some((own) => own[at])).reverse();
    const top = rows.firstChild?.scrollTop ?? 0;
    refresh(rows, table({caption: title, columns, rows: full, hideCaption: true, empty: "Nothing in this time."}));
    rows.firstChild.scrollTop = top;
  }

  details.addEventListener("toggle", fillTable);
  const resized = new ResizeObserver(() => drawn?.setSize({width: Math.max(plot.clientWidth, 100), height: plot.clientHeight}));
  resized.observe(plot);
  document.addEventListener("themechange", draw);
  return {
    node,
    set(new_times, new_values, new_step_s) {
      const same = drawn && new_step_s === step_s;
      [times, values, step_s] = [new_times, new_values, new_step_s];
      if (same) { drawn.setData(data()); pointed(drawn); } else draw();
      fillTable();
    },
    end() {
      document.removeEventListener("themechange", draw);
      resized.disconnect();
      drawn?.destroy();
    },
  };
}

// Indexes of points between two that are not known, which no line leads to.
function alone(drawn, series) {
  const own = drawn.data[series], found = [];
  own.forEach((value, at) => { if (value !== null && (own[at - 1] ?? null) === null && (own[at + 1] ?? null) === null) found.push(at); });
  return found;
}

/** One bar of shares: parts [{label, value, colour}]. Its text says the same. */
export function bar(parts, all, {tall = false, write = format.count} = {}) {
  const text = parts.map((one) => `${one.label} ${write(one.value)}`).join(", ");
  return el("div", {class: `bar${tall ? " tall" : ""}`, role: "img", "aria-label": text, title: text},
    parts.filter((one) => one.value > 0).map((one) =>
      el("i", {style: {"--share": Math.min(1, all ? one.value / all : 0), "--colour": `var(${one.colour})`}})));
}

/** What the colours of a bar mean. */
export const legend = (parts, write = format.count) => el("ul", {class: "keys"}, parts.map((one) =>
  el("li", null, el("i", {style: {"--colour": `var(${one.colour})`}}), one.label, " ", el("b", null, write(one.value)))));
