// Puts the parts of the page together.

const runs = JSON.parse(byId("data").textContent).map((run, index) => ({ ...run, index }));
const hidden = new Set(); // runs whose lines are not drawn
let chosen = 0; // the run of all that is about one

function about({ run, verdict, findings }) {
  const state = run.ended === null ? `no end noted; the newest step ended ${time(run.at)}` : `ended ${time(run.ended)}`;
  byId("about").textContent = [run.model, run.host, state].filter(Boolean).join(" \u00b7 ");
  byId("figures").replaceChildren(...run.figures.map(([name, value, remark]) => el("div", {}, el("dt", {}, name), el("dd", {}, value), el("dd", {}, remark))));
  byId("verdict").className = verdict[0];
  byId("verdict").textContent = verdict[1][0].toUpperCase() + verdict[1].slice(1) + ".";
  byId("findings").replaceChildren(...findings.map(([severity, rule, what, changes]) => el("li", { class: severity },
    el("h3", {}, `${severity}: ${rule}`), words(el("div"), what), el("ul", {}, ...changes.map((change) => words(el("li"), change))))));
}

function tables({ events, config }) {
  byId("happened").replaceChildren(head("when", "after step", "what", "message"),
    ...events.map(([step, at, kind, message]) => el("tr", {}, ...[time(at), String(step), kind, message].map((text) => el("td", {}, text)))));
  byId("keys").replaceChildren(head("key", "value"),
    ...config.map((pair) => el("tr", {}, ...pair.map((text) => el("td", {}, el("code", {}, text))))));
}

// Returns the charts of the runs: lines of all of them over each other, stacks of the chosen one.
function specs(ready) {
  const several = runs.length > 1, found = new Map();
  for (const run of ready) {
    const middles = run.columns.map(([first, last]) => (first + last) / 2);
    for (const chart of run.charts) {
      if (chart.stacked ? run.index !== chosen : hidden.has(run.index)) continue;
      const one = found.get(chart.title) || { ...chart, lines: [] };
      found.set(chart.title, one);
      chart.lines.forEach((line, number) => {
        const byRun = several && !chart.stacked;
        const label = byRun ? (chart.lines.length > 1 ? `${run.run.name}: ${line.label}` : run.run.name) : line.label;
        const color = line.over ? 0 : ((byRun ? run.index : number) % 8) + 1;
        one.lines.push({ x: middles, ...line, label, run: run.index, color, dash: byRun ? number : 0 });
      });
    }
  }
  const titles = [...new Set(ready.flatMap((run) => run.charts.map((chart) => chart.title)))];
  const drawn = titles.filter((title) => found.has(title)).map((title) => found.get(title));
  const flat = drawn.filter((chart) => chart.lines.every((line) => line.values.every((value) => !value)));
  byId("flat").textContent = flat.length ? `At 0 all the time: ${flat.map((chart) => chart.title).join(", ")}.` : "";
  return drawn.filter((chart) => !flat.includes(chart));
}

// Draws whatever has data. What the reader has chosen, opened or scrolled to stays.
function update() {
  const ready = runs.filter((run) => run.charts), names = runs.map((run) => run.run.name);
  document.title = `${names.join(", ")}: ${names.length > 1 ? "dapo runs" : "a dapo run"}`;
  byId("name").textContent = names.join(", ");
  byId("several").hidden = runs.length < 2;
  if (!runs[chosen].charts && ready.length) detail.value = chosen = ready[0].index;
  drawCharts(specs(ready));
  const run = runs[chosen];
  document.querySelector("main").hidden = !run.charts;
  if (!run.charts) return;
  about(run);
  tables(run);
  browse(run);
}

const detail = el("select", {}, ...runs.map((run) => option(run.index, run.run.name)));

function several() {
  detail.addEventListener("change", () => {
    chosen = Number(detail.value);
    update();
  });
  byId("several").append(el("label", {}, "figures, findings, stacks and groups of ", detail), ...runs.map((run) => {
    const toggle = button("", () => {
      hidden[hidden.has(run.index) ? "delete" : "add"](run.index);
      toggle.setAttribute("aria-pressed", !hidden.has(run.index));
      update();
    }, { "aria-pressed": "true" });
    toggle.append(el("i", { class: `f${(run.index % 8) + 1}` }), run.run.name);
    return toggle;
  }));
}

const smooth = el("select", {}, option(0, "none"), option(0.6, "some"), option(0.9, "much"));
smooth.addEventListener("change", () => {
  view.smooth = Number(smooth.value);
  for (const chart of charts.values()) paint(chart);
  settle();
});
byId("tools").append(el("label", {}, "smoothing ", smooth), button("Zoom in", () => zoomBy(0.5)), button("Zoom out", () => zoomBy(2)),
  button("Whole run", () => zoom(null), { id: "whole", disabled: "" }));
several();
if (runs.every((run) => run.charts)) update();
