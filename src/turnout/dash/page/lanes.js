// Lanes: what each engine and the trainer did in a stretch of time, and where they were idle.
import { Canvas } from "./charts.js";
import { ask, bytes, clock, color, count, fill, h, percent, seconds } from "./dom.js";

const ROW = 36, NAME = 150, SHARE = 74, HEAD = 6, FOOT = 26;
const SHADES = { rollout: "rollout", train: "train", publish: "publish", prepare: "prepare", activate: "activate", evaluate: "evaluate", checkpoint: "checkpoint", idle: "idle", fenced: "bad", released: "checkpoint", drain: "dim" };
const OVER = new Set(["prepare", "activate", "fenced"]); // lie over what else an engine does
const STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200];

class LaneChart extends Canvas {
  constructor() { super("Lanes", { height: 120, label: "Lanes; arrow keys move in time, plus and minus zoom" }); this.pan = () => {}; }

  set(view) { this.view = view; this.height = HEAD + FOOT + ROW * Math.max(2, view.lanes.length); this.canvas.style.height = `${this.height}px`; this.draw(); }

  x(at) { return NAME + ((at - this.view.start) / (this.view.end - this.view.start)) * (this.w - NAME - SHARE); }

  draw() {
    const paint = this.begin();
    if (!paint || !this.view) return;
    const { view } = this, base = this.height - FOOT;
    if (!view.lanes.length) { this.nothing("no phase was told in this time"); return; }
    paint.textBaseline = "middle";
    const length = view.end - view.start, step = STEPS.find((one) => length / one <= 9) || 14400;
    [paint.strokeStyle, paint.fillStyle, paint.textAlign, paint.lineWidth] = [color("line"), color("dim"), "center", 1];
    for (let at = Math.ceil(view.start / step) * step; at <= view.end; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      paint.beginPath(); paint.moveTo(x, HEAD); paint.lineTo(x, base); paint.stroke();
      paint.fillText(step < 1 ? `+${seconds(at - view.start)}` : clock(at), Math.max(NAME + 24, Math.min(this.w - SHARE - 24, x)), base + 13);
    }
    view.lanes.forEach((lane, row) => {
      const top = HEAD + row * ROW + 4, tall = ROW - 8;
      [paint.fillStyle, paint.textAlign] = [color("ink"), "left"];
      paint.fillText(lane.lane.length > 20 ? `…${lane.lane.slice(-19)}` : lane.lane, 0, top + tall / 2);
      for (const over of [false, true]) for (const one of lane.spans) {
        if (OVER.has(one[0]) !== over) continue;
        const [name, start, end] = one, left = this.x(start), idle = name === "idle";
        paint.fillStyle = color(SHADES[name] || "accent");
        paint.globalAlpha = this.cursor === null || this.cursor === one ? 1 : 0.75;
        if (idle) paint.fillRect(left, top + tall / 2 - 2, Math.max(0.7, this.x(end) - left), 4);
        else if (over && lane.lane !== "update") paint.fillRect(left, top + tall - 9, Math.max(1.4, this.x(end) - left), 9);
        else paint.fillRect(left, top, Math.max(0.9, this.x(end) - left), tall);
      }
      paint.globalAlpha = 1;
      [paint.fillStyle, paint.textAlign] = [color("dim"), "right"];
      const idle = lane.shares.idle;
      if (idle !== undefined) paint.fillText(`idle ${percent(idle)}`, this.w, top + tall / 2);
    });
    this.tell();
  }

  tell() {
    const names = [...new Set(this.view.lanes.flatMap((lane) => lane.spans.map((one) => one[0])))].sort((a, b) => Object.keys(SHADES).indexOf(a) - Object.keys(SHADES).indexOf(b));
    const one = this.cursor, args = one ? one[3] : {};
    const more = one ? [args.step === undefined ? "" : `step ${count(args.step)}`, args.version ? args.version.slice(0, 7) : "", args.bytes ? bytes(args.bytes) : "", args.groups ? `${args.groups} groups` : "", args.requests ? `${count(args.requests)} requests` : "", args.waits_for ? `waits for ${args.waits_for}` : "", args.reason || "", args.aborted || "", args.spans ? `${args.spans} in a row` : ""].filter(Boolean) : [];
    fill(this.legend, names.map((name) => this.key(name, color(SHADES[name] || "accent"))), one ? h("span", { class: "at" }, h("b", {}, one[0]), ` ${seconds(one[2] - one[1])}`, more.length ? ` · ${more.join(" · ")}` : "") : null);
    this.say(this.view.lanes.map((lane) => `${lane.lane}: ${Object.entries(lane.shares).map(([name, share]) => `${name} ${percent(share)}`).join(", ")}`).join("; "));
  }

  point(x, y) {
    const lane = this.view && this.view.lanes[Math.floor((y - HEAD) / ROW)];
    const inside = lane ? lane.spans.filter((one) => this.x(one[1]) - 1 <= x && this.x(one[2]) + 1 >= x) : [];
    this.move(inside.sort((a, b) => OVER.has(b[0]) - OVER.has(a[0]) || a[2] - a[1] - (b[2] - b[1]))[0] || null);
  }

  step(by) { this.pan(Number.isFinite(by) ? by * 0.5 : by); }
}

export class Lanes {
  stores = ["health"];

  constructor() {
    this.chart = new LaneChart();
    this.chart.pan = (by) => this.pan(by);
    const button = (text, label, call) => h("button", { class: "plain", type: "button", "aria-label": label, title: label, on: { click: call } }, text);
    this.told = h("span", { class: "dim" });
    const bar = h("div", { class: "spread" }, h("div", { class: "members", role: "group", "aria-label": "Time" }, button("←", "earlier", () => this.pan(-0.5)), button("→", "later", () => this.pan(0.5)), button("−", "longer stretch", () => this.zoom(2)), button("+", "shorter stretch", () => this.zoom(0.5)), button("whole run", "the whole run", () => this.go(0, Infinity)), button("latest", "follow the run", () => this.go(null, null))), this.told);
    this.table = h("section", { class: "card", "aria-label": "Shares of the time" });
    this.chart.el.insertBefore(bar, this.chart.legend);
    this.chart.canvas.addEventListener("keydown", (event) => { if ("+-=".includes(event.key)) { event.preventDefault(); this.zoom(event.key === "-" ? 2 : 0.5); } });
    this.el = h("div", { class: "stack" }, this.chart.el, this.table);
    [this.start, this.end] = [null, null];
  }

  // Whether it asked: not for what it has got already of as much of the run as is read.
  async load({ health } = {}) {
    const query = this.start === null ? "" : `?start=${this.start}&end=${this.end}`, { view } = this;
    if (health && view && this.query === query && view.epoch === health.epoch && view.revision >= health.revision) return false;
    const found = await ask(`api/lanes${query}`);
    [this.view, this.query] = [found, query];
    return true;
  }

  go(start, end) {
    const { view } = this;
    if (start === null || !view || view.first === null) [this.start, this.end] = [null, null];
    else {
      const length = Math.min(Math.max(0.02, end - start), view.last - view.first), from = Math.max(view.first, Math.min(start, view.last - length));
      [this.start, this.end] = [from.toFixed(4), (from + length).toFixed(4)];
    }
    return this.load().then(() => this.draw());
  }

  pan(by) {
    if (!this.view || this.view.first === null) return;
    if (!Number.isFinite(by)) { this.go(by < 0 ? this.view.first : null, this.view.first + this.view.end - this.view.start); return; }
    const shift = by * (this.view.end - this.view.start);
    this.go(this.view.start + shift, this.view.end + shift);
  }

  zoom(by) {
    if (!this.view || this.view.first === null) return;
    const middle = (this.view.start + this.view.end) / 2, half = (by * (this.view.end - this.view.start)) / 2;
    this.go(middle - half, middle + half);
  }

  draw() {
    const { view } = this;
    if (!view) return;
    fill(this.told, view.first === null ? "" : `${clock(view.start)} to ${clock(view.end)}, ${seconds(view.end - view.start)}${this.start === null ? ", the latest steps" : ""}${view.left_out ? `; ${count(view.left_out)} short spans left out` : ""}${view.whole ? "" : "; too much to read in one: shorten it"}`);
    this.chart.set(view);
    const names = [...new Set(view.lanes.flatMap((lane) => Object.keys(lane.shares)))].sort((a, b) => Object.keys(SHADES).indexOf(a) - Object.keys(SHADES).indexOf(b));
    fill(this.table, h("h2", {}, "Shares of this time"), h("p", { class: "note" }, "an engine prepares and activates versions beside its rollouts; idle on the trainer is the bubble"),
      h("table", { "aria-label": "Shares" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "lane"), names.map((name) => h("th", { class: "n", scope: "col" }, name)), h("th", { scope: "col" }, ""))), h("tbody", {}, view.lanes.map((lane) => h("tr", {}, h("td", {}, h("b", {}, lane.lane)), names.map((name) => h("td", { class: `n ${name === "idle" && lane.shares.idle > 0.5 ? "warn-ink" : ""}` }, lane.shares[name] === undefined ? "" : percent(lane.shares[name]))), h("td", {}))))));
  }
}
