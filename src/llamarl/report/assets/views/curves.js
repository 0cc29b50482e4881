// Curves of all runs over versions, tokens or seconds.

const CURVES = [
  ["reward/mean", "Mean reward"], ...Object.entries(HELD_OUT), ["entropy", "Entropy"], ["mismatch/kl", "KL(behaviour, policy)"],
  ["kl/reference", "KL to the reference"], ["ratio/clipped_fraction", "Clipped share of tokens"], ["response/length_mean", "Mean response length"],
  ["response/truncated_fraction", "Share cut at the length limit"], ["staleness/mean", "Staleness"], ["grad_norm", "Gradient norm"], ["tokens_per_s/generated", "Tokens a second"],
  ...["none", "few", "some", "most", "all"].map((band) => [`groups/pass_rate/${band}`, `Items with ${band} of their answers right`]),
];
const IMITATION = ["loss/policy", "Training loss"]; // of a job that judges nothing
const curveState = { axis: "version", weight: 0.6, hidden: new Set(), more: new Set() };

view("curves", {
  title: "Curves", section: "Learning",
  async render(run, page) {
    const all = await Promise.all(RUNS.map((one) => one.metrics()));
    const keys = new Set(all.flatMap((metrics) => Object.keys(metrics.columns)));
    const grid = h("div", { class: "grid" });
    const redraw = () => grid.querySelectorAll(".chart").forEach((element) => element.redraw());
    const shown = () => [...[...CURVES, ...(keys.has("reward/mean") ? [] : [IMITATION])].filter(([key]) => keys.has(key) && (!HELD_OUT[key] || RUNS.some((one) => one.info.totals.held_out === key))), ...[...curveState.more].filter((key) => keys.has(key)).map((key) => [key, key])];
    const fill = () => grid.replaceChildren(...shown().map(([key, title]) => curvePanel(key, title, all)));
    const rest = [...keys].filter((key) => !CURVES.some(([known]) => known === key) && !["step", "policy_version"].includes(key));
    page.append(
      h("h1", {}, "Curves"),
      h("p", { class: "lead" }, "Numbers are those that were measured; where a line is smoothed, a thin one shows them. Click a point to open its tick."),
      h("div", { class: "controls" },
        segments("Horizontal axis", [["version", "Versions"], ["tokens", "Tokens trained"], ["seconds", "Seconds"]], curveState.axis, (value) => { curveState.axis = value; redraw(); }),
        labelled("Smoothing", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: curveState.weight, oninput: (event) => { curveState.weight = Number(event.target.value); redraw(); } })),
        RUNS.length > 1 && h("div", { class: "field" }, h("span", { class: "soft", style: { fontSize: "13px" } }, "Runs"), h("div", { class: "segments" },
          RUNS.map((one) => h("button", {
            type: "button", class: "chip", "aria-pressed": String(!curveState.hidden.has(one.number)),
            onclick: (event) => {
              const hide = !curveState.hidden.has(one.number);
              curveState.hidden[hide ? "add" : "delete"](one.number);
              event.currentTarget.setAttribute("aria-pressed", String(!hide));
              redraw();
            },
          }, swatch(one.number), one.name)))),
        labelled("Add a curve", select([["", "choose a metric…"], ...rest.map((key) => [key, key])], "", (key) => { if (key) { curveState.more.add(key); fill(); } })),
      ),
      grid,
    );
    if (!keys.size) page.append(note("No row has been written yet."));
    fill();
  },
});

function horizontal({ columns }, axis, key) {
  if (axis === "version") return (key.startsWith("eval/") && columns["eval/policy_version"]) || columns.policy_version || columns.step;
  const steps = axis === "tokens" ? columns["tokens/trained"] : columns["time/step_s"];
  let total = 0;
  return (steps || []).map((value) => (total += value || 0));
}

function curvePanel(key, title, all, runs = RUNS) {
  const meaning = all.map((metrics) => metrics.meanings[key]).find(Boolean) || "";
  const unit = all.map((metrics) => metrics.units[key]).find(Boolean) || "";
  const shown = unit === "share" ? format.share : format.number;
  const lasts = runs.map((run, i) => ({ name: run.name, value: (all[i].columns[key] || []).filter((value) => value !== null).pop() }))
    .filter(({ value }) => value !== undefined);
  const values = lasts.map(({ value }) => value), range = `${shown(Math.min(...values))} … ${shown(Math.max(...values))}`;
  const last = lasts.length > MOST_NAMED ? [range] : lasts.map(({ name, value }) => (runs.length > 1 ? `${name} ` : "") + shown(value));
  return h("section", { class: "panel", title: meaning, data: { key } },
    h("h3", {}, title),
    h("small", { class: "soft" }, `${last.join(" · ") || "nothing recorded"}${["", "share", "norm", "reward", "loss"].includes(unit) ? "" : ` ${unit}`}, last`),
    chart(`${title}: last ${last.join(", ")}. ${meaning}`, () => {
      const traces = [];
      runs.forEach((run, i) => {
        const values = all[i].columns[key];
        if (!values || curveState.hidden.has(run.number)) return;
        const where = horizontal(all[i], curveState.axis, key), ticks = all[i].columns.step;
        const held = values.map((value, at) => at).filter((at) => values[at] !== null);
        const x = held.map((at) => where[at]), y = held.map((at) => values[at]), customdata = held.map((at) => [run.number, ticks[at]]);
        traces.push(...measured({ x, y, customdata }, stroke(run.number), runs.length > 1 ? run.name : "", curveState.weight));
      });
      const values = traces.flatMap((trace) => trace.y);
      const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
      const flat = high - low <= 1e-6 * Math.abs(high); // else the axis would show the last bits
      return { traces, layout: { xaxis: { title: { version: "policy version", tokens: "tokens trained", seconds: "seconds up" }[curveState.axis] }, yaxis: flat ? { range: [Math.min(0, 2 * low), Math.max(0, 2 * high) || 1] } : { rangemode: "normal" } } };
    }, { onpoint: (point) => go("tick", ...point.customdata) }));
}

const FEW = 40, MOST_NAMED = 4;

/** The traces of one curve. Few points are joined and marked as they are; of many a smoothed line shows the trend. */
function measured(points, line, name, weight) {
  const few = points.y.length < FEW, text = points.y.map((value) => format.number(value, 4)), thin = !few && weight > 0;
  const values = { ...points, text, hovertemplate: "%{text}", name, mode: few ? "lines+markers" : "lines", marker: { size: 5 } };
  if (!thin) return [{ ...values, line: { ...line, width: 2 } }];
  const trend = { ...points, y: smooth(points.y, weight), mode: "lines", line: { ...line, width: 2.4 }, hoverinfo: "skip" };
  return [{ ...values, line: { ...line, width: 1 }, opacity: 0.35 }, trend];
}
