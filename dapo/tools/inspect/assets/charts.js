// Lines, stacks and heat maps over the steps of the run.

const middles = data.columns.map(([first, last]) => (first + last) / 2);
const ends = [data.columns[0][0], data.columns[data.columns.length - 1][1]];
const around = [ends[0] - 0.5, ends[1] + 0.5]; // for charts whose columns have a width
const fixed = (value) => value.toFixed(1);

// Returns the path of a line through points [x, y]; a gap where y is null; a lone point is a short stroke.
function path(points) {
  let text = "", open = false;
  points.forEach(([x, y], number) => {
    if (y === null) { open = false; return; }
    text += `${open ? "L" : "M"}${fixed(x)} ${fixed(y)}`;
    const next = points[number + 1];
    if (!open && (!next || next[1] === null)) text += `h1.5`;
    open = true;
  });
  return text;
}

function lines({ title, unit, note, top, lines: all }) {
  const at = scales(ends, range(all.flatMap((line) => line.values), top));
  return chart({
    title, unit, note, at,
    legend: all.map((line, number) => [`f${(number % 7) + 1}`, line.label]),
    read: (column) => all.map((line) => short(line.values[column])),
    paint(root) {
      all.forEach((line, number) => {
        const points = line.values.map((value, column) => [at.x(middles[column]), value === null ? null : at.y(value)]);
        root.append(svg("path", { class: `line s${(number % 7) + 1}`, d: path(points) }));
      });
    },
  });
}

// Draws the accuracy of held-out sets with their intervals.
function evaluations(sets) {
  const points = sets.flatMap((set) => set.points);
  const xs = [Math.min(ends[0], ...points.map((point) => point[0])), Math.max(ends[1], ...points.map((point) => point[0]))];
  const at = scales(xs, range(points.flatMap((point) => point.slice(1)), 1));
  const newest = (set, column) => set.points.filter((point) => point[0] <= data.columns[column][1]).pop();
  return chart({
    title: "Held-out accuracy", unit: "share", note: "with 95 % intervals over problems", at,
    legend: sets.map((set, number) => [`f${(number % 7) + 1}`, set.label]),
    read: (column) => sets.map((set) => {
      const point = newest(set, column);
      if (!point) return short(null);
      return short(point[1]) + (point[2] === null ? "" : ` (${short(point[2])} to ${short(point[3])})`) + ` at ${point[0]}`;
    }),
    paint(root) {
      sets.forEach((set, number) => {
        const color = (number % 7) + 1;
        for (const [step, value, low, high] of set.points) {
          if (low !== null && high !== null) root.append(svg("path", { class: `interval s${color}`, d: `M${fixed(at.x(step))} ${fixed(at.y(low))}V${fixed(at.y(high))}` }));
          if (value !== null) root.append(svg("circle", { class: `f${color}`, cx: at.x(step), cy: at.y(value), r: 2.6 }));
        }
        root.append(svg("path", { class: `line s${color}`, d: path(set.points.map(([step, value]) => [at.x(step), value === null ? null : at.y(value)])) }));
      });
    },
  });
}

// Returns a path of one rectangle per column; sides(column): lower and upper value, or null.
function bars(at, sides) {
  return data.columns.map(([first, last], column) => {
    const found = sides(column);
    if (!found || found[0] === found[1]) return "";
    return `M${fixed(at.x(first - 0.5))} ${fixed(at.y(found[0]))}V${fixed(at.y(found[1]))}H${fixed(at.x(last + 0.5))}V${fixed(at.y(found[0]))}Z`;
  }).join("");
}

// Draws parts on top of each other; wall: a line over them.
function stack({ title, unit, note, parts, top, wall, text }) {
  const below = parts.map((_, number) => middles.map((_, column) => parts.slice(0, number).reduce((sum, part) => sum + (part.values[column] || 0), 0)));
  const sums = middles.map((_, column) => parts.reduce((sum, part) => sum + (part.values[column] || 0), 0));
  const at = scales(around, range([0, ...sums, ...(wall || [])], top));
  return chart({
    title, unit, note, at,
    legend: [...parts.map((part, number) => [`f${(number % 7) + 1}`, part.label]), ...(wall ? [["f0", "whole step"]] : [])],
    read: (column) => [...parts.map((part) => text(part.values[column])), ...(wall ? [text(wall[column])] : [])],
    paint(root) {
      parts.forEach((part, number) => {
        const sides = (column) => [below[number][column], below[number][column] + (part.values[column] || 0)];
        root.append(svg("path", { class: `f${(number % 7) + 1}`, d: bars(at, sides) }));
      });
      if (wall) root.append(svg("path", { class: "wall", d: path(wall.map((value, column) => [at.x(middles[column]), value === null ? null : at.y(value)])) }));
    },
  });
}

const LEVELS = 10;

// Draws how dark each cell of a grid is; values: by column and row, 0 to 1, or null.
function heat({ title, unit, note, values, rows, ys, labels, legend, read }) {
  const at = scales(around, ys || [0, rows]);
  const edge = (row) => at.ys[0] + ((at.ys[1] - at.ys[0]) * row) / rows;
  return chart({
    title, unit, note, at, labels, legend, read,
    paint(root) {
      for (let level = 1; level <= LEVELS; level++) {
        let cells = "";
        for (let row = 0; row < rows; row++) {
          cells += bars(at, (column) => {
            const value = values[column][row];
            return value && Math.ceil(value * LEVELS) === level ? [edge(row), edge(row + 1)] : null;
          });
        }
        if (cells) root.append(svg("path", { class: "f1", "fill-opacity": (level / LEVELS).toFixed(2), d: cells }));
      }
    },
  });
}

// Returns the counts of a column as shares, the greatest being 1; faint ones are kept visible.
function shades(counts) {
  return counts.map((column) => {
    const most = Math.max(...column, 1);
    return column.map((count) => Math.sqrt(count / most));
  });
}

// Returns the bin below which so many of a column's responses lie, as an upper bound.
function quantile(counts, part) {
  const all = counts.reduce((sum, count) => sum + count, 0);
  let sum = 0;
  for (let bin = 0; bin < counts.length; bin++) {
    sum += counts[bin];
    if (all && sum >= part * all) return bin + 1;
  }
  return null;
}

function lengths({ width, every, counts }) {
  const upTo = (column, part) => {
    const bin = quantile(counts[column], part);
    return bin === null ? short(null) : "\u2264 " + short(bin * width);
  };
  const all = every > 1 ? `; one draw of ${every}` : "";
  return heat({
    title: "Response lengths", unit: "tokens", note: `how many answers are how long, per step${all}`,
    values: shades(counts), rows: counts[0].length, ys: [0, counts[0].length * width],
    legend: [["", "half"], ["", "nine of ten"]],
    read: (column) => [upTo(column, 0.5), upTo(column, 0.9)],
  });
}

function passRates({ bins, counts }) {
  const part = (column, from, to) => {
    const all = counts[column].reduce((sum, count) => sum + count, 0);
    return share(all ? counts[column].slice(from, to).reduce((sum, count) => sum + count, 0) / all : null);
  };
  return heat({
    title: "Pass rates", unit: "share right", note: "how many groups have which mean accuracy; none and all right apart",
    values: shades(counts), rows: bins + 2,
    labels: [[0.5, "none"], [1 + bins / 4, "0.25"], [1 + bins / 2, "0.5"], [1 + (3 * bins) / 4, "0.75"], [bins + 1.5, "all"]],
    legend: [["", "none right"], ["", "mixed"], ["", "all right"]],
    read: (column) => [part(column, 0, 1), part(column, 1, bins + 1), part(column, bins + 1, bins + 2)],
  });
}
