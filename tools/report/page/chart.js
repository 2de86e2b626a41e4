// Curves over steps or time. All charts share the axis, the hidden runs and the place of the crosshair.

const charts = { all: [], axis: "step", hidden: new Set() };

const axes = {
  step: { text: (value) => "step " + grouped(value), tick: grouped, ticks: (low, high, count) =>
    ticks(low, high, count).filter(Number.isInteger) },
  seconds: { text: seconds, tick: seconds, ticks: timeTicks },
};

/** Index of the x nearest to `at`; xs rise. */
function nearest(xs, at) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < at) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - at) <= Math.abs(xs[high] - at) ? low : high;
}

/**
 * A chart of `spec`: { id, title, format, tick, fromZero, wide, isCrowded, marks, curves: [{ run, label, kind, colour, data }] }.
 * `kind` is "line", "raw" (faint, beneath) or "checked" (dashed with dots). A crowded chart tells no raw values.
 */
class Chart {
  constructor(spec) {
    this.spec = spec;
    this.svg = shape("svg", { role: "img", "aria-label": spec.title });
    this.legend = make("div", { class: "legend" });
    this.element = make("div", { class: "card chart" + (spec.wide ? " wide" : ""), id: "chart-" + spec.id },
      make("div", { class: "heading" }, make("h3", {}, spec.title), this.legend), this.svg);
    this.tooltip = new Tooltip(this.element);
    charts.all.push(this);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => charts.all.forEach((chart) => chart.unpoint()));
  }

  start() {
    onWidth(this.svg, (width) => this.draw(width));
  }

  shown() {
    return this.spec.curves.filter((curve) => !charts.hidden.has(curve.run) && curve.data.value.length > 0);
  }

  draw(width) {
    this.width = width || this.width;
    const curves = this.shown();
    const values = curves.flatMap((curve) => curve.data.value);
    const places = curves.flatMap((curve) => [curve.data[charts.axis][0], curve.data[charts.axis].at(-1)]);
    if (values.length === 0) return this.svg.replaceChildren();
    this.box = { top: 8, right: this.width - 10, bottom: (this.spec.wide ? Math.min(330, 170 + this.width / 5) : 172) };
    let low = values.reduce((a, b) => Math.min(a, b));
    let high = values.reduce((a, b) => Math.max(a, b));
    if (this.spec.fromZero) low = Math.min(0, low);
    if (high === low) high = low + (Math.abs(low) || 1) * 0.1;
    if (!this.spec.fromZero) low -= (high - low) * 0.04;
    high += (high - low) * 0.06;
    const yTicks = ticks(low, high, this.spec.wide ? 6 : 4);
    const yText = this.spec.tick ? this.spec.tick(yTicks) : tickText(yTicks);
    this.box.left = 12 + 6.9 * Math.max(...yTicks.map((value) => yText(value).length));
    const last = Math.max(...places);
    const begin = Math.min(...places);
    const first = begin < last * 0.1 ? 0 : begin;
    const across = last - first || 1;
    this.x = (value) => this.box.left + ((value - first) / across) * (this.box.right - this.box.left);
    this.y = (value) => this.box.bottom - ((value - low) / (high - low)) * (this.box.bottom - this.box.top);
    this.fromX = (x) => first + ((x - this.box.left) / (this.box.right - this.box.left)) * across;
    this.svg.setAttribute("height", this.box.bottom + 26);
    this.crosshair = shape("g", {});
    this.svg.replaceChildren(this.grid(yTicks, yText, first, last), this.drawMarks(first, last),
      ...curves.map((curve) => this.curve(curve)), this.crosshair);
  }

  grid(yTicks, yText, first, last) {
    const { left, right, bottom } = this.box;
    const axis = axes[charts.axis];
    const group = shape("g", {});
    for (const value of yTicks) {
      const y = this.y(value);
      group.append(shape("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        shape("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, yText(value)));
    }
    group.append(shape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    for (const value of axis.ticks(first, last, Math.max(2, (right - left) / 110))) {
      const x = this.x(value);
      const anchor = x > right - 24 ? "end" : x < left + 12 ? "start" : "middle";
      group.append(shape("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }),
        shape("text", { x, y: bottom + 19, "text-anchor": anchor }, axis.tick(value)));
    }
    return group;
  }

  /** Resumptions and trouble across the chart, checkpoints as ticks on its axis. */
  drawMarks(first, last) {
    const group = shape("g", { class: "marks" });
    this.marks = (this.spec.marks || []).filter((mark) => !charts.hidden.has(mark.run) &&
      mark[charts.axis] >= first && mark[charts.axis] <= last);
    for (const mark of this.marks) {
      const x = this.x(mark[charts.axis]);
      const colour = mark.kind === "nonfinite" ? "var(--wait)" : mark.colour;
      if (mark.kind === "saved") {
        group.append(shape("line", { class: "tick", x1: x, x2: x, y1: this.box.bottom - 6, y2: this.box.bottom, stroke: colour }));
        continue;
      }
      group.append(shape("line", { class: "mark", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom, stroke: colour }));
      if (this.spec.wide) {
        const atEnd = x > this.box.right - 70;
        group.append(shape("text", { x: x + (atEnd ? -5 : 5), y: this.box.top + 9, "text-anchor": atEnd ? "end" : "start",
          style: { fill: colour } }, mark.kind === "nonfinite" ? "not finite" : mark.kind));
      }
    }
    return group;
  }

  curve({ kind, colour, data }) {
    const xs = data[charts.axis];
    const point = (at) => this.x(xs[at]).toFixed(1) + " " + this.y(data.value[at]).toFixed(1);
    const group = shape("g", {});
    group.append(shape("path", { class: "curve " + kind, stroke: colour, d: "M" + xs.map((_, at) => point(at)).join("L") }));
    if (kind === "checked" || xs.length === 1) {
      const every = Math.ceil(xs.length / 60);
      xs.forEach((x, at) => at % every === 0 && group.append(
        shape("circle", { cx: this.x(x), cy: this.y(data.value[at]), r: 2.6, fill: colour })));
    }
    return group;
  }

  point(event) {
    if (!this.box) return;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const at = this.fromX(Math.min(this.box.right, Math.max(this.box.left, x)));
    for (const chart of charts.all) chart.pointAt(at, chart === this);
  }

  /** The crosshair at the shared place; the values only where the pointer is. */
  pointAt(at, isHere) {
    if (!this.crosshair) return;
    const curves = this.shown();
    const hits = curves.map((curve) => ({ curve, index: nearest(curve.data[charts.axis], at) }));
    const dense = hits.filter(({ curve }) => curve.kind !== "checked");
    if (hits.length === 0) return this.unpoint();
    const lead = (dense[0] || hits[0]);
    const place = lead.curve.data[charts.axis][lead.index];
    const x = this.x(place);
    if (x < this.box.left - 1 || x > this.box.right + 1) return this.unpoint();
    this.crosshair.replaceChildren(shape("line", { class: "crosshair", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom }));
    const rows = [];
    for (const { curve, index } of hits) {
      const own = curve.data[charts.axis][index];
      const isFar = Math.abs(this.x(own) - x) > 40;
      if (isFar) continue;
      this.crosshair.append(shape("circle", { cx: this.x(own), cy: this.y(curve.data.value[index]), r: 3.4, fill: curve.colour,
        stroke: "var(--surface)", "stroke-width": 1.5 }));
      if (this.spec.isCrowded && curve.kind === "raw") continue;
      const where = curve.kind === "checked" && own !== place ? " (" + axes[charts.axis].text(own) + ")" : "";
      rows.push(make("div", { class: "row" }, chip(curve.colour), curve.label + where, make("b", {}, this.spec.format(curve.data.value[index]))));
    }
    if (!isHere) return this.tooltip.hide();
    for (const mark of this.marks.filter((mark) => Math.abs(this.x(mark[charts.axis]) - x) < 5).slice(0, 4)) {
      rows.push(make("div", { class: "text muted" }, `${mark.kind} at step ${grouped(mark.step)}${mark.detail ? ": " + mark.detail : ""}`));
    }
    const [left, top] = offsetIn(this.element, this.svg);
    this.tooltip.show(left + x, top + 10, make("div", { class: "head" }, axes[charts.axis].text(place)), ...rows);
  }

  unpoint() {
    if (this.crosshair) this.crosshair.replaceChildren();
    this.tooltip.hide();
  }
}

const redrawCharts = () => charts.all.forEach((chart) => (chart.unpoint(), chart.draw()));
