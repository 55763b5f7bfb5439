// The browser of groups: one at a time, right and wrong answers side by side.

const NOBREAK = "\u00a0";

function option(value, text) {
  return el("option", { value }, text);
}

function chooser(label, node) {
  return el("label", {}, label, node);
}

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
  const parts = Object.entries(one.parts).map(([name, value]) => `${name}${NOBREAK}${short(value)}`);
  const about = [
    `accuracy ${short(one.accuracy)}`, `reward ${short(one.reward)}`, ...(parts.length > 1 ? [`(${parts.join(", ")})`] : []),
    `${one.tokens} tokens`, one.finish_reason === "length" ? "truncated" : one.finish_reason,
    ...(one.engine >= 0 ? [`engine ${one.engine}`] : []), ...(one.seconds ? [`${short(one.seconds)} s`] : []),
  ];
  const node = el("article", { class: "card" }, el("div", {}, el("strong", {}, `sample ${one.sample}`)));
  if (one.prediction) node.append(el("div", {}, "read as ", el("code", {}, one.prediction)));
  if (one.failure) node.append(el("div", {}, "no verdict, or cut off by a limit: ", el("code", {}, one.failure)));
  node.append(el("div", { class: "quiet" }, about.join(" \u00b7 ")), block(one.text, `answer, sample ${one.sample}`));
  return node;
}

function side({ side: name, all, answers }) {
  const shown = answers.length < all ? `${answers.length} of ${all} ${name}` : `${all} ${name}`;
  const node = el("section", { class: "side" }, el("h3", { class: name === "right" ? "right" : "wrong" }, shown));
  node.append(...(answers.length ? answers.map(answer) : [el("p", { class: "quiet" }, "none")]));
  return node;
}

function show(group) {
  const head = el("div", { class: "card" },
    el("div", {}, el("strong", {}, `step ${group.step}, draw ${group.draw}, prompt ${group.prompt}`), ` (${group.source})`),
    el("div", {}, group.why), el("div", { class: "quiet" }, group.kinds.join(", ")),
    block(group.question, "prompt"), el("div", {}, "ground truth: ", el("code", {}, group.truth)));
  const sides = group.sides.filter((each) => each.all || each.side !== "no verdict");
  return el("div", { class: "group" }, head, el("div", { class: "sides" }, ...sides.map(side)));
}

// Says which groups these are.
function coverage(steps) {
  const of = steps.length < data.run.steps ? `${steps.length} of ${data.run.steps} steps, and of each ` : "Of each step ";
  return of + "the groups and answers that a person would look for. All are in the store: python -m dapo.inspect RUN step N.";
}

// Fills the chooser: a step or all, a kind or all, and the groups that are left one after the other.
function browse() {
  const groups = data.groups;
  if (!groups.length) {
    byId("group").append(el("p", { class: "quiet" }, "no group is in the store"));
    return;
  }
  const kinds = [...new Set(groups.flatMap((group) => group.kinds))];
  const steps = [...new Set(groups.map((group) => group.step))];
  const step = el("select", {}, option("", "all shown"), ...steps.map((each) => option(each, String(each))));
  const kind = el("select", {}, option("", "all kinds"), ...kinds.map((each) => option(each, each)));
  const which = el("select");
  const back = el("button", { type: "button" }, "\u2190 previous");
  const next = el("button", { type: "button" }, "next \u2192");
  let left = [];
  const turn = () => {
    back.disabled = which.selectedIndex <= 0;
    next.disabled = which.selectedIndex >= left.length - 1;
    const found = left[which.selectedIndex];
    byId("group").replaceChildren(found ? show(found) : el("p", { class: "quiet" }, "no group of this kind in this step"));
  };
  const choose = () => {
    left = groups.filter((group) => (!step.value || group.step === Number(step.value)) && (!kind.value || group.kinds.includes(kind.value)));
    which.replaceChildren(...left.map((group, number) => option(number, `step ${group.step}, draw ${group.draw}: ${group.kinds.join(", ")}`)));
    turn();
  };
  const move = (by) => () => {
    which.selectedIndex += by;
    turn();
  };
  back.addEventListener("click", move(-1));
  next.addEventListener("click", move(1));
  which.addEventListener("change", turn);
  for (const each of [step, kind]) each.addEventListener("change", choose);
  byId("chooser").addEventListener("submit", (event) => event.preventDefault());
  byId("groups").insertBefore(el("p", { class: "quiet" }, coverage(steps)), byId("chooser"));
  byId("chooser").append(chooser("step", step), chooser("kind", kind), chooser("group", which), back, next);
  step.value = String(steps[steps.length - 1]);
  choose();
}
