// Reads tags, ids, keys and the start of each body for entries, and saves the table as NDJSON or CSV.
import { json } from "./api.js";
import { NUMBER, bytes, column, entryOf, make, time } from "./page.js";
import { here } from "./times.js";

const HIDDEN = "tiered-index-hidden-columns";
const MOST = 1000;
// pages of a time range that are read in addition to those that its rows need
const MORE_PAGES = 4;

const placeOf = ({ queue_id: queue, offset, entry_id: id, source }) => `${id ? entryOf(id) : `${queue} ${offset}`} ${source ?? ""}`;

// Finds the messages of the entries in `left` in a time range; returns whether it read the whole range. Adds files that
// could not be read to `failed`.
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

// Reads the messages of entries and sets them as `found` of each row. Returns the files that could not be read.
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
      // entries that are not sorted by time may have distant times: read each second
      for (const at of new Set([...left.values()].map((row) => row.timestamp_ms))) {
        if (await take(left, asked(at, at), MORE_PAGES, failed)) continue;
        // this second has too many messages of the key
        for (const [place, row] of left) {
          if (row.timestamp_ms !== at) continue;
          row.found = { state: "not known", message: null };
          left.delete(place);
        }
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
  of("Keys", (row) => messageOf(row)?.keys?.length ?? "", { ...NUMBER, rare: Boolean }),
  { title: "Body", of: bodyCell, by: bodyOf, text: true },
];

// Returns the columns of messages; `opening` makes the first one, `places` are the columns for a message's place.
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

// Makes a time with the browser's local time below it.
export function timed(ms, shown) {
  const local = here(ms);
  return local ? make("span", {}, shown, make("span", { class: "here" }, `${local} here`)) : shown;
}

export const ndjson = (rows) => rows.map(({ found, asked: _, ...item }) =>
  `${JSON.stringify({ item, state: found?.state ?? null, message: messageOf({ found }) ?? null })}\n`).join("");

// The places where a spreadsheet can begin a formula: the start of a cell, or after a character that can end a cell.
const FORMULA = /^(?=\s*[=+\-@\t\r\n＝＋－＠])|(?<=[;\t\r\n])(?=[^\S\t\r\n]*[=+\-@＝＋－＠])/g;

function cell(value) {
  const text = typeof value === "string" ? value.replace(FORMULA, "'") : String(value ?? "");
  return /[",;\t\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const csv = (rows, columns) => [columns.map(({ title }) => title),
  ...rows.map((row) => columns.map(({ by, saved = by }) => saved(row)))].map((line) => `${line.map(cell).join(",")}\r\n`).join("");
