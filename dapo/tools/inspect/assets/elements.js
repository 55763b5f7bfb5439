"use strict";
// Elements, numbers and downloads. Whatever comes from a run goes in as text: append() of a string makes a text node.

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function button(text, act, attributes = {}) {
  const node = el("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", act);
  return node;
}

const byId = (id) => document.getElementById(id);
const known = (value) => value !== null && value !== undefined;
const time = (seconds) => new Date(1000 * seconds).toLocaleString();
const head = (...names) => el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)));

// Returns a number in few characters; nothing: a dash.
function short(value) {
  if (!known(value) || Number.isNaN(value)) return "\u2013";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= (unit === 1e3 ? 1e4 : unit)) return Number((value / unit).toPrecision(3)) + letter;
  }
  if (size >= 1000) return value.toFixed(0);
  const rounded = Number(value.toPrecision(3));
  return size && size < 1e-4 ? rounded.toExponential() : String(rounded);
}

// Appends a text in which `names` stand in backticks.
function words(node, text) {
  text.split("`").forEach((part, number) => node.append(number % 2 ? el("code", {}, part) : part));
  return node;
}

function save(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.]+/g, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
