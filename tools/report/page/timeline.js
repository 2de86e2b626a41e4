// One step across the ranks: a lane per rank, waits hatched, an arrow to the rank that was waited for.

const categories = ["data", "forward", "backward", "optimizer", "communication", "wait", "kernel", "other"];
const categoryColour = (category) => `var(--${category})`;
const categoryChip = (category) => chip(categoryColour(category), category === "wait" ? "hatched" : "");

const rowHeight = 21;
const laneGap = 12;

const peerText = (peers) => (peers.length === 0 ? "" : (peers.length === 1 ? "rank " : "ranks ") + peers.join(", "));

/** The spans as objects; the page holds them as a list per field, texts by their number. */
function unpackSpans({ spans, texts }) {
  return spans.rank.map((rank, at) => ({
    rank, thread: spans.thread[at], depth: spans.depth[at], start: spans.start[at], duration: spans.duration[at], peers: spans.peers[at] || [],
    category: texts[spans.category[at]], name: texts[spans.name[at]], detail: texts[spans.detail[at]],
  }));
}

/** Rows of each rank: its threads one below the other, each as deep as its spans nest. */
function layLanes(timeline) {
  const lanes = new Map();
  for (const span of timeline.spans) {
    if (!lanes.has(span.rank)) lanes.set(span.rank, { rank: span.rank, threads: new Map() });
    const threads = lanes.get(span.rank).threads;
    threads.set(span.thread, Math.max(threads.get(span.thread) || 0, span.depth + 1));
  }
  let y = 26;
  for (const lane of lanes.values()) {
    lane.y = y;
    lane.firstRow = new Map();
    let rows = 0;
    for (const [thread, depth] of lane.threads) {
      lane.firstRow.set(thread, rows);
      rows += depth;
    }
    lane.height = rows * rowHeight;
    y += lane.height + laneGap;
  }
  return { lanes, height: y };
}

class Lanes {
  constructor(timeline) {
    this.timeline = timeline;
    this.view = [0, timeline.duration || 1];
    Object.assign(this, layLanes(timeline));
    this.svg = shape("svg", { role: "img", "aria-label": "timeline of one step across ranks", height: this.height });
    this.reset = make("button", { type: "button", hidden: true, onclick: () => this.zoom(0, timeline.duration || 1) }, "Whole step");
    this.element = make("div", { class: "lanes" }, make("div", { class: "window" }, this.svg));
    this.tooltip = new Tooltip(this.element);
    this.listen();
  }

  start() {
    onWidth(this.svg, (width) => this.draw(width));
  }

  x(time) {
    return this.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (this.width - this.left - 8);
  }

  time(x) {
    return this.view[0] + ((x - this.left) / (this.width - this.left - 8)) * (this.view[1] - this.view[0]);
  }

  /** Of a span, or of the span a wait is in; one that was too short to be kept has its lane's first. */
  rowOf({ rank, thread, depth }) {
    const lane = this.lanes.get(rank);
    return lane.y + Math.min(lane.height - rowHeight, ((lane.firstRow.get(thread) || 0) + depth) * rowHeight);
  }

  zoom(from, to) {
    const least = Math.max(this.timeline.duration * 1e-5, 0.01);
    this.view = [Math.max(0, from), Math.min(this.timeline.duration || 1, Math.max(to, from + least))];
    this.reset.hidden = this.view[0] === 0 && this.view[1] >= this.timeline.duration;
    this.draw();
  }

  draw(width) {
    this.width = width || this.width;
    this.left = this.width < 560 ? 30 : 64;
    const pattern = shape("pattern", { id: "hatching", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      shape("rect", { width: 5, height: 5, fill: "var(--surface)" }), shape("line", { x1: 0, x2: 0, y1: 0, y2: 5, stroke: "var(--wait)", "stroke-width": 1.6 }));
    const clip = shape("clipPath", { id: "inside" }, shape("rect", { x: this.left, y: 0, width: Math.max(0, this.width - this.left), height: this.height }));
    this.selection = shape("rect", { class: "selection", y: 20, height: this.height - 20, width: 0 });
    this.svg.replaceChildren(shape("defs", {}, pattern, clip), this.drawAxis(),
      shape("g", { "clip-path": "url(#inside)" }, this.drawSpans(), this.drawWaits(), this.selection));
  }

  drawAxis() {
    const group = shape("g", {});
    const [from, to] = this.view;
    const unit = to - from >= 2e6 ? [1e6, " s"] : to - from >= 2000 ? [1e3, " ms"] : [1, " \u00b5s"];
    const list = ticks(from / unit[0], to / unit[0], Math.max(2, (this.width - this.left) / 120));
    const text = tickText(list);
    for (const value of list) {
      const x = this.x(value * unit[0]);
      group.append(shape("line", { class: "grid", x1: x, x2: x, y1: 18, y2: this.height - laneGap }),
        shape("text", { x, y: 11, "text-anchor": x > this.width - 30 ? "end" : x < this.left + 8 ? "start" : "middle" }, text(value) + unit[1]));
    }
    for (const lane of this.lanes.values()) {
      group.append(shape("text", { class: "rank", x: 0, y: lane.y + 15 }, (this.left < 60 ? "" : "rank ") + lane.rank));
    }
    return group;
  }

  drawSpans() {
    const group = shape("g", {});
    const lastEnd = new Map();  // by row and category: spans too narrow to be seen one by one are drawn once
    this.timeline.spans.forEach((span, index) => {
      if (span.start > this.view[1] || span.start + span.duration < this.view[0]) return;
      const from = Math.max(this.x(span.start), this.left - 4);
      const to = Math.min(this.x(span.start + span.duration), this.width + 4);
      const y = this.rowOf(span);
      const key = y + span.category;
      if (to - from < 0.7 && from - (lastEnd.get(key) ?? -9) < 0.7) return;
      lastEnd.set(key, Math.max(to, from + 0.7));
      const isWait = span.category === "wait";
      group.append(shape("rect", { class: isWait ? "span waits" : to - from < 2 ? "span narrow" : "span", x: from, y, width: Math.max(0.7, to - from), height: rowHeight - 2, rx: to - from > 6 ? 2.5 : 0,
        fill: isWait ? "url(#hatching)" : categoryColour(span.category), "data-span": index }));
      const name = isWait || to - from < 24 ? "" : fitText(span.name, to - from - 9);
      if (name) group.append(shape("text", { class: "label", x: from + 5, y: y + 13.5 }, name));
    });
    return group;
  }

  drawWaits() {
    const group = shape("g", {});
    const least = (this.view[1] - this.view[0]) * 0.008;
    this.timeline.waits.forEach((wait, index) => {
      if (!this.lanes.has(wait.rank)) return;
      const end = wait.start + wait.duration;
      if (end < this.view[0] || wait.start > this.view[1]) return;
      const from = Math.max(this.x(wait.start), this.left - 4);
      const to = Math.min(this.x(end), this.width + 4);
      const y = this.rowOf(wait);
      if (wait.inferred) {
        group.append(shape("rect", { class: "span waits", x: from, y, width: Math.max(0.7, to - from), height: rowHeight - 2, rx: 2.5,
          fill: "url(#hatching)", "data-wait": index }));
      }
      const name = wait.peer >= 0 && ["waits for rank ", "for rank ", "for ", ""].map((text) => fitText(text + wait.peer, to - from - 6, true)).find(Boolean);
      if (name) group.append(shape("text", { class: "wait-label", x: (from + to) / 2, y: y + 13.5, "text-anchor": "middle" }, name));
      if (wait.duration >= least && end <= this.view[1]) this.drawArrow(group, this.x(end), y, wait);
    });
    return group;
  }

  /** From the rank that came last, at the moment it came, to the one that could go on. */
  drawArrow(group, x, y, wait) {
    const peer = this.lanes.get(wait.peer);
    if (!peer || wait.peer === wait.rank) return;
    const isBelow = peer.y > y;
    const from = isBelow ? peer.y : peer.y + peer.height - 2;
    const to = isBelow ? y + rowHeight - 2 : y;
    const tip = isBelow ? 6 : -6;
    group.append(shape("path", { class: "arrow", d: `M${x} ${from}L${x} ${to + tip}` }),
      shape("circle", { class: "head", cx: x, cy: from, r: 2.4 }),
      shape("path", { class: "head", d: `M${x} ${to}l-3.6 ${tip * 1.2}l7.2 0z` }));
  }

  listen() {
    let begin = null;
    const at = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener("pointerdown", (event) => event.pointerType === "mouse" && (begin = at(event)));
    this.svg.addEventListener("pointermove", (event) => {
      if (begin === null || event.buttons === 0) return (begin = null), this.point(event);
      const [from, to] = [begin, at(event)].sort((a, b) => a - b);
      this.selection.setAttribute("x", from);
      this.selection.setAttribute("width", to - from);
      this.tooltip.hide();
    });
    this.svg.addEventListener("pointerup", (event) => {
      const [from, to] = [begin ?? 0, at(event)].sort((a, b) => a - b);
      const isDrag = begin !== null && to - from > 5;
      begin = null;
      if (isDrag) this.zoom(this.time(from), this.time(to));
      else this.point(event);
    });
    this.svg.addEventListener("dblclick", () => this.zoom(0, this.timeline.duration || 1));
    this.svg.addEventListener("pointerleave", () => this.tooltip.hide());
  }

  point(event) {
    const { span: spanIndex, wait: waitIndex } = event.target.dataset || {};
    if (spanIndex === undefined && waitIndex === undefined) return this.tooltip.hide();
    const rows = waitIndex === undefined ? describeSpan(this.timeline.spans[spanIndex]) : describeWait(this.timeline.waits[waitIndex]);
    const box = this.element.getBoundingClientRect();
    const target = event.target.getBoundingClientRect();
    this.tooltip.show(event.clientX - box.left, target.bottom - box.top + 6, ...rows);
  }
}

const ruler = document.createElement("canvas").getContext("2d");
const labelFont = "11px " + getComputedStyle(document.body).fontFamily;

/** As much of a text as fits; none if that says nothing. */
function fitText(text, width, isWhole) {
  ruler.font = (isWhole ? "600 " : "") + labelFont;
  const size = ruler.measureText(text).width;
  if (size <= width) return text;
  const room = Math.floor((text.length * width) / size) - 2;
  return isWhole || room < 3 ? "" : text.slice(0, room) + "\u2026";
}

function describeSpan(span) {
  const isWait = span.category === "wait";
  return [
    make("div", { class: "row" }, categoryChip(span.category), make("span", { class: "text" }, span.name || span.category), make("b", {}, micros(span.duration))),
    make("div", { class: "head" }, `rank ${span.rank}, ${span.category}, from ${micros(span.start)}`),
    span.peers.length > 0 && make("div", { class: "text" }, (isWait ? "waits for " : "with ") + peerText(span.peers)),
    span.detail && make("div", { class: "text muted" }, span.detail),
  ].filter(Boolean);
}

function describeWait(wait) {
  return [
    make("div", { class: "row" }, categoryChip("wait"), make("span", { class: "text" }, `rank ${wait.rank} waits for rank ${wait.peer}`), make("b", {}, micros(wait.duration))),
    make("div", { class: "head" }, `in ${wait.name}; rank ${wait.peer} came last`),
  ];
}

/** Bars: what each rank's time went into. */
function shareBars(timeline) {
  const grid = make("div", { class: "shares" });
  for (const share of timeline.shares) {
    const bar = make("div", { class: "bar" });
    for (const category of categories) {
      const part = share[category] / (timeline.duration || 1);
      if (part < 0.002) continue;
      bar.append(make("span", { class: category === "wait" ? "hatched" : "", title: `${category}: ${micros(share[category])}, ${percent(part)}`,
        style: { width: 100 * part + "%", background: category === "wait" ? "" : categoryColour(category) } }, part > 0.07 ? percent(part) : ""));
    }
    grid.append(make("span", {}, "rank " + share.rank), bar);
  }
  return grid;
}

/** Who waited how long for whom. */
function waitTable(timeline) {
  const pairs = new Map();
  for (const wait of timeline.waits) {
    const key = wait.rank + " " + wait.peer;
    const pair = pairs.get(key) || { rank: wait.rank, peer: wait.peer, times: 0, total: 0, longest: wait };
    pair.times += 1;
    pair.total += wait.duration;
    if (wait.duration > pair.longest.duration) pair.longest = wait;
    pairs.set(key, pair);
  }
  if (pairs.size === 0) return make("p", { class: "muted small" }, "No rank waited for another in this step.");
  const sorted = [...pairs.values()].sort((a, b) => b.total - a.total).slice(0, 24);
  const head = ["who", "for whom", "in all", "longest"];
  return make("div", { class: "scroll" }, make("table", { id: "waits" },
    make("thead", {}, make("tr", {}, head.map((text, at) => make("th", { class: at === 2 ? "number" : "" }, text)))),
    make("tbody", {}, sorted.map((pair) => make("tr", {}, make("td", { class: "short" }, "rank " + pair.rank),
      make("td", { class: "short" }, pair.peer < 0 ? "not told" : "rank " + pair.peer),
      make("td", { class: "number" }, micros(pair.total)),
      make("td", { class: "long" }, micros(pair.longest.duration), make("span", { class: "muted" }, " in " + pair.longest.name)))))));
}

function drawTimeline(packed) {
  const timeline = { ...packed, spans: unpackSpans(packed) };
  const lanes = new Lanes(timeline);
  const used = categories.filter((category) => timeline.spans.some((span) => span.category === category) ||
    (category === "wait" && timeline.waits.length > 0));
  const legend = make("div", { class: "legend" }, used.map((category) => make("span", { class: "key" }, categoryChip(category), category)));
  const isInferred = timeline.waits.some((wait) => wait.inferred);
  const box = make("div", {},
    make("div", { class: "card" }, make("div", { class: "heading" }, legend,
      make("span", { class: "muted small" }, lanes.reset, " drag to zoom, double-click for the whole")), lanes.element),
    make("div", { class: "pair" },
      make("div", { class: "card" }, make("h3", {}, "Where the time went"), make("div", { class: "scroll" }, shareBars(timeline))),
      make("div", { class: "card" }, make("h3", {}, "Who waited for whom"), waitTable(timeline),
        isInferred && make("p", { class: "muted small" }, "Found from when each rank came to a collective: nobody can go on before the last one."))));
  return { box, start: () => lanes.start() };
}
