// Shows one message: its state, its fields, and its body as text, JSON, a tree or hexadecimal digits.
import { json } from "./api.js";
import { around } from "./browse.js";
import { ofMessage, ofRecord, shown } from "./commands.js";
import { bytes, counted, entryOf, fileList, find, make, tell, time } from "./page.js";

const SHOWN = 64 << 10;
// most pages of one second's messages that are searched for the chosen message
const PAGES = 20;
// most levels of JSON that are indented: a few KiB of brackets would become gigabytes
const DEEPEST = 32;
const STATES = {
  local: "read from the store’s own files", archived: "read from an archived segment",
  expired: "expired: the broker has deleted it, and no archive has it",
  no_topic: "no such topic: the cluster has none of this name, and no archive has it",
  refused: "refused: the broker or the storage does not let the service read it",
  unavailable: "unavailable: the broker can't return it now, and no archive has it",
  erased: "erased from its archived segment",
  missing: "missing: no message could be read, for this reason:",
  "not known": "not known: the search for the message is not complete, for this reason:",
};
// ends of the problem of a message without any place to read it, and the option of the service that gives one
const NO_PLACE = [
  [", and no store directory was given",
    "This service reads no store (pass serve --store), and no archived segment has the message."],
  [", and no broker was given", "This service asks no broker (pass serve --kafka), and no archive has the record."],
];
// most rows of one opened node of a tree
const BRANCHES = 200;
// characters that no text has; tabs and line ends are allowed
const CONTROLS = /[\x00-\x08\x0b\x0c\x0e-\x1f]/;
const TIMES = { born_ms: "born", store_ms: "stored", timestamp_ms: "time" };
const LEFT_OUT = new Set(["body", "body_format", "body_problem", "topic_id", "key_hash", "fingerprint", "entry_id", "found", "asked"]);
const FIRST = new Set(["file", "row", "line", "partition", "offset", "key", "headers", "timestamp_ms", "topic", "keys", "uniq_key", "tags", "store_ms", "msg_id"]);
let opened = 0;
let bodies = 0;
let opener = null;

// Finds the message of an entry among those of its key and second, and shows it.
export async function showEntry(item, { topic, key }, from) {
  await open(from, async () => {
    const at = item.timestamp_ms;
    const second = { begin_ms: at, end_ms: at, max_count: 64, body: "hex", allow_partial: true };
    let cursor = "";
    let collisions = 0;
    const failed = new Map();
    for (let page = 0; page < PAGES && cursor !== null; page += 1) {
      const answer = await json("v1/messages", { topic, key, ...second, cursor });
      // values from an address are texts
      const said = (one, name) => String(name === "entry_id" ? entryOf(one[name]) : one[name] ?? "");
      const same = ({ item: one }) => one && ["entry_id", "queue_id", "offset", "source"].every((n) => said(one, n) === said(item, n));
      const found = answer.messages.find(same);
      if (found) return [found];
      cursor = answer.cursor;
      collisions += answer.collisions;
      for (const one of answer.failed) failed.set(`${one.source ?? ""} ${one.file}`, one);
    }
    // the message may be in a file that could not be read, or on a later page
    if (failed.size || cursor !== null) {
      const problem = failed.size ? "These files could not be read:" : "This second has too many messages of this key.";
      return [{ state: "not known", item, message: null, problem, failed: [...failed.values()] }];
    }
    const other = collisions ? "The message at this position has another key with the same hash."
      : "The index no longer has this entry.";
    return [{ state: "missing", item, message: null, problem: other }];
  });
}

// Shows the message at the place that an id names, or with a topic the messages of a unique key.
export const showId = (id, topic, from) => open(from, async () => {
  const { messages, cursor } = await json(`v1/messages/${encodeURIComponent(id)}`, { topic, body: "hex" });
  const rest = { state: "not known", item: null, message: null, problem: "More messages have this id." };
  return cursor === null ? messages : [...messages, rest];
});

export function close() {
  opened += 1;
  const hasFocus = find("message").contains(document.activeElement);
  find("message").hidden = true;
  // the focus of a form stays where it is
  if (hasFocus) (opener?.isConnected ? opener : drawnAgain(opener))?.focus();
}

// The button of the same row, after its table was drawn again.
function drawnAgain(button) {
  const label = button?.getAttribute("aria-label");
  return label ? document.querySelector(`button[aria-label="${CSS.escape(label)}"]`) : null;
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

// A record of Kafka has a place of its own.
const placeOf = ({ topic, partition, offset }) => `kafka:${topic}/${partition}/${offset}`;

function parts({ state, item, message, read_from: place, problem, failed }) {
  const isRecord = message?.partition !== undefined;
  const none = NO_PLACE.find(([ending]) => /^no archive[^;]*$/.test(problem ?? "") && problem.endsWith(ending));
  const warnings = [none?.[1] ?? problem, message?.body_problem && `The body is shown as it is stored: ${message.body_problem}`];
  const fields = Object.entries(message ?? item ?? {}).filter(([name]) => !LEFT_OUT.has(name));
  return [
    make("p", { class: "state", role: "status" }, isRecord && state === "local" ? "read from the broker"
      : message?.file !== undefined ? "read from its file" : STATES[state] ?? state),
    ...warnings.filter(Boolean).map((warning) => make("p", { class: "warning" }, warning)),
    ...(failed?.length ? [fileList(failed)] : []),
    ...(place ? [make("p", { class: "hint" }, `From ${place}`)] : []),
    ...(isRecord && message.body_bytes === null ? [make("p", { class: "hint" }, "A record without a value (a tombstone).")] : []),
    ...(message?.body === undefined ? [] : bodyParts(message.body, isRecord ? placeOf(message) : message.file ?? (message.uniq_key || message.msg_id))),
    list(message ? fields.filter(([name]) => FIRST.has(name)) : fields, message),
    ...(message ? [make("details", {}, make("summary", {}, "All fields"), list(fields, message)),
      ...(message.file !== undefined ? [] : isRecord ? [shown(ofRecord(placeOf(message)))]
        : [make("p", {}, make("a", { href: around(message) }, "Messages around it in its queue")), shown(ofMessage(message.msg_id))])] : []),
  ];
}

function list(fields, message) {
  const pair = ([name, value]) => [make("dt", {}, TIMES[name] ?? name), make("dd", {}, ...said(name, value, message))];
  return make("dl", {}, ...fields.flatMap(pair));
}

// Links to the messages of another key of this message, for example from an order to its payment.
const keyLink = (key, { topic }) => make("a", { href: `#search?${new URLSearchParams({ topic, key })}` }, key);

function said(name, value, message) {
  if (message && name === "keys") return value.flatMap((key, n) => [n ? ", " : "", keyLink(key, message)]);
  if (message && (name === "uniq_key" || name === "key") && value) return [keyLink(value, message)];
  if (name.endsWith("_ms") && value !== null) return [`${time(value)} (${value})`];
  if (Array.isArray(value) && name !== "headers") return [value.join(", ")];
  if (value === null || typeof value !== "object") return [String(value ?? "–")];
  const rows = (Array.isArray(value) ? value : Object.entries(value)).map(([one, text]) =>
    make("tr", {}, make("th", { scope: "row" }, one), make("td", { class: "text" }, String(text ?? "–"))));
  return [make("table", {}, make("caption", { class: "skip" }, name), make("tbody", {}, ...rows))];
}

function bodyParts(digits, id) {
  const content = Uint8Array.from(digits.match(/../g) ?? [], (pair) => parseInt(pair, 16));
  const forms = { Text: null, JSON: null, Tree: null, Hex: (whole) => hexDump(whole ? content : content.subarray(0, SHOWN)) };
  let isReadable = false;
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(content);
    forms.Text = () => text;
    isReadable = !CONTROLS.test(text);
    JSON.parse(text);
    forms.JSON = () => indented(text);
    forms.Tree = () => "";
  } catch { /* the body is not text or not JSON */ }
  const box = make("pre", { tabindex: "0", role: "region", "aria-label": "Body" });
  const more = make("p", { class: "buttons" });
  const tree = make("div", { class: "branches" });
  const show = (form, whole) => {
    box.hidden = form === "Tree";
    tree.replaceChildren(...(form === "Tree" ? [treeOf(new TextDecoder().decode(content))] : []));
    const all = { type: "button", onclick: () => show(form, true) };
    box.className = form.toLowerCase();
    box.textContent = whole ? forms[form](true) : forms[form](false).slice(0, SHOWN);
    more.replaceChildren(...(whole || form === "Tree" ? [] : [make("button", all, `Show all of the ${bytes(content.length)}`)]));
  };
  const isSmall = content.length <= SHOWN;
  const first = forms.JSON ? "JSON" : isReadable ? "Text" : "Hex";
  const name = `body-${(bodies += 1)}`;
  const choices = Object.keys(forms).map((form) => make("label", {}, make("input", {
    type: "radio", name, value: form, checked: form === first, disabled: !forms[form],
    onchange: () => show(form, isSmall),
  }), ` ${form}`));
  show(first, isSmall);
  // the stored bytes; characters of the id that a file name may not have are replaced
  const file = `${id.replace(/[^\w.-]+/g, "_").slice(0, 100)}.${{ JSON: "json", Text: "txt", Hex: "bin" }[first]}`;
  const save = make("button", { type: "button", onclick: () => download(content, file) }, "Download");
  const legend = make("legend", {}, `Body, ${counted(content.length, "byte")}, as`);
  return [make("fieldset", {}, legend, ...choices), box, tree, more, make("p", { class: "buttons" }, save)];
}

class Digits {
  constructor(digits) {
    this.digits = digits;
  }
}

// A branch is made when it is opened, because a body can have millions.
function treeOf(text) {
  // numbers keep all their digits
  const digits = (_, value, context) =>
    typeof value === "number" && context?.source ? new Digits(context.source) : value;
  try {
    return branch("", JSON.parse(text, digits), true);
  } catch {
    return make("p", { class: "hint" }, "The body has too many levels for a tree.");
  }
}

function branch(name, value, isOpen = false) {
  const label = name === "" ? "" : `${name}: `;
  if (value instanceof Digits) return make("div", {}, label + value.digits);
  if (value === null || typeof value !== "object") return make("div", {}, label + JSON.stringify(value));
  const under = Object.entries(value);
  const size = Array.isArray(value) ? counted(under.length, "item") : counted(under.length, "field");
  const node = make("details", {}, make("summary", {}, `${label}${size}`));
  const fill = () => {
    if (node.childElementCount > 1) return;
    const left = under.length - BRANCHES;
    node.append(...under.slice(0, BRANCHES).map(([one, of]) => branch(one, of)),
      ...(left > 0 ? [make("p", { class: "hint" }, `and ${counted(left, "more", "more")}`)] : []));
  };
  node.addEventListener("toggle", fill);
  if (isOpen) {
    fill();
    node.open = true;
  }
  return node;
}

export function download(content, name) {
  const href = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  make("a", { href, download: name }).click();
  // the URL must exist until the download has begun
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

// Indents the text of JSON. To parse it and write it again would lose digits of long numbers and repeated names.
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
