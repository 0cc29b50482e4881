// Where every sampled token went.

const LEDGER = [["trained", "Trained, each counted once"], ["unused", "Reached the trainer, in no optimizer step"], ["failed", "No reward"], ["dropped", "Dropped: no signal, or too old"]];

view("ledger", {
  title: "Token ledger", section: "Time",
  async render(run, page) {
    const metrics = await run.metrics(), column = (name) => metrics.columns[`tokens/${name}`] || [];
    page.append(h("h1", {}, "Token ledger"), h("p", { class: "lead" }, "Each token that was sampled, and what became of it."));
    if (!column("generated").length || !column("trained").length) { page.append(note("This run's executors do not count their tokens, or no tick is done.")); return; }
    const steps = metrics.columns.step, at = (values, i) => values[i] || 0, last = steps.length - 1;
    const once = steps.map((_, i) => at(column("trained"), i) - at(column("repeated"), i));
    const flows = { trained: once, unused: column("unused"), failed: column("failed"), dropped: column("dropped") };
    const stock = at(column("carried"), last) + at(column("spare"), last), generated = sum(column("generated")), imitated = sum(column("imitated")), came = generated + imitated;
    const rows = [...LEDGER.map(([key, label]) => ({ label, tokens: sum(flows[key]) })), { label: "Still in the generator, or spare, at the end", tokens: stock }];
    const open = metrics.imbalance.map((missing, i) => [steps[i], missing]).filter(([, missing]) => missing), unknown = metrics.imbalance.filter((missing) => missing === null).length;
    const gap = came - sum(rows.map((row) => row.tokens));
    page.append(
      tiles(tile(format.number(generated), "tokens generated"), imitated > 0 && tile(format.number(imitated), "of rows to imitate, beside them"), tile(format.share(sum(once) / came), "of them trained"), tile(gap === 0 && !open.length ? "closes" : "does not close", `${imitated ? "generated and imitated" : "generated"} = where they went`), sum(column("repeated")) > 0 && tile(format.number(sum(column("repeated"))), "trained again, in further passes")),
      open.length || unknown ? note(open.length ? `The rows of ${open.map(([tick, missing]) => `tick ${tick} (${missing > 0 ? "+" : ""}${missing})`).slice(0, 6).join(", ")} do not add up: rows before them are missing, or an executor of your own drops tokens.` : `${format.count(unknown, "row")} cannot be checked.`) : null,
      panel("Over the whole run", table([
        { title: "where", cell: (row) => row.label }, { title: "tokens", number: true, cell: (row) => format.number(row.tokens) }, { title: "share", number: true, cell: (row) => format.share(row.tokens / came) },
        { title: "", wide: true, cell: (row) => h("span", { class: "bar", style: { width: `${Math.max(0, 180 * row.tokens) / came}px` } }) },
      ], [...rows, { label: imitated ? "Generated, and rows to imitate" : "Generated", tokens: came }])),
      panel("Tick by tick", chart("Tokens of every tick by what became of them; the line is what was generated", () => ({
        traces: [
          ...LEDGER.filter(([key]) => sum(flows[key])).map(([key, label], i) => ({ type: "bar", x: steps, y: flows[key], name: label, marker: { color: colour(i) } })),
          { x: steps, y: column("generated"), mode: "lines", name: "generated", line: { color: css("--ink"), width: 1.5 } },
          { x: steps, y: steps.map((_, i) => at(column("carried"), i) + at(column("spare"), i)), mode: "lines", name: "carried over and spare", line: { color: css("--soft"), width: 1.5, dash: "dot" } },
        ], layout: { xaxis: { title: "tick" }, yaxis: { title: "tokens" }, showlegend: true, bargap: 0.05 },
      }), { size: "tall", onpoint: (point) => go("tick", run.number, point.x) })));
  },
});
