// Charts on a time axis (UTC), by uPlot: files as bars in lanes. Tables show the files, too.
/* global uPlot */
import { counted, isTimed, make, time } from "./page.js";

// pixels: heights of a lane, its title and the axis; distance at which the pointer is on a bar
const LANE = 46;
const TITLE = 18;
const AXIS = 52;
const NEAR = 3;
const ROWS = 4;
const DAY_MS = 86_400_000;
const HINT = "Drag to zoom in, double-click to zoom out.";
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
// dates if the steps are days, else the time of day, with the date where it changes
const stamps = (_, splits, axisNumber, space, step) => splits.map((ms, n) => {
  const [day, clock] = time(ms).split(" ");
  if (step >= DAY_MS) return day;
  const changed = n === 0 || time(splits[n - 1]).split(" ")[0] !== day;
  return `${clock.slice(0, step < 60_000 ? 8 : 5)}${changed ? `\n${day}` : ""}`;
});
const axis = (more) => ({
  stroke: () => color("--muted"), grid: { stroke: () => color("--line"), width: 1 },
  ticks: { stroke: () => color("--line") }, font: "12px system-ui, sans-serif", ...more,
});
const TIMES = axis({ size: AXIS, values: stamps, space: 76 });

// Puts files that overlap in different rows, up to `ROWS`.
function inRows(files) {
  const ends = Array(ROWS).fill(-Infinity);
  const bars = [...files].sort((a, b) => a.begin_ms - b.begin_ms).map((file) => {
    const free = ends.findIndex((end) => end <= file.begin_ms);
    const row = free < 0 ? ends.indexOf(Math.min(...ends)) : free;
    ends[row] = Math.max(ends[row], file.end_ms);
    return { file, row };
  });
  const rows = ends.filter(Number.isFinite).length;
  return { bars, high: rows > 2 ? 24 / rows : 12 };
}

class Chart {
  constructor(box, hint = HINT) {
    this.box = box;
    this.picture = make("div", { class: "chart", role: "img" });
    this.note = make("p", { class: "hint under", "aria-hidden": "true" }, hint);
    box.replaceChildren(this.picture, this.note);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.picture);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot?.redraw(false, true));
  }

  size() {
    const edge = 2 * parseFloat(getComputedStyle(this.picture).paddingLeft);
    return { width: Math.max(200, this.picture.clientWidth - edge), height: this.height };
  }

  draw(data, summary, options) {
    this.picture.setAttribute("aria-label", summary);
    if (!this.plot) {
      const utc = (ms) => uPlot.tzDate(new Date(ms), "Etc/UTC");
      const all = { ...this.size(), ms: 1, legend: { show: false }, tzDate: utc, ...options };
      const zoom = ({ select }) => { this.zoomed ||= select.width > 0; };
      all.hooks = { ...options.hooks, setSelect: [zoom] };
      this.plot = new uPlot(all, data, this.picture);
      this.picture.addEventListener("dblclick", () => { this.zoomed = false; });
      return;
    }
    this.plot.setSize(this.size());
    // new data does not reset the zoom
    this.plot.setData(data, !this.zoomed);
    if (this.zoomed) this.plot.redraw();
  }
}

// Files as bars from their first to their last second, in a lane for each of [{name, color, files}]. A lane's name has
// the number of files without known times.
export class Lanes extends Chart {
  constructor(box, describe) {
    super(box);
    this.describe = describe;
  }

  show(lanes, summary) {
    this.lanes = lanes.map(({ name, color: ink, files: all }) => {
      const timed = all.filter(isTimed);
      const left = all.length - timed.length;
      return { name: left ? `${name}, ${counted(left, "file")} without known times` : name, color: ink, ...inRows(timed) };
    });
    this.height = lanes.length * LANE + AXIS + 4;
    const files = this.lanes.flatMap((lane) => lane.bars.map((bar) => bar.file));
    this.box.hidden = !files.length;
    const begin = files.reduce((least, file) => Math.min(least, file.begin_ms), files[0]?.begin_ms ?? Date.now());
    const end = files.reduce((most, file) => Math.max(most, file.end_ms), begin);
    const margin = Math.max(1000, (end - begin) / 50);
    this.draw([[begin - margin, end + margin], [0, 1]], summary, {
      scales: { y: { range: [0, 1] } },
      axes: [TIMES, { show: false }],
      series: [{}, { paths: () => null, points: { show: false } }],
      cursor: { y: false, points: { show: false } },
      hooks: { draw: [() => this.bars()], setCursor: [() => this.point()] },
      padding: [0, 36, 0, 36],
    });
  }

  bars() {
    const { ctx, bbox } = this.plot;
    const dot = devicePixelRatio;
    ctx.save();
    ctx.font = `${12 * dot}px system-ui, sans-serif`;
    [ctx.textAlign, ctx.textBaseline] = ["left", "alphabetic"];
    // the legend; a long name is condensed in a narrow chart
    this.lanes.forEach(({ name, color: ink }, n) => {
      const [left, top] = [4 * dot, bbox.top + n * LANE * dot];
      ctx.fillStyle = color("--ink");
      ctx.fillText(name, left + 15 * dot, top + 13 * dot, ctx.canvas.width - left - 19 * dot);
      ctx.fillStyle = color(ink);
      ctx.fillRect(left, top + 4 * dot, 10 * dot, 10 * dot);
    });
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    this.lanes.forEach((lane, n) => {
      const top = bbox.top + n * LANE * dot;
      ctx.fillStyle = color(lane.color);
      for (const { file, row } of lane.bars) {
        const left = this.plot.valToPos(file.begin_ms, "x", true);
        const width = Math.max(2 * dot, this.plot.valToPos(file.end_ms, "x", true) - left - dot);
        ctx.fillRect(left, top + (TITLE + row * lane.high) * dot, width, (lane.high - 1) * dot);
      }
    });
    ctx.restore();
  }

  point() {
    const { left, top } = this.plot.cursor;
    const at = (x) => this.plot.posToVal(x, "x");
    const lane = left >= 0 ? this.lanes[Math.floor(top / LANE)] : null;
    const row = Math.floor((top % LANE - TITLE) / (lane?.high ?? 1));
    const bars = lane?.bars.filter((bar) => bar.row === row).map((bar) => bar.file) ?? [];
    const found = bars.find((file) => file.begin_ms <= at(left + NEAR) && file.end_ms >= at(left - NEAR));
    this.note.textContent = found ? this.describe(found) : HINT;
  }
}
