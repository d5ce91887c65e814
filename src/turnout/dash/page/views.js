// The views but for trajectories: each has an element, and draws what its stores have told.
import { Curves, Heat, Stacked } from "./charts.js";
import { bytes, clock, count, fill, h, num, percent, seconds, span } from "./dom.js";

const PHASES = ["rollout", "train", "publish", "prepare", "activate", "evaluate", "checkpoint"];
const phaseParts = PHASES.map((name) => ({ name, color: name, key: `seconds/${name}` }));
const REWARD = "rollout/reward_mean", LENGTH = "rollout/response_len_mean", MISMATCH = "train/mismatch_mean_abs_logprob";
const SHOWN = 200; // versions
const CAUSE_COLORS = ["publish", "bad", "train", "prepare", "evaluate", "checkpoint", "rollout", "idle"];
const lastOf = (rows, key) => { for (let at = rows.length - 1; at >= 0; at -= 1) if (rows[at][key] !== undefined) return rows[at][key]; return null; };
const tokensPerSecond = (row) => (row["tokens/response"] && row["seconds/step"] ? row["tokens/response"] / row["seconds/step"] : null);
export const lengthOf = (bucket) => (bucket < 1 ? 0 : Math.ceil(2 ** ((bucket - 1) / 4) - 1e-9));

const kpi = (name, value, small) => h("div", { class: "kpi" }, h("div", { class: "k" }, name), h("div", { class: "v" }, value), h("div", { class: "s" }, small || " "));

function table(heads, rows, label) {
  return h("table", { "aria-label": label },
    h("thead", {}, h("tr", {}, heads.map(([name, kind]) => h("th", { class: kind, scope: "col" }, name)))),
    h("tbody", {}, rows));
}

export class Overview {
  stores = ["overview"];

  constructor() {
    this.evals = [];
    this.kpis = h("div", { class: "kpis" });
    const points = (name) => () => this.evals.filter((one) => one.name === name);
    this.evalCurves = new Map();
    this.reward = new Curves("Reward and held-out score", [{ name: "reward of rollouts", color: "reward", key: REWARD, smooth: true }], { note: "mean of a step, and of 5 steps; held-out scores with their 95 % intervals", height: 214 });
    this.points = points;
    this.charts = [
      this.reward,
      new Stacked("Seconds of a step by phase", phaseParts, { format: seconds, note: "a mark on top: higher than the chart; in async rollouts go on beside these", height: 214 }),
      new Curves("Tokens per second", [{ name: "response tokens a second of the step", color: "accent", of: tokensPerSecond, smooth: true }], { format: num }),
      new Curves("Response length", [{ name: "mean tokens", color: "prepare", key: LENGTH, smooth: true }]),
      new Curves("Mismatch of engine and trainer", [{ name: "mean |log-prob difference|", color: "bad", key: MISMATCH, smooth: true }]),
      new Curves("Gradient norm and entropy", [{ name: "gradient norm", color: "train", key: "train/grad_norm", smooth: true }, { name: "entropy", color: "publish", key: "train/entropy", smooth: true }]),
    ];
    this.el = h("div", {}, this.kpis, h("div", { class: "grid" }, this.charts.map((chart) => chart.el)));
  }

  draw({ overview }, head) {
    const rows = overview.sorted || [];
    this.evals = ((overview.view && overview.view.evals) || []).map((one) => ({ ...one, value: one.score }));
    for (const name of new Set(this.evals.map((one) => one.name))) {
      if (this.evalCurves.has(name)) continue;
      const shade = ["eval", "evaluate", "publish", "train"][this.evalCurves.size % 4];
      this.evalCurves.set(name, { name: name.includes("held-out") ? name : `held-out ${name}`, color: shade, points: this.points(name) });
      this.reward.curves.push(this.evalCurves.get(name));
    }
    const recent = rows.slice(-20), mean = (key) => { const found = recent.map((row) => row[key]).filter((v) => v !== undefined); return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null; };
    const first = rows.find((row) => row[REWARD] !== undefined), eval_ = this.evals[this.evals.length - 1], begun = this.evals.find((one) => eval_ && one.name === eval_.name);
    const speed = recent.map(tokensPerSecond).filter((one) => one !== null);
    const bubble = 1 - (mean("seconds/train") ?? 0) / (mean("seconds/step") || 1);
    fill(this.kpis,
      kpi("step", count(head.step ?? (rows.length ? rows[rows.length - 1].step + overview.width : 0)), head.config.num_rollout ? `of ${count(head.config.num_rollout)}` : ""),
      kpi("reward", num(lastOf(rows, REWARD)), first ? `from ${num(first[REWARD], 2)}` : ""),
      kpi("held-out", eval_ ? num(eval_.score) : "–", eval_ && begun !== eval_ ? `from ${num(begun.score, 2)}, ${eval_.items} samples` : eval_ ? `${eval_.items} samples` : "no evaluation yet"),
      kpi("seconds a step", seconds(mean("seconds/step")), `trainer idle ${rows.length ? percent(Math.max(0, bubble)) : "–"}`),
      kpi("tokens a second", speed.length ? num(speed.reduce((a, b) => a + b, 0) / speed.length) : "–", "of responses"),
      kpi("lag", num(lastOf(rows, "rollout/lag_mean"), 2), `at most ${num(lastOf(rows, "rollout/lag_max"))}, bound ${head.run.max_lag ?? "–"}`),
      kpi("faults", count(head.faults), head.incarnations > 1 ? `${head.incarnations} incarnations` : "one incarnation"));
    for (const chart of this.charts) chart.set(rows, overview.width);
  }
}

export class Distributions {
  stores = ["distributions", "overview"];

  constructor() {
    const quantile = (cells, total, share) => { let sum = 0; for (const [place, n] of cells) { sum += n; if (sum >= share * total) return place; } return 0; };
    this.lags = new Heat("Lag of trained tokens", (row) => row.lags, {
      note: "tokens by how many train steps older their weights were; stronger is more", edge: String, unit: "train steps", height: 220,
      told: (cells, total) => [["mean", num(cells.reduce((sum, [lag, n]) => sum + lag * n, 0) / total, 3)], ["most", String(cells[cells.length - 1][0])], ["tokens", count(total)]],
    });
    this.lengths = new Heat("Response length of trained groups", (row) => row.lengths, {
      note: "responses by their number of tokens, four buckets an octave; stronger is more", edge: (b) => String(lengthOf(b)), unit: "tokens", height: 220,
      told: (cells, total) => [["median", `${lengthOf(quantile(cells, total, 0.5))}+`], ["90 %", `${lengthOf(quantile(cells, total, 0.9))}+`], ["longest", `${lengthOf(cells[cells.length - 1][0])}+`], ["responses", count(total)]],
    });
    this.lag = new Curves("Lag", [{ name: "mean", color: "accent", key: "rollout/lag_mean" }, { name: "greatest", color: "publish", key: "rollout/lag_max" }], { note: "train steps; the dotted line is the bound of this run" });
    this.drops = new Stacked("Groups dropped or sent back, by cause", [], { format: count, note: "at the step that was next to train" });
    this.masked = new Curves("Masked and truncated", [{ name: "tokens masked as too old", color: "bad", key: "tokens/masked" }], { format: num });
    this.truncated = new Curves("Responses cut by the length limit", [{ name: "share", color: "train", key: "rollout/truncated_share" }], { format: (v) => percent(v) });
    this.el = h("div", { class: "grid" }, [this.lags, this.lengths, this.lag, this.truncated, this.drops, this.masked].map((one) => one.el));
  }

  draw({ distributions, overview }, head) {
    const rows = distributions.sorted || [], { width } = distributions;
    this.lags.set(rows, width);
    this.lengths.set(rows, width);
    const totals = new Map();
    for (const row of rows) for (const [cause, n] of row.drops) totals.set(cause, (totals.get(cause) || 0) + n);
    const causes = [...totals].sort((a, b) => b[1] - a[1]).map(([cause]) => cause), shown = causes.slice(0, 7);
    const of = (test) => (row) => row.drops.reduce((sum, [cause, n]) => sum + (test(cause) ? n : 0), 0);
    const parts = shown.map((cause, at) => ({ name: cause.length > 60 ? `${cause.slice(0, 59)}…` : cause, color: CAUSE_COLORS[at], of: of((one) => one === cause) }));
    if (causes.length > 7) parts.push({ name: "others", color: "idle", of: of((one) => !shown.includes(one)) });
    this.drops.set(rows, width, parts);
    this.lag.options.bound = head.run.max_lag || undefined;
    for (const chart of [this.lag, this.masked, this.truncated]) chart.set(overview.sorted || [], overview.width);
  }
}

export class Weights {
  stores = ["versions", "overview"];

  constructor() {
    this.bytes = new Curves("Size of a version", [{ name: "bytes", color: "accent", key: "weights/bytes" }], { format: bytes });
    this.density = new Curves("Density", [{ name: "share of elements in it", color: "train", key: "weights/density" }], { format: (v) => percent(v) });
    this.times = new Stacked("Seconds of an update", ["publish", "prepare", "activate"].map((name) => ({ name, color: name, key: `seconds/${name}` })), { format: seconds });
    this.serving = h("section", { class: "card", "aria-label": "Who serves what" });
    this.list = h("section", { class: "card wide", "aria-label": "Versions" });
    this.el = h("div", { class: "grid" }, this.serving, this.times.el, this.bytes.el, this.density.el, this.list);
  }

  draw({ versions, overview }) {
    const view = versions.view || { serving: {} }, rows = overview.sorted || [], all = (versions.sorted || []).slice().reverse();
    for (const chart of [this.bytes, this.density, this.times]) chart.set(rows, overview.width);
    const served = Object.entries(view.serving).sort().reverse().map(([version, serving]) => ({ version, serving })), most = Math.max(1, ...served.map((one) => one.serving.length));
    fill(this.serving, h("h2", {}, "Who serves what"), h("p", { class: "note" }, "by what each engine attested last; engines that are lost or removed serve nothing"),
      served.length ? served.map((one) => {
        const bar = h("div", { class: "fill" });
        bar.style.width = `${(100 * one.serving.length) / most}%`;
        if (one.version !== view.committed) bar.style.background = "var(--publish)";
        return h("div", { class: "bar", title: one.serving.join(", ") }, h("span", { class: "m" }, one.version.slice(0, 12)), h("div", { class: "track" }, bar), h("span", { class: "c" }, `${one.serving.length} engine${one.serving.length > 1 ? "s" : ""}`));
      }) : h("p", { class: "empty" }, "no engine serves a version now"),
      served.length ? h("p", { class: "note" }, served.slice(0, 6).map((one) => `${one.version.slice(0, 7)}: ${one.serving.slice(0, 4).join(", ")}${one.serving.length > 4 ? ` and ${one.serving.length - 4} more` : ""}`).join("; ")) : null);
    const body = all.slice(0, SHOWN).map((one) => {
      const slowest = Object.entries(one.attested).filter(([, s]) => s !== null).sort((a, b) => b[1] - a[1])[0];
      const state = one.aborted ? h("span", { class: "bad-ink", title: one.aborted }, "aborted") : one.committed ? h("span", { class: one.version === view.committed ? "good-ink" : "dim" }, one.version === view.committed ? "current" : "committed") : h("span", { class: "warn-ink" }, "under way");
      return h("tr", {}, h("td", { class: "m nowrap" }, one.version), h("td", {}, state), h("td", { class: "n" }, one.step === null ? "–" : count(one.step)), h("td", { class: "n" }, bytes(one.bytes)),
        h("td", {}, one.published === null ? "at the start" : one.encoding || "in full"), h("td", { class: "n" }, one.encoding ? percent(one.density) : "–"), h("td", { class: "n" }, clock(one.committed)),
        h("td", { class: "n" }, one.published !== null && one.committed ? seconds(one.committed - one.published) : "–"), h("td", { class: "n" }, `${Object.keys(one.attested).length}${one.required ? `/${one.required}` : ""}`),
        h("td", {}, one.aborted || (slowest ? `${slowest[0]} ${seconds(slowest[1])}` : "–")));
    });
    fill(this.list, h("h2", {}, "Versions"), h("p", { class: "note" }, `${count(view.count || 0)} so far; the newest ${Math.min(SHOWN, all.length)}`),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of versions" }, table([["version"], ["state"], ["steps", "n"], ["size", "n"], ["form"], ["density", "n"], ["committed", "n"], ["publish → commit", "n"], ["attested", "n"], ["last to attest"]], body, "Versions")));
  }
}

export class Buffer {
  stores = ["overview", "states"];

  constructor() {
    this.flow = new Curves("Groups on their way", [{ name: "being made", color: "rollout", key: "groups/under_way" }, { name: "complete, not trained yet", color: "train", key: "groups/buffered" }], { format: num, note: "when a step was trained" });
    this.slots = new Curves("Slots taken", [{ name: "slots", color: "accent", key: "groups/slots" }], { format: num, note: "a group gives its slot back when the version made from it is committed" });
    this.states = h("section", { class: "card", "aria-label": "Groups by state" });
    this.causes = h("section", { class: "card", "aria-label": "Why groups did not train" });
    this.el = h("div", { class: "grid" }, this.flow.el, this.slots.el, this.states, this.causes);
  }

  draw({ overview, states }, head) {
    this.flow.set(overview.sorted || [], overview.width);
    this.slots.options.bound = head.config.rollout_slots || undefined;
    this.slots.set(overview.sorted || [], overview.width);
    const view = states.view || { states: {}, causes: [] }, entries = Object.entries(view.states), most = Math.max(1, ...entries.map(([, n]) => n));
    const order = ["waiting", "inflight", "partial", "completed", "taken", "trained", "dropped", "requeued"];
    const shades = { trained: "good", dropped: "bad", requeued: "publish", inflight: "rollout", completed: "train" };
    fill(this.states, h("h2", {}, "Groups by state"), h("p", { class: "note" }, `${count(entries.reduce((sum, [, n]) => sum + n, 0))} attempts in the ledger; counted anew every 10 s at most`),
      view.why ? h("p", { class: "why warn" }, `not counted now: ${view.why}`) : null,
      order.filter((name) => view.states[name]).map((name) => {
        const bar = h("div", { class: "fill" });
        bar.style.width = `${(100 * view.states[name]) / most}%`;
        bar.style.background = `var(--${shades[name] || "prepare"})`;
        return h("div", { class: "bar" }, h("a", { href: `#trajectories?state=${name}` }, name), h("div", { class: "track" }, bar), h("span", { class: "c" }, count(view.states[name])));
      }));
    fill(this.causes, h("h2", {}, "Why groups did not train"), h("p", { class: "note" }, "dropped, or sent back for another attempt"),
      view.causes.length ? view.causes.map(([cause, n]) => h("div", { class: "bar cause" }, h("a", { class: "t", href: `#trajectories?cause=${encodeURIComponent(cause)}` }, cause), h("span", { class: "c" }, count(n)))) : h("p", { class: "empty" }, "every group that ended was trained"));
  }
}

export class Health {
  stores = ["health"];

  constructor() {
    this.engines = h("section", { class: "card", "aria-label": "Engines" });
    this.faults = h("section", { class: "card", "aria-label": "Faults" });
    this.el = h("div", { class: "stack" }, this.engines, this.faults);
  }

  draw({ health }) {
    const view = health.view || { engines: [], faults: [], fault_counts: {}, incarnations: [], routers: {} };
    const shade = { ready: "good", fenced: "warn", lost: "bad" };
    const rows = view.engines.map((one) => h("tr", {}, h("td", {}, h("b", {}, one.name)), h("td", { class: "nowrap" }, h("span", { class: `dot ${shade[one.state] || ""}` }), one.state),
      h("td", {}, [one.model, one.worker_type && one.worker_type !== "regular" ? one.worker_type : null].filter(Boolean).join(", ") || "–"), h("td", { class: `m ${one.current ? "good-ink" : one.updated ? "warn-ink" : ""}` }, one.version || "–"), h("td", { class: "n" }, one.lives), h("td", { class: "n" }, h("span", { class: one.losses ? "bad-ink" : "" }, one.losses)), h("td", { class: "n" }, one.fences), h("td", { class: "n" }, clock(one.since)), h("td", { class: "m" }, one.url), h("td", {}, one.reason)));
    fill(this.engines, h("h2", {}, "Engines"), h("p", { class: "note" }, `${view.engines.length} so far${Object.keys(view.routers).length ? `; router ${Object.values(view.routers).join(", ")}` : ""}; an engine is told as lost, fenced or ready by the run's event log`),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of engines" }, table([["engine"], ["state"], ["model"], ["attested version"], ["lives", "n"], ["losses", "n"], ["fences", "n"], ["since", "n"], ["address"], ["reason"]], rows, "Engines")));
    const told = Object.entries(view.fault_counts).map(([kind, n]) => `${kind}: ${count(n)}`).join(", ");
    const lines = view.faults.map(([at, kind, who, text]) => h("tr", {}, h("td", { class: "nowrap dim" }, clock(at)), h("td", { class: "nowrap" }, h("span", { class: `dot ${/lost|stall|aborted/.test(kind) ? "bad" : "warn"}` }), kind), h("td", { class: "m" }, who || "–"), h("td", {}, text)));
    fill(this.faults, h("h2", {}, "What went wrong"), h("p", { class: "note" }, told || "nothing so far"),
      lines.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of faults" }, table([["time"], ["what"], ["who"], ["why"]], lines, "Faults")) : null);
  }
}

export class Waits {
  stores = ["health"];

  constructor() {
    this.line = h("section", { class: "card", "aria-label": "What the run waits for" });
    this.graph = h("section", { class: "card graph", tabindex: "0", role: "region", "aria-label": "The chain of waits" });
    this.stalls = h("section", { class: "card", "aria-label": "Stalls so far" });
    this.el = h("div", { class: "stack" }, this.line, this.graph, this.stalls);
  }

  draw({ health }, head) {
    const { doctor } = head, chain = doctor.waits.chain || [], stalled = doctor.status !== 0;
    fill(this.line, h("h2", {}, "What the run waits for"), h("div", { class: `why ${doctor.status === 0 ? "good" : doctor.status === 3 ? "warn" : ""}` }, doctor.text),
      h("p", { class: "note" }, doctor.waits.at ? `as it was at ${clock(doctor.waits.at)}, in the phase ${doctor.waits.phase}, process ${doctor.waits.pid} on ${doctor.waits.host}` : "waits.json is not written yet"));
    const nodes = chain.length ? [h("div", { class: "node" }, chain[0].who)] : [];
    chain.forEach((one, at) => {
      const root = at === chain.length - 1;
      nodes.push(h("div", { class: "edge" }, one.what, h("br"), h("span", {}, `${seconds(one.seconds)}${one.limit_s === null ? "" : ` of ${span(one.limit_s)}`}`)));
      nodes.push(h("div", { class: `node ${root ? (stalled ? "stalled" : "root") : ""}` }, one.on));
    });
    fill(this.graph, h("h2", {}, "Who waits for whom"), h("p", { class: "note" }, "from the run to the root: who is waited for and waits for nobody else; over each arrow what for, and since it last moved"),
      nodes.length ? h("div", { class: "chain" }, nodes) : h("p", { class: "empty" }, "nothing is waited for"));
    const faults = ((health.view || {}).faults || []).filter((one) => one[1] === "stall");
    fill(this.stalls, h("h2", {}, "Stalls so far"), faults.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of stalls" }, table([["time"], ["root"], ["who waited for whom"]], faults.map(([at, , who, text]) => h("tr", {}, h("td", { class: "nowrap dim" }, clock(at)), h("td", { class: "nowrap" }, who), h("td", {}, text))), "Stalls")) : h("p", { class: "note" }, "none"));
  }
}
