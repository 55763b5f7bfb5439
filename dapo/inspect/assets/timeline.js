// What every role did within one step, a row each.

const LONG = 1000, THICK = 20;
const COLORS = ["f1", "f2", "f1", "f2", "f3", "f4", "f5", "f6", "f7", "f8", "f0"]; // colors, in the order of data.kinds

function lane({ role, about, parts }, { began, ended }) {
  const x = (seconds) => ((seconds - began) / Math.max(1e-9, ended - began)) * LONG;
  const root = svg("svg", { viewBox: `0 0 ${LONG} ${THICK}`, preserveAspectRatio: "none", role: "img", "aria-label": `${role}: ${about}` });
  for (const [from, to, kind, level] of parts) {
    const high = Math.max(1, level * THICK);
    const bar = svg("rect", { class: COLORS[kind], x: fixed(x(from)), width: fixed(Math.max(1, x(to) - x(from))), y: fixed(THICK - high), height: fixed(high) });
    bar.append(svg("title", {}, `${data.kinds[kind]}: ${short(from)} to ${short(to)} s`));
    root.append(bar);
  }
  if (began < 0) root.append(svg("line", { class: "cursor", x1: x(0), x2: x(0), y1: 0, y2: THICK }));
  return el("div", { class: "lane" }, el("b", {}, role), root, el("span", { class: "quiet" }, about));
}

function axis({ began, ended }) {
  const marks = [0, 1, 2, 3, 4].map((place) => el("span", {}, `${short(began + (place / 4) * (ended - began))} s`));
  return el("div", { class: "lane" }, el("b"), el("div", { class: "marks quiet" }, ...marks));
}

function timelines() {
  const all = data.timelines;
  if (!all.length) {
    byId("lanes").append(el("p", { class: "quiet" }, "none: an older dapo has written this run"));
    return;
  }
  const step = el("select", {}, ...all.map((each, number) => option(number, `step ${each.step}: ${short(each.ended)} s${number ? "" : ", the slowest"}`)));
  const paint = () => {
    const found = all[step.selectedIndex];
    const kinds = [...new Set(found.lanes.flatMap((each) => each.parts.map((part) => part[2])))].filter((kind) => kind > 1).sort((one, other) => one - other);
    const legend = kinds.map((kind) => el("span", {}, el("i", { class: COLORS[kind] }), data.kinds[kind]));
    byId("lanes").replaceChildren(el("div", { class: "card" }, axis(found), ...found.lanes.map((each) => lane(each, found)), el("div", { class: "legend" }, ...legend)));
  };
  step.addEventListener("change", paint);
  byId("times").addEventListener("submit", (event) => event.preventDefault());
  byId("times").append(chooser("step", step), el("p", { class: "quiet" },
    "Seconds since the step began; before 0 lies what was between it and the step before. Engines and reward workers: as high as the number of requests, of the most in this step."));
  paint();
}
