// How numbers and times are written. What is not known is a dash. A number and its unit stay on one line.

const NONE = "–";
const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 3});
const clock = new Intl.DateTimeFormat("en-GB", {hour: "2-digit", minute: "2-digit", second: "2-digit"});
const minute = new Intl.DateTimeFormat("en-GB", {hour: "2-digit", minute: "2-digit"});
const day = new Intl.DateTimeFormat("en-GB", {day: "numeric", month: "short"});
const full = new Intl.DateTimeFormat("en-GB", {dateStyle: "medium", timeStyle: "medium"});

const known = (value) => value !== null && value !== undefined && Number.isFinite(Number(value));

/** 1,234 */
export const count = (value) => (known(value) ? whole.format(value) : NONE);

/** 1.23M; small numbers in full */
export const tokens = (value) => (known(value) ? (Math.abs(value) < 10_000 ? whole : compact).format(value) : NONE);

/** 0.42 -> 42 %; a share that is neither nothing nor all does not look so */
export function percent(share) {
  if (!known(share)) return NONE;
  const value = share * 100;
  if (value > 0 && value < 0.1) return "<0.1\u00a0%";
  if (value < 100 && value > 99.9) return ">99.9\u00a0%";
  return `${value.toFixed(value < 10 || value > 99 ? 1 : 0).replace(/\.0$/, "")}\u00a0%`;
}

export const ratio = (part, all) => (all ? part / all : null);

/** Milliseconds as a person says them: 4.2 ms, 310 ms, 1.8 s, 3 min 20 s, 5 h 12 min */
export function ms(value) {
  if (!known(value)) return NONE;
  if (value < 10) return `${Number(value).toFixed(value ? 1 : 0)}\u00a0ms`;
  if (value < 1000) return `${Math.round(value)}\u00a0ms`;
  return seconds(value / 1000);
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 1 && value > 0) return ms(value * 1000);
  if (value < 60) return `${Number(value).toFixed(value < 10 ? 1 : 0).replace(/\.0$/, "")}\u00a0s`;
  const units = [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([size]) => value >= size);
  const [size, name] = units[first];
  const rest = units[first + 1] && Math.floor((value % size) / units[first + 1][0]);
  return `${Math.floor(value / size)}\u00a0${name}${rest ? ` ${rest}\u00a0${units[first + 1][1]}` : ""}`;
}

/** {"USD": "0.0012"} -> $0.0012; a null is a price that nobody knows. */
export function money(value) {
  if (!value || !Object.keys(value).length) return NONE;
  return Object.entries(value).map(([currency, amount]) => {
    const number = Number(amount);
    const digits = number === 0 || Math.abs(number) >= 1 ? 2 : Math.min(9, 1 - Math.floor(Math.log10(Math.abs(number))));
    try {
      return new Intl.NumberFormat("en", {style: "currency", currency, minimumFractionDigits: digits, maximumFractionDigits: digits}).format(number);
    } catch {
      return `${number.toFixed(digits)} ${currency}`;
    }
  }).join(" + ");
}

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, value > 0 ? Math.floor(Math.log2(value) / 10) : 0);
  return `${(value / 1024 ** power).toFixed(power && value / 1024 ** power < 10 ? 1 : 0)}\u00a0${units[power]}`;
}

/** Unix seconds. Today's as 14:03:07, others with their day. */
export function time(at_s) {
  if (!known(at_s)) return NONE;
  const then = new Date(at_s * 1000);
  return then.toDateString() === new Date().toDateString() ? clock.format(then) : `${day.format(then)} ${minute.format(then)}`;
}

export const fullTime = (at_s) => (known(at_s) ? full.format(new Date(at_s * 1000)) : NONE);

/** For an axis whose points are so far apart. */
export const step = (at_s, step_s) => (step_s >= 86_400 ? day : minute).format(new Date(at_s * 1000));

export function ago(at_s) {
  if (!known(at_s)) return NONE;
  const passed = Date.now() / 1000 - at_s;
  return passed < 5 ? "just now" : `${seconds(Math.round(passed))} ago`;
}
