// Shows what `phalanx watch` has read: a row for each run, and a chart for each number of the runs that are chosen.
"use strict";

const COLORS = ["#2f6fde", "#d9622b", "#1a936f", "#b0388f", "#8a6d00", "#0f8ca8", "#c43c4a", "#6b5bd0"];
const CHARTS = [
  { title: "loss", of: (c) => [c.step, c.loss], log: () => by("log").checked, smooth: true },
  { title: "test loss", of: (c) => judged(c, "test_loss"), log: () => by("log").checked },
  { title: "test accuracy", of: (c) => judged(c, "test_accuracy") },
  { title: "samples a second", of: (c) => judged(c, "samples_per_s"), zero: true },
  { title: "ms a step", of: (c) => [c.step, c.ms], smooth: true, zero: true },
  { title: "ms waiting for other ranks", of: (c) => [c.step, c.comm_ms], smooth: true, zero: true },
  { title: "ms waiting for samples", of: (c) => [c.step, c.input_ms], smooth: true, zero: true },
  { title: "learning rate", of: (c) => [c.step, c.lr], zero: true },
  { title: "workers", of: (c) => [c.step, c.workers], zero: true, steps: true },
];
// A chart for each number of programs' own comes behind these.
const OWN_FROM = 3, MOST_OWN = 32;
const WIDTH = 520, HEIGHT = 220, LEFT = 56, RIGHT = 8, TOP = 10, BOTTOM = 24;
const LOOK_MS = 2000;

const by = (id) => document.getElementById(id);
const shown = new Map(); // Whether a run is, by its name; those that nobody has chosen are if they are among the first.
const curves = new Map();
let runs = [];

function judged(c, key) {
  const those = c.epochs.filter((e) => e[key] !== null);
  return [those.map((e) => e.step), those.map((e) => e[key])];
}

function element(name, attributes = {}, text = "") {
  const svg = ["svg", "path", "line", "text", "rect", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

function short(x) {
  if (x === null || x === undefined) return "-";
  const size = Math.abs(x);
  if (size >= 1e6) return (x / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (x / 1e3).toPrecision(3) + "k";
  if (size !== 0 && size < 1e-3) return x.toExponential(1);
  return String(Number(x.toPrecision(4)));
}

function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

// Numbers that people count in, about so many of them.
function ticks(from, to, about) {
  const raw = (to - from) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const first = Math.ceil(from / step), n = Math.floor(to / step + 1e-9) - first + 1;
  return Array.from({ length: Math.min(Math.max(n, 0) || 0, 12) }, (_, i) => (first + i) * step);
}

function smoothed(values, weight) {
  let mean = 0, seen = 0;
  return values.map((x) => {
    if (x === null) return null;
    mean = weight * mean + (1 - weight) * x;
    seen = weight * seen + (1 - weight);
    return mean / seen;
  });
}

function figureOf(chart) {
  const figure = element("figure");
  const caption = element("figcaption", {}, chart.title);
  caption.append(element("output"));
  figure.append(caption);
  return figure;
}

function draw(chart, figure) {
  const output = figure.querySelector("output");
  const weight = chart.smooth ? Number(by("smooth").value) : 0;
  const log = chart.log && chart.log();
  const drawn = runs.filter((run) => run.on && curves.has(run.name)).map((run) => {
    const [xs, ys] = chart.of(curves.get(run.name));
    return { run, xs, ys, line: weight > 0 ? smoothed(ys, weight) : ys };
  }).filter((one) => one.xs.length > 0);
  figure.hidden = drawn.length === 0;
  figure.querySelector("svg")?.remove();
  if (figure.hidden) return;
  const good = (y) => y !== null && (!log || y > 0);
  const all = drawn.flatMap((one) => one.ys.filter(good));
  let from = Math.min(...drawn.map((one) => one.xs[0])), to = Math.max(...drawn.map((one) => one.xs.at(-1)));
  let low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  if (chart.zero && !log) low = Math.min(low, 0);
  if (to === from) to = from + 1;
  // Nearly equal ones as well: between them there are no numbers to count in.
  if (high - low <= 1e-9 * Math.max(Math.abs(high), Math.abs(low))) [low, high] = [low - Math.abs(low || 1) * 0.05, high + Math.abs(high || 1) * 0.05];
  const scale = (y) => (log ? Math.log10(y) : y);
  if (log && low <= 0) low = high / 10;
  const x = (step) => LEFT + (WIDTH - LEFT - RIGHT) * (step - from) / (to - from);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (scale(value) - scale(low)) / (scale(high) - scale(low)));
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
  const levels = log ? ticks(scale(low), scale(high), 4).map((p) => 10 ** p) : ticks(low, high, 4);
  for (const level of levels) {
    svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(level), y2: y(level) }));
    svg.append(element("text", { x: LEFT - 6, y: y(level) + 4, "text-anchor": "end" }, short(level)));
  }
  for (const step of ticks(from, to, 6)) {
    svg.append(element("text", { x: x(step), y: HEIGHT - 6, "text-anchor": "middle" }, short(step)));
  }
  const path = (xs, ys) => {
    let text = "", pen = "M";
    ys.forEach((value, i) => {
      if (!good(value)) { pen = "M"; return; }
      if (chart.steps && pen === "L") text += `H${x(xs[i]).toFixed(1)}`;
      text += `${pen}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    });
    // A single point has to be seen, too.
    return text.includes("L") ? text : text.replace(/M(\S+) (\S+)/g, "M$1 $2h3");
  };
  for (const { run, xs, ys, line } of drawn) {
    if (weight > 0) svg.append(element("path", { class: "curve faint", stroke: run.color, d: path(xs, ys) }));
    svg.append(element("path", { class: "curve", stroke: run.color, d: path(xs, line) }));
    for (const mark of chart.title === "loss" ? curves.get(run.name).marks : []) {
      if (mark.step < from || mark.step > to) continue;
      const at = element("line", { class: "mark", stroke: run.color, x1: x(mark.step), x2: x(mark.step), y1: TOP, y2: HEIGHT - BOTTOM });
      at.append(element("title", {}, `step ${mark.step}: ${mark.what}`));
      svg.append(at);
    }
  }
  const at = element("line", { class: "at", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(at);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const step = from + (to - from) * ((event.clientX - box.left) * WIDTH / box.width - LEFT) / (WIDTH - LEFT - RIGHT);
    const near = drawn.map(({ run, xs, line }) => {
      let i = 0;
      while (i + 1 < xs.length && Math.abs(xs[i + 1] - step) <= Math.abs(xs[i] - step)) i += 1;
      return { run, step: xs[i], value: line[i] };
    });
    at.setAttribute("x1", x(near[0].step)); at.setAttribute("x2", x(near[0].step)); at.setAttribute("visibility", "visible");
    const words = near.map((n) => (near.length > 1 ? `${n.run.name} ` : "") + short(n.value));
    output.textContent = `step ${near[0].step}: ${words.slice(0, 4).join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => { at.setAttribute("visibility", "hidden"); output.textContent = ""; });
  figure.append(svg);
}

// Charts for numbers that no other run has had.
function addOwn() {
  const names = runs.flatMap((run) => (curves.get(run.name)?.epochs ?? []).flatMap((e) => Object.keys(e.test_metrics)));
  const own = CHARTS.filter((chart) => chart.own).map((chart) => chart.own);
  for (const name of new Set(names.filter((name) => !own.includes(name)))) {
    if (own.length === MOST_OWN) return;
    const those = (c) => c.epochs.filter((e) => Object.hasOwn(e.test_metrics, name));
    const chart = { title: `test ${name}`, own: name, of: (c) => [those(c).map((e) => e.step), those(c).map((e) => e.test_metrics[name])] };
    const at = OWN_FROM + own.length;
    CHARTS.splice(at, 0, chart);
    by("charts").insertBefore(figureOf(chart), by("charts").children[at]);
    own.push(name);
  }
}

function redraw() {
  CHARTS.forEach((chart, i) => draw(chart, by("charts").children[i]));
}

function list() {
  const now = Date.now() / 1000;
  by("none").hidden = runs.length > 0;
  by("runs").replaceChildren(...runs.map((run) => {
    const row = element("tr", { class: run.on ? "" : "hidden", title: run.on ? "leave it out" : "show it" });
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = run.on ? run.color : "transparent";
    swatch.style.border = `1px solid ${run.color}`;
    const first = element("td");
    first.append(swatch);
    const cells = [
      run.name, run.state, `${run.made} of ${run.steps}`, short(run.loss),
      run.test_accuracy === null ? "-" : `${(100 * run.test_accuracy).toFixed(2)}%`,
      short(run.samples_per_s), short(run.ms), run.world_size, run.told_at === null ? "-" : ago(now - run.told_at),
    ];
    row.append(first, ...cells.map((text, i) => element("td", i === 1 ? { class: run.state } : {}, String(text))));
    row.addEventListener("click", () => { shown.set(run.name, !run.on); look(); });
    return row;
  }));
  const marks = runs.filter((run) => run.on && curves.has(run.name))
    .flatMap((run) => curves.get(run.name).marks.map((mark) => ({ run, mark }))).slice(-50).reverse();
  by("marks").replaceChildren(...marks.map(({ run, mark }) => {
    const line = element("li");
    line.append(element("b", {}, `${run.name}, step ${mark.step}: `), mark.what);
    return line;
  }));
}

async function get(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
  return answer.json();
}

let looking = false;
async function look() {
  if (looking) return;
  looking = true;
  try {
    const found = await get("/api/runs");
    found.sort((a, b) => (b.told_at ?? 0) - (a.told_at ?? 0));
    found.forEach((run, i) => {
      run.on = shown.get(run.name) ?? i < 4;
      shown.set(run.name, run.on);
    });
    const names = [...shown.keys()];
    found.forEach((run) => { run.color = COLORS[names.indexOf(run.name) % COLORS.length]; });
    await Promise.all(found.filter((run) => run.on).map(async (run) => {
      const known = curves.get(run.name);
      if (known && known.told_at === run.told_at) return;
      const fresh = await get(`/api/run?name=${encodeURIComponent(run.name)}`);
      fresh.told_at = run.told_at;
      curves.set(run.name, fresh);
    }));
    runs = found;
    by("told").textContent = `${runs.length} run${runs.length === 1 ? "" : "s"}, as of ${new Date().toLocaleTimeString()}`;
    list();
    addOwn();
    redraw();
  } catch (error) {
    by("told").textContent = `nothing new: ${error.message}`;
  } finally {
    looking = false;
  }
}

by("charts").append(...CHARTS.map(figureOf));
by("smooth").addEventListener("input", redraw);
by("log").addEventListener("change", redraw);
look();
setInterval(look, LOOK_MS);
