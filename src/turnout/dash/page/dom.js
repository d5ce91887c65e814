// Elements and numbers. Text is set as text only: nothing that a model wrote is ever parsed as HTML.

export function h(tag, props, ...kids) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "on") for (const [name, call] of Object.entries(value)) made.addEventListener(name, call);
    else made.setAttribute(key, value === true ? "" : value);
  }
  put(made, ...kids);
  return made;
}

export function put(parent, ...kids) {
  for (const kid of kids.flat(Infinity)) {
    if (kid === null || kid === undefined || kid === false) continue;
    parent.append(kid instanceof Node ? kid : document.createTextNode(String(kid)));
  }
  return parent;
}

export function fill(parent, ...kids) {
  parent.replaceChildren();
  return put(parent, ...kids);
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function num(value, digits = 3) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(digits + (size >= 100 ? 1 : 0))).toString();
}

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");

export function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 999.5 && at < 4) { value /= 1000; at += 1; }
  return `${value >= 100 || at === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[at]}`;
}

export function seconds(value) {
  if (!known(value)) return "–";
  if (value < 1) return `${(value * 1000).toPrecision(value < 0.01 ? 2 : 3).replace(/\.0+$/, "")} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return span(value);
}

export function span(value) {
  if (!known(value)) return "–";
  const whole = Math.max(0, Math.round(value));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function clock(at) {
  if (!known(at)) return "–";
  const date = new Date(at * 1000);
  return date.toLocaleTimeString("en-GB");
}

export const percent = (value, digits = 2) => (known(value) ? `${Number((100 * value).toPrecision(digits))} %` : "–");

// Controls, direction marks and the like are shown by their number: they can't hide or turn what stands beside them.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/u;
export function visible(text) {
  let made = "";
  for (const one of text) {
    if (one === "\n") made += "↵\n";
    else if (one === "\t") made += "⇥\t";
    else if (HIDDEN.test(one)) made += `\\u{${one.codePointAt(0).toString(16)}}`;
    else made += one;
  }
  return made;
}

export async function ask(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(value.error || `${answer.status} ${answer.statusText}`), { status: answer.status });
  return value;
}

// What one endpoint has told so far: rows by step, merged as they change.
export class Store {
  constructor(name) { this.name = name; this.epoch = -1; this.revision = 0; this.rows = new Map(); this.view = null; }

  async refresh() {
    const got = await ask(`api/live/${this.name}?epoch=${this.epoch}&revision=${this.revision}`);
    if (got.whole) this.rows.clear();
    [this.epoch, this.revision, this.width] = [got.epoch, got.revision, got.width];
    if (got.view) {
      this.view = got.view;
      for (const row of got.view.rows || []) this.rows.set(row.key ?? row.step, row);
      this.sorted = [...this.rows.values()];
      if (this.sorted.length && this.sorted[0].key === undefined) this.sorted.sort((a, b) => a.step - b.step);
    }
    return { head: got.head, changed: Boolean(got.view) };
  }
}
