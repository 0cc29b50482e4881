// Weights on their way from trainer to generator: bytes, time, versions in flight.

view("handover", {
  title: "Hand-over", section: "Time",
  async render(run, page) {
    const metrics = await run.metrics(), line = await run.timeline(), { job, through_controller } = await run.config(), index = await run.index();
    const channels = (job.channels || []).filter((channel) => channel.version_bytes !== null && channel.version_bytes !== undefined);
    const times = [["time/weight_sync_s", "executors on weights, summed"], ["time/weight_copy_s", "the trainer's copies, beside its next tick"], ["time/repack_s", "packing or quantizing in the generator"]].filter(([key]) => metrics.columns[key]);
    const flight = versionsInFlight(line, index);
    page.append(
      h("h1", {}, "Hand-over of weights"), h("p", { class: "lead" }, "What each new version costs on its way to the generator, and how many are on their way."),
      tiles(
        ...channels.map((channel) => tile(format.bytes(channel.version_bytes), `a version, ${channel.name}: a ${channel.source} rank, ${channel.transport.replace(/_/g, " ")}`)),
        ...times.map(([key, label]) => tile(format.seconds(median(metrics.columns[key].filter((value) => value !== null))), `${label}; median of a tick`)),
        flight.y.length > 0 && tile(`${format.number(mean(flight.y))} / ${Math.max(...flight.y)}`, "versions in flight, mean / most")));
    if (!channels.length) page.append(note("The size of a version is not recorded: this run has no job.json."));
    page.append(h("div", { class: "grid" },
      times.length ? panel("Time of the hand-over", chart("Seconds of each tick spent on weights", () => ({
        traces: times.map(([key, label], i) => ({ x: metrics.columns.step, y: metrics.columns[key], mode: "lines", name: label, line: { color: colour(i), width: 2 } })),
        layout: { xaxis: { title: "tick" }, yaxis: { title: "seconds" }, showlegend: true, margin: { t: 8, l: 56, r: 10, b: 40 } },
      }), { size: "tall", onpoint: (point) => go("tick", run.number, point.x) })) : null,
      flight.y.length ? panel("Versions in flight", h("p", { class: "soft" }, "Whenever the trainer finishes a version: how many versions it is then ahead of the newest one in the batch that the generator is sampling."), chart("Versions in flight whenever the trainer finishes a tick", () => ({
        traces: [{ type: "bar", x: flight.x, y: flight.y, marker: { color: colour(0) }, hovertemplate: "%{y}<extra></extra>" }], layout: { xaxis: { title: "tick" }, yaxis: { title: "versions", dtick: 1 }, bargap: 0.1 },
      }))) : null));
    const spans = weightSpans(line);
    if (spans.length) page.append(panel("Who spends the time", table([
      { title: "executor", cell: (row) => row.lane }, { title: "what", cell: (row) => row.label }, { title: "median", number: true, cell: (row) => format.seconds(median(row.values) / 1e3) }, { title: "longest", number: true, cell: (row) => format.seconds(Math.max(...row.values) / 1e3) }, { title: "in all", number: true, wide: true, cell: (row) => format.seconds(sum(row.values) / 1e3) },
    ], spans)));
    const through = Object.entries(through_controller || {});
    if (through.length) page.append(panel("Through the controller", h("p", {}, "Weights and samples go from executor to executor. Through the controller goes only this, a tick, in the median: "), table([{ title: "executor", cell: ([lane]) => lane }, { title: "bytes", number: true, cell: ([, ticks]) => format.bytes(median(Object.values(ticks))) }], through)));
  },
});

function weightSpans(line) {
  const found = new Map();
  for (const lane of line.lanes) lane.span_label.forEach((label, i) => {
    const name = line.labels[label];
    if (!/^(weight_sync|repack)/.test(name)) return;
    const key = `${lane.name}\n${name}`;
    if (!found.has(key)) found.set(key, { lane: lane.name, label: name, values: [] });
    found.get(key).values.push(lane.span_length[i]);
  });
  return [...found.values()].sort((a, b) => sum(b.values) - sum(a.values));
}

/** When the trainer finishes a version: how many it is ahead of the newest one that the generator computes with. */
function versionsInFlight(line, index) {
  const generator = line.lanes.find((lane) => lane.name === "generator"), trainer = line.lanes.find((lane) => lane.name === "trainer"), result = { x: [], y: [] };
  if (!generator || !trainer || !generator.tick.length) return result;
  const newest = new Map();
  index.newest.forEach((late, response) => { if (late >= 0) { const tick = index.tickOf(response); newest.set(tick, Math.max(newest.get(tick) ?? 0, tick - late)); } });
  const over = generator.start[generator.start.length - 1] + generator.length[generator.length.length - 1];
  let at = -1;
  trainer.tick.forEach((tick, i) => {
    const end = trainer.start[i] + trainer.length[i];
    while (at + 1 < generator.tick.length && generator.start[at + 1] <= end) at++;
    if (at < 0 || end > over || !newest.has(generator.tick[at])) return;
    result.x.push(tick);
    result.y.push(tick + 1 - newest.get(generator.tick[at]));
  });
  return result;
}
