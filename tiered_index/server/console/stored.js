// Shows the files by state on a time axis, refreshed regularly, and the monthly cost by topic.
import { json } from "./api.js";
import { Lanes } from "./chart.js";
import { ERROR, LANE, NUMBER, SPAN, Table, bytes, column, count, counted, find, make, state, tell, time,
  usd } from "./page.js";

const EVERY_MS = 5000;
const STATES = { unsealed: "--unsealed", compacted: "--compacted", uploaded: "--uploaded", storage: "--storage",
  "window table": "--table", damaged: "--failed" };
const colorOf = (name) => STATES[name] ?? "--skipped";
const known = (shown) => (value) => (value === null ? "–" : shown(value));
const NOBODYS = "(archived segments, and files that name no topic)";
let timer, chart, table, costTable, readMs;
let paused = false;
// a pause or a later read ends the turn of a read, so that its answer is not shown
let turn = 0;

export function start() {
  table = new Table(find("files-table"), "Files", [
    column("File", "file_id"), column("State", "state", (name) => state(name, colorOf(name))), LANE,
    ...SPAN, column("Entries", "entries", known(count), NUMBER),
    column("Bytes", "bytes", known(bytes), NUMBER), ERROR,
  ]);
  find("pause").addEventListener("click", ({ target }) => {
    paused = !paused;
    target.setAttribute("aria-pressed", String(paused));
    if (paused) {
      clearTimeout(timer);
      turn += 1;
    } else showFiles();
  });
  costTable = new Table(find("cost-table"), "Topics", [
    column("Topic", "topic", (topic) => topic ?? NOBODYS, { text: true }), column("Entries", "entries", count, NUMBER),
    column("Bytes", "bytes", bytes, NUMBER), column("$ a month", "usd_a_month", usd, NUMBER),
    column("Share of the bytes", "share", bar),
  ]);
}

export function leave() {
  clearTimeout(timer);
}

export async function showFiles() {
  clearTimeout(timer);
  const mine = (turn += 1);
  const began = performance.now();
  let isRefused = false;
  try {
    const { files, totals } = await json("v1/files");
    if (mine !== turn) return;
    for (const file of files) file.state = file.error ? "damaged" : file.table ? "window table" : file.state;
    const states = [...new Set([...Object.keys(STATES), ...files.map((file) => file.state)])];
    const lanes = states.map((name) => ({ state: name, files: files.filter((file) => file.state === name) }))
      .filter((lane) => lane.files.length)
      .map((lane) => ({ ...lane, color: colorOf(lane.state), name: `${lane.state}: ${counted(lane.files.length, "file")}` }));
    const said = lanes.map((lane) => `${count(lane.files.length)} ${lane.state}`).join(", ");
    const sums = `${counted(totals.entries, "entry", "entries")}, ${bytes(totals.bytes)}`;
    find("files-sums").textContent = files.length ? `${counted(files.length, "file")} (${said}), ${sums}.`
      : "The index has no files yet.";
    chart ??= new Lanes(find("files-chart"), (file) => `${file.file_id}: ${file.state}, ${time(file.begin_ms)} to `
      + `${time(file.end_ms)}, ${known(count)(file.entries)} entries, ${known(bytes)(file.bytes)}`);
    chart.show(lanes, `Files by state on a time axis: ${said || "none"}. A table is below.`);
    table.show(files.reverse());
    readMs = Date.now();
    tell(find("files-said"), null);
  } catch (problem) {
    if (mine !== turn) return;
    // a service of several indexes never lists files
    isRefused = problem.status === 400;
    if (readMs) problem.advice += ` The table is from ${time(readMs)}. This page keeps trying.`;
    tell(find("files-said"), problem);
  }
  // bounds the load on a service with many files
  const wait = Math.max(EVERY_MS, 20 * (performance.now() - began));
  if (!paused && !isRefused && !find("files-view").hidden) timer = setTimeout(showFiles, wait);
}

export async function showCost() {
  const said = find("cost-sums");
  said.textContent = "Adding up…";
  try {
    const { rows, totals, prices_as_of: when, usd_per_gib_month: price } = await json("v1/du", { by: "topic" });
    rows.sort((a, b) => b.usd_a_month - a.usd_a_month || b.bytes - a.bytes);
    for (const row of rows) row.share = totals.bytes ? row.bytes / totals.bytes : 0;
    // local files have bytes but no cost
    said.textContent = rows.length ? `${counted(totals.entries, "entry", "entries")}, ${bytes(totals.bytes)}; objects `
      + `in the storage cost ${usd(totals.usd_a_month)} a month, at $${price} a GiB (prices of ${when}).`
      : "Nothing is stored yet.";
    costTable.show(rows);
    tell(find("cost-said"), null);
  } catch (problem) {
    said.textContent = "";
    tell(find("cost-said"), problem);
  }
}

function bar(share) {
  const made = make("span", { class: "bar", role: "img", "aria-label": `${(100 * share).toFixed(1)} % of the bytes` });
  made.style.width = `${100 * share}%`;
  return made;
}
