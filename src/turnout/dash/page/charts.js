// Charts on a canvas: curves, stacked bars, heat maps, lanes. Each has a legend with the numbers at the cursor,
// which the pointer and the arrow keys move.
import { color, count, fill, h, num } from "./dom.js";

const LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 22;

export function ticks(low, high, wanted = 4) {
  const span = high - low || 1, raw = span / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => span / n <= wanted) || power * 10;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

export class Canvas {
  constructor(title, { height = 190, note = "", label = "" } = {}) {
    this.height = height;
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": label || title });
    this.canvas.style.height = `${height}px`;
    this.legend = h("div", { class: "legend", "aria-live": "off" });
    this.note = h("p", { class: "note" }, note);
    this.el = h("section", { class: "card", "aria-label": title }, h("h2", {}, title), note ? this.note : null, this.legend, this.canvas);
    this.title = title;
    this.cursor = null;
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.move(null));
    this.canvas.addEventListener("blur", () => this.move(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      this.step(step);
    });
  }

  begin() {
    const width = this.canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!width) return null;
    if (this.canvas.width !== Math.round(width * ratio)) this.canvas.width = Math.round(width * ratio);
    if (this.canvas.height !== Math.round(this.height * ratio)) this.canvas.height = Math.round(this.height * ratio);
    const paint = this.canvas.getContext("2d");
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.clearRect(0, 0, width, this.height);
    paint.font = "11.5px system-ui, 'DejaVu Sans', sans-serif";
    [this.w, this.paint] = [width, paint];
    return paint;
  }

  move(at) { if (at !== this.cursor) { this.cursor = at; this.draw(); } }

  say(text) { this.canvas.setAttribute("aria-label", `${this.title}. ${text}`); }

  nothing(text = "nothing yet") {
    const paint = this.paint;
    paint.fillStyle = color("dim");
    paint.textAlign = "center";
    paint.fillText(text, this.w / 2, this.height / 2);
    fill(this.legend);
  }

  key(name, paint, value) {
    const dot = h("i");
    dot.style.background = paint;
    return h("span", { class: "key" }, dot, name, value === undefined ? null : h("b", {}, value));
  }
}

class Stepped extends Canvas {
  // A chart over train steps: `xs` are the first steps of its bins.
  place(xs, width) {
    const last = xs.length ? xs[xs.length - 1] + width : 1, first = xs.length ? xs[0] : 0;
    this.x = (step) => LEFT + ((step - first) / Math.max(width, last - first)) * (this.w - LEFT - RIGHT);
    [this.xs, this.binWidth] = [xs, width];
  }

  point(x) {
    if (!this.xs || !this.xs.length) return;
    const half = this.binWidth / 2;
    let best = 0;
    for (let at = 0; at < this.xs.length; at += 1) if (Math.abs(this.x(this.xs[at] + half) - x) < Math.abs(this.x(this.xs[best] + half) - x)) best = at;
    this.move(best);
  }

  step(by) {
    if (!this.xs || !this.xs.length) return;
    const from = this.cursor ?? (by < 0 ? this.xs.length : -1);
    this.move(Math.max(0, Math.min(this.xs.length - 1, Number.isFinite(by) ? from + by : by < 0 ? 0 : this.xs.length - 1)));
  }

  axes(low, high, format) {
    const { paint } = this, base = this.height - BOTTOM;
    this.y = (value) => base - ((value - low) / (high - low || 1)) * (base - TOP);
    paint.lineWidth = 1;
    paint.strokeStyle = color("line");
    paint.fillStyle = color("dim");
    paint.textAlign = "right";
    paint.textBaseline = "middle";
    for (const at of ticks(low, high)) {
      const y = Math.round(this.y(at)) + 0.5;
      paint.beginPath(); paint.moveTo(LEFT, y); paint.lineTo(this.w - RIGHT, y); paint.stroke();
      paint.fillText(format(at), LEFT - 7, y);
    }
    this.steps();
  }

  steps() {
    const { paint, xs } = this, base = this.height - BOTTOM;
    paint.fillStyle = color("dim");
    paint.textAlign = "center";
    paint.textBaseline = "alphabetic";
    const last = xs[xs.length - 1] + this.binWidth;
    for (const at of ticks(xs[0], last, 7)) if (Number.isInteger(at) && at < last) paint.fillText(`${count(at)}`, this.x(at + this.binWidth / 2), base + 16);
  }

  cursorLine() {
    if (this.cursor === null || this.xs[this.cursor] === undefined) return;
    const x = this.x(this.xs[this.cursor] + this.binWidth / 2), { paint } = this;
    paint.strokeStyle = color("dim");
    paint.lineWidth = 1;
    paint.setLineDash([3, 3]);
    paint.beginPath(); paint.moveTo(x, TOP); paint.lineTo(x, this.height - BOTTOM); paint.stroke();
    paint.setLineDash([]);
  }

  at() {
    if (this.cursor === null || this.xs[this.cursor] === undefined) return null;
    const step = this.xs[this.cursor];
    return h("span", { class: "at" }, this.binWidth > 1 ? `steps ${count(step)}–${count(step + this.binWidth - 1)}` : `step ${count(step)}`);
  }
}

function smooth(values, window = 5) {
  return values.map((value, at) => {
    if (value === null) return null;
    const part = values.slice(Math.max(0, at - window + 1), at + 1).filter((one) => one !== null);
    return part.reduce((sum, one) => sum + one, 0) / part.length;
  });
}

// curves: [{name, color, key | of(row), smooth, points: [{step, value, low, high}]}]
export class Curves extends Stepped {
  constructor(title, curves, options = {}) { super(title, options); [this.curves, this.options] = [curves, options]; }

  set(rows, width) { [this.rows, this.width] = [rows, width]; this.draw(); }

  draw() {
    const paint = this.begin();
    if (!paint || !this.rows) return;
    const rows = this.rows, { zero = true, format = num, bound } = this.options;
    this.place(rows.map((row) => row.step), this.width || 1);
    const lines = this.curves.map((curve) => ({ ...curve, values: curve.points ? null : rows.map((row) => (curve.of ? curve.of(row) : row[curve.key]) ?? null) }));
    const all = lines.flatMap((line) => (line.points ? line.points().flatMap((one) => [one.value, one.low, one.high]) : line.values)).filter((one) => one !== null && one !== undefined && Number.isFinite(one));
    if (!all.length || !rows.length) { this.nothing(); return; }
    if (bound !== undefined) all.push(bound);
    let [low, high] = [Math.min(...all), Math.max(...all)];
    if (zero && low > 0) low = 0;
    if (zero && high < 0) high = 0;
    if (low === high) high = low + (Math.abs(low) || 1);
    high += (high - low) * 0.06;
    if (low < 0 || !zero) low -= (high - low) * 0.04;
    this.axes(low, high, format);
    if (bound !== undefined) this.rule(bound);
    for (const line of lines) line.points ? this.marks(line) : this.line(line);
    this.cursorLine();
    const at = this.cursor ?? this.newest(lines);
    fill(this.legend, lines.map((line) => this.key(line.name, color(line.color), this.told(line, at, format))), this.at());
    this.say(lines.map((line) => `${line.name} ${this.told(line, at, format)}`).join(", "));
  }

  newest(lines) {
    for (let at = this.rows.length - 1; at >= 0; at -= 1) if (lines.some((line) => line.values && line.values[at] !== null)) return at;
    return this.rows.length - 1;
  }

  told(line, at, format) {
    if (!line.points) return format(line.values[at] ?? null);
    const step = this.xs[at] + this.binWidth, near = line.points().filter((one) => one.step <= step).pop();
    if (!near) return "–";
    return near.low === null ? format(near.value) : `${format(near.value)} [${num(near.low, 2)}, ${num(near.high, 2)}]`;
  }

  rule(value) {
    const { paint } = this;
    paint.strokeStyle = color("bad");
    paint.setLineDash([2, 4]);
    paint.beginPath(); paint.moveTo(LEFT, this.y(value)); paint.lineTo(this.w - RIGHT, this.y(value)); paint.stroke();
    paint.setLineDash([]);
  }

  line({ values, color: name, smooth: smoothed, dots }) {
    const { paint } = this, half = this.binWidth / 2;
    const trace = (numbers, width, alpha) => {
      paint.beginPath();
      let pen = false;
      numbers.forEach((value, at) => {
        if (value === null) { pen = false; return; }
        const [x, y] = [this.x(this.xs[at] + half), this.y(value)];
        pen ? paint.lineTo(x, y) : paint.moveTo(x, y);
        if (!pen && (numbers[at + 1] ?? null) === null) paint.arc(x, y, 1.5, 0, 7);
        pen = true;
      });
      [paint.strokeStyle, paint.lineWidth, paint.globalAlpha, paint.lineJoin] = [color(name), width, alpha, "round"];
      paint.stroke();
      paint.globalAlpha = 1;
    };
    if (smoothed && values.length > 8) { trace(values, 1.2, 0.38); trace(smooth(values), 2.2, 1); } else trace(values, 2, 1);
    if (dots || this.cursor === null) return;
    const value = values[this.cursor];
    if (value === null || value === undefined) return;
    paint.fillStyle = color(name);
    paint.beginPath(); paint.arc(this.x(this.xs[this.cursor] + half), this.y(value), 3.5, 0, 7); paint.fill();
  }

  marks(line) {
    const { paint } = this, points = line.points();
    [paint.strokeStyle, paint.fillStyle, paint.lineWidth] = [color(line.color), color(line.color), 1.6];
    // an evaluation is of the weights after `step` train steps: the left edge of that step
    const x = (one) => Math.max(LEFT + 4, Math.min(this.w - RIGHT - 4, this.x(one.step)));
    paint.globalAlpha = 0.16;
    const band = points.filter((one) => one.low !== null);
    if (band.length > 1) {
      paint.beginPath();
      band.forEach((one, at) => (at ? paint.lineTo(x(one), this.y(one.high)) : paint.moveTo(x(one), this.y(one.high))));
      band.slice().reverse().forEach((one) => paint.lineTo(x(one), this.y(one.low)));
      paint.closePath(); paint.fill();
    }
    paint.globalAlpha = 1;
    paint.beginPath();
    points.forEach((one, at) => (at ? paint.lineTo(x(one), this.y(one.value)) : paint.moveTo(x(one), this.y(one.value))));
    paint.stroke();
    for (const one of points.length > 60 ? [] : points) {
      if (one.low !== null) {
        paint.beginPath();
        paint.moveTo(x(one), this.y(one.low)); paint.lineTo(x(one), this.y(one.high));
        for (const edge of [one.low, one.high]) { paint.moveTo(x(one) - 3, this.y(edge)); paint.lineTo(x(one) + 3, this.y(edge)); }
        paint.stroke();
      }
      paint.beginPath(); paint.arc(x(one), this.y(one.value), 3.4, 0, 7); paint.fill();
    }
  }
}

// parts: [{name, color, key}]
export class Stacked extends Stepped {
  constructor(title, parts, options = {}) { super(title, options); [this.parts, this.options] = [parts, options]; }

  set(rows, width, parts) { [this.rows, this.width] = [rows, width]; if (parts) this.parts = parts; this.draw(); }

  draw() {
    const paint = this.begin();
    if (!paint || !this.rows) return;
    const { format = num } = this.options, value = (part, row) => (part.of ? part.of(row) : row[part.key]) ?? 0;
    const parts = this.parts.filter((part) => this.rows.some((row) => value(part, row) > 0));
    this.place(this.rows.map((row) => row.step), this.width || 1);
    if (!parts.length) { this.nothing(); return; }
    const sums = this.rows.map((row) => parts.reduce((sum, part) => sum + value(part, row), 0));
    const sorted = sums.slice().sort((a, b) => a - b), high = Math.max(sorted[Math.floor(0.98 * (sorted.length - 1))] * 1.2, 1e-9);
    this.axes(0, high, format);
    const base = this.y(0);
    this.rows.forEach((row, at) => {
      const left = this.x(row.step), width = this.x(row.step + this.binWidth) - left, gap = width > 5 ? 1 : 0;
      let floor = 0;
      for (const part of parts) {
        const size = value(part, row);
        const [top, bottom] = [Math.max(TOP, this.y(floor + size)), Math.max(TOP, this.y(floor))];
        paint.fillStyle = part.paint || color(part.color);
        paint.globalAlpha = this.cursor === null || this.cursor === at ? 1 : 0.55;
        paint.fillRect(left + gap / 2, top, Math.max(0.8, width - gap), Math.min(base, bottom) - top);
        floor += size;
      }
      if (floor > high) { paint.fillStyle = color("ink"); paint.fillRect(left, TOP - 3, Math.max(1.5, width - gap), 2); }
    });
    paint.globalAlpha = 1;
    let at = this.cursor ?? sums.findLastIndex((sum) => sum > 0);
    at = Math.min(at, this.rows.length - 1);
    fill(this.legend, parts.map((part) => this.key(part.name, part.paint || color(part.color), format(value(part, this.rows[at])))), this.at());
    this.say(parts.map((part) => `${part.name} ${format(value(part, this.rows[at]))}`).join(", "));
  }
}

// A row of cells per bin: `cells(row)` gives pairs of (place, count), `edge(place)` the lower end of a place.
export class Heat extends Stepped {
  constructor(title, cells, options = {}) { super(title, options); [this.cells, this.options] = [cells, options]; }

  set(rows, width) { [this.rows, this.width] = [rows, width]; this.draw(); }

  draw() {
    const paint = this.begin();
    if (!paint || !this.rows) return;
    const rows = this.rows.filter((row) => this.cells(row).length), { edge, unit } = this.options;
    this.place(rows.map((row) => row.step), this.width || 1);
    if (!rows.length) { this.nothing(); return; }
    const places = rows.flatMap((row) => this.cells(row).map(([place]) => place));
    const [low, high] = [Math.min(...places), Math.max(...places) + 1], base = this.height - BOTTOM;
    this.y = (place) => base - ((place - low) / (high - low)) * (base - TOP);
    paint.fillStyle = color("dim");
    paint.textAlign = "right";
    paint.textBaseline = "middle";
    const every = Math.max(1, Math.ceil((high - low) / 7));
    for (let place = low; place < high; place += every) paint.fillText(edge(place), LEFT - 7, (this.y(place) + this.y(place + 1)) / 2);
    this.steps();
    const heat = color("heat");
    rows.forEach((row) => {
      const cells = this.cells(row), total = cells.reduce((sum, [, n]) => sum + n, 0);
      const left = this.x(row.step), width = this.x(row.step + this.binWidth) - left;
      for (const [place, n] of cells) {
        paint.fillStyle = `rgba(${heat}, ${0.1 + 0.9 * Math.sqrt(n / total)})`;
        paint.fillRect(left, this.y(place + 1) + 0.5, Math.max(0.8, width > 6 ? width - 1 : width + 0.3), this.y(place) - this.y(place + 1) - 1);
      }
    });
    this.cursorLine();
    const row = rows[Math.min(this.cursor ?? Infinity, rows.length - 1)], cells = this.cells(row), total = cells.reduce((sum, [, n]) => sum + n, 0);
    const told = this.options.told(cells, total);
    fill(this.legend, told.map(([name, value]) => h("span", { class: "key" }, name, h("b", {}, value))), this.at());
    this.say(`${told.map(([name, value]) => `${name} ${value}`).join(", ")} ${unit}`);
  }
}
