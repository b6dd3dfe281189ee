// Shows the service's readiness, the freshness of its answers, and an hour of figures with their alerts.
import { json, metrics, text } from "./api.js";
import { Line } from "./chart.js";
import { NUMBER, Table, ago, column, count, find, make, tell, time, usd } from "./page.js";

// the service's interval of samples
const EVERY_MS = 15000;
// later than every entry: the service reads no file
const NEVER_MS = 253402300799000;
const UNREACHED = "it can’t be reached";
const short = (number) => number.toLocaleString("en", { maximumSignificantDigits: 3 });
const LENGTHS = [[7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]];
function duration(seconds) {
  const [, size, unit] = LENGTHS.find(([least]) => seconds >= least) ?? LENGTHS.at(-1);
  return `${short(seconds / size)} ${unit}`;
}
const FORMS = { s: duration, usd, share: (part) => `${short(100 * part)} %` };
const charts = new Map();
let timer, table;

export function start() {
  const value = (number) => number.toLocaleString("en", { maximumSignificantDigits: 6 });
  table = new Table(find("metrics-table"), "Raw metrics", [
    column("Metric", "name", (name) => name.replace("tiered_index_", "")), column("Of", "labels"),
    column("Value", "value", value, NUMBER), column("Meaning", "meaning", String, { text: true }),
  ]);
  find("raw").addEventListener("toggle", () => find("raw").open && raw());
}

export function leave() {
  clearTimeout(timer);
}

// Shows in the page's head whether the service is ready and has problems; returns the reasons and the problems.
export async function ready() {
  // a proxy may answer in place of a service that restarts
  const state = await json("readyz", {}, { also: [503] }).catch(() => null);
  const { reasons = [UNREACHED], problems = [] } = state ?? {};
  const said = find("ready");
  const now = reasons.length ? `not ready: ${reasons[0]}` : problems.length ? `problem: ${problems[0]}` : "ready";
  // a screen reader would read a status again if it were written again
  if (said.textContent !== now) said.textContent = said.title = now;
  said.className = now === "ready" ? "good" : "bad";
  return { reasons, problems };
}

export async function show() {
  clearTimeout(timer);
  const { reasons, problems: told } = await ready();
  // if the service has tokens, its probe names only the parts
  const detailed = ({ problems: found }) => found.map(({ reason }) => reason);
  const problems = told.length ? await json("v1/health").then(detailed).catch(() => told) : told;
  const listed = (title, texts) => make("div", { class: "problem" }, make("h3", {}, title),
    make("ul", {}, ...texts.map((text) => make("li", {}, text))));
  find("reasons").replaceChildren(
    ...reasons.length ? [listed("Not ready", reasons)] : [make("p", {}, "The service is ready.")],
    ...problems.length ? [listed("Problems", problems)] : []);
  if (reasons.includes(UNREACHED)) {
    find("reasons").append(make("p", { class: "hint" }, "The figures below may be old. This page keeps trying."));
    return later();
  }
  await part("fresh", async () => {
    const { freshness } = await json("v1/topics", { begin_ms: NEVER_MS, allow_partial: true });
    const beside = "The service reads the writer’s files: answers have all flushed entries.";
    tell(find("fresh"), null);
    find("fresh").replaceChildren(...(freshness.length ? freshness.map(published) : [make("p", {}, beside)]));
  });
  await part("history-said", async () => history(await json("v1/history")));
  if (find("raw").open) await raw();
  later();
}

function later() {
  clearTimeout(timer);
  if (!find("health-view").hidden) timer = setTimeout(show, EVERY_MS);
}

const raw = () => part("metrics-said", async () => {
  const page = metrics(await text("metrics"));
  table.show(page.filter(({ name }) => /^tiered_index_(?!http_)/.test(name)));
});

async function part(id, read) {
  try {
    await read();
    if (find(id).dataset.said) tell(find(id), null);
  } catch (problem) {
    tell(find(id), problem);
  }
}

function published({ source, as_of_ms: ms, not_asked: why }) {
  const until = ms === null ? "nothing is published yet" : `the newest published entry is from ${time(ms)}, ${ago(ms)}`;
  return make("p", {}, `${source}: ${until}${why ? `; a newer state was not read: ${why}` : ""}.`);
}

function history({ begin_ms: begin, end_ms: end, times_ms: times, figures }) {
  find("no-figures").hidden = figures.length > 0;
  // a service that restarted may lack some figures
  const told = new Set(figures.map(({ title }) => title));
  for (const [title, { box }] of charts) box.hidden = !told.has(title);
  for (const figure of figures) {
    if (!charts.has(figure.title)) charts.set(figure.title, boxOf(figure));
    const { box, now, verdict, line } = charts.get(figure.title);
    const { title, unit, values, alert } = figure;
    const form = FORMS[unit] ?? ((number) => (Number.isInteger(number) ? count(number) : short(number)));
    const last = values.at(-1) ?? null;
    const known = values.filter((value) => value !== null);
    const most = known.length ? `, at most ${form(known.reduce((a, b) => Math.max(a, b)))} in the last hour` : "";
    const fires = (value) => (alert.is_floor ? value <= alert.threshold : value > alert.threshold);
    const isBeyond = Boolean(alert) && (last === null ? alert.unknown_fires : fires(last));
    box.classList.toggle("beyond", isBeyond);
    now.textContent = last === null ? "not known" : form(last);
    const bound = alert ? `${alert.is_floor ? "at most" : "above"} ${form(alert.threshold)}` : "";
    const rule = alert ? `${bound}${alert.unknown_fires ? " or not known" : ""} for ${duration(alert.for_s)}` : "";
    verdict.textContent = !alert ? "No alert." : `${isBeyond ? "Beyond its alert" : "Alert"}: ${rule}.`;
    verdict.title = alert?.name ?? "";
    // an element has a size only in the document
    if (!box.isConnected) find("history").append(box);
    line.show({ times, values, begin, end, form, threshold: alert?.threshold ?? null, isBeyond },
      `${title}: now ${now.textContent}${most}. ${verdict.textContent}`);
  }
}

function boxOf({ title }) {
  const now = make("span", { class: "now" });
  const verdict = make("p", { class: "hint" });
  const picture = make("div");
  const box = make("figure", {}, make("figcaption", {}, make("strong", {}, title), now), picture, verdict);
  return { box, now, verdict, line: new Line(picture) };
}
