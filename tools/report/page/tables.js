// Header, figures, sample, mesh, sharding, configuration and program.

const runName = (run) => make("span", { class: "run-name" }, chip(runColour(run.index)), run.name);

function drawHeader(runs) {
  const [run] = runs;
  const facts = run.facts;
  const parts = runs.length > 1 ? [] : [
    facts.started && "started " + facts.started.replace("T", " ").replace(/(\d\d:\d\d):\d\d.*$/, "$1"),
    facts.world_size && counted(facts.world_size, "rank"),
    facts.device,
    facts.parameters && compact(facts.parameters) + " parameters",
    facts.dataset_tokens && compact(facts.dataset_tokens) + " tokens" + (facts.dataset_files ? " in " + counted(facts.dataset_files, "file") : ""),
    Array.isArray(facts.hosts) && facts.hosts.length > 0 && [...new Set(facts.hosts)].slice(0, 4).join(", "),
  ].filter(Boolean);
  document.getElementById("top").append(
    make("div", { class: "brand" }, "Tessera" + (facts.version && runs.length === 1 ? " " + facts.version : "")),
    make("h1", {}, runs.length === 1 ? run.name : counted(runs.length, "run") + " compared"),
    make("div", { class: "facts" }, parts.map((text) => make("span", {}, text))),
    runs.length === 1 && facts.command ? make("p", { class: "command" }, facts.command) : "");
}

function drawNotes(runs) {
  const notes = runs.flatMap((run) => run.notes.map((note) => (runs.length > 1 ? run.name + ": " : "") + note));
  if (notes.length > 0) show("notes", ...notes.map((note) => make("p", { class: "note" }, note)));
}

// One row per figure of a run: what it is called, how it is written, what is said under it.
const figures = [
  ["Nats per byte", (s) => s.nats_per_byte != null && lossText(s.nats_per_byte), (s) => `${lossText(s.nats_per_byte / Math.LN2)} bits, of unseen text`],
  ["Training loss", (s) => s.last_loss != null && lossText(s.last_loss), (s) => `from ${lossText(s.first_loss)}` + (s.smoothing > 1 ? `, mean of about ${s.smoothing} steps` : "")],
  ["Best validation loss", (s) => s.best_val_loss != null && lossText(s.best_val_loss), (s) => `at step ${grouped(s.best_val_step)}`],
  ["Steps", (s) => grouped(s.steps), (s) => (s.steps > 0 && s.seconds > 0 ? micros((1e6 * s.seconds) / s.steps) + " each" : "")],
  ["Time", (s) => s.seconds > 0 && seconds(s.seconds), () => "in training"],
  ["Tokens per second", (s) => s.tokens_per_s != null && compact(s.tokens_per_s), () => "median, all ranks"],
  ["MFU", (s) => s.mfu != null && percent(s.mfu), () => "of the devices' peak, median"],
  ["Communication", (s) => s.comm_share != null && percent(s.comm_share), () => "of the time, median"],
  ["Memory", (s) => s.memory_bytes != null && bytes(s.memory_bytes), () => "peak"],
];

function drawSummary(runs) {
  const shown = figures.filter(([, text]) => runs.some((run) => text(run.summary)));
  if (runs.length === 1) {
    const { summary } = runs[0];
    return show("summary", make("div", { class: "tiles" }, shown.map(([label, text, under]) => make("div", { class: "tile" },
      make("div", { class: "label" }, label), make("div", { class: "figure" }, text(summary)), make("div", { class: "under" }, under(summary))))));
  }
  show("summary", make("div", { class: "card scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, make("th", {}, "Run"), make("th", { class: "number" }, "Ranks"), shown.map(([label]) => make("th", { class: "number" }, label)))),
    make("tbody", {}, runs.map((run) => make("tr", {}, make("td", { class: "run" }, runName(run)),
      make("td", { class: "number" }, run.facts.world_size ? grouped(run.facts.world_size) : "\u2013"),
      shown.map(([, text]) => make("td", { class: "number" }, text(run.summary) || "\u2013"))))))));
}

/** The ranks as the mesh lays them out; the last dim runs across. */
function drawMesh(run) {
  if (!run.mesh) return null;
  const size = run.mesh.reduce((product, dim) => product * dim.size, 1);
  const title = run.mesh.map((dim) => `${dim.name} ${grouped(dim.size)}`).join(" \u00d7 ");
  const box = make("div", { class: "card" }, make("h3", {}, "Mesh"), make("div", { class: "muted small" }, title));
  const across = run.mesh.at(-1).size;
  if (size > 256 || across > 16) return box;
  const grid = make("div", { class: "mesh", style: { gridTemplateColumns: `max-content repeat(${across}, max-content)` } });
  const outer = run.mesh.slice(0, -1);
  if (outer.length > 0) {
    grid.append(make("span", {}), ...Array.from({ length: across }, (_, at) => make("span", { class: "dim" }, `${run.mesh.at(-1).name} ${at}`)));
  }
  for (let row = 0; row < size / across; ++row) {
    let rest = row;
    const place = outer.slice().reverse().map((dim) => {
      const at = rest % dim.size;
      rest = Math.floor(rest / dim.size);
      return `${dim.name} ${at}`;
    });
    grid.append(make("span", { class: "dim" }, outer.length > 0 ? place.reverse().join(", ") : run.mesh[0].name),
      ...Array.from({ length: across }, (_, at) => make("span", { class: "cell" }, "rank " + (row * across + at))));
  }
  box.append(make("div", { class: "scroll" }, grid));
  return box;
}

const shapeText = (text) => text.replace(/^\[|\]$/g, "").replace(/, ?/g, " \u00d7 ") || "scalar";

function drawShardingTable(run) {
  const rows = run.sharding;
  const total = rows.reduce((sum, row) => sum + (row.bytes_per_rank || 0), 0);
  const cells = (row) => [
    make("td", { class: "name" }, row.name), make("td", {}, shapeText(row.shape)), make("td", { class: "long" }, row.placements),
    make("td", {}, shapeText(row.local_shape)), make("td", {}, row.dtype),
    make("td", { class: "number" }, row.bytes_per_rank != null ? bytes(row.bytes_per_rank) : "")];
  const body = make("tbody", {});
  const fillBody = (wanted) => {
    const kept = rows.filter((row) => (row.name + " " + row.placements).toLowerCase().includes(wanted.toLowerCase()));
    body.replaceChildren(...kept.map((row) => make("tr", {}, cells(row))));
  };
  fillBody("");
  const search = make("input", { type: "search", placeholder: "Find a parameter", "aria-label": "find a parameter", oninput: () => fillBody(search.value) });
  const head = ["Parameter", "Global shape", "Placements", "Local shape", "Type", "Bytes per rank"];
  return make("div", { class: "card" },
    make("div", { class: "heading" }, make("h3", {}, `${counted(rows.length, "parameter")}, ${bytes(total)} per rank`), rows.length > 12 && search),
    make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, head.map((text, at) => make("th", { class: at === 5 ? "number" : "" }, text)))), body)));
}

function drawCommunicationTable(run) {
  const rows = run.communication;
  const sum = (of) => rows.reduce((total, row) => total + row[of], 0);
  const milliseconds = (time) => `${(time * 1e3).toFixed(2)} ms`;
  const cells = (row) => [make("td", { class: "name" }, row.unit), ...[String(row.parameters), bytes(row.bytes), milliseconds(row.seconds)]
    .map((text) => make("td", { class: "number" }, text))];
  return make("div", { class: "card" },
    make("div", { class: "heading" }, make("h3", {}, `Communication per step: ${bytes(sum("bytes"))}, ${milliseconds(sum("seconds"))} of rank 0`)),
    make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ["Unit or bucket", "Parameters", "Bytes", "Time"].map((text, at) => make("th", { class: at > 0 ? "number" : "" }, text)))),
      make("tbody", {}, rows.map((row) => make("tr", {}, cells(row)))))));
}

function drawSharding(runs) {
  const having = runs.filter((run) => run.mesh || run.sharding.length > 0);
  if (having.length === 0) return;
  const content = make("div", {});
  const choose = runChoice(having, (run) => content.replaceChildren(make("div", { class: run.mesh && run.sharding.length > 0 ? "sharded" : "" },
    ...[drawMesh(run), run.sharding.length > 0 ? drawShardingTable(run) : null].filter(Boolean)),
    ...(run.communication.length > 0 ? [drawCommunicationTable(run)] : [])));
  show("sharding", make("div", { class: "heading" }, make("h2", {}, "Mesh and sharding"), choose), content);
}

/** One run's settings in as many columns as there is room for. */
function drawSettings(run) {
  show("configuration", make("div", { class: "heading" }, make("h2", {}, "Configuration")),
    make("div", { class: "card" }, make("dl", { class: "settings mono" },
      run.config.map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, value))))));
}

function drawConfiguration(runs) {
  const keys = [...new Set(runs.flatMap((run) => run.config.map(([key]) => key)))];
  if (keys.length === 0) return;
  if (runs.length === 1) return drawSettings(runs[0]);
  const settings = runs.map((run) => new Map(run.config));
  const differs = (key) => settings.some((one) => one.get(key) !== settings[0].get(key));
  const different = keys.filter(differs);
  const body = make("tbody", {});
  const fillBody = (wanted) => body.replaceChildren(...wanted.map((key) => make("tr", { class: differs(key) ? "differs" : "" }, make("td", { class: "name" }, key),
    settings.map((one) => make("td", { class: "long mono" }, one.has(key) ? one.get(key) : "\u2013")))));
  const onlyDifferent = different.length > 0 && different.length < keys.length;
  fillBody(keys);
  show("configuration", make("div", { class: "heading" }, make("h2", {}, "Configuration"),
    make("span", { class: "muted small" }, different.length > 0 ? counted(different.length, "difference") : "no differences"),
    onlyDifferent && choice([["all", "All"], ["different", "Differences"]], "all", (value) => fillBody(value === "all" ? keys : different))),
  make("div", { class: "card scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, make("th", {}, "Setting"), runs.map((run) => make("th", {}, runName(run))))), body)));
}

function drawSample(runs) {
  const having = runs.filter((run) => run.sample && run.sample.trim());
  if (having.length === 0) return;
  const content = make("div", { class: "card" });
  const choose = runChoice(having, (run) => content.replaceChildren(make("p", { class: "sample" }, run.sample)));
  show("sample", make("div", { class: "heading" }, make("h2", {}, "What the model writes"), choose), content);
}

function drawProgram(runs) {
  const having = runs.filter((run) => run.program);
  if (having.length === 0) return;
  const content = make("div", { class: "card" });
  const choose = runChoice(having, (run) => {
    const details = make("details", { ontoggle: () => details.children.length === 1 && details.append(colouredCode(run.program)) },
      make("summary", {}, `program.cpp, ${counted(run.program.split("\n").length, "line")}: the step as it was compiled`));
    content.replaceChildren(details);
  });
  show("program", make("div", { class: "heading" }, make("h2", {}, "Generated program"), choose), content);
}
