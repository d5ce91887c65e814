// Tabs, keys, and the refresh: a view asks for what has changed, every two seconds while the page is looked at.
import { Store, count, fill, h, span } from "./dom.js";
import { Lanes } from "./lanes.js";
import { Trajectories } from "./trajectories.js";
import { Buffer, Distributions, Health, Overview, Waits, Weights } from "./views.js";

const EVERY_MS = 2000;
const VIEWS = [["overview", "Overview", Overview], ["distributions", "Lag and length", Distributions], ["lanes", "Lanes", Lanes], ["weights", "Weights", Weights], ["buffer", "Buffer", Buffer], ["health", "Health", Health], ["waits", "Waits", Waits], ["trajectories", "Trajectories", Trajectories]];
const stores = Object.fromEntries(["overview", "distributions", "versions", "health", "states"].map((name) => [name, new Store(name)]));
const views = {}, find = (id) => document.getElementById(id);
let current = "", opened = "", turn = 0, timer = 0, lastHead = null;

const tabs = VIEWS.map(([name, title], at) => h("button", { role: "tab", id: `tab-${name}`, "aria-controls": "main", "aria-selected": "false", tabindex: "-1", title: `${title} (${at + 1})`, on: { click: () => { location.hash = name; } } }, title));
fill(find("tabs"), tabs);
find("tabs").addEventListener("keydown", (event) => {
  const at = tabs.indexOf(document.activeElement), to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const next = tabs[(to + tabs.length) % tabs.length];
  next.focus();
  next.click();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const at = Number(event.key) - 1;
  if (tabs[at]) { tabs[at].click(); tabs[at].focus(); }
  if (event.key === "Escape" && location.hash.startsWith("#group/")) location.hash = opened || "trajectories";
});

function route() {
  const [path, query] = location.hash.slice(1).split("?"), name = path.startsWith("group/") ? "trajectories" : path || "overview";
  if (!VIEWS.some(([known]) => known === name)) { location.hash = "overview"; return; }
  if (!views[name]) views[name] = new (VIEWS.find(([known]) => known === name)[2])();
  if (name !== current) {
    current = name;
    tabs.forEach((tab, at) => { const on = VIEWS[at][0] === name; tab.setAttribute("aria-selected", String(on)); tab.tabIndex = on ? 0 : -1; });
    find("main").setAttribute("aria-labelledby", `tab-${name}`);
    find("main").setAttribute("role", "tabpanel");
    fill(find("main"), views[name].el);
    views[name].fresh = false;
  }
  if (name === "trajectories") {
    if (!path.startsWith("group/")) opened = location.hash.slice(1);
    views[name].open(path, query || "");
  }
  refresh();
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++turn, view = views[current];
  try {
    let head;
    for (const name of view.stores) {
      const got = await stores[name].refresh();
      head = got.head;
      if (got.changed) view.fresh = false;
    }
    if (mine !== turn) return;
    if (head) top(lastHead = head);
    if (view.load && await view.load(stores)) view.fresh = false;
    if (mine !== turn) return;
    if (!view.fresh || current === "waits") view.draw(stores, head);
    view.fresh = true;
    document.documentElement.dataset.ready = current;
    again(head && head.progress < 1 ? 250 : EVERY_MS);
  } catch (fault) {
    if (mine !== turn) return;
    pill(fault.status ? "refused" : "no answer", "bad");
    fill(find("doctor"), `the dashboard's server ${fault.status ? "says" : "does not answer"}: ${fault.message}`);
    again(2 * EVERY_MS);
  }
}

function again(ms) { if (!document.hidden) timer = setTimeout(refresh, ms); }

function pill(text, shade) { const at = find("status"); if (at.textContent !== text) fill(at, text); at.className = `pill ${shade}`; }

function top(head) {
  document.title = `${head.name} · Turnout`;
  if (find("name").textContent !== head.name) fill(find("name"), head.name);
  const shade = { finished: "good", running: "good", paused: "warn", dead: "bad", failed: "bad", interrupted: "warn" }[head.status] || "";
  pill(head.progress < 1 ? `reading ${Math.floor(100 * head.progress)} %` : head.doctor.status === 3 ? "stalled" : head.status, head.doctor.status === 3 ? "warn" : shade);
  const facts = [[head.model, ""], [head.run.schedule, "schedule "], [head.step === null ? null : count(head.step), "step "], [head.version ? head.version.slice(0, 7) : null, "version "], [head.started ? span((head.status === "running" ? Date.now() / 1000 : head.last) - head.started) : null, ""]];
  fill(find("facts"), facts.filter(([value]) => value).map(([value, name], at) => [at ? " · " : "", name, h("b", {}, value)]));
  const told = head.bad.count ? `${head.bad.count} lines of its files can't be read (${head.bad.first[0]}). ` : "", more = head.unknown ? `${head.unknown} events are of a newer Turnout. ` : "";
  const line = `${told}${more}${head.doctor.text}`;
  if (find("doctor").textContent !== line) { fill(find("doctor"), line); find("doctor").title = line; }
  find("doctor").className = `doctor ${head.doctor.status === 0 && !told ? "" : "bad"}`;
}

document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (lastHead) views[current].draw(stores, lastHead); });
window.addEventListener("hashchange", route);
route();
