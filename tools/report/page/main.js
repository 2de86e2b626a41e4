// Puts the page together from the data that `tessera report` embedded.

const report = JSON.parse(document.getElementById("data").textContent);
report.runs.forEach((run, index) => (run.index = index));

// The charts beside the loss: metric, title, how its values are written, ticks, whether its axis begins at 0.
const measures = [
  ["val_nats_per_byte", "Nats per byte of unseen text", plain, null, false],
  ["tokens_per_s", "Tokens per second", compact, compactTicks, true],
  ["mfu", "Model FLOPs utilization", percent, percentTicks, true],
  ["host_lead_seconds", "Work that the GPU still has when a step is issued", seconds, null, true],
  ["memory_bytes", "Memory", bytes, () => (value) => rounded(bytes(value)), true],
  ["comm_share", "Share of time in communication", percent, percentTicks, true],
  ["grad_norm", "Gradient norm", plain, null, true],
  ["lr", "Learning rate", plain, null, true],
];

function compactTicks(list) {
  return list.at(-1) < 10000 ? grouped : (value) => rounded(scaled(value, 1000, ["", "k", "M", "G", "T"]));
}

function percentTicks(list) {
  const text = tickText(list.map((value) => 100 * value));
  return (value) => text(100 * value) + "%";
}

const swatch = (kind, colour) => shape("svg", { viewBox: "0 0 22 10" },
  shape("path", { class: "curve " + kind, stroke: colour, d: "M1 5L21 5" }),
  kind === "checked" ? shape("circle", { cx: 11, cy: 5, r: 2.6, fill: colour }) : null);

const lossKinds = [["loss", "raw", "training"], ["smoothed_loss", "line", "training, smoothed"], ["val_loss", "checked", "validation"]];

function lossChart(runs) {
  const isAlone = runs.length === 1;
  const marks = runs.flatMap((run) => run.marks.map((mark) => ({ ...mark, run: run.index, colour: isAlone ? "var(--muted)" : runColour(run.index) })));
  const curves = [];
  for (const [metric, kind, text] of lossKinds) {
    for (const run of runs.filter((run) => run.curves[metric])) {
      const isOnlyTrain = metric === "loss" && !run.curves.smoothed_loss;
      curves.push({ run: run.index, kind: isOnlyTrain ? "line" : kind, label: isAlone ? text : `${run.name}, ${text}`, data: run.curves[metric],
        colour: isAlone && metric === "val_loss" ? runColour(1) : runColour(run.index) });
    }
  }
  const chart = new Chart({ id: "loss", title: "Loss", wide: true, isCrowded: !isAlone, format: lossText, marks, curves });
  const kinds = lossKinds.filter(([metric]) => runs.some((run) => run.curves[metric]));
  const grey = (metric) => (isAlone ? runColour(metric === "val_loss" ? 1 : 0) : "var(--muted)");
  if (!isAlone) chart.legend.append(...runs.map(runToggle));
  chart.legend.append(...kinds.map(([metric, kind, text]) => make("span", { class: "key" }, swatch(kind, grey(metric)), text)));
  if (marks.some((mark) => mark.kind === "saved")) {
    chart.legend.append(make("span", { class: "key" }, shape("svg", { viewBox: "0 0 22 10" },
      shape("line", { class: "tick", x1: 11, x2: 11, y1: 2, y2: 9, stroke: "var(--muted)" })), "saved"));
  }
  return chart;
}

function runToggle(run) {
  const button = make("button", { type: "button", "aria-pressed": "true", title: "show or hide this run", onclick: () => {
    const isShown = charts.hidden.delete(run.index) || !charts.hidden.add(run.index);
    button.setAttribute("aria-pressed", isShown);
    redrawCharts();
  } }, chip(runColour(run.index)), run.name);
  return button;
}

function measureChart(runs, [metric, title, format, tick, fromZero]) {
  const having = runs.filter((run) => run.curves[metric]);
  const marks = having.flatMap((run) => run.marks.filter((mark) => mark.kind !== "saved").map((mark) => ({ ...mark, run: run.index, colour: "var(--muted)" })));
  const curves = having.map((run) => ({ run: run.index, kind: "line", label: runs.length === 1 ? title.toLowerCase() : run.name, data: run.curves[metric], colour: runColour(run.index) }));
  return having.length > 0 ? new Chart({ id: metric, title, format, tick, fromZero, marks, curves }) : null;
}

/** Rows of three, then of two, so that none is left half empty. */
function spread(elements) {
  const threes = [0, 0, 0, 3, 0, 3, 6][elements.length] ?? 0;
  elements.forEach((element, at) => element.classList.add(at < threes ? "third" : elements.length === 1 ? "wide" : "half"));
}

function drawCurves(runs) {
  const stepping = runs.filter((run) => run.curves.loss || run.curves.val_loss);
  if (stepping.length === 0) return;
  const all = [lossChart(stepping), ...measures.map((measure) => measureChart(stepping, measure))].filter(Boolean);
  const axis = choice([["step", "Step"], ["seconds", "Time"]], "step", (value) => ((charts.axis = value), redrawCharts()));
  spread(all.slice(1).map((chart) => chart.element));
  show("curves", make("div", { class: "heading" }, make("h2", {}, "Training"), axis), make("div", { class: "charts" }, all.map((chart) => chart.element)));
  all.forEach((chart) => chart.start());
}

function drawTimelines(runs) {
  const having = runs.filter((run) => run.timeline);
  if (having.length === 0) return;
  const content = make("div", {});
  let start = () => {};
  const choose = runChoice(having, (run) => {
    const drawn = drawTimeline(run.timeline);
    content.replaceChildren(drawn.box);
    start = drawn.start;
    if (content.isConnected) start();
  });
  show("timeline", make("div", { class: "heading" }, make("h2", {}, "One step, rank by rank"), choose), content);
  start();
}

drawHeader(report.runs);
drawNotes(report.runs);
drawSummary(report.runs);
drawCurves(report.runs);
drawSample(report.runs);
drawTimelines(report.runs);
drawSharding(report.runs);
drawConfiguration(report.runs);
drawProgram(report.runs);
