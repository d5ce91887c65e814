// Trajectories: the list of groups, and one group with its tokens.
import { ask, clock, color, count, fill, h, num, seconds, visible } from "./dom.js";

const PAGE = 50;
const STATES = ["waiting", "inflight", "partial", "completed", "taken", "trained", "dropped", "requeued"];
const SHADES = { trained: "good", dropped: "bad", requeued: "warn" };
const PALETTE = ["rollout", "train", "publish", "prepare", "activate", "evaluate", "checkpoint"];
const state = (one) => h("span", { class: "nowrap" }, h("span", { class: `dot ${SHADES[one.state] || ""}` }), one.state, one.trained === null ? "" : ` by step ${count(one.trained)}`);
const went = (name, query) => { location.hash = query ? `${name}?${query}` : name; };

export class Trajectories {
  stores = ["states"];

  constructor() {
    this.select = h("select", { name: "state" }, h("option", { value: "" }, "any state"), STATES.map((one) => h("option", { value: one }, one)));
    this.cause = h("select", { name: "cause" }, h("option", { value: "" }, "any cause"));
    this.step = h("input", { name: "step", type: "number", min: "0", placeholder: "any" });
    this.order = h("select", { name: "order" }, h("option", { value: "" }, "newest first"), h("option", { value: "slowest" }, "slowest to complete"));
    this.find = h("input", { name: "group", placeholder: "g00000012.0", size: "13", pattern: "g[0-9]{8,12}\\.[0-9]{1,6}" });
    this.form = h("form", { class: "filters", "aria-label": "Filter", on: { submit: (event) => { event.preventDefault(); this.find.value ? went(`group/${this.find.value}`) : this.apply(); } } },
      h("label", {}, "state", this.select), h("label", {}, "cause of its end", this.cause), h("label", {}, "of the batch of step", this.step), h("label", {}, "order", this.order), h("label", {}, "or one group", this.find),
      h("button", { class: "plain", type: "submit" }, "Show"));
    for (const one of [this.select, this.cause, this.order, this.step]) one.addEventListener("change", () => this.apply());
    this.order.addEventListener("change", () => this.lock());
    this.body = h("div");
    this.el = h("div", {}, h("section", { class: "card", "aria-label": "Trajectories" }, this.form, this.body));
    this.detail = new Detail();
  }

  lock() { for (const one of [this.select, this.cause, this.step]) one.disabled = this.order.value === "slowest"; }

  apply() {
    const query = new URLSearchParams();
    for (const one of [this.select, this.cause, this.step, this.order]) if (one.value && !one.disabled) query.set(one.name, one.value);
    went("trajectories", query.toString());
  }

  async open(path, query) {
    if (path.startsWith("group/")) {
      fill(this.el, this.detail.el);
      return this.detail.open(...path.slice(6).split("/"));
    }
    if (!this.el.contains(this.form)) fill(this.el, h("section", { class: "card", "aria-label": "Trajectories" }, this.form, this.body));
    const wanted = new URLSearchParams(query);
    for (const one of [this.select, this.step, this.order]) one.value = wanted.get(one.name) || "";
    this.wantCause(wanted.get("cause") || "");
    this.lock();
    this.shown = [];
    return this.more(wanted);
  }

  wantCause(cause) {
    if (cause && ![...this.cause.options].some((one) => one.value === cause)) this.cause.append(h("option", { value: cause }, cause));
    this.cause.value = cause;
  }

  draw({ states }) {
    const causes = ((states || {}).view || {}).causes || [], known = new Set([...this.cause.options].map((one) => one.value));
    for (const [cause] of causes) if (!known.has(cause)) this.cause.append(h("option", { value: cause }, cause.length > 90 ? `${cause.slice(0, 89)}…` : cause));
  }

  async more(wanted) {
    const query = new URLSearchParams(wanted);
    query.set("limit", PAGE);
    if (this.shown.length) query.set("below", this.shown[this.shown.length - 1].group);
    this.asked = query.toString();
    let found;
    try { found = (await ask(`api/groups?${this.asked}`)).groups; } catch (fault) { fill(this.body, h("p", { class: "why" }, fault.message)); return; }
    if (this.asked !== query.toString()) return;
    const first = this.shown.length;
    this.shown.push(...found);
    this.list(wanted, found.length === PAGE && !wanted.get("order"), first);
  }

  list(wanted, more, first) {
    const rows = this.shown.map((one, at) => h("tr", { class: "row", tabindex: at === first || (!first && !at) ? "0" : "-1", "data-group": one.group, on: { click: () => went(`group/${one.group}`) } },
      h("td", { class: "m nowrap" }, h("a", { href: `#group/${one.group}`, tabindex: "-1" }, one.group)), h("td", {}, state(one)), h("td", { class: "n" }, count(one.tokens)), h("td", { class: "n" }, num(one.reward)), h("td", { class: "n" }, seconds(one.seconds)), h("td", { class: "n dim" }, clock(one.at)), h("td", { class: "dim" }, one.prompt), h("td", {}, one.cause || (one.stored ? "" : h("span", { class: "dim" }, "tokens forgotten")))));
    const body = h("tbody", { on: { keydown: (event) => this.keys(event) } }, rows);
    const heads = [["group"], ["state"], ["tokens", "n"], ["reward", "n"], ["to complete", "n"], ["last change", "n"], ["prompt"], ["why"]];
    fill(this.body, this.shown.length ? h("div", { class: "scroll" }, h("table", { "aria-label": "Groups" }, h("thead", {}, h("tr", {}, heads.map(([name, kind]) => h("th", { class: kind, scope: "col" }, name)))), body)) : h("p", { class: "empty" }, "no group fits"),
      h("footer", { class: "spread" }, h("span", {}, `${this.shown.length} groups shown. `, h("kbd", {}, "↑"), " ", h("kbd", {}, "↓"), " move, ", h("kbd", {}, "Enter"), " opens"), more ? h("button", { class: "plain", type: "button", on: { click: () => this.more(wanted) } }, "More") : null));
    if (first && rows[first]) rows[first].focus();
  }

  keys(event) {
    const rows = [...event.currentTarget.children], at = rows.indexOf(event.target.closest("tr"));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); went(`group/${rows[at].dataset.group}`); }
    if (to === undefined || !rows[to]) return;
    event.preventDefault();
    rows[at].tabIndex = -1;
    rows[to].tabIndex = 0;
    rows[to].focus();
  }
}

class Detail {
  constructor() { this.el = h("div", { class: "stack" }); this.mode = "log-prob"; }

  async open(group, member) {
    if (this.group && this.group.group === group && this.el.isConnected && member !== undefined) return this.member(Number(member), 0);
    fill(this.el, h("p", { class: "empty" }, "reading"));
    try { this.group = await ask(`api/groups/${encodeURIComponent(group)}`); } catch (fault) { fill(this.el, h("section", { class: "card" }, this.back(), h("p", { class: "why" }, fault.message))); return null; }
    this.shell();
    const known = this.group.members.map((one) => one.member);
    const first = member === undefined ? known[0] : Number(member);
    return known.includes(first) ? this.member(first, 0) : null;
  }

  back() { return h("button", { class: "plain", type: "button", on: { click: () => history.length > 1 ? history.back() : went("trajectories") } }, "← Back (Esc)"); }

  shell() {
    const { group: name, history: moves, prompt_text: prompt, prompt_missing: noPrompt, members, attempts, cause, missing } = this.group;
    this.buttons = members.map((one) => h("button", { class: "plain", type: "button", "data-member": one.member, on: { click: () => went(`group/${name}/${one.member}`) } }, `member ${one.member} · ${count(one.tokens)} tokens · ${one.reward === null ? "unscored" : `reward ${num(one.reward)}`}`));
    this.tokens = h("div");
    const why = cause ? h("div", { class: "why" }, h("b", {}, this.group.state === "requeued" ? "Sent back: " : "Dropped: "), cause) : null;
    const lines = moves.map((one) => h("tr", {}, h("td", { class: "nowrap dim" }, clock(one.at)), h("td", { class: "nowrap" }, `${one.event} → ${one.state}`), h("td", {}, [one.step === null ? "" : `step ${one.step}`, one.incarnation ? `inc. ${one.incarnation}` : "", one.cause || ""].filter(Boolean).join(", "))));
    fill(this.el,
      h("section", { class: "card", "aria-label": `Group ${name}` }, h("div", { class: "head" }, this.back(), h("h2", { class: "m" }, name), state(this.group), h("span", { class: "dim" }, `prompt ${this.group.prompt}, admitted at step ${this.group.admitted}`), attempts.length > 1 ? attempts.filter((one) => one.group !== name).map((one) => h("a", { href: `#group/${one.group}` }, `attempt ${one.attempt}: ${one.state}`)) : null), why, missing ? h("div", { class: "why warn" }, missing) : null, h("div", { class: "members", role: "group", "aria-label": "Members" }, this.buttons)),
      h("div", { class: "two" }, this.tokens, h("div", { class: "stack" },
        this.readout = h("section", { class: "card", "aria-label": "The token at the cursor", "aria-live": "polite" }, h("h2", {}, "Token"), h("p", { class: "note" }, "point at a token, or move with the arrow keys")),
        h("section", { class: "card", "aria-label": "Prompt" }, h("h2", {}, "Prompt"), prompt ? h("pre", { class: "text", tabindex: "0" }, visible(prompt)) : h("p", { class: "note" }, noPrompt)),
        h("section", { class: "card", "aria-label": "History" }, h("h2", {}, "History"), h("table", { "aria-label": "History" }, h("tbody", {}, lines))))));
  }

  async member(number, first) {
    for (const one of this.buttons) one.setAttribute("aria-pressed", String(Number(one.dataset.member) === number));
    const about = this.group.members.find((one) => one.member === number);
    if (!about) return;
    if (!this.group.stored) { this.pieces(about); return; }
    try { this.shown = await ask(`api/groups/${encodeURIComponent(this.group.group)}/members/${number}?first=${first}`); } catch (fault) { fill(this.tokens, h("section", { class: "card" }, h("p", { class: "why warn" }, fault.message))); return; }
    this.expand();
    this.draw(number, about);
  }

  pieces(about) {
    fill(this.tokens, h("section", { class: "card", "aria-label": "What stays" }, h("h2", {}, `Member ${about.member}: ${count(about.tokens)} tokens, ended by ${about.finish}`), h("p", { class: "note" }, "its tokens are forgotten; this is what stays"),
      about.versions.map(([n, label]) => h("div", { class: "m" }, `${count(n)} tokens by ${label}`)), h("p", { class: "dim" }, `made by ${about.engines.map(([n, name]) => `${name} (${n})`).join(", ")}`)));
  }

  expand() {
    // per token: version with its lag, engine
    const { shown } = this;
    shown.version = shown.versions.flatMap(([n, label, lag]) => Array(n).fill({ label, lag }));
    shown.engine = shown.engines.flatMap(([n, name]) => Array(n).fill(name));
    shown.labels = [...new Set(shown.versions.map(([, label]) => label))];
  }

  draw(number, about) {
    const { shown } = this;
    this.spans = shown.ids.map((id, at) => {
      const text = shown.texts ? shown.texts[at] : `${id} `;
      const made = h("span", { class: `tok${shown.mask[at] ? "" : " masked"}`, "data-at": at }, text === "" ? h("span", { class: "sign" }, "·") : visible(text));
      return made;
    });
    const box = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `Tokens of member ${number}; arrow keys move`, on: { keydown: (event) => this.keys(event), pointerover: (event) => { const at = event.target.closest("[data-at]"); if (at) this.at(Number(at.dataset.at)); } } }, this.spans);
    this.box = box;
    const modes = ["log-prob", "version", "mask"].map((mode) => h("button", { class: "plain", type: "button", "aria-pressed": String(mode === this.mode), on: { click: () => { this.mode = mode; this.draw(number, about); } } }, mode));
    const last = shown.first + shown.ids.length, paged = shown.count > shown.ids.length;
    const more = paged ? h("div", { class: "members" }, shown.first ? h("button", { class: "plain", type: "button", on: { click: () => this.member(number, Math.max(0, shown.first - 2048)) } }, "← earlier") : null, last < shown.count ? h("button", { class: "plain", type: "button", on: { click: () => this.member(number, last) } }, "later →") : null) : null;
    const masked = shown.mask.filter((one) => !one).length;
    this.legend = h("div", { class: "legend" });
    fill(this.tokens, h("section", { class: "card", "aria-label": "Response" },
      h("div", { class: "spread" }, h("h2", {}, `Member ${number}: tokens ${count(shown.first)}–${count(Math.max(shown.first, last - 1))} of ${count(shown.count)}`), h("div", { class: "members", role: "group", "aria-label": "Colour by" }, h("span", { class: "dim" }, "colour by"), modes)),
      h("p", { class: "note" }, [`ended by ${shown.finish}`, shown.reward === null ? "unscored" : `reward ${num(shown.reward)}`, masked ? `${count(masked)} tokens masked (struck through)` : "no token masked", shown.mixed.length ? "some on a cache of older weights" : ""].filter(Boolean).join(", ")),
      shown.texts ? null : h("p", { class: "why warn" }, `token ids only: ${shown.texts_missing}`), this.legend, box, shown.text ? h("details", {}, h("summary", {}, "the whole text"), h("pre", { class: "text" }, visible(shown.text))) : null, more));
    this.paint();
    this.cursor = null;
  }

  paint() {
    const { shown } = this, legend = [];
    const shade = (name) => color(name);
    this.spans.forEach((one, at) => {
      if (this.mode === "log-prob") one.style.background = `color-mix(in srgb, var(--bad) ${Math.round(Math.min(1, -shown.logprobs[at] / 5) * 70)}%, transparent)`;
      else if (this.mode === "version") one.style.background = `color-mix(in srgb, ${shade(PALETTE[shown.labels.indexOf(shown.version[at].label) % PALETTE.length])} 34%, transparent)`;
      else one.style.background = shown.mask[at] ? "color-mix(in srgb, var(--good) 22%, transparent)" : "color-mix(in srgb, var(--bad) 30%, transparent)";
    });
    const key = (name, paint) => { const dot = h("i"); dot.style.background = paint; return h("span", { class: "key" }, dot, name); };
    if (this.mode === "log-prob") legend.push(key("certain", "color-mix(in srgb, var(--bad) 4%, transparent)"), key("log-prob −5 and less", "color-mix(in srgb, var(--bad) 70%, transparent)"));
    else if (this.mode === "version") shown.versions.forEach(([n, label, lag]) => legend.push(key(`${label}${lag === null ? "" : `, lag ${lag}`} (${count(n)} tokens)`, `color-mix(in srgb, ${shade(PALETTE[shown.labels.indexOf(label) % PALETTE.length])} 60%, transparent)`)));
    else legend.push(key("carries loss", "color-mix(in srgb, var(--good) 50%, transparent)"), key("masked", "color-mix(in srgb, var(--bad) 50%, transparent)"));
    fill(this.legend, legend);
  }

  keys(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !this.spans.length) return;
    event.preventDefault();
    this.at(Math.max(0, Math.min(this.spans.length - 1, (this.cursor ?? -1) + by)));
    this.spans[this.cursor].scrollIntoView({ block: "nearest" });
  }

  at(place) {
    const { shown } = this;
    if (this.cursor !== null && this.spans[this.cursor]) this.spans[this.cursor].classList.remove("here");
    this.cursor = place;
    this.spans[place].classList.add("here");
    const rows = [["place", `${count(shown.first + place)} of ${count(shown.count)}`], ["id", String(shown.ids[place])], ["text", shown.texts ? (shown.texts[place] === "" ? "a part of the next" : JSON.stringify(visible(shown.texts[place]))) : "–"],
      ["log-prob", `${shown.logprobs[place]} (probability ${num(Math.exp(shown.logprobs[place]))})`], ["version", shown.version[place].label], ["lag", shown.version[place].lag === null ? "not trained" : `${shown.version[place].lag} train steps`], ["mask", shown.mask[place] ? "carries loss" : "masked"], ["engine", shown.engine[place]]];
    if (shown.mixed.length) rows.push(["cache", shown.mixed[place] ? "of older weights" : "of its own version"]);
    fill(this.readout, h("h2", {}, "Token"), h("dl", { class: "readout" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", { class: "m" }, value)])));
  }
}

