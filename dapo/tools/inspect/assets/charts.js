// Charts over the steps (uPlot). All share the step that is pointed at and the range of steps that is shown.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const FONT = "12px system-ui, sans-serif";
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
const FEW = 20; // known values: each has a marker, and nothing is smoothed
const ENDS = ["low", "high"];
const view = { at: null, zoom: null, smooth: 0, extent: [0, 1], off: new Set() };
const charts = new Map(); // by title

// Moves the cursor of all charts to a step.
function point(step) {
  view.at = step;
  for (const chart of charts.values()) {
    chart.plot.setCursor({ left: chart.plot.valToPos(step, "x"), top: 1 }, false);
    read(chart);
  }
}

const settle = () => queueMicrotask(() => point(view.at)); // after uPlot has its scales, a microtask later

// Shows a range of steps in all charts; null: all of them.
function zoom(range) {
  if (range) {
    const [low, high] = [Math.max(range[0], view.extent[0]), Math.min(range[1], view.extent[1])];
    range = high - low < 1 || (low === view.extent[0] && high === view.extent[1]) ? null : [low, high];
  }
  view.zoom = range;
  view.at = Math.min(Math.max(view.at, (range || view.extent)[0]), (range || view.extent)[1]);
  byId("whole").disabled = range === null;
  for (const { plot } of charts.values()) plot.setData(plot.data);
  settle();
}

function zoomBy(factor) {
  const [low, high] = view.zoom || view.extent;
  const width = (high - low) * factor;
  const middle = Math.min(Math.max(view.at, low), high);
  const start = Math.max(view.extent[0], middle - width * ((middle - low) / (high - low)));
  if (width >= 1) zoom([start, start + width]);
}

// Returns the range of the y axis, with 0 where that is not far away.
function range(low, high, { top, stacked }) {
  if (!known(low)) return [0, 1];
  if (stacked || (low > 0 && low < 0.7 * high)) low = 0;
  if (low >= 0 && high <= 0) high = 1;
  if (known(top) && (stacked || !view.zoom)) [low, high] = [Math.min(0, low), Math.max(top, high)];
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low === 0 ? 0 : low - room, high === top ? top : high + room];
}

const tick = (values) => {
  const texts = values.map(short);
  return new Set(texts).size < texts.length ? values.map((value) => String(Number(value.toPrecision(6)))) : texts;
};

// Returns the exponential moving average of what is known.
function smoothed(values, weight) {
  let mean = null, norm = 0;
  return values.map((value) => {
    if (!known(value)) return value;
    mean = weight * (mean || 0) + (1 - weight) * value;
    norm = weight * norm + 1 - weight;
    return mean / norm;
  });
}

const nameOf = (chart, line) => `${chart.spec.title}/${line.run}/${line.label}`;

// Returns what uPlot draws: rows of numbers, a description of each, and bands between them.
function layers(chart) {
  const { lines, stacked } = chart.spec;
  const tables = lines.map((line) => [line.x, line.values, ...(line.low ? ENDS.map((end) => line[end]) : [])]);
  const [xs, ...columns] = uPlot.join(tables);
  const rows = [xs], series = [{}], bands = [];
  const add = (values, options) => rows.push(values) && series.push({ width: 1.8, spanGaps: true, points: { show: false }, ...options }) - 1;
  chart.values = lines.map((line) => columns.splice(0, line.low ? 3 : 1));
  const shown = lines.map((_, number) => number).filter((number) => !view.off.has(nameOf(chart, lines[number])));
  let below = xs.map(() => 0);
  const parts = [];
  for (const number of shown) {
    const line = lines[number], [values, low, high] = chart.values[number];
    const stroke = () => css(`--c${line.color}`);
    if (stacked && !line.over) {
      below = below.map((sum, place) => sum + (values[place] || 0));
      parts.push([below, { fill: stroke, width: 0, paths: uPlot.paths.bars({ size: [1, Infinity] }) }]);
      continue;
    }
    if (low) bands.push({ series: [add(high, { width: 0 }), add(low, { width: 0 })], fill: () => `${stroke()}33` });
    const few = values.filter(known).length <= FEW, smooth = few || stacked ? 0 : view.smooth;
    const points = { show: few, size: 5, fill: () => css("--card") };
    const dash = line.dash ? { dash: DASHES[line.dash % DASHES.length] } : {};
    if (smooth) add(values, { stroke: () => `${stroke()}55`, ...dash });
    parts.unshift([smooth ? smoothed(values, smooth) : values, { stroke, points, ...dash }]);
  }
  for (const [values, options] of parts.reverse()) add(values, options); // the tallest first, lines over it
  return { rows, series, bands };
}

// Draws a chart anew, or only its new numbers.
function paint(chart) {
  const { rows, series, bands } = layers(chart);
  const form = JSON.stringify([chart.spec.lines.map((line) => [line.label, line.run, line.color]), series, view.smooth, [...view.off]]);
  if (chart.plot && chart.form === form) return chart.plot.setData(rows);
  if (chart.plot) chart.plot.destroy();
  chart.form = form;
  const axis = { font: FONT, stroke: () => css("--quiet"), ticks: { show: false }, grid: { stroke: () => css("--line"), width: 1 } };
  const width = chart.box.clientWidth || 300;
  chart.plot = new uPlot({
    width, height: chart.spec.large ? 260 : 190, padding: [10, 12, 0, 0], legend: { show: false }, series, bands,
    scales: { x: { time: false, range: () => view.zoom || view.extent }, y: { range: (_, low, high) => range(low, high, chart.spec) } },
    axes: [
      { ...axis, size: 28, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] },
      { ...axis, size: 52, space: 34, values: (_, values) => tick(values) },
    ],
    cursor: {
      y: false, drag: { x: true, y: false, setScale: false },
      bind: { mouseleave: () => null, dblclick: () => () => zoom(null) },
    },
    hooks: {
      setCursor: [({ cursor: { idx }, data, over }) => known(idx) && over.matches(":hover") && data[0][idx] !== view.at && point(data[0][idx])],
      setSelect: [(plot) => {
        const { left, width: wide } = plot.select;
        if (!wide) return;
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        zoom([plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")]);
      }],
    },
  }, rows, chart.box);
}

// Writes the values at the cursor into the legend, and for screen readers.
function read(chart) {
  const xs = chart.plot.data[0];
  if (!xs.length) return;
  const found = chart.plot.valToIdx(view.at);
  const texts = chart.values.map(([values, low, high]) => {
    let place = found;
    while (place > 0 && values[place] === undefined) place--; // another run's step
    return short(values[place]) + (low && known(low[place]) ? ` (${short(low[place])} to ${short(high[place])})` : "");
  });
  const step = `step ${Math.round(xs[found])}`;
  chart.where.textContent = step;
  chart.numbers.forEach((node, number) => { node.textContent = texts[number]; });
  chart.box.setAttribute("aria-valuemin", Math.floor(view.extent[0]));
  chart.box.setAttribute("aria-valuemax", Math.floor(view.extent[1]));
  chart.box.setAttribute("aria-valuenow", Math.round(xs[found]));
  const said = chart.spec.lines.map((line, number) => `${line.label} ${texts[number]}`);
  chart.box.setAttribute("aria-valuetext", `${step}: ${said.join(", ")}`);
}

function legend(chart) {
  chart.numbers = chart.spec.lines.map(() => el("b"));
  chart.legend.replaceChildren(chart.where, ...chart.spec.lines.map((line, number) => {
    const name = nameOf(chart, line);
    const swatch = el("i", { class: `f${line.color}${line.dash ? " dashed" : ""}` });
    const entry = button("", () => {
      view.off[view.off.has(name) ? "delete" : "add"](name);
      entry.setAttribute("aria-pressed", !view.off.has(name));
      paint(chart);
      settle();
    }, { "aria-pressed": !view.off.has(name) });
    entry.append(swatch, line.label + " ", chart.numbers[number]);
    return entry;
  }));
}

const KEYS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };

function press(chart, event) {
  const xs = chart.plot.data[0];
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key in KEYS) {
    const [low, high] = view.zoom || view.extent;
    const inside = xs.filter((x) => x >= low && x <= high);
    const here = inside.findLastIndex((x) => x <= view.at) + KEYS[event.key];
    if (inside.length) point(inside[Math.min(inside.length - 1, Math.max(0, here))]);
  } else if (event.key === "+") zoomBy(0.5);
  else if (event.key === "-") zoomBy(2);
  else return;
  event.preventDefault();
}

function make(title) {
  const chart = { where: el("span", { class: "quiet where" }), note: el("div", { class: "quiet" }), legend: el("div", { class: "legend" }) };
  chart.box = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": title });
  chart.heading = el("h3");
  const saves = el("div", { class: "saves" },
    button("PNG", () => picture(chart), { "aria-label": `${title}: save the picture` }),
    button("CSV", () => save(new Blob([csv(chart)], { type: "text/csv" }), `${title}.csv`), { "aria-label": `${title}: save the numbers` }));
  chart.figure = el("figure", {}, chart.heading, chart.box, chart.legend, el("div", { class: "top" }, chart.note, saves));
  chart.box.addEventListener("keydown", (event) => press(chart, event));
  new ResizeObserver(() => {
    const width = chart.box.clientWidth;
    if (chart.plot && width && width !== chart.plot.width) {
      chart.plot.setSize({ width, height: chart.plot.height });
      settle();
    }
  }).observe(chart.box);
  return chart;
}

// Shows charts as described: { title, unit, note, top, stacked, large, lines: [{ label, run, color, dash, x, values }] }.
function drawCharts(specs) {
  const xs = specs.flatMap((spec) => spec.lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]));
  const newest = view.at === null || view.at >= view.extent[1] - 0.5;
  view.extent = xs.length ? [Math.min(...xs) - 0.5, Math.max(...xs) + 0.5] : [0, 1];
  if (newest) view.at = view.extent[1] - 0.5;
  for (const [title, chart] of charts) {
    if (specs.some((spec) => spec.title === title)) continue;
    chart.plot.destroy();
    chart.figure.remove();
    charts.delete(title);
  }
  specs.forEach((spec, place) => {
    const chart = charts.get(spec.title) || make(spec.title);
    const labels = JSON.stringify(spec.lines.map((line) => [line.label, line.run, line.color, line.dash]));
    chart.spec = spec;
    charts.set(spec.title, chart);
    chart.heading.textContent = spec.unit ? `${spec.title} (${spec.unit})` : spec.title;
    chart.note.replaceChildren();
    words(chart.note, spec.note);
    chart.figure.classList.toggle("large", Boolean(spec.large));
    if (byId("charts").children[place] !== chart.figure) byId("charts").insertBefore(chart.figure, byId("charts").children[place] || null);
    if (chart.labels !== labels) legend(chart);
    chart.labels = labels;
    paint(chart);
  });
  if (specs.length) zoom(view.zoom);
}

function csv(chart) {
  const { lines } = chart.spec;
  const quoted = (text) => `"${String(text).replace(/"/g, '""')}"`;
  const rows = chart.plot.data[0].map((step, place) => [
    step, ...chart.values.flatMap((columns) => columns.map((values) => (known(values[place]) ? values[place] : ""))),
  ]);
  const names = lines.flatMap((line) => [line.label, ...(line.low ? ENDS.map((end) => `${line.label} ${end}`) : [])]);
  return [["step", ...names].map(quoted), ...rows].map((row) => row.join(",")).join("\n") + "\n";
}

// Saves the picture of a chart with its title and legend.
function picture(chart) {
  const plot = chart.plot.ctx.canvas, scale = plot.width / chart.plot.width, line = 18 * scale, edge = 10 * scale;
  const canvas = el("canvas");
  const draw = canvas.getContext("2d");
  const shown = chart.spec.lines.filter((each) => !view.off.has(nameOf(chart, each)));
  canvas.width = plot.width;
  canvas.height = plot.height + line * (shown.length + 2);
  draw.fillStyle = css("--card");
  draw.fillRect(0, 0, canvas.width, canvas.height);
  draw.drawImage(plot, 0, line * 1.5);
  draw.fillStyle = css("--ink");
  draw.font = `600 ${14 * scale}px system-ui, sans-serif`;
  draw.fillText(`${byId("name").textContent}: ${chart.heading.textContent}`, edge, line);
  draw.font = `${12 * scale}px system-ui, sans-serif`;
  shown.forEach((each, number) => {
    const y = plot.height + line * (number + 2.3);
    draw.fillStyle = css(`--c${each.color}`);
    draw.fillRect(edge, y - 9 * scale, 10 * scale, 10 * scale);
    draw.fillStyle = css("--ink");
    draw.fillText(each.label, edge + 16 * scale, y);
  });
  canvas.toBlob((blob) => save(blob, `${chart.spec.title}.png`));
}

document.addEventListener("keydown", (event) => event.key === "Escape" && view.zoom && zoom(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { plot } of charts.values()) plot.redraw(false, true);
});
