// One message: what became of it, its fields, and its body as text, JSON or hexadecimal digits.
import { json } from "./api.js";
import { bytes, counted, find, make, tell, time } from "./page.js";

const SHOWN = 64 << 10;
// pages of one second's messages that are searched for the chosen one
const PAGES = 20;
// levels of JSON that are indented: a few KiB of nothing but brackets would become gigabytes
const DEEPEST = 32;
const STATES = {
  local: "read from the store’s own files", archived: "read from an archived segment",
  expired: "expired: the store has deleted it, and no archive has it",
  erased: "erased from its archived segment",
  missing: "missing: it should be there and is not, or could not be read",
};
// those that no text has, but for tabs and ends of lines
const CONTROLS = /[\x00-\x08\x0b\x0c\x0e-\x1f]/;
const TIMES = { born_ms: "born", store_ms: "stored" };
const LEFT_OUT = new Set(["body", "body_format", "body_problem", "topic_id", "key_hash", "fingerprint"]);
const FIRST = new Set(["topic", "keys", "uniq_key", "tags", "store_ms", "msg_id"]);
let opened = 0;
let bodies = 0;
let opener = null;

// Shows the message of an entry, among those of its key and second.
export async function showEntry(item, { topic, key }, from) {
  await open(from, async () => {
    const at = item.timestamp_ms;
    const second = { begin_ms: at, end_ms: at, max_count: 64, body: "hex", allow_partial: true };
    let cursor = "";
    let collisions = 0;
    for (let page = 0; page < PAGES && cursor !== null; page += 1) {
      const answer = await json("v1/messages", { topic, key, ...second, cursor });
      const same = ({ item: one }) => one && ["queue_id", "offset", "source"].every((name) => one[name] === item[name]);
      const found = answer.messages.find(same);
      if (found) return [found];
      cursor = answer.cursor;
      collisions += answer.collisions;
    }
    const other = collisions ? "The message at this place has another key, whose hash is the same."
      : "The index has no such entry any more.";
    return [{ state: "missing", item, message: null, problem: other }];
  });
}

// Shows what has a message id: the one at the place that it names, or with a topic those of a unique key.
export const showId = (id, topic, from) =>
  open(from, async () => (await json(`v1/messages/${encodeURIComponent(id)}`, { topic, body: "hex" })).messages);

export function close() {
  opened += 1;
  find("message").hidden = true;
  opener?.isConnected && opener.focus();
}

async function open(from, read) {
  const mine = (opened += 1);
  opener = from;
  const content = find("message-content");
  content.replaceChildren(make("p", { class: "hint" }, "Reading…"));
  find("answer").hidden = find("message").hidden = false;
  find("message-title").focus();
  try {
    const found = await read();
    if (mine === opened) content.replaceChildren(...found.flatMap(parts));
  } catch (problem) {
    if (mine === opened) tell(content, problem);
  }
}

function parts({ state, item, message, read_from: place, problem }) {
  const warnings = [problem, message?.body_problem && `The body is shown as it is stored: ${message.body_problem}`];
  const fields = Object.entries(message ?? item ?? {}).filter(([name]) => !LEFT_OUT.has(name));
  return [
    make("p", { class: "state", role: "status" }, STATES[state] ?? state),
    ...warnings.filter(Boolean).map((warning) => make("p", { class: "warning" }, warning)),
    ...(place ? [make("p", { class: "hint" }, `From ${place}`)] : []),
    ...(message?.body === undefined ? [] : bodyParts(message.body, message.uniq_key || message.msg_id)),
    list(message ? fields.filter(([name]) => FIRST.has(name)) : fields),
    ...(message ? [make("details", {}, make("summary", {}, "All fields"), list(fields))] : []),
  ];
}

function list(fields) {
  const pair = ([name, value]) => [make("dt", {}, TIMES[name] ?? name), make("dd", {}, said(name, value))];
  return make("dl", {}, ...fields.flatMap(pair));
}

function said(name, value) {
  if (name.endsWith("_ms")) return `${time(value)} (${value})`;
  if (Array.isArray(value)) return value.join(", ");
  if (value === null || typeof value !== "object") return String(value ?? "–");
  return Object.entries(value).map((pair) => pair.join("=")).join(", ");
}

function bodyParts(digits, id) {
  const content = Uint8Array.from(digits.match(/../g) ?? [], (pair) => parseInt(pair, 16));
  const forms = { Text: null, JSON: null, Hex: (whole) => hexDump(whole ? content : content.subarray(0, SHOWN)) };
  let isReadable = false;
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(content);
    forms.Text = () => text;
    isReadable = !CONTROLS.test(text);
    JSON.parse(text);
    forms.JSON = () => indented(text);
  } catch { /* what is no text, or no JSON, has no such form */ }
  const box = make("pre", { tabindex: "0", role: "region", "aria-label": "Body" });
  const more = make("p", { class: "buttons" });
  const show = (form, whole) => {
    const all = { type: "button", onclick: () => show(form, true) };
    box.className = form.toLowerCase();
    box.textContent = whole ? forms[form](true) : forms[form](false).slice(0, SHOWN);
    more.replaceChildren(...(whole ? [] : [make("button", all, `Show all of the ${bytes(content.length)}`)]));
  };
  const isSmall = content.length <= SHOWN;
  const first = forms.JSON ? "JSON" : isReadable ? "Text" : "Hex";
  const name = `body-${(bodies += 1)}`;
  const choices = Object.keys(forms).map((form) => make("label", {}, make("input", {
    type: "radio", name, value: form, checked: form === first, disabled: !forms[form],
    onchange: () => show(form, isSmall),
  }), ` ${form}`));
  show(first, isSmall);
  // as it is stored; what a file system may not take of an id is left out
  const file = `${id.replace(/[^\w.-]+/g, "_").slice(0, 100)}.${{ JSON: "json", Text: "txt", Hex: "bin" }[first]}`;
  const save = make("button", { type: "button", onclick: () => download(content, file) }, "Download");
  const legend = make("legend", {}, `Body, ${counted(content.length, "byte")}, as`);
  return [make("fieldset", {}, legend, ...choices), box, more, make("p", { class: "buttons" }, save)];
}

function download(content, name) {
  const href = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  make("a", { href, download: name }).click();
  // the browser has its own hold of it only once it has begun
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

function hexDump(content) {
  const rows = [];
  for (let at = 0; at < content.length; at += 16) {
    const row = [...content.subarray(at, at + 16)];
    const digits = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    const letters = row.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    rows.push(`${at.toString(16).padStart(8, "0")}  ${digits}  ${letters}`);
  }
  return rows.join("\n");
}

// Indents JSON as it is written: parsed and written again, long numbers would lose digits and repeated names would go.
function indented(text) {
  let depth = 0;
  const line = () => `\n${"  ".repeat(Math.min(depth, DEEPEST))}`;
  return text.replace(/"(?:[^"\\]+|\\.)*"|\{\s*\}|\[\s*\]|[^\s"{}[\],:]+|\S|\s+/g, (token) => {
    if (/^\s/.test(token)) return "";
    if (token === ":") return ": ";
    if (token === ",") return token + line();
    if (token === "{" || token === "[") depth += 1;
    if (token === "}" || token === "]") depth -= 1;
    if (token === "{" || token === "[") return token + line();
    if (token === "}" || token === "]") return line() + token;
    return /^[{[]/.test(token) ? token[0] + token.at(-1) : token;
  });
}
