// Finds similar keys and topics that have entries: other forms of the key, and topics that differ in case.
import { json } from "./api.js";

const MOST = 200;
// such a text is short enough for a key
const LONGEST = 16383;

const UUID = /^(?:urn:uuid:)?\{?([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})\}?$/i;
const NAME = /^[A-Za-z_][A-Za-z0-9_.-]*=(?!=)/;

const cases = (texts) => texts.flatMap((one) => [one, one.toLowerCase(), one.toUpperCase()]);

// Returns the keys that other sources make of a key's bytes: of text its digits, of digits their text.
function ofBytes(key) {
  const name = NAME.exec(key)?.[0] ?? "", value = key.slice(name.length);
  const digits = /^0x((?:[0-9a-f]{2})+)$/i.exec(value)?.[1].match(/../g).map((pair) => parseInt(pair, 16));
  const bytes = [...new TextEncoder().encode(value)].map((byte) => byte.toString(16).padStart(2, "0"));
  return [`${name}0x${bytes.join("")}`, ...(digits ? [name + new TextDecoder().decode(Uint8Array.from(digits))] : [])];
}

// Returns other forms of a value: a UUID without hyphens or with them, and bytes as digits after 0x.
function formsOf(value) {
  const uuid = UUID.exec(value)?.slice(1);
  const hex = /^(?:0x)?((?:[0-9a-f]{2})+)$/i.exec(value)?.[1];
  const forms = [value, value.replace(/\s+/g, ""), value.replace(/^0+(?=.)/, "")];
  if (uuid) forms.push(uuid.join("-"), uuid.join(""));
  if (hex) forms.push(hex, `0x${hex.toLowerCase()}`);
  return cases(forms);
}

function keysLike(key, templates, names) {
  const bare = key.trim().replace(/^["'#]+|["']+$/g, "");
  const value = bare.replace(NAME, "");
  const stripped = templates.map((template) => template.split("{}")).filter(([head, tail]) => tail !== undefined
    && bare.startsWith(head) && bare.endsWith(tail) && bare.length > head.length + tail.length)
    .map(([head, tail]) => bare.slice(head.length, bare.length - tail.length));
  const written = [...formsOf(bare), ...formsOf(value), ...stripped.flatMap(formsOf)];
  const filled = written.flatMap((one) => templates.filter((template) => template.includes("{}"))
    .map((template) => template.replaceAll("{}", one)));
  const prefixes = [bare.slice(0, bare.length - value.length), ...names];
  const named = formsOf(value).flatMap((one) => prefixes.map((prefix) => prefix + one));
  return [...new Set([key, ...ofBytes(key), ...named, ...written, ...cases(filled)])]
    .filter((one) => one && one.length <= LONGEST);
}

function topicsLike(topic, known) {
  const fold = (one) => one.trim().toLowerCase();
  return topic ? [...new Set([topic, ...known.filter((one) => fold(one) === fold(topic))])] : known;
}

// Returns the [{topic, key}] that have entries in the time range.
export async function found({ key, topic }, templates, names, known, times) {
  const lookups = topicsLike(topic, known).flatMap((one) =>
    keysLike(key, templates, names).map((like) => ({ topic: one, key: like, max_count: 1, ...times })))
    .filter((one) => one.key !== key || one.topic !== topic).slice(0, MOST);
  if (!lookups.length) return [];
  const { results } = await json("v1/query:batch", {}, { body: { lookups, allow_partial: true, allow_spent: true } });
  return lookups.filter((_, n) => results[n].items.length);
}
