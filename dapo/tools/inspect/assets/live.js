// Follows the runs: asks the server of the page for what is new, and for groups and answers.

const EVERY_MS = 2000;
const stamps = runs.map(() => "");

async function ask(what, asked) {
  const answer = await fetch(`${what}?${new URLSearchParams(asked)}`);
  if (answer.status === 204) return null;
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function say(text) {
  if (byId("state").textContent !== text) byId("state").textContent = text;
}

async function follow() {
  const began = performance.now();
  try {
    let changed = false;
    for (const run of document.hidden ? [] : runs) {
      const found = await ask("data", { run: run.index, seen: stamps[run.index] });
      if (!found) continue;
      stamps[run.index] = found.stamp;
      if (found.data) Object.assign(run, found.data);
      changed = true;
    }
    if (changed) update();
    const waiting = runs.filter((run) => !run.charts).map((run) => run.run.name);
    say(waiting.length ? `waiting for the first step of ${waiting.join(", ")}` : "follows the run while it goes on");
  } catch (error) {
    say(`nothing new: ${error.message}; is the command still running?`);
  }
  setTimeout(follow, Math.max(EVERY_MS, 10 * (performance.now() - began)));
}

source.steps = (run) => run.steps;
source.groups = (run, step) => ask("groups", { run: run.index, step });

function hit(run, one, text) {
  const at = one.where.toLowerCase().indexOf(text.toLowerCase());
  const marked = at < 0 ? [one.where] : [one.where.slice(0, at), el("mark", {}, one.where.slice(at, at + text.length)), one.where.slice(at + text.length)];
  const name = (runs.length > 1 ? `${run.run.name}, ` : "") + `step ${one.step}, draw ${one.draw}, sample ${one.sample}`;
  const open = button(name, async () => {
    show(await ask("group", { run: run.index, draw: one.draw }));
    byId("group").scrollIntoView();
    byId("group").focus();
  });
  return el("li", {}, open, ` accuracy ${short(one.accuracy)}, ${one.fate} `, el("span", { class: "quiet" }, ...marked));
}

byId("search").hidden = false;
byId("search").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = byId("text").value;
  if (!text) return byId("hits").replaceChildren();
  const found = await Promise.all(runs.map((run) => ask("search", { run: run.index, text })));
  byId("hits").replaceChildren(...runs.flatMap((run) => found[run.index].map((one) => hit(run, one, text))));
  byId("count").textContent = `${found.flat().length} answers; at most 50 of a run, the newest first`;
});
byId("offline").remove();
addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  say(`no answer: ${event.reason.message}`);
});
follow();
