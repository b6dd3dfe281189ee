// Parts of views: elements, texts for people, problems, and tables with pages.
const ROWS = 25;
const NAMED = 20;
const LAST_MS = 253402300799000;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const AGES = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];

export const find = (id) => document.getElementById(id);

// Makes an element. Texts become text nodes: data of an index is never parsed as HTML.
export function make(tag, more = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(more)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const count = (number) => Number(number).toLocaleString("en");
export const counted = (number, one, many = `${one}s`) => `${count(number)} ${Number(number) === 1 ? one : many}`;
const rounded = (number) =>
  number.toLocaleString("en", number < 1 ? { maximumSignificantDigits: 2 } : { maximumFractionDigits: 2 });
export const usd = (dollars) => `$${rounded(dollars)}`;
export const cents = (dollars) => `${rounded(100 * dollars)} ¢`;

// Returns the queue and the offset in the id of an entry of files, which stay if files are merged.
export const entryOf = (id = "") => id.slice(0, 24);

export function time(ms) {
  const moment = new Date(Number(ms));
  return Number.isNaN(moment.valueOf()) ? String(ms) : `${moment.toISOString().slice(0, 19).replace("T", " ")}Z`;
}

// A file with unknown times is given as one of all times, or of none.
export const isTimed = ({ begin_ms: begin, end_ms: end }) => begin !== 0 || (end !== 0 && end < LAST_MS);
const spanned = (file) => (isTimed(file) ? `${time(file.begin_ms)} to ${time(file.end_ms)}` : "times not known");

// Returns the time ranges [[begin, end]] of files; files that overlap or touch share one.
export function spans(files) {
  const found = [];
  for (const { begin_ms: begin, end_ms: end } of files.filter(isTimed).sort((a, b) => a.begin_ms - b.begin_ms)) {
    const last = found.at(-1);
    if (last && begin <= last[1] + 1000) last[1] = Math.max(last[1], end);
    else found.push([begin, end]);
  }
  return found;
}

// Makes a state's name with a dot of its colour.
export function state(name, color) {
  const dot = make("span", { class: "dot" });
  dot.style.background = `var(${color})`;
  return make("span", {}, dot, name);
}

export function bytes(size) {
  const unit = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, size)) / 10));
  return `${unit ? (size / 1024 ** unit).toFixed(1) : size} ${UNITS[unit]}`;
}

export function ago(ms) {
  const seconds = Math.max(0, (Date.now() - ms) / 1000);
  const [unit, name] = AGES.find(([size]) => seconds >= 2 * size || size === 1);
  return `${counted(Math.floor(seconds / unit), name)} ago`;
}

// Makes a list of files that were not read.
export function fileList(files) {
  const said = ({ error, source }) => `${error ? `: ${error}` : ""}${source ? `, of ${source}` : ""}`;
  const shown = files.slice(0, NAMED).map((one) =>
    make("li", {}, `${one.file} (${one.place}), ${spanned(one)}${said(one)}`));
  const left = files.length - shown.length;
  return make("ul", {}, ...shown, left ? make("li", {}, `and ${count(left)} more`) : null);
}

// Shows a problem with advice and buttons; nothing for null.
export function tell(box, problem, ...buttons) {
  const said = problem?.message ?? "";
  // a screen reader would read the same problem again each time
  if (said && box.dataset.said === said && box.firstChild?.className === "problem" && !buttons.length) return;
  box.dataset.said = said;
  box.replaceChildren(...(problem ? [make("div", { class: "problem", role: "alert" },
    make("h3", {}, problem.status ? `${problem.title} (${problem.status})` : (problem.title ?? "Error")),
    make("p", {}, said),
    problem.failed?.length ? fileList(problem.failed) : null,
    problem.advice ? make("p", {}, problem.advice) : null,
    problem.request_id ? make("p", { class: "hint" }, `Request ${problem.request_id}`) : null,
    buttons.length ? make("p", { class: "buttons" }, ...buttons) : null)] : []));
}

// Makes a column that shows `shown(row[name])`, a text or a node. Rows are sorted by `row[name]`.
export const column = (title, name, shown = String, more = {}) =>
  ({ title, of: (row) => shown(row[name]), by: (row) => row[name], ...more });
export const NUMBER = { number: true };
// a column that is shown only if a row has another value than the usual one
const rare = (usual) => (value) => value !== usual;
export const ERROR = column("Error", "error", (error) => error ?? "", { text: true, rare: rare(null) });
export const LANE = column("Lane", "lane", String, { rare: rare("main") });
const moment = (title, name) =>
  ({ title, of: (row) => (isTimed(row) ? time(row[name]) : "not known"), by: (row) => row[name] });
export const SPAN = [moment("From", "begin_ms"), moment("To", "end_ms")];

// A table of any number of rows; the document has one page of them. If there may be more rows, `more` reads them. If it
// is too wide, each row becomes a card: cells below each other, with their titles. Roles keep it a table for screen
// readers.
export class Table {
  constructor(box, label, columns, { marked = () => false, drawn = () => {} } = {}) {
    Object.assign(this, { columns, marked, drawn, page: 0, sorted: null, descending: false, more: null });
    this.body = make("tbody", { role: "rowgroup" });
    this.head = make("tr", { role: "row" });
    this.said = make("span", { role: "status" });
    this.back = make("button", { type: "button", onclick: () => this.turn(-1) }, "Previous");
    this.on = make("button", { type: "button", onclick: () => this.turn(1) }, "Next");
    this.pages = make("div", { class: "pages" }, this.back, this.said, this.on);
    this.table = make("table", { role: "table" }, make("caption", { class: "skip" }, label),
      make("thead", { role: "rowgroup" }, this.head), this.body);
    this.place = make("div", { class: "place" }, this.table);
    box.replaceChildren(this.place, this.pages);
    this.show([]);
    new ResizeObserver(([{ contentRect: { width } }]) => width !== this.width && this.fit(width)).observe(this.place);
  }

  fit(width = this.place.clientWidth) {
    this.width = width;
    this.place.classList.remove("cards");
    this.place.classList.toggle("cards", this.table.scrollWidth > this.place.clientWidth);
  }

  turn(pages) {
    this.page += pages;
    if (this.page > this.last && this.more) this.more();
    else this.draw();
  }

  sort(title) {
    this.descending = this.sorted === title && !this.descending;
    this.sorted = title;
    this.page = 0;
    this.draw();
  }

  show(rows, columns = this.columns) {
    Object.assign(this, { rows, columns });
    this.draw();
  }

  draw() {
    this.last = Math.max(0, Math.ceil(this.rows.length / ROWS) - 1);
    this.page = Math.min(Math.max(this.page, 0), this.last);
    const [first, focus] = [this.page * ROWS, document.activeElement];
    const parts = [this.head, this.body];
    const focused = parts.map((part) => [...part.children].findIndex((one) => one.contains(focus)));
    this.shown = this.columns.filter(({ by, rare: is }) => !is || this.rows.some((row) => is(by(row))));
    this.head.replaceChildren(...this.shown.map((one) => this.title(one)));
    const inView = this.ordered().slice(first, first + ROWS);
    this.body.replaceChildren(...inView.map((row) => this.row(row)));
    parts.forEach((part, n) => part.children[focused[n]]?.querySelector("button")?.focus());
    this.place.hidden = !this.rows.length;
    this.fit();
    this.pages.hidden = this.last === 0 && !this.more;
    this.back.disabled = this.page === 0;
    this.on.disabled = this.page === this.last && !this.more;
    // a button that becomes disabled passes on the focus
    if (focus === this.on && focus.disabled) this.back.focus();
    if (focus === this.back && focus.disabled) this.on.focus();
    const total = this.rows.length;
    const range = `${count(Math.min(first + 1, total))} to ${count(Math.min(first + ROWS, total))}`;
    const said = `${range} of ${count(total)}${this.more ? " so far" : ""}`;
    // a screen reader would read a status again if it were written again
    if (this.said.textContent !== said) this.said.textContent = said;
    this.drawn(inView);
  }

  // Draws the page that has a row.
  drawAt(row) {
    this.page = Math.floor(this.ordered().indexOf(row) / ROWS);
    this.draw();
  }

  ordered() {
    const { by: of, number } = this.columns.find(({ title }) => title === this.sorted) ?? {};
    if (!of) return this.rows;
    // texts of integers that a JavaScript number would round
    const isText = (value) => number && typeof value === "string" && /^-?\d+$/.test(value);
    const by = (row) => (isText(of(row)) ? BigInt(of(row)) : of(row));
    const sign = this.descending ? -1 : 1;
    return [...this.rows].sort((a, b) => sign * (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0));
  }

  title({ title, number, by }) {
    const sorted = this.sorted === title ? (this.descending ? "descending" : "ascending") : null;
    return make("th", { scope: "col", role: "columnheader", class: number ? "number" : null, "aria-sort": sorted },
      by ? make("button", { type: "button", onclick: () => this.sort(title) }, title) : title);
  }

  row(row) {
    return make("tr", { role: "row", class: this.marked(row) ? "chosen" : null },
      ...this.shown.map(({ title, of, number, text }) => make("td",
        { role: "cell", "data-title": title, class: number ? "number" : text ? "text" : null }, of(row))));
  }
}
