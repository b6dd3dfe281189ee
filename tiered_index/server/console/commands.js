// Shows a search as shell commands. Keys and topics are quoted.
import { token } from "./api.js";
import { make } from "./page.js";

// A terminal would interpret control characters in a pasted command: they could end the line.
const CONTROL = /[\x00-\x1f\x7f-\x9f\u2028\u2029]/g;
const digits = (one) => [...new TextEncoder().encode(one)].map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");

export function quoted(given) {
  const text = String(given);
  // the form of bash and zsh
  if (text.search(CONTROL) >= 0) return `$'${text.replace(/[\\']/g, "\\$&").replace(CONTROL, digits)}'`;
  return `'${text.replaceAll("'", "'\\''")}'`;
}

const NAMED = "-n \"$NAMESRV\"";
// mqadmin compares milliseconds; an end here includes its whole second
const millis = (given) => (/^\d+$/.test(given) ? Number(given) : Date.parse(given));

function curl(path, asked) {
  const url = new URL(`../${path}`, document.baseURI);
  for (const [name, value] of Object.entries(asked)) if (value) url.searchParams.set(name, value);
  return `curl -sf ${token.get() ? '-H "Authorization: Bearer $TOKEN" ' : ""}${quoted(url)}`;
}

// Returns the commands that look up a key in topics; those of mqadmin only with `isOfBroker`.
export function ofKey(topics, { key, begin_ms: begin, end_ms: end, having: contains }, isOfBroker) {
  const times = [...(begin ? ["-b", millis(begin)] : []), ...(end ? ["-e", millis(end) + 999] : [])].join(" ");
  const lines = topics.map((topic) => [curl("v1/messages", { topic, key, begin_ms: begin, end_ms: end, contains }),
    `mqadmin queryMsgByKey ${NAMED} -t ${quoted(topic)} -k ${quoted(key)}${times && ` ${times}`}`]);
  const curls = { curl: lines.map(([one]) => one).join("\n") };
  return isOfBroker ? { ...curls, mqadmin: lines.map(([, one]) => one).join("\n") } : curls;
}

export const ofMessage = (id) => ({ curl: curl(`v1/messages/${encodeURIComponent(id)}`, {}),
  mqadmin: `mqadmin queryMsgById ${NAMED} -i ${quoted(id)}` });

export const ofRecord = (place) => ({ curl: curl(`v1/messages/${encodeURIComponent(place)}`, {}) });

// Copies a text, and reports it in `said`.
export async function copy(text, said) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // pages without HTTPS have no clipboard API
    const field = make("textarea", { readonly: true }, text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  said.textContent = "Copied.";
}

export function shown(commands) {
  const said = make("span", { role: "status" });
  const each = Object.entries(commands).flatMap(([name, text]) => [
    make("code", {}, text),
    make("p", { class: "buttons" }, make("button", { type: "button", onclick: () => copy(text, said) }, `Copy as ${name}`)),
  ]);
  return make("details", { class: "commands" }, make("summary", {}, "As a command"), ...each, said);
}
