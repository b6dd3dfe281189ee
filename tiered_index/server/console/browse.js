// Browses the messages of a topic around a moment, without a key: a page by time, with earlier and later pages.
import { json } from "./api.js";
import { NUMBER, Table, column, counted, find, make, tell, time } from "./page.js";
import { columnsOf, timed } from "./results.js";
import { moment } from "./times.js";

const COUNT = 25;
const NAMES = ["topic", "queue_id", "at_ms"];
const PLACES = [column("Queue", "queue_id", String, NUMBER), column("Queue offset", "queue_offset", String, NUMBER)];
let table;
let turn = 0;

const addressOf = (named) => `#browse?${new URLSearchParams(Object.entries(named).filter(([, value]) => value))}`;
export const around = ({ topic, queue_id: queue, store_ms: at }) => addressOf({ topic, queue_id: String(queue), at_ms: at });

export function start() {
  table = new Table(find("browse-table"), "Messages by time", []);
  find("browse-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = Object.fromEntries(NAMES.map((name) => [name, event.target.elements[name].value.trim()]));
    const place = addressOf({ ...given, at_ms: moment(given.at_ms) });
    if (location.hash === place) show(new URLSearchParams(place.split("?")[1])); else location.hash = place;
  });
}

// Shows the messages for the parameters in the page's address.
export async function show(params) {
  const mine = (turn += 1);
  const fields = find("browse-form").elements;
  for (const name of NAMES) if (params.has("topic")) fields[name].value = params.get(name) ?? "";
  find("browse-answer").hidden = !params.has("topic");
  if (!params.has("topic")) return fields.topic.focus();
  const said = find("browse-status");
  said.textContent = "Reading…";
  for (const way of ["earlier", "later"]) find(way).replaceChildren();
  const cursor = params.get("cursor");
  const asked = Object.fromEntries(NAMES.map((name) => [name, params.get(name) ?? ""]));
  try {
    const place = cursor ? { cursor, at_ms: "" } : {};
    const answer = await json("v1/browse", { ...asked, ...place, max_count: COUNT, body: "excerpt" });
    if (mine === turn) draw(answer, asked);
  } catch (problem) {
    if (mine !== turn) return null;
    said.textContent = "Browsing failed.";
    table.show([]);
    tell(find("browse-said"), problem);
  }
  return null;
}

function draw(answer, asked) {
  tell(find("browse-said"), null);
  const rows = answer.messages.map(({ message, problem, ...place }) => ({
    ...place, timestamp_ms: message?.store_ms ?? null, found: { state: problem ?? "missing", message },
  }));
  table.page = 0;
  table.show(rows, columnsOf(opening, PLACES, new Set()));
  const [first, last] = [rows.find((row) => row.timestamp_ms), rows.findLast((row) => row.timestamp_ms)];
  const span = first ? `, from ${time(first.timestamp_ms)} to ${time(last.timestamp_ms)}` : "";
  const queues = counted(answer.queues.length, "queue");
  const kept = answer.queues.reduce((sum, { begin, end }) => sum + end - begin, 0);
  const unread = rows.filter(({ found }) => !found.message).length;
  const lacking = unread ? `${counted(unread, "message")} of these can’t be read. ` : "";
  find("browse-status").textContent = `${counted(rows.length, "message")}${span}, the oldest first. ${lacking}`
    + `${queues} of topic ${answer.topic} with ${counted(kept, "message")} at most.`;
  for (const [way, title] of [["earlier", "Earlier"], ["later", "Later"]]) {
    const link = answer[way] && make("a", { href: addressOf({ ...asked, cursor: answer[way] }) }, title);
    find(way).replaceChildren(link || make("span", { class: "hint" }, `Nothing ${way}`));
  }
}

function opening({ timestamp_ms: at, found: { message } }) {
  if (!message) return "not known";
  const label = `Message of ${time(at)}, queue ${message.queue_id}, queue offset ${message.queue_offset}`;
  const link = { href: `#search?${new URLSearchParams({ id: message.msg_id })}`, "aria-label": label };
  return timed(at, make("a", link, time(at)));
}
