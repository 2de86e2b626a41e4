// Elements, ticks and the tooltip that all drawings share. Texts from files only ever become text nodes.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const shape = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const show = (id, ...children) => {
  const section = document.getElementById(id);
  section.hidden = false;
  section.replaceChildren(...children);
};

const runColour = (index) => `var(--run-${index % 8})`;
const chip = (colour, extra) => make("span", { class: "chip " + (extra || ""), style: extra ? {} : { background: colour } });

/** About `count` round numbers from `low` to `high`. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const list = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; ++at) list.push(at * step + 0);  // + 0: no -0
  return list;
}

/** As ticks, for seconds: minutes and hours are not tens. */
function timeTicks(low, high, count) {
  const sizes = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const rough = (high - low) / Math.max(1, count);
  const step = sizes.find((size) => size >= rough);
  if (rough < 30 || !step) return ticks(low, high, count);
  const list = [];
  for (let at = Math.ceil(low / step); at * step <= high; ++at) list.push(at * step + 0);
  return list;
}

/** One size of digits for all ticks of an axis: 0.5, 1.0, 1.5. */
function tickText(list) {
  const step = list.length > 1 ? list[1] - list[0] : 1;
  const exact = (digits) => list.every((value) => Math.abs(value - Number(value.toFixed(digits))) < step * 1e-6);
  const digits = [0, 1, 2, 3, 4, 5].find(exact);
  if (digits === undefined) return (value) => (value === 0 ? "0" : value.toExponential(1));
  return (value) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Where a drawing lies inside the element that holds its tooltip. */
function offsetIn(parent, child) {
  const outer = parent.getBoundingClientRect();
  const inner = child.getBoundingClientRect();
  return [inner.left - outer.left - parent.clientLeft, inner.top - outer.top - parent.clientTop];
}

/** The tooltip of one drawing, beside a point of it and never outside the drawing's width. */
class Tooltip {
  constructor(parent) {
    this.box = parent.appendChild(make("div", { class: "tooltip", hidden: true, role: "status" }));
  }
  show(x, y, ...children) {
    this.box.replaceChildren(...children);
    this.box.hidden = false;
    const room = this.box.parentElement.clientWidth;
    const width = this.box.offsetWidth;
    const right = x + 14 + width <= room ? x + 14 : x - 14 - width;
    this.box.style.left = Math.max(Math.min(0, room - width), right) + "px";
    this.box.style.top = y + "px";
  }
  hide() {
    this.box.hidden = true;
  }
}

/** Calls `draw(width)` at once and whenever the element's width changes. */
function onWidth(element, draw) {
  let drawn = 0;
  const check = () => {
    const width = element.clientWidth;
    if (width > 0 && width !== drawn) draw((drawn = width));
  };
  new ResizeObserver(check).observe(element);
  check();
}

/** Buttons of which one is pressed. */
function choice(entries, chosen, choose) {
  const box = make("div", { class: "switch", role: "group" });
  const press = (value) => {
    for (const button of box.children) button.setAttribute("aria-pressed", button.dataset.value === String(value));
  };
  for (const [value, text] of entries) {
    box.append(make("button", { type: "button", "data-value": value, onclick: () => (press(value), choose(value)) }, text));
  }
  press(chosen);
  return box;
}

/** Chooses among several runs what a section shows; with one run, no choice. */
function runChoice(runs, draw) {
  draw(runs[0]);
  if (runs.length === 1) return null;
  const select = make("select", { "aria-label": "run", onchange: () => draw(runs[select.selectedIndex]) },
    runs.map((run) => make("option", {}, run.name)));
  return select;
}
