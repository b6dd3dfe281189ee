// Shows the service's readiness, the freshness of its answers, and its metrics now.
import { json, metrics, text } from "./api.js";
import { NUMBER, Table, ago, column, find, make, tell, time } from "./page.js";

// between two looks
const EVERY_MS = 15000;
// later than every entry: the service reads no file
const NEVER_MS = 253402300799000;
const UNREACHED = "it can’t be reached";
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
    find("reasons").append(make("p", { class: "hint" }, "What follows may be old. This page keeps trying."));
    return later();
  }
  await part("fresh", async () => {
    const { freshness } = await json("v1/topics", { begin_ms: NEVER_MS, allow_partial: true });
    const beside = "The service reads the writer’s files: answers have all flushed entries.";
    tell(find("fresh"), null);
    find("fresh").replaceChildren(...(freshness.length ? freshness.map(published) : [make("p", {}, beside)]));
  });
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
