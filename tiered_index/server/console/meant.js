// Finds similar keys and topics that have entries: other spellings of the key, and topics that differ in case.
import { json } from "./api.js";

const MOST = 200;

function keysLike(key, templates) {
  const bare = key.trim().replace(/^["'#]+|["']+$/g, "");
  const stripped = templates.map((template) => template.split("{}")).filter(([head, tail]) => tail !== undefined
    && bare.startsWith(head) && bare.endsWith(tail) && bare.length > head.length + tail.length)
    .map(([head, tail]) => bare.slice(head.length, bare.length - tail.length));
  const written = [bare, bare.replace(/\s+/g, ""), bare.replace(/^0+(?=.)/, ""), ...stripped];
  const filled = written.flatMap((one) => templates.filter((template) => template.includes("{}"))
    .map((template) => template.replaceAll("{}", one)));
  const all = [...written, ...filled].flatMap((one) => [one, one.toLowerCase(), one.toUpperCase()]);
  return [...new Set([key, ...all])].filter(Boolean);
}

function topicsLike(topic, known) {
  const fold = (one) => one.trim().toLowerCase();
  return topic ? [...new Set([topic, ...known.filter((one) => fold(one) === fold(topic))])] : known;
}

// Returns the [{topic, key}] that have entries in the time range.
export async function found({ key, topic }, templates, known, times) {
  const lookups = topicsLike(topic, known).flatMap((one) =>
    keysLike(key, templates).map((like) => ({ topic: one, key: like, max_count: 1, ...times })))
    .filter((one) => one.key !== key || one.topic !== topic).slice(0, MOST);
  if (!lookups.length) return [];
  const { results } = await json("v1/query:batch", {}, { body: { lookups, allow_partial: true, allow_spent: true } });
  return lookups.filter((_, n) => results[n].items.length);
}
