// The search: shows entries of a key as they arrive, the missing parts of the answer, and the result of each file.
import { Problem, brokeOff, json, lines } from "./api.js";
import { Lanes } from "./chart.js";
import * as commands from "./commands.js";
import { found } from "./meant.js";
import * as message from "./message.js";
import { ERROR, NUMBER, SPAN, Table, ago, bytes, cents, column, count, counted, entryOf, fileList, find, make, spans, state,
  tell, time } from "./page.js";
import * as results from "./results.js";
import { isDay, isLikelySeconds, isLocal, moment, ownZone, setLocal } from "./times.js";

const PAGE = 25;
const MANY = 1000;
const TEMPLATES = "tiered-index-templates";
const HOUR_MS = 3_600_000;
const NAMES = ["topic", "key", "begin_ms", "end_ms", "having"];
const COSTS = ["requests", "bytes", "cost_usd", "elapsed_ms", "matched"];
const STANDARD = new Set(["topic", "topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash", "fingerprint",
  "source", "found", "asked", "file", "row", "entry_id"]);
// outcomes of files, as lanes of the chart; an outcome without color is not about a file
const OUTCOMES = [
  ["read", "read", "--read"],
  ["failed", "could not be read", "--failed"],
  ["skipped_filter", "excluded by filter", "--filter"],
  ["skipped_time", "outside the time range", "--skipped"],
  ["skipped_topic", "without the topic", "--skipped"],
  ["skipped_budget", "not needed for these answers", "--skipped"],
  ["outdated", "read again, since the log changed", "--skipped"],
  ["refreshed", "the storage’s log, read again", ""],
];
const colors = Object.fromEntries(OUTCOMES.map(([outcome, , color]) => [outcome, color]));
const words = Object.fromEntries(OUTCOMES.map(([outcome, name]) => [outcome, name]));
// the source of a topic that was never read to its end has the time 0
const upTo = (until) => (until === null ? "" : until === 0 ? " so far: its source was never read to its end"
  : ` as of ${time(until)} (${ago(until)})`);
const entries = (number) => counted(number, "entry", "entries");
const costs = ({ requests, bytes: size, cost_usd: cost }) =>
  `${counted(requests, "request")}, ${bytes(size)}, ${cents(cost)}`;

// the shown search, its entries (the first `known` are of complete pages), and the reports
let asked = {};
let items = [];
let known, cursor, partial, reports, sums, chosen;
// missing parts of the answers so far: files by name, files of single messages, lost files
let missed, unread, lost, isPartial;
// whether the search has all its entries
let isWhole = false;
let stopping = null;
let table, chart, files, suggested;

export function start() {
  table = new Table(find("entries-table"), "Entries", columnsOf([]),
    { marked: (item) => placeOf(item) === chosen, drawn: tellApart });
  files = new Table(find("explain-table"), "Result of each file", [
    column("File", "file"),
    column("Outcome", "outcome", (outcome) => state(words[outcome] ?? outcome, colors[outcome] || "--skipped")),
    column("Place", "place"), ...SPAN,
    column("Requests", "requests", count, NUMBER), column("Read", "bytes", bytes, NUMBER),
    column("Cost", "cost_usd", cents, NUMBER), column("ms", "elapsed_ms", (ms) => ms.toFixed(2), NUMBER),
    column("Matched", "matched", count, NUMBER), ERROR,
  ]);
  find("search-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = Object.fromEntries(NAMES.map((name) => [name, entered(name)]));
    // "Tuesday" means the whole day
    if (isDay(given.begin_ms) && !given.end_ms.trim()) given.end_ms = given.begin_ms;
    // a filter applies to the present results only
    if (given.topic !== asked.topic || given.key !== asked.key) given.having = "";
    given.begin_ms = moment(given.begin_ms);
    given.end_ms = moment(given.end_ms, { isEnd: true });
    go(Object.entries(given), () => search(new URLSearchParams(given)));
  });
  find("id-form").addEventListener("submit", (event) => {
    event.preventDefault();
    go([["id", find("message-id").value.trim()], ["topic", find("id-topic").value]], showId);
  });
  find("within").addEventListener("change", ({ target }) => {
    const since = target.value && new Date(Date.now() - target.value * HOUR_MS).toISOString();
    find("begin").value = since ? `${since.slice(0, 19)}Z` : "";
    find("end").value = "";
  });
  find("own-zone").textContent = `here (${ownZone()})`;
  find("zone").value = isLocal() ? "local" : "";
  find("zone").addEventListener("change", ({ target }) => setLocal(target.value === "local"));
  for (const button of document.querySelectorAll(".pick")) {
    const picker = find(`${button.dataset.of}-picker`);
    button.addEventListener("click", () => picker.showPicker());
    picker.addEventListener("change", () => { find(button.dataset.of).value = picker.value.replace("T", " "); });
  }
  find("templates").value = localStorage.getItem(TEMPLATES) ?? "";
  find("templates").addEventListener("change", ({ target }) => localStorage.setItem(TEMPLATES, target.value.trim()));
  find("every").addEventListener("click", () => read(true));
  find("stop").addEventListener("click", () => stopping?.abort());
  find("close").addEventListener("click", leave);
  find("copy").addEventListener("click", () => commands.copy(location.href, find("copied")));
  for (const [id, step] of [["before", -1], ["behind", 1]]) find(id).addEventListener("click", () => move(id, step));
  find("save-ndjson").addEventListener("click", () => save("ndjson", results.ndjson));
  find("save-csv").addEventListener("click", () => save("csv", results.csv));
  find("message").addEventListener("keydown", ({ key }) => key === "Escape" && leave());
}

// The place of an entry, which names the open message in the address.
const placeOf = ({ timestamp_ms: at, queue_id: queue, offset, entry_id: id, source }) =>
  [at, ...(id ? [entryOf(id)] : [queue, offset]), ...(source ? [source] : [])].join("-");

const addressOf = (named) => `#search?${new URLSearchParams(named.filter(([, value]) => value))}`;

// Sets the address, with the open message or without one.
function note(place, topic = null) {
  chosen = place;
  if (asked.key) history[place ? "pushState" : "replaceState"](null, "",
    addressOf([...NAMES.map((name) => [name, asked[name]]), ["at", place], ["of", single() ? null : topic]]));
}

function leave() {
  message.close();
  if (chosen) note(null);
}

function openAt(place, topic, from) {
  const [, at, id, queue, offset, source] = /^(\d+)-(?:([0-9a-f]{24})|(\d+)-(\d+))(?:-(.*))?$/s.exec(place) ?? [];
  if (at === undefined) return;
  chosen = place;
  find("copied").textContent = "";
  message.showEntry({ timestamp_ms: at, entry_id: id, queue_id: queue, offset, source }, { topic, key: asked.key }, from);
  neighbours();
}

// Sets the address to the search, so that it can be shared; searches again if the address is the same.
function go(named, ask) {
  const place = addressOf(named);
  const [before] = location.hash.split("&at=");
  if (before !== place) location.hash = place;
  else {
    history.replaceState(null, "", place);
    ask();
  }
}

function showId() {
  forget();
  neighbours();
  find("filter").hidden = true;
  find("status").textContent = "";
  message.showId(find("message-id").value, find("id-topic").value, find("message-id"));
}

// Shows the results for the parameters in the page's address.
export function show(params) {
  suggestTopics();
  if (params.has("id")) {
    find("by-id").open = true;
    find("message-id").value = params.get("id");
    find("id-topic").value = params.get("topic") ?? "";
    return showId();
  }
  // without a search in the address the last one stays
  if (!params.has("key")) return find("topic").focus();
  const isNew = NAMES.some((name) => (params.get(name) ?? "") !== (asked[name] ?? "")) || !items.length;
  for (const name of NAMES) find("search-form").elements[name].value = params.get(name) ?? "";
  find("within").value = "";
  if (isNew) search(params);
  // the entries stay if only the open message changes
  else message.close();
  if (params.has("at")) openAt(params.get("at"), single() || params.get("of"), find("topic"));
  return null;
}

async function suggestTopics() {
  if (await suggested) return;
  // a few requests only: a topic can also be typed
  const bounds = { allow_partial: true, max_requests: 16, timeout_s: 5 };
  suggested = json("v1/topics", bounds).then(({ topics }) => topics).catch(() => null);
  find("topics").replaceChildren(...((await suggested) ?? []).map(({ topic }) => make("option", { value: topic })));
}

function forget() {
  stopping?.abort();
  stopping = null;
  [items, known, cursor, partial, reports, chosen] = [[], 0, null, false, new Map(), null];
  sums = Object.fromEntries(COSTS.map((name) => [name, 0]));
  [missed, unread, lost, isPartial] = [new Map(), new Map(), [], false];
  table.page = 0;
  message.close();
  tell(find("said"), null);
  find("missing").replaceChildren();
  for (const id of ["entries", "explain", "every", "stop"]) find(id).hidden = true;
}

// Returns the text of a field. A field drops line breaks: if it is unchanged, it has the text of the last search.
function entered(name) {
  const { value } = find("search-form").elements[name];
  const before = asked[name] ?? "";
  return value === before.replace(/[\r\n]/g, "") ? before : value;
}

function search(params) {
  forget();
  asked = Object.fromEntries(NAMES.map((name) => [name, params.get(name) ?? ""]));
  for (const name of NAMES) find("search-form").elements[name].value = asked[name];
  if (single()) read(false);
  else readEverywhere();
}

// Returns the topic of the search; an empty text for several topics or all.
const single = () => (/,|\*$/.test(asked.topic ?? "") ? "" : asked.topic);

function isChosen({ topic }) {
  const patterns = asked.topic.split(",").map((one) => one.trim()).filter(Boolean);
  return topic === asked.topic || patterns.some((one) =>
    (one.endsWith("*") ? topic.startsWith(one.slice(0, -1)) : topic === one));
}

const times = () => Object.fromEntries(["begin_ms", "end_ms"].filter((name) => asked[name]).map((name) =>
  [name, /^\d+$/.test(asked[name]) ? Number(asked[name]) : asked[name]]));

// Reads the first page of the key in each chosen topic that the token may see.
async function readEverywhere() {
  const mine = (stopping = new AbortController());
  find("answer").hidden = find("stop").hidden = false;
  find("status").textContent = "Searching…";
  isWhole = false;
  table.more = null;
  try {
    const { topics: all, status, failed } = await json("v1/topics", { allow_partial: true }, { signal: mine.signal });
    const topics = asked.topic ? all.filter(isChosen) : all;
    const lookups = topics.map(({ topic }) => ({ topic, key: asked.key, max_count: PAGE, ...times() }));
    const nothing = { results: [], status: "complete", failed: [], lost: [], freshness: [], explain: { files: [] } };
    const whole = lookups.length ? await json("v1/query:batch", {}, {
      signal: mine.signal, body: { lookups, explain: true, allow_partial: true },
    }) : nothing;
    if (asked.having) await narrow(whole, topics, mine.signal);
    items = whole.results.flatMap((one) => one.items).sort((a, b) => b.timestamp_ms - a.timestamp_ms);
    known = items.length;
    explain(whole.explain, whole.replaced ?? 0);
    const lacksSome = whole.status === "partial" || status === "partial";
    const open = topics.filter((_, n) => whole.results[n].cursor !== null).map(({ topic }) => topic);
    const matchesNone = !topics.length && !["", "*"].includes(asked.topic);
    conclude({ unknown_topics: [], as_of_ms: null, expired_before_ms: null, ...whole, cursor: null, matchesNone,
      failed: [...failed, ...whole.failed], status: lacksSome ? "partial" : open.length ? "truncated" : "complete" });
    find("said").prepend(make("p", {}, `Searched ${counted(topics.length, "topic")}.`), ...open.map((topic) =>
      make("p", {}, make("a", { href: addressOf([["topic", topic], ...NAMES.slice(1).map((n) => [n, asked[n]])]) },
        `More in topic ${topic}`))));
  } catch (problem) {
    if (mine !== stopping) return;
    find("status").textContent = mine.signal.aborted ? "Stopped." : "The search failed.";
    if (!mine.signal.aborted) fail(problem, false);
  } finally {
    if (mine === stopping) {
      drawItems();
      find("stop").hidden = true;
    }
  }
}

function drawItems() {
  find("entries").hidden = !items.length;
  // a filter that excludes all entries must stay visible, to be changed
  find("filter").hidden = !items.length && !asked.having;
  table.show(items, columnsOf(items));
}

const rowsOf = ({ messages }) => messages.map((one) => ({ ...one.item, found: one }));
const filtered = () => ({ ...times(), key: asked.key, contains: asked.having, max_count: PAGE, body: "excerpt" });

// Replaces the entries of each topic by those whose messages have the text.
async function narrow(whole, topics, signal) {
  for (const [n, answer] of whole.results.entries()) {
    if (!answer.items.length) continue;
    const more = { topic: topics[n].topic, allow_partial: true, explain: true };
    const some = await json("v1/messages", { ...filtered(), ...more }, { signal });
    Object.assign(answer, { items: rowsOf(some), cursor: some.cursor });
    explain(some.explain);
    whole.failed.push(...some.failed);
    if (some.status === "partial") whole.status = "partial";
  }
}

// Offers similar keys and topics that have entries, if the key has none.
async function offer(mine) {
  const [key, topic] = [asked.key, single()];
  const templates = (localStorage.getItem(TEMPLATES) ?? "").split(/\s+/).filter(Boolean);
  const known = (await suggested) ?? [];
  const names = [...new Set(known.flatMap((one) => one.key_names))];
  const some = await found({ key, topic }, templates, names, known.map((one) => one.topic), times()).catch(() => []);
  if (mine !== stopping || !some.length) return;
  const link = (one) => make("li", {}, make("a", { href: addressOf([
    ["topic", one.topic], ["key", one.key], ["begin_ms", asked.begin_ms], ["end_ms", asked.end_ms]]) },
  `key ${one.key} of topic ${one.topic}`));
  find("said").append(make("p", {}, "Keys are exact. These have entries:"), make("ul", {}, ...some.map(link)));
}

// Reads the next page of the search, or all pages.
async function read(every) {
  stopping?.abort();
  const mine = (stopping = new AbortController());
  find("answer").hidden = find("stop").hidden = false;
  find("every").hidden = true;
  find("status").textContent = "Searching…";
  isWhole = false;
  table.more = null;
  let end = null;
  let waiting = 0;
  const draw = () => {
    waiting = 0;
    drawItems();
  };
  try {
    const more = { cursor, explain: true, allow_partial: partial || null, all: every || null };
    // the service searches a hot key's messages in pieces: a page may need several
    const wanted = every ? Infinity : items.length + PAGE;
    let searched = 0;
    for (let isFirst = true; asked.having && (isFirst || (cursor !== null && items.length < wanted)); isFirst = false) {
      const asking = { ...filtered(), topic: asked.topic, cursor, explain: true, allow_partial: partial || null };
      end = await json("v1/messages", asking, { signal: mine.signal });
      items.push(...rowsOf(end));
      searched += end.messages.length + end.collisions;
      find("status").textContent = `Searching… ${counted(searched, "message")} read, ${items.length} have the text.`;
      [cursor, known] = [end.cursor, items.length];
      explain(end.explain, end.replaced);
      add(end);
      draw();
    }
    if (asked.having) return conclude(end);
    for await (const line of lines("v1/query", { ...asked, ...more, max_count: every ? MANY : PAGE }, mine.signal)) {
      if (!("timestamp_ms" in line)) {
        // at the end of each page: if the stream is cut, the next read continues there
        [end, cursor, known] = [line, line.cursor, items.length];
      } else if (items.push(line) && !waiting) waiting = requestAnimationFrame(draw);
    }
    if (end?.error) throw new Problem(end.error);
    if (!end?.status) throw brokeOff();
    explain(end.explain, end.replaced);
    conclude(end);
  } catch (problem) {
    if (mine !== stopping) return;
    const so = mine.signal.aborted ? "Stopped" : "The search failed";
    const sofar = items.length ? `: ${entries(items.length)} so far, and there may be more` : "";
    find("status").textContent = `${so}${sofar}.`;
    if (!mine.signal.aborted) fail(problem, every);
  } finally {
    if (mine === stopping) {
      cancelAnimationFrame(waiting);
      draw();
      find("stop").hidden = true;
    }
  }
}

function fail(problem, every) {
  const again = (allowed) => {
    tell(find("said"), null);
    items.length = known;
    partial = allowed;
    if (single()) read(every); else readEverywhere();
  };
  const button = (text, allowed) => make("button", { type: "button", onclick: () => again(allowed) }, text);
  // a search of several topics shows what can be read anyway
  const may = single() && !partial && [422, 502].includes(problem.status);
  // use the form's names and times in place of the service's parameters
  problem.message = problem.message.replace(/\b(begin|end)_ms\b(?: (-?\d+)\b)?/g, (_, side, ms) =>
    [side === "begin" ? "From" : "To", ...(ms ? [time(ms)] : [])].join(" "));
  // a repeat of an invalid request fails again
  const buttons = problem.status === 400 ? [] : [button("Try again", partial)];
  tell(find("said"), problem, ...buttons, ...(may ? [button("Show what can be read", true)] : []));
}

// Adds a request's cost and reports. A file has one report for all requests: it is "read" if any of them read it.
function explain(more, replaced = 0) {
  for (const name of COSTS) sums[name] += more[name] ?? 0;
  sums.folded = (sums.folded ?? 0) + (more.folded_entries ?? 0);
  sums.replaced = (sums.replaced ?? 0) + replaced;
  for (const report of more.files ?? []) {
    const id = `${report.source ?? ""} ${report.file}`;
    const before = reports.get(id);
    if (before) {
      for (const name of COSTS) before[name] += report[name];
      const { outcome, place, error } = report;
      const isNews = outcome === "failed" || before.outcome.startsWith("skipped");
      if (isNews) Object.assign(before, { outcome, place, error });
    } else reports.set(id, report);
  }
  find("explain").hidden = false;
  // files are about all topics: the service does not report them to a token for some topics
  const isTold = Boolean(more.files);
  for (const part of find("explain").querySelectorAll("#explain-chart, details")) part.hidden = !isTold;
  if (!isTold) {
    find("explain-sums").textContent = `${costs(sums)}, ${sums.elapsed_ms.toFixed(1)} ms. This token covers `
      + "some topics only, so files are not shown.";
    return;
  }
  const all = [...reports.values()];
  find("explain").querySelector("details").hidden = !all.length;
  const of = (outcome) => all.filter((file) => file.outcome === outcome);
  const lanes = OUTCOMES.map(([outcome, name, color]) => ({ name, color, files: of(outcome) }))
    .filter((lane) => lane.color && lane.files.length);
  const said = lanes.map((lane) => `${counted(lane.files.length, "file")} ${lane.name}`).join(", ") || "no file";
  find("explain-sums").textContent = `${said}: ${costs(sums)}, ${sums.elapsed_ms.toFixed(1)} ms.`;
  chart ??= new Lanes(find("explain-chart"), (file) => `${file.file}, ${time(file.begin_ms)} to ${time(file.end_ms)}: `
    + `${words[file.outcome]}, ${file.place}, ${costs(file)}`);
  chart.show(lanes.map((lane) => ({ ...lane, name: title(lane) })), `Files on a time axis: ${said}. A table is below.`);
  files.show(all);
}

function title({ name, files: some }) {
  const sum = { requests: 0, bytes: 0, cost_usd: 0 };
  for (const file of some) for (const cost of Object.keys(sum)) sum[cost] += file[cost];
  return `${name}: ${counted(some.length, "file")}${sum.requests ? `, ${costs(sum)}` : ""}`;
}

// Keeps the missing parts of an answer: its next page reads other files.
function add(end) {
  isPartial = isPartial || end.status === "partial" || end.failed.length > 0;
  for (const one of end.failed) missed.set(`${one.source ?? ""} ${one.file}`, one);
  lost = end.lost.map((one) => ({ ...one, place: one.reason ?? entries(one.entries) }));
}

function drawMissing() {
  find("missing").replaceChildren();
  lacks("Missing: files that could not be read", [...missed.values()]);
  lacks("Lost: an operator declared these files lost, or the index skipped these parts of its source", lost);
  lacks("Not known: messages of these files could not be read", [...unread].filter(([id]) => !missed.has(id))
    .map(([, one]) => one), "Entries of these times may lack tags, ids, keys and bodies:");
}

// Shows the status of an answer and its missing parts.
function conclude(end) {
  add(end);
  const { as_of_ms: until, expired_before_ms: expired } = end;
  const where = asked.topic ? `topic ${asked.topic}` : "any topic";
  const having = asked.having ? ` with “${asked.having}”` : "";
  const said = (items.length ? entries(items.length) : `No match for key ${asked.key} of ${where}`) + having;
  const how = {
    complete: `: the answer is complete${upTo(until)}.`,
    truncated: items.length ? " so far; there are more." : " so far; the search has not finished.",
    partial: items.length ? ", and some may be missing." : " in the files that could be read; others may have some.",
  };
  find("status").textContent = said + how[isPartial ? "partial" : end.status];
  isWhole = !isPartial && end.status === "complete";
  find("every").hidden = cursor === null;
  table.more = cursor === null ? null : () => read(false);
  const notes = [];
  const timed = asked.begin_ms || asked.end_ms;
  if (timed) {
    const shown = (text) => (/^-?\d+$/.test(text) ? time(Number(text)) : text);
    notes.push(`Searched from ${shown(asked.begin_ms) || "the beginning"} to ${shown(asked.end_ms) || "now"}.`);
  }
  for (const name of ["begin_ms", "end_ms"]) if (isLikelySeconds(asked[name]))
    notes.push(`${asked[name]} is read as milliseconds; did you mean ${asked[name]}000?`);
  if (!items.length) {
    const looked = [...reports.values()].filter(({ outcome }) => outcome !== "refreshed").length;
    if (end.matchesNone) notes.push("No topic that you may see matches.");
    else if (looked) notes.push(`The search read or skipped ${counted(looked, "file")}: see below.`);
    else if (!end.explain.files) notes.push("This token does not show which files were read.");
    else if (timed || expired !== null || until !== null) notes.push("No file has entries of this time.");
    else notes.push("The index has no entries yet.");
    for (const topic of end.unknown_topics) notes.push(`No file that was read has topic ${topic}: check its spelling.`);
    for (const name of ["topic", "key"]) {
      const isPadded = asked[name] !== asked[name].trim();
      if (isPadded) notes.push(`The ${name} begins or ends with a space.`);
    }
  }
  if (/[\r\n]/.test(asked.key)) notes.push("The key has line breaks, which its field does not show.");
  if (expired !== null) notes.push(`Entries before ${time(expired)} have expired.`);
  for (const { source, not_asked: why } of end.freshness)
    if (why) notes.push(`The newest state of ${source} was not read: ${why}`);
  const unsearched = asked.having ? items.filter(({ found: one }) => !one?.message).length : 0;
  if (unsearched) notes.push(`${counted(unsearched, "message")} of these can’t be read, and may not have the text.`);
  if (sums.folded) notes.push(`${entries(sums.folded)} left out: topic, queue and offset of a newer answer.`);
  if (sums.replaced) notes.push(`${counted(sums.replaced, "row")} left out: a newer reading of the file replaced them.`);
  find("said").replaceChildren(...notes.map((note) => make("p", {}, note)));
  // the service reads a number of messages at once; perhaps none of them has the text
  if (!items.length && cursor !== null) find("said").append(make("p", { class: "buttons" },
    make("button", { type: "button", onclick: () => read(false) }, "Continue the search")));
  const topics = single() ? [asked.topic] : [...new Set(items.map(({ topic }) => topic))];
  find("commands").replaceChildren(...(topics.length ? [commands.shown(commands.ofKey(topics, asked, items.every(({ file }) => file === undefined)))] : []));
  drawMissing();
  if (!items.length && !asked.having) offer(stopping);
}

// Shows a missing part of the answer next to the list: its times and its files.
function lacks(title, some, what = "Entries of these times may not be in the list:") {
  if (!some.length) return;
  const times = spans(some).map(([begin, end]) => make("li", {}, `${time(begin)} to ${time(end)}`));
  find("missing").append(make("div", { class: "warning" }, make("h3", {}, title),
    times.length ? make("p", {}, what) : null,
    times.length ? make("ul", {}, ...times) : null, make("p", {}, "The files:"), fileList(some)));
}

function placesOf(rows) {
  const extra = Object.keys(rows[0] ?? {}).filter((name) => !STANDARD.has(name));
  const isOfFiles = rows.some((item) => item.file !== undefined);
  return [
    ...(single() ? [] : [column("Topic", "topic")]),
    ...(isOfFiles ? [column("File", "file", (file = "") => file, { text: true }), column("Row", "row", (row = "") => String(row), NUMBER)]
      : [column("Queue", "queue_id", String, NUMBER), column("Offset", "offset", String, NUMBER), results.SIZE]),
    ...extra.map((name) => column(name, name)),
    ...(rows.some((item) => item.source) ? [column("Index", "source")] : []),
  ];
}

function columnsOf(rows) {
  const places = placesOf(rows);
  const hidden = results.hidden();
  const choose = ({ target }) => {
    results.hide(target.value, !target.checked);
    table.show(items, columnsOf(items));
  };
  const names = results.names(places).filter((title) => title !== "Topic");
  if (find("columns").childElementCount !== names.length) find("columns").replaceChildren(
    ...names.map((title) => make("label", {}, make("input", { type: "checkbox", value: title,
      checked: !hidden.has(title), onchange: choose }), ` ${title}`)));
  return results.columnsOf(opening, places, hidden);
}

// Reads the messages of rows, once for each row: `asked` of a row is the promise of its read.
function tellApart(rows) {
  const some = rows.filter((row) => !row.found && !row.asked && row.topic !== undefined);
  if (!some.length) return;
  const reading = readMessages(some);
  for (const row of some) row.asked = reading;
}

async function readMessages(some) {
  const mine = stopping;
  try {
    const failed = await results.fill(some, asked.key);
    if (mine !== stopping) return;
    for (const one of failed) unread.set(`${one.source ?? ""} ${one.file}`, one);
    if (failed.length) drawMissing();
  } catch (problem) {
    for (const row of some) row.found ??= { state: `not read: ${problem.message}`, message: null };
  }
  if (mine === stopping) table.draw();
}

function opening(item) {
  const at = time(item.timestamp_ms);
  const place = item.file === undefined ? `queue ${item.queue_id}, offset ${item.offset}` : `row ${item.row} of ${item.file}`;
  const label = `Message of ${at}, ${place}`;
  const more = { type: "button", class: "link", onclick: () => openRow(item), "aria-label": label };
  return results.timed(item.timestamp_ms, make("button", more, at));
}

function openRow(item) {
  note(placeOf(item), item.topic);
  find("copied").textContent = "";
  table.drawAt(item);
  const button = find("entries-table").querySelector("tr.chosen button");
  message.showEntry(item, { topic: item.topic, key: asked.key }, button);
  neighbours();
}

const indexOf = (rows) => rows.findIndex((row) => placeOf(row) === chosen);

function neighbours() {
  const rows = table.ordered();
  const at = indexOf(rows);
  find("before").hidden = find("behind").hidden = at < 0;
  find("before").disabled = at <= 0;
  find("behind").disabled = at === rows.length - 1 && !table.more;
}

// Shows the message of the previous or next row, in the order of the table.
async function move(id, step) {
  const at = indexOf(table.ordered()) + step;
  if (at === items.length && table.more) await read(false);
  const row = table.ordered()[at];
  if (row) openRow(row);
  find(id).focus();
}

async function save(kind, made) {
  // a new search may begin before all messages are read
  const rows = [...table.ordered()];
  const name = `${asked.key.replace(/[^\w.-]+/g, "_").slice(0, 100)}${isWhole ? "" : "-part"}.${kind}`;
  const columns = columnsOf(items);
  tellApart(rows);
  await Promise.all(rows.map((row) => row.asked));
  message.download(made(rows, columns), name);
}
