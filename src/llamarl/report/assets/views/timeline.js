// Who worked when. An idle gap, clicked or chosen from the list, says what it waited for and opens the tick.

const timelineState = { first: null, count: matchMedia("(max-width: 820px)").matches ? 4 : 8, lane: "" };

view("timeline", {
  title: "Timeline", section: "Time",
  async render(run, page, args) {
    const line = await run.timeline();
    page.append(h("h1", {}, "Timeline"), h("p", { class: "lead" }, "What each executor did in every tick, and what it waited for in between. Click an idle gap, or choose one below."));
    if (!line.lanes.some((lane) => lane.tick.length)) {
      page.append(note("This run has no trace: observability.trace was off, or no tick is done."));
      return;
    }
    const ticks = line.lanes.flatMap((lane) => lane.tick), began = ticks.reduce((a, b) => Math.min(a, b)), last = ticks.reduce((a, b) => Math.max(a, b)); // a fork's trace begins late
    const gaps = allGaps(line);
    const chosen = args.length >= 2 ? gaps.find((gap) => gap.lane === args[0] && gap.tick === Number(args[1])) : null;
    let first = chosen ? chosen.tick - Math.floor(timelineState.count / 2) : timelineState.first ?? began + 1;
    const detail = h("div", { id: "gap", "aria-live": "polite" });
    const span = h("output", {});
    const lanes = chart("Bars of work and idle gaps, one row an executor; the list of gaps below holds the same", () => timelineChart(line, first, timelineState.count, chosen), {
      size: "tall", onpoint: (point) => { if (point.customdata) openPlace(point.customdata); },
    });
    const openPlace = (place) => (place.gap ? go("timeline", run.number, place.lane, place.tick) : go("tick", run.number, place.tick));
    const gapList = h("ol", { class: "list", id: "gaps" }), busy = new Set(line.lanes.filter((lane) => lane.tick.length && idleShare(lane) < 0.5).map((lane) => lane.name));
    const fillGaps = () => gapList.replaceChildren(...gaps.filter((gap) => (timelineState.lane ? gap.lane === timelineState.lane : busy.has(gap.lane) || !busy.size))
      .sort((a, b) => b.length - a.length).slice(0, 10).map((gap) => h("li", {},
        h("button", { type: "button", "aria-pressed": String(gap === chosen), onclick: () => go("timeline", run.number, gap.lane, gap.tick) },
          h("b", {}, format.seconds(gap.length / 1e3)), ` ${gap.lane}, before tick ${gap.tick}`, h("span", { class: "soft" }, gap.cause ? ` · waited for ${gap.cause}` : "")))));
    const move = (to) => {
      first = Math.max(began, Math.min(to, last));
      timelineState.first = first;
      span.textContent = `ticks ${first} to ${Math.min(last, first + timelineState.count - 1)} of ${last + 1}`;
      back.disabled = first === began;
      onward.disabled = first + timelineState.count > last;
      lanes.redraw();
    };
    const back = h("button", { type: "button", onclick: () => move(first - timelineState.count) }, "← earlier");
    const onward = h("button", { type: "button", onclick: () => move(first + timelineState.count) }, "later →");
    page.append(
      h("div", { class: "controls" }, back, onward, span,
        labelled("Ticks shown", select([[4, "4"], [8, "8"], [16, "16"], [32, "32"]], timelineState.count, (value) => { timelineState.count = Number(value); move(first); }))),
      panel(null, lanes, legend([["work", colour(0)], ["inside a tick", colour(6)], ["idle", mix(css("--bad"), 0.43)]])),
      detail,
      h("div", { class: "grid" },
        pace(line),
        panel("Longest gaps", h("div", { class: "controls" }, labelled("Of", select([["", "executors that are mostly busy"], ...line.lanes.map((lane) => [lane.name, lane.name])], timelineState.lane, (value) => { timelineState.lane = value; fillGaps(); }))), gapList),
        line.lanes.some((lane) => lane.tick.length > 2) && panel("Idle share, tick by tick", chart("Share of the time before and in each tick that an executor did nothing", () => ({
          traces: line.lanes.map((lane, i) => ({ x: lane.tick, y: idleByTick(lane), mode: "lines", line: { color: colour(i), width: 2 }, name: lane.name, customdata: lane.tick.map((tick) => tick), hovertemplate: "%{y:.0%}" })),
          layout: { xaxis: { title: "tick" }, yaxis: { tickformat: ".0%" }, showlegend: true },
        }), { onpoint: (point) => move(point.customdata - Math.floor(timelineState.count / 2)) }))),
    );
    fillGaps();
    move(first);
    if (chosen) {
      detail.append(gapPanel(run, chosen, line.knows_channels), await tickGroups(run, chosen.tick) || "");
      requestAnimationFrame(() => detail.scrollIntoView({ block: "nearest" }));
    }
  },
});

function legend(entries) {
  return h("div", { class: "legend" }, entries.map(([name, shade]) => h("span", {}, dot({ color: shade }), name)));
}

function allGaps(line) {
  return line.lanes.flatMap((lane) => lane.gap_tick.map((tick, i) => ({
    lane: lane.name, tick, start: lane.gap_start[i], length: lane.gap_length[i], cause: lane.gap_cause[i], causeTick: lane.gap_cause_tick[i],
    causeEnd: lane.gap_cause_end[i], channel: lane.gap_channel[i], forRoom: lane.gap_for_room[i],
  })));
}

function idleShare(lane) {
  const end = lane.start[lane.start.length - 1] + lane.length[lane.length.length - 1];
  return end ? sum(lane.gap_length) / (sum(lane.gap_length) + sum(lane.length)) : 0;
}

function idleByTick(lane) {
  const gap = new Map(lane.gap_tick.map((tick, i) => [tick, lane.gap_length[i]]));
  return lane.tick.map((tick, i) => { const idle = gap.get(tick) || 0; return idle + lane.length[i] ? idle / (idle + lane.length[i]) : 0; });
}

/** Who sets the pace. */
function pace(line) {
  const lanes = line.lanes.filter((lane) => lane.tick.length);
  const busiest = lanes.reduce((best, lane) => (idleShare(lane) < idleShare(best) ? lane : best));
  const trainer = line.lanes.find((lane) => lane.name === "trainer") || busiest;
  const ends = trainer.start.map((start, i) => start + trainer.length[i]);
  const period = median(ends.slice(1).map((end, i) => end - ends[i]));
  const rows = lanes.map((lane) => ({ name: lane.name, busy: median(lane.length), idle: idleShare(lane) }));
  return panel("Who sets the pace",
    h("p", {}, h("b", {}, busiest.name), ` is idle least (${format.share(idleShare(busiest))}). `,
      period ? `A tick takes ${format.seconds(period / 1e3)} (median).` : ""),
    table([
      { title: "executor", cell: (row) => row.name },
      { title: "a tick, median", number: true, cell: (row) => format.seconds(row.busy / 1e3) },
      { title: "idle", number: true, cell: (row) => format.share(row.idle) },
    ], rows));
}

function timelineChart(line, first, count, chosen) {
  const shown = (tick) => tick >= first && tick < first + count;
  const lanes = line.lanes.filter((lane) => lane.tick.length);
  const work = bars(), gap = bars(), span = bars();
  const seen = lanes.flatMap((lane) => lane.tick.map((tick, i) => i).filter((i) => shown(lane.tick[i])).map((i) => [lane.start[i], lane.start[i] + lane.length[i]]));
  const left = Math.min(...seen.map(([start]) => start)), right = Math.max(...seen.map(([, end]) => end));
  const pixels = Math.max(120, document.getElementById("main").clientWidth - 140) / (right - left), wide = (length, tick) => length * pixels > 4 + 8 * String(tick).length;
  lanes.forEach((lane, y) => {
    lane.tick.forEach((tick, i) => { if (shown(tick)) push(work, y, 0.5, lane.start[i], lane.length[i], `${lane.name}, tick ${tick}: ${format.seconds(lane.length[i] / 1e3)}`, { tick, lane: lane.name }, wide(lane.length[i], tick) ? String(tick) : ""); });
    lane.gap_tick.forEach((tick, i) => { if (shown(tick) && lane.gap_start[i] + lane.gap_length[i] > left) push(gap, y, 0.5, lane.gap_start[i], lane.gap_length[i], `${lane.name} idle before tick ${tick}: ${format.seconds(lane.gap_length[i] / 1e3)}${lane.gap_cause[i] ? `, waited for ${lane.gap_cause[i]}` : ""}`, { gap: true, tick, lane: lane.name }, ""); });
    lane.span_tick.forEach((tick, i) => { if (shown(tick)) push(span, y + 0.34, 0.13, lane.span_start[i], lane.span_length[i], `${line.labels[lane.span_label[i]]}: ${format.seconds(lane.span_length[i] / 1e3)}`, { tick, lane: lane.name }, ""); });
  });
  const common = { type: "bar", orientation: "h", hovertemplate: "%{hovertext}<extra></extra>", textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none", cliponaxis: true };
  return {
    traces: [
      { ...common, ...gap, marker: { color: css("--bad"), opacity: gap.customdata.map((one) => (chosen && one.lane === chosen.lane && one.tick === chosen.tick ? 1 : 0.32)), line: { color: css("--bad"), width: 1 } } },
      { ...common, ...work, marker: { color: colour(0), line: { color: css("--panel"), width: 1 } }, textfont: { color: isDark() ? "#0c141b" : "#ffffff", size: 11 } },
      { ...common, ...span, marker: { color: colour(6), line: { color: css("--panel"), width: 0.5 } } },
    ],
    layout: {
      barmode: "overlay", hovermode: "closest", margin: { l: 76, r: 8, t: 4, b: 36 },
      xaxis: { title: "seconds since the run began", tickformat: "~g", range: [(left - 0.01 * (right - left)) / 1e3, (right + 0.01 * (right - left)) / 1e3] },
      yaxis: { tickvals: lanes.map((_, y) => y), ticktext: lanes.map((lane) => escapeMarkup(lane.name)), range: [lanes.length - 0.4, -0.55], rangemode: "normal", showgrid: false, zeroline: false },
    },
  };
}

const bars = () => ({ y: [], width: [], base: [], x: [], hovertext: [], customdata: [], text: [] });

function push(into, y, width, base, length, hovertext, customdata, text) {
  into.y.push(y); into.width.push(width); into.base.push(base / 1e3); into.x.push(length / 1e3);
  into.hovertext.push(escapeMarkup(hovertext)); into.customdata.push(customdata); into.text.push(text);
}

function gapPanel(run, gap, known) {
  const what = gap.forRoom ? `for room on the channel “${gap.channel}”: ${gap.cause} had not finished tick ${gap.causeTick}` : `for tick ${gap.causeTick} of ${gap.cause}, which comes over the channel “${gap.channel}”`;
  const after = gap.cause ? gap.start + gap.length - gap.causeEnd : null;
  return h("section", { class: "finding", id: "gap-panel" },
    h("h3", {}, `${gap.lane} stood idle for ${format.seconds(gap.length / 1e3)} before tick ${gap.tick}`),
    gap.cause
      ? h("p", {}, `It waited ${what}. That ended ${format.seconds((gap.causeEnd - gap.start) / 1e3)} into the gap; the remaining ${format.seconds(after / 1e3)} went to the hand-over and to starting the tick.`)
      : h("p", {}, known
        ? "Everything that it needed was there before the gap began, so the time went into starting the tick: reports to the controller, a checkpoint, the hand-over."
        : "What it waited for is not known: this run has no job.json, which names its channels."),
    h("div", { class: "actions" },
      h("a", { class: "button primary", href: link("tick", run.number, gap.tick) }, `Open tick ${gap.tick}`),
      gap.cause && gap.causeTick !== gap.tick && gap.causeTick >= 0 && h("a", { class: "button", href: link("tick", run.number, gap.causeTick) }, `Open tick ${gap.causeTick} of ${gap.cause}`)));
}
