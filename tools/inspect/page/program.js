// One program: its memory over its instructions, the instructions, and the kernels that they call.

const program = JSON.parse(document.getElementById("data").textContent);
const own = program.buffers.filter((buffer) => !buffer.is_input);
program.buffers.forEach((buffer, index) => (buffer.index = index));

const kindColours = { temporary: "var(--forward)", gradient: "var(--backward)", result: "var(--data)", written: "var(--optimizer)" };
const kindTexts = { temporary: "temporary", gradient: "becomes a gradient", result: "returned", written: "written to an input" };
const kindColour = (kind) => kindColours[kind] || "var(--other)";
const nameOf = (at) => `instruction ${grouped(at)}`;
const endText = (buffer) => (buffer.last >= program.instructions.length ? "kept" : "last needed by " + nameOf(buffer.last));
const goTo = (at) => {
  const row = document.getElementById("instruction-" + at);
  if (!row) return;
  row.scrollIntoView({ block: "center" });
  row.classList.add("chosen");
  setTimeout(() => row.classList.remove("chosen"), 1500);
};

function drawHeader() {
  document.getElementById("top").replaceChildren(make("div", { class: "brand" }, "Tessera program"), make("h1", {}, program.name),
    make("div", { class: "facts" }, [counted(program.instructions.length, "instruction"), counted(program.inputs, "tensor") + " in",
      counted(program.outputs.length, "tensor") + " out", program.devices.join(", ")].filter(Boolean).map((text) => make("span", {}, text))));
}

function drawSummary() {
  const { instructions, kernels } = program;
  const calls = instructions.filter((each) => each.kernel != null);
  const fused = calls.reduce((sum, each) => sum + each.operators.length, 0);
  const given = new Map();
  for (const buffer of program.buffers.filter((each) => each.is_input)) given.set(buffer.kind, (given.get(buffer.kind) || 0) + buffer.bytes);
  const largest = [...given].sort((a, b) => b[1] - a[1]).slice(0, 2).map(([kind, size]) => `${kind} ${bytes(size)}`);
  const tiles = [
    ["Memory of its own", bytes(program.peak_bytes), instructions.length > 0 ? "at most, at " + nameOf(program.peak) : ""],
    ["Memory it is given", bytes(program.input_bytes), largest.join(", ")],
    ["Instructions", grouped(instructions.length), `${grouped(instructions.length - calls.length)} operators`],
    ["Kernels", grouped(kernels.length), calls.length > 0 ? `${counted(calls.length, "call")} for ${counted(fused, "operator")}` : "none: all are operators of ATen"],
    ["Moved by kernels", bytes(calls.reduce((sum, each) => sum + each.moved, 0)), "read and written, at least"],
    ["Messages", grouped(instructions.filter((each) => each.sends).length), "to other ranks"],
  ];
  show("summary", make("div", { class: "tiles" }, tiles.map(([label, figure, under]) => make("div", { class: "tile" },
    make("div", { class: "label" }, label), make("div", { class: "figure" }, figure), make("div", { class: "under" }, under)))));
}

const areaHeight = 130;
const barHeight = 15;
const shownAtFirst = 40;

/** Bytes held over the instructions and, below, each buffer from the instruction that makes it to the last that needs it. */
class Memory {
  constructor() {
    this.svg = shape("svg", { role: "img", "aria-label": "memory over the instructions" });
    this.element = make("div", { class: "lanes" }, make("div", { class: "window" }, this.svg));
    this.tooltip = new Tooltip(this.element);
    this.choose(false);
    this.svg.addEventListener("mousemove", (event) => this.tell(event));
    this.svg.addEventListener("mouseleave", () => this.tooltip.hide());
    this.svg.addEventListener("click", (event) => goTo(event.target.dataset.buffer != null
      ? program.buffers[event.target.dataset.buffer].first : this.position(event)));
  }

  start() {
    onWidth(this.svg, (width) => this.draw(width));
  }

  choose(all) {
    const largest = own.filter((buffer) => buffer.bytes > 0).sort((a, b) => b.bytes - a.bytes);
    this.rows = (all ? largest : largest.slice(0, shownAtFirst)).sort((a, b) => a.first - b.first || a.last - b.last);
    if (this.width) this.draw();
  }

  x(at) {
    return 1 + (at / Math.max(1, program.instructions.length)) * (this.width - 2);
  }

  y(held) {
    return 20 + (1 - held / Math.max(1, program.peak_bytes)) * (areaHeight - 26);
  }

  position(event) {
    const share = (event.clientX - this.svg.getBoundingClientRect().left - 1) / (this.width - 2);
    return Math.max(0, Math.min(program.instructions.length - 1, Math.floor(share * program.instructions.length)));
  }

  draw(width) {
    this.width = width || this.width;
    const height = areaHeight + 8 + this.rows.length * barHeight;
    this.svg.setAttribute("height", height);
    const line = program.instructions.map((each, at) => `L${this.x(at).toFixed(1)} ${this.y(each.held).toFixed(1)}L${this.x(at + 1).toFixed(1)} ${this.y(each.held).toFixed(1)}`).join("");
    const peak = this.x(program.peak + 0.5);
    const list = ticks(0, program.instructions.length, Math.max(2, this.width / 120)).filter(Number.isInteger);
    this.svg.replaceChildren(
      ...list.map((at) => shape("line", { class: "grid", x1: this.x(at), x2: this.x(at), y1: 18, y2: height })),
      ...list.map((at) => shape("text", { x: this.x(at) + 2, y: 11 }, grouped(at))),
      shape("path", { class: "held", d: `M1 ${areaHeight - 6}${line}L${this.x(program.instructions.length)} ${areaHeight - 6}Z` }),
      shape("line", { class: "peak", x1: peak, x2: peak, y1: 18, y2: height }),
      shape("text", { class: "peak-label", x: peak, y: 32, dx: peak > this.width / 2 ? -5 : 5, "text-anchor": peak > this.width / 2 ? "end" : "start" }, `peak ${bytes(program.peak_bytes)}`),
      ...this.rows.flatMap((buffer, row) => this.drawBar(buffer, areaHeight + 4 + row * barHeight)));
  }

  drawBar(buffer, y) {
    const from = this.x(buffer.first);
    const to = Math.max(from + 2, this.x(Math.min(buffer.last + 1, program.instructions.length)));
    const text = `${buffer.name} ${bytes(buffer.bytes)}`;
    const isRight = to + 8 * text.length < this.width || from < this.width - to;
    const inside = to - from > 7 * text.length;
    return [
      shape("rect", { class: "span", x: from, y, width: to - from, height: barHeight - 3, rx: 2, fill: kindColour(buffer.kind), "data-buffer": buffer.index }),
      shape("text", { class: inside ? "label" : "beside", x: inside ? from + 5 : isRight ? to + 4 : from - 4, y: y + 9.5, "text-anchor": inside || isRight ? "start" : "end" }, text)];
  }

  tell(event) {
    const [left, top] = offsetIn(this.element, this.svg);
    const box = this.svg.getBoundingClientRect();
    const x = event.clientX - box.left + left;
    const y = event.clientY - box.top + top + 12;
    const index = event.target.dataset.buffer;
    if (index != null) {
      const buffer = program.buffers[index];
      return this.tooltip.show(x, y, make("div", { class: "head" }, buffer.name), make("div", {}, `${buffer.type}, ${bytes(buffer.bytes)}`),
        make("div", {}, `${kindTexts[buffer.kind] || buffer.kind}, made by ${nameOf(buffer.first)}, ${endText(buffer)}`));
    }
    if (program.instructions.length === 0) return;
    const at = this.position(event);
    const held = own.filter((buffer) => buffer.first <= at && at <= buffer.last).sort((a, b) => b.bytes - a.bytes);
    this.tooltip.show(x, y, make("div", { class: "head" }, nameOf(at)), make("div", { class: "text" }, shorten(program.instructions[at].text)),
      make("div", { class: "row" }, counted(held.length, "buffer"), make("b", {}, bytes(program.instructions[at].held))),
      held.slice(0, 5).map((buffer) => make("div", { class: "row" }, chip(kindColour(buffer.kind)), buffer.name, make("b", {}, bytes(buffer.bytes)))));
  }
}

const shorten = (text) => (text.length > 160 ? text.slice(0, 157) + "\u2026" : text);

function drawMemory() {
  if (own.length === 0) return;
  const memory = new Memory();
  const rows = own.filter((buffer) => buffer.bytes > 0).length;
  const used = Object.keys(kindColours).filter((kind) => own.some((buffer) => buffer.kind === kind));
  show("memory", make("div", { class: "heading" }, make("h2", {}, "Memory"),
    make("span", { class: "muted small" }, "over the instructions; what operators take for themselves is not known"),
    rows > shownAtFirst && choice([["largest", `Largest ${shownAtFirst}`], ["all", `All ${grouped(rows)}`]], "largest", (value) => memory.choose(value === "all"))),
  make("div", { class: "card" }, make("div", { class: "legend" }, used.map((kind) => make("span", { class: "key" }, chip(kindColours[kind]), kindTexts[kind]))), memory.element));
  memory.start();
}

/** A text that opens to what `fill` makes, once. */
function unfolding(summary, fill) {
  const details = make("details", { ontoggle: () => details.children.length === 1 && details.append(...fill()) }, make("summary", {}, summary));
  return details;
}

function drawInstruction(each, at) {
  const text = make("span", { class: "mono" }, each.text);
  const content = each.kernel == null ? text : unfolding(text, () => [
    make("ol", { class: "operators mono" }, each.operators.map((line) => make("li", {}, line))), colouredCode(program.kernels[each.kernel].source)]);
  const share = program.peak_bytes > 0 ? each.held / program.peak_bytes : 0;
  const row = make("tr", { id: "instruction-" + at, class: (each.kernel != null ? "kernel" : each.sends ? "sends" : "") + (at === program.peak ? " at-peak" : ""),
    onmouseenter: () => mark(at, true), onmouseleave: () => mark(at, false) },
  make("td", { class: "number" }, grouped(at)), make("td", { class: "long" }, content, each.module && make("div", { class: "muted small" }, each.module)),
  make("td", { class: "number" }, each.moved > 0 ? bytes(each.moved) : "\u2013"),
  make("td", { class: "number" }, bytes(each.held), make("div", { class: "bar thin" }, make("span", { style: { width: 100 * share + "%", background: "var(--forward)" } }))));
  return row;
}

const makers = new Map();  // by buffer: instructions that write it
const readers = new Map();

/** Shows who made what an instruction reads, and who reads what it makes. */
function mark(at, on) {
  const each = program.instructions[at];
  const touch = (numbers, name) => {
    for (const number of numbers) document.getElementById("instruction-" + number)?.classList.toggle(name, on);
  };
  for (const buffer of each.reads) touch((makers.get(buffer) || []).filter((number) => number < at).slice(-1), "makes");
  for (const buffer of each.writes) {
    const next = (makers.get(buffer) || []).find((number) => number > at) ?? Infinity;
    touch((readers.get(buffer) || []).filter((number) => number > at && number <= next), "takes");
  }
}

function drawFlow() {
  const note = (map, buffer, at) => (map.has(buffer) ? map.get(buffer).push(at) : map.set(buffer, [at]));
  program.instructions.forEach((each, at) => {
    for (const buffer of each.writes) note(makers, buffer, at);
    for (const buffer of each.reads) note(readers, buffer, at);
  });
  const rows = program.instructions.map(drawInstruction);
  const texts = program.instructions.map((each) => [each.text, each.module, ...each.operators].join("\n").toLowerCase());
  const search = make("input", { type: "search", placeholder: "Find an operator or module", "aria-label": "find an operator or module",
    oninput: () => rows.forEach((row, at) => (row.hidden = !texts[at].includes(search.value.toLowerCase()))) });
  show("flow", make("div", { class: "heading" }, make("h2", {}, "Instructions"),
    make("span", { class: "muted small" }, "a kernel opens to its operators and its source; rows that a row reads from and is read by are marked"), search),
  make("div", { class: "card scroll tall" }, make("table", {},
    make("thead", {}, make("tr", {}, ["", "Instruction", "Moved", "Held"].map((text, at) => make("th", { class: at === 1 ? "" : "number" }, text)))),
    make("tbody", {}, rows, program.outputs.map((line) => make("tr", {}, make("td", {}), make("td", { class: "mono" }, line), make("td", {}), make("td", {})))))));
}

function drawKernels() {
  if (program.kernels.length === 0) return;
  const calls = program.kernels.map((_, index) => program.instructions.map((each, at) => ({ ...each, at })).filter((each) => each.kernel === index));
  const total = (index) => calls[index].reduce((sum, each) => sum + each.moved, 0);
  const order = program.kernels.map((_, index) => index).sort((a, b) => total(b) - total(a));
  show("kernels", make("div", { class: "heading" }, make("h2", {}, "Kernels"), make("span", { class: "muted small" }, "those that move most first")),
    make("div", { class: "card scroll tall" }, make("table", {},
      make("thead", {}, make("tr", {}, ["Kernel", "Device", "Calls", "Operators", "Moved by a call", "In all"].map((text, at) => make("th", { class: at < 2 ? "" : "number" }, text)))),
      make("tbody", {}, order.map((index) => make("tr", {},
        make("td", { class: "name" }, unfolding(program.kernels[index].name, () => [colouredCode(program.kernels[index].source)])),
        make("td", {}, program.kernels[index].device),
        make("td", { class: "number" }, make("button", { type: "button", onclick: () => goTo(calls[index][0].at) }, grouped(calls[index].length))),
        make("td", { class: "number" }, grouped(calls[index][0].operators.length)),
        make("td", { class: "number" }, bytes(calls[index][0].moved)), make("td", { class: "number" }, bytes(total(index)))))))));
}

drawHeader();
drawSummary();
drawMemory();
drawFlow();
drawKernels();
