// What tells the messages of entries apart: tags, ids, keys and the beginning of each body, and files of what is shown.
import { json } from "./api.js";
import { NUMBER, bytes, column, make, time } from "./page.js";
import { here } from "./times.js";

const HIDDEN = "tiered-index-hidden-columns";
const MOST = 1000;
// pages of a time range that are read for its rows, beyond those that they need
const MORE_PAGES = 4;

const placeOf = ({ queue_id: queue, offset, source }) => `${queue} ${offset} ${source ?? ""}`;

// Takes the messages of a time range for the entries in `left`; returns whether it read all of them. `failed` takes the
// files that could not be read.
async function take(left, asked, pages, failed) {
  let cursor = "";
  for (let page = 0; page < pages && cursor !== null && left.size; page += 1) {
    const answer = await json("v1/messages", { ...asked, body: "excerpt", allow_partial: true, cursor });
    for (const one of answer.messages) {
      const row = left.get(placeOf(one.item));
      if (row) row.found = one;
      left.delete(placeOf(one.item));
    }
    failed.push(...answer.failed);
    cursor = answer.cursor;
  }
  return cursor === null;
}

// Reads what tells the messages of entries apart, as `found` of each. Returns the files that could not be read.
export async function fill(rows, key) {
  const failed = [];
  const topics = new Set(rows.map((row) => row.topic));
  for (const topic of topics) {
    const some = rows.filter((row) => row.topic === topic && !row.found);
    if (!some.length) continue;
    const left = new Map(some.map((row) => [placeOf(row), row]));
    const times = some.map((row) => row.timestamp_ms);
    const range = [times.reduce((a, b) => Math.min(a, b)), times.reduce((a, b) => Math.max(a, b))];
    const size = Math.min(MOST, Math.max(50, 2 * some.length));
    const asked = (begin, end) => ({ topic, key, begin_ms: begin, end_ms: end, max_count: size });
    if (!await take(left, asked(...range), MORE_PAGES + some.length / size, failed)) {
      // in another order than that of time they may lie far apart
      for (const at of new Set([...left.values()].map((row) => row.timestamp_ms))) {
        await take(left, asked(at, at), MORE_PAGES, failed);
      }
    }
    // a file that could not be read may have them
    const state = failed.length ? "not known" : "missing";
    for (const row of left.values()) row.found = { state, message: null };
  }
  return failed;
}

const messageOf = (row) => row.found?.message;
const idOf = (row) => messageOf(row)?.uniq_key || messageOf(row)?.msg_id || "";

function bodyOf(row) {
  const message = messageOf(row);
  if (!message) return row.found ? row.found.state : "";
  return message.body_format === "hex" ? `bytes ${message.body}` : (message.body ?? "");
}

function bodyCell(row) {
  if (!row.found) return "…";
  return messageOf(row) ? bodyOf(row) : make("span", { class: "hint" }, bodyOf(row));
}

const of = (title, value, more) => ({ title, of: value, by: value, ...more });
const ABOUT = [
  of("Tags", (row) => messageOf(row)?.tags ?? "", { rare: Boolean }),
  of("Message id", idOf, { text: true, rare: Boolean }),
  of("Keys", (row) => messageOf(row)?.keys.length ?? "", { ...NUMBER, rare: Boolean }),
  { title: "Body", of: bodyCell, by: bodyOf, text: true },
];

// Columns of messages; `opening` makes the first one, `places` are those that say where a message is.
export const columnsOf = (opening, places, isHidden = hidden()) => [
  { title: "Message of (UTC)", of: opening, by: (row) => row.timestamp_ms, saved: (row) => time(row.timestamp_ms) },
  ...[...places, ...ABOUT].filter(({ title }) => !isHidden.has(title)),
];
export const SIZE = column("Size", "size", bytes, NUMBER);
export const names = (places) => [...places, ...ABOUT].map(({ title }) => title);

export function hidden() {
  try {
    return new Set(JSON.parse(localStorage.getItem(HIDDEN) ?? "[]"));
  } catch {
    return new Set();
  }
}

export function hide(title, isHidden) {
  const now = hidden();
  if (isHidden) now.add(title); else now.delete(title);
  localStorage.setItem(HIDDEN, JSON.stringify([...now]));
}

// A time with the same moment on the clock on the wall here below it.
export function timed(ms, shown) {
  const local = here(ms);
  return local ? make("span", {}, shown, make("span", { class: "here" }, `${local} here`)) : shown;
}

export const ndjson = (rows) => rows.map(({ found, asked: _, ...item }) =>
  `${JSON.stringify({ ...item, state: found?.state ?? null, message: messageOf({ found }) ?? null })}\n`).join("");

// Where a spreadsheet would begin a formula: at the beginning of a cell, or behind what it may take for a cell's end.
const FORMULA = /^(?=\s*[=+\-@\t\r\n＝＋－＠])|(?<=[;\t\r\n])(?=[^\S\t\r\n]*[=+\-@＝＋－＠])/g;

function cell(value) {
  const text = typeof value === "string" ? value.replace(FORMULA, "'") : String(value ?? "");
  return /[",;\t\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const csv = (rows, columns) => [columns.map(({ title }) => title),
  ...rows.map((row) => columns.map(({ by, saved = by }) => saved(row)))].map((line) => `${line.map(cell).join(",")}\r\n`).join("");
