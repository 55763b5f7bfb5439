// Puts the parts of the page together.

const time = (seconds) => new Date(1000 * seconds).toLocaleString();

function about() {
  const run = data.run;
  document.title = `${run.name}: a dapo run`;
  byId("name").textContent = run.name;
  const state = run.ended === null ? `no end noted; the newest step ended ${time(run.at)}` : `ended ${time(run.ended)}`;
  byId("about").textContent = [run.model, run.host, state].filter(Boolean).join(" \u00b7 ");
  for (const [name, value, remark] of run.figures) {
    byId("figures").append(el("div", {}, el("dt", {}, name), el("dd", {}, value), el("dd", {}, remark)));
  }
}

function look() {
  const list = byId("findings");
  for (const found of data.findings) {
    const item = el("li", {}, el("h3", {}, found.rule), words(el("div"), found.what));
    item.append(el("ul", {}, ...found.changes.map((change) => words(el("li"), change))));
    list.append(item);
  }
  if (!data.findings.length) list.append(el("li", { class: "well" }, "Nothing that a rule knows. Rules need ten steps."));
}

function draw() {
  const wide = data.columns.some(([first, last]) => first !== last);
  byId("columns").textContent = (wide ? "Each point is the mean of several steps. " : "") +
    "Point at a step, or use the arrow keys in a chart: all charts show its values.";
  const flat = data.curves.filter((curve) => curve.lines.every((line) => line.values.every((value) => !value)));
  const [first, ...rest] = data.curves.filter((curve) => !flat.includes(curve)).map(lines);
  if (flat.length) byId("columns").append(" At 0 all the time: " + flat.map((curve) => curve.title).join(", ") + ".");
  const seconds = stack({
    title: "Where the seconds went", unit: "s", parts: data.seconds, wall: data.wall, text: short,
    note: "phases overlap (answers are scored while others are generated), so that together they may exceed the step",
  });
  const fates = stack({
    title: "What became of the groups", unit: "share", parts: data.fates, top: 1, text: share,
    note: "only groups of mixed accuracy teach something",
  });
  byId("charts").append(...(first ? [first] : []), ...(data.evaluations.length ? [evaluations(data.evaluations)] : []), fates,
    passRates(data.pass_rates), lengths(data.lengths), seconds, ...rest);
  cursor.go(cursor.at);
}

function tables() {
  const head = (...names) => el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)));
  byId("happened").append(head("when", "after step", "what", ""));
  for (const [step, at, kind, message] of data.events) {
    byId("happened").append(el("tr", {}, el("td", {}, time(at)), el("td", {}, String(step)), el("td", {}, kind), el("td", {}, message)));
  }
  byId("keys").append(head("key", "value"));
  for (const [key, value] of data.config) {
    byId("keys").append(el("tr", {}, el("td", {}, el("code", {}, key)), el("td", {}, el("code", {}, value))));
  }
}

about();
browse();
look();
draw();
tables();
