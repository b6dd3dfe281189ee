// How the service is: whether it is ready, how far its answers reach, the lag of its follower, and its figures.
import { json, metrics, text } from "./api.js";
import { Line } from "./chart.js";
import { NUMBER, Table, ago, bytes, column, counted, find, make, tell, time } from "./page.js";

const EVERY_MS = 5000;
const KEPT = 720;
// later than every entry, so that no file is looked into
const NEVER_MS = 253402300799000;
const UNREACHED = "it can’t be reached";
const seen = [[], []];
let timer, chart, lagTable, table;

export function start() {
  lagTable = new Table(find("lag-table"), "Lag", [
    column("Time (UTC)", 0, time), column("Seconds behind", 1, (seconds) => String(seconds ?? "not known"), NUMBER),
  ]);
  const value = (number) => number.toLocaleString("en", { maximumSignificantDigits: 6 });
  table = new Table(find("metrics-table"), "Figures", [
    column("Metric", "name", (name) => name.replace("tiered_index_", "")), column("Of", "labels"),
    column("Value", "value", value, NUMBER), column("Meaning", "meaning", String, { text: true }),
  ]);
}

export function leave() {
  clearTimeout(timer);
}

// Shows in the page's head whether the service is ready and has no problem; returns why not, and its problems.
export async function ready() {
  const state = await json("readyz", {}, { also: [503] }).catch(() => ({ reasons: [UNREACHED] }));
  const { reasons, problems = [] } = state;
  const said = find("ready");
  const now = reasons.length ? `not ready: ${reasons[0]}` : problems.length ? `problem: ${problems[0]}` : "ready";
  // a status that is written again is read aloud again
  if (said.textContent !== now) said.textContent = now;
  said.className = now === "ready" ? "good" : "bad";
  return { reasons, problems };
}

export async function show() {
  clearTimeout(timer);
  const { reasons, problems } = await ready();
  const listed = (title, texts) => make("div", { class: "problem" }, make("h3", {}, title),
    make("ul", {}, ...texts.map((text) => make("li", {}, text))));
  find("reasons").replaceChildren(
    ...reasons.length ? [listed("Not ready", reasons)] : [make("p", {}, "The service is ready: it takes requests.")],
    ...problems.length ? [listed("Problems", problems)] : []);
  if (reasons.includes(UNREACHED)) {
    find("reasons").append(make("p", { class: "hint" }, "What may be below is older. This page keeps asking."));
    return later();
  }
  await part("fresh", async () => {
    const { freshness } = await json("v1/topics", { begin_ms: NEVER_MS, allow_partial: true });
    const beside = "It reads beside the writer: answers have all that was flushed.";
    return freshness.length ? freshness.map(published) : [make("p", {}, beside)];
  });
  await part("metrics-said", async () => {
    const page = metrics(await text("metrics"));
    table.show(page.filter(({ name }) => /^tiered_index_(?!http_)/.test(name)));
    lag(Object.fromEntries(page.map(({ name, value }) => [name, value])));
    return [];
  });
  later();
}

function later() {
  clearTimeout(timer);
  if (!find("health-view").hidden) timer = setTimeout(show, EVERY_MS);
}

async function part(id, read) {
  try {
    const parts = await read();
    tell(find(id), null);
    find(id).replaceChildren(...parts);
  } catch (problem) {
    tell(find(id), problem);
  }
}

function published({ source, as_of_ms: ms, not_asked: why }) {
  const until = ms === null ? "nothing is published yet" : `the newest published entry is of ${time(ms)}, ${ago(ms)}`;
  return make("p", {}, `${source}: ${until}${why ? `; the storage could not be asked: ${why}` : ""}.`);
}

function lag({ tiered_index_follow_lag_bytes: behind, tiered_index_follow_lag_seconds: seconds }) {
  find("lag").hidden = behind === undefined;
  if (behind === undefined) return;
  const known = Number.isNaN(seconds) ? null : seconds;
  seen[0].push(Date.now());
  seen[1].push(known);
  for (const values of seen) values.splice(0, values.length - KEPT);
  const since = known === null ? "an unknown time" : counted(known, "second");
  find("lag-now").textContent = `${bytes(behind)} and ${since} behind the end of the store’s log.`;
  chart ??= new Line(find("lag-chart"));
  chart.show(seen, "seconds behind", "Seconds behind the store while this page is open. A table is below.");
  lagTable.show(seen[0].map((ms, n) => [ms, seen[1][n]]).reverse());
}
