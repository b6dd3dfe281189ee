// Times as people write them: days by name, dates and times of the chosen zone. Requests use UTC.
const DAYS = ["sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday"];
const ZONE = "tiered-index-zone";

export const ownZone = () => Intl.DateTimeFormat().resolvedOptions().timeZone;
export const isLocal = () => localStorage.getItem(ZONE) === "local";
export const setLocal = (on) => (on ? localStorage.setItem(ZONE, "local") : localStorage.removeItem(ZONE));

const milliseconds = (parts, local) => (local ? new Date(...parts).valueOf() : Date.UTC(...parts));
const iso = (ms) => `${new Date(ms).toISOString().slice(0, 19)}Z`;

// Returns whether the calendar has a date, with or without a time: `Date` reads 31 June as 1 July.
const isReal = (text, parts) => iso(Date.UTC(...parts)).startsWith(text.replace(/[ t]/, "T"));

// Returns the day that a text names, as [year, month, day]: today, yesterday, the last Tuesday, 2025-11-04; or null.
function dayOf(text, local) {
  const date = /^(\d{4})-(\d\d)-(\d\d)$/.exec(text);
  if (date) {
    const parts = [Number(date[1]), date[2] - 1, Number(date[3])];
    return isReal(text, parts) ? parts : null;
  }
  const now = new Date();
  const [year, month, day, weekday] = local ? [now.getFullYear(), now.getMonth(), now.getDate(), now.getDay()]
    : [now.getUTCFullYear(), now.getUTCMonth(), now.getUTCDate(), now.getUTCDay()];
  const word = text.toLowerCase();
  const named = DAYS.findIndex((name) => word.length >= 3 && name.startsWith(word));
  const back = word === "today" ? 0 : word === "yesterday" ? 1 : named < 0 ? null : (weekday - named + 7) % 7;
  return back === null ? null : [year, month, day - back];
}

export const isDay = (text) => dayOf(text.trim(), false) !== null;

// Returns a time in the service's form, and another text unchanged. A day becomes its first second, or with `isEnd` its
// last second.
export function moment(given, { isEnd = false, local = isLocal() } = {}) {
  const text = given.trim();
  const day = dayOf(text, local);
  if (day) {
    const [year, month, date] = day;
    return iso(isEnd ? milliseconds([year, month, date + 1], local) - 1000 : milliseconds(day, local));
  }
  const parts = /^(\d{4})-(\d\d)-(\d\d)[ Tt](\d\d)(?::(\d\d)(?::(\d\d)(?:[.,](\d+))?)?)?$/.exec(text)?.slice(1);
  if (!parts) return text;
  const fraction = parts.pop();
  const numbers = parts.map((part) => Number(part ?? 0));
  numbers[1] -= 1;
  if (!isReal(text.slice(0, 19), numbers)) return text;
  const found = iso(milliseconds(numbers, local));
  return fraction ? found.replace("Z", `.${fraction}Z`) : found;
}

// Returns whether a number is probably of seconds: as milliseconds it is before March 1973.
export const isLikelySeconds = (text) => /^\d+$/.test(text ?? "") && Number(text) > 0 && Number(text) < 1e11;

// Returns a moment in the browser's time zone; an empty text if that is UTC.
export function here(ms) {
  const at = new Date(Number(ms));
  if (Number.isNaN(at.valueOf()) || at.getTimezoneOffset() === 0) return "";
  const shown = { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" };
  return at.toLocaleString("en-GB", shown);
}
