"use strict";
// Elements, numbers and axes. Whatever comes from the run goes in as text: append() of a string makes a text node.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const WIDE = 400, HIGH = 170, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

// Returns a number in few characters; nothing: a dash.
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size >= 1000) return value.toFixed(0);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

const share = (value) => (value === null || value === undefined ? "\u2013" : (100 * value).toFixed(value < 0.1 ? 1 : 0) + " %");

// Appends a text in which `names` stand in backticks.
function words(node, text) {
  text.split("`").forEach((part, number) => node.append(number % 2 ? el("code", {}, part) : part));
  return node;
}

// Returns round numbers that cover low to high.
function ticks(low, high) {
  const size = Math.pow(10, Math.floor(Math.log10((high - low) / 3)));
  const step = [1, 2, 5, 10].map((each) => each * size).find((each) => (high - low) / each <= 4.5);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(place * step);
  return found;
}

// The column that all charts point at, and who wants to know.
const cursor = {
  at: data.columns.length - 1,
  told: [],
  go(column) {
    this.at = Math.max(0, Math.min(data.columns.length - 1, column));
    for (const tell of this.told) tell(this.at);
  },
};

const named = ([first, last]) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);

// Places of steps and values in a chart. xs: leftmost and rightmost step.
function scales(xs, ys) {
  const x = (step) => LEFT + ((step - xs[0]) / Math.max(1e-9, xs[1] - xs[0])) * (WIDE - LEFT - RIGHT);
  const y = (value) => HIGH - BOTTOM - ((value - ys[0]) / (ys[1] - ys[0])) * (HIGH - TOP - BOTTOM);
  return { x, y, xs, ys };
}

// Returns the range of an axis for these values, with 0 where that is not far away.
function range(values, top) {
  const known = values.filter((value) => typeof value === "number");
  let low = Math.min(...known, Infinity), high = Math.max(...known, -Infinity);
  if (low > high) return [0, 1];
  if (low > 0 && low < 0.7 * high) low = 0;
  if (low >= 0 && high <= 0) high = 1;
  if (top !== undefined && top !== null) [low, high] = [Math.min(0, low), Math.max(top, high)];
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low === 0 ? 0 : low - room, top !== undefined && top !== null && high === top ? top : high + room];
}

// Draws the axes; labels: of the ticks of y, [value, text], where they are no plain numbers.
function axes(root, at, labels) {
  let marks = labels || ticks(...at.ys).map((value) => [value, short(value)]);
  if (new Set(marks.map((mark) => mark[1])).size < marks.length) { // a narrow range far from 0
    marks = marks.map(([value]) => [value, String(Number(value.toPrecision(6)))]);
  }
  for (const [value, text] of marks) {
    const y = at.y(value);
    root.append(svg("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y, y2: y }));
    root.append(svg("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, text));
  }
  for (const step of ticks(...at.xs).filter(Number.isInteger)) {
    const x = at.x(step);
    root.append(svg("text", { x, y: HIGH - 5, "text-anchor": x > WIDE - 24 ? "end" : "middle" }, String(step)));
  }
}

// Returns a chart that is moved through with keys, a mouse or a finger. paint(root): draws it. legend: [class, label].
// read(column): the values of a column as text, one for each entry of the legend.
function chart({ title, unit, note, at, paint, legend, read, labels }) {
  const root = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, tabindex: 0, role: "slider", "aria-label": title });
  axes(root, at, labels);
  paint(root);
  const line = svg("line", { class: "cursor", y1: TOP, y2: HIGH - BOTTOM });
  root.append(line);
  const where = el("span", { class: "quiet where" });
  const values = legend.map(() => el("b"));
  const entries = legend.map(([color, label], number) =>
    el("span", {}, ...(color ? [el("i", { class: color })] : []), label ? label + " " : "", values[number]));
  root.setAttribute("aria-valuemin", data.columns[0][0]);
  root.setAttribute("aria-valuemax", data.columns[data.columns.length - 1][1]);
  cursor.told.push((column) => {
    const steps = data.columns[column], texts = read(column);
    const x = at.x((steps[0] + steps[1]) / 2);
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    where.textContent = named(steps);
    values.forEach((node, number) => { node.textContent = texts[number]; });
    root.setAttribute("aria-valuenow", steps[1]);
    root.setAttribute("aria-valuetext", named(steps) + ": " + legend.map(([, label], number) => `${label} ${texts[number]}`).join(", "));
  });
  movable(root, at);
  const caption = el("figcaption", {}, el("div", { class: "top" }, el("h3", {}, unit ? `${title} (${unit})` : title), where));
  caption.append(...(note ? [words(el("div", { class: "quiet" }), note)] : []), el("div", { class: "legend" }, ...entries));
  return el("figure", {}, caption, root);
}

const KEYS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };

function movable(root, at) {
  root.addEventListener("keydown", (event) => {
    if (!(event.key in KEYS)) return;
    event.preventDefault();
    cursor.go(cursor.at + KEYS[event.key]);
  });
  const point = (event) => {
    const box = root.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * WIDE;
    let nearest = 0;
    data.columns.forEach(([first, last], column) => {
      const [a, b] = data.columns[nearest];
      if (Math.abs(at.x((first + last) / 2) - place) < Math.abs(at.x((a + b) / 2) - place)) nearest = column;
    });
    cursor.go(nearest);
  };
  root.addEventListener("pointermove", point);
  root.addEventListener("pointerdown", point);
}
