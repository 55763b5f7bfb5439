// The browser of groups: one at a time, right and wrong answers side by side.

const option = (value, text) => el("option", { value }, text);

// Returns a text with a note where its middle is left out; nothing: it was not kept.
function block(pieces, label) {
  const node = el("pre", { tabindex: 0, role: "region", "aria-label": label });
  if (pieces === null) node.append(el("span", { class: "cut" }, "(not kept: logging.sample_fraction, logging.max_text_bytes)"));
  else {
    const [head, left, tail] = pieces;
    node.append(head);
    if (left) node.append(el("span", { class: "cut" }, `\n[... ${left} characters left out ...]\n`), tail);
  }
  return node;
}

function answer(one) {
  const parts = Object.entries(one.parts).map(([name, value]) => `${name} ${short(value)}`);
  const about = [
    `accuracy ${short(one.accuracy)}`, `reward ${short(one.reward)}`, ...(parts.length > 1 ? [`(${parts.join(", ")})`] : []),
    `${one.tokens} tokens`, one.finish_reason === "length" ? "truncated" : one.finish_reason,
    ...(one.engine >= 0 ? [`engine ${one.engine}`] : []), ...(one.seconds ? [`${short(one.seconds)} s`] : []),
  ];
  const alike = one.samples.length;
  const name = alike > 1 ? `${alike} answers are the same: samples ${one.samples.join(", ")}` : `sample ${one.samples[0]}`;
  const node = el("article", { class: "card" }, el("div", {}, el("strong", {}, name)));
  if (one.prediction) node.append(el("div", {}, "read as ", el("code", {}, one.prediction)));
  if (one.failure) node.append(el("div", {}, "no verdict, or cut off by a limit: ", el("code", {}, one.failure)));
  node.append(el("div", { class: "quiet" }, about.join(" \u00b7 ")), block(one.text, `answer, ${name}`));
  return node;
}

function side({ side: name, all, answers }) {
  const shown = answers.reduce((sum, one) => sum + one.samples.length, 0);
  const title = shown < all ? `${shown} of ${all} ${name}` : `${all} ${name}`;
  const node = el("section", { class: "side" }, el("h3", { class: name }, title));
  node.append(...(answers.length ? answers.map(answer) : [el("p", { class: "quiet" }, "none")]));
  return node;
}

function show(group) {
  const head = el("div", { class: "card" },
    el("div", {}, el("strong", {}, `step ${group.step}, draw ${group.draw}, prompt ${group.prompt}`), ` (${group.source})`),
    el("div", {}, group.why), el("div", { class: "quiet" }, group.kinds.join(", ")),
    block(group.question, "prompt"), el("div", {}, "ground truth: ", el("code", {}, group.truth)));
  const sides = group.sides.filter((each) => each.all || each.side !== "no verdict");
  byId("group").replaceChildren(el("div", { class: "group" }, head, el("div", { class: "sides" }, ...sides.map(side))));
}

// Where groups come from; a page that is served asks for those of any step.
const source = {
  steps: (run) => [...new Set(run.groups.map((group) => group.step))],
  groups: async (run, step) => run.groups.filter((group) => group.step === step),
};

const chooser = { run: null, found: [], steps: el("select"), kind: el("select"), which: el("select") };
const back = button("\u2190 previous", () => turn(chooser.which.selectedIndex - 1));
const next = button("next \u2192", () => turn(chooser.which.selectedIndex + 1));

function turn(place) {
  chooser.which.selectedIndex = place;
  back.disabled = place <= 0;
  next.disabled = place >= chooser.found.length - 1;
  if (chooser.found[place]) show(chooser.found[place]);
  else byId("group").replaceChildren(el("p", { class: "quiet" }, "no group of this kind in this step"));
}

async function choose() {
  const { run, steps: { value } } = chooser;
  const groups = await source.groups(run, Number(value));
  if (run !== chooser.run || value !== chooser.steps.value) return; // another one was chosen meanwhile
  const kinds = [...new Set(groups.flatMap((group) => group.kinds))], kind = chooser.kind.value;
  chooser.kind.replaceChildren(option("", "all kinds"), ...kinds.map((each) => option(each, each)));
  chooser.kind.value = kinds.includes(kind) ? kind : "";
  chooser.found = groups.filter((group) => !chooser.kind.value || group.kinds.includes(chooser.kind.value));
  chooser.which.replaceChildren(...chooser.found.map((group, number) => option(number, `draw ${group.draw}: ${group.kinds.join(", ")}`)));
  turn(chooser.found.length ? 0 : -1);
}

// Offers the steps of a run; what is shown stays, unless it is of another run.
function browse(run) {
  const steps = source.steps(run), fresh = !chooser.run || chooser.run.index !== run.index, chosen = chooser.steps.value;
  chooser.run = run;
  if (chooser.steps.options.length !== steps.length || fresh) {
    chooser.steps.replaceChildren(...steps.map((step) => option(step, String(step))));
    chooser.steps.value = fresh ? steps[steps.length - 1] : chosen;
  }
  if (fresh) choose();
}

for (const node of [chooser.steps, chooser.kind]) node.addEventListener("change", choose);
chooser.which.addEventListener("change", () => turn(chooser.which.selectedIndex));
byId("chooser").addEventListener("submit", (event) => event.preventDefault());
for (const [label, node] of [["step", chooser.steps], ["kind", chooser.kind], ["group", chooser.which]]) {
  byId("chooser").append(el("label", {}, label, node));
}
byId("chooser").append(back, next);
