// Responses without a reward, by cause, with the answer that was expected.

view("failures", {
  title: "Failures", section: "Learning",
  async render(run, page, args) {
    const index = await run.index(), causes = new Map();
    index.failure.forEach((cause, response) => {
      if (!cause) return;
      const kind = kindOf(index.tables.failure[cause]);
      if (!causes.has(kind)) causes.set(kind, []);
      causes.get(kind).push(response);
    });
    const kinds = [...causes.entries()].sort((a, b) => b[1].length - a[1].length), failed = sum(kinds.map(([, responses]) => responses.length));
    page.append(h("h1", {}, "Failures"), h("p", { class: "lead" }, "A response that could not be judged has no reward. It is never scored 0, and no baseline counts it."));
    if (!failed) { page.append(index.sample.length ? note("Every response that was written has a reward.") : note("No response was written.")); return; }
    const names = kinds.map(([kind]) => kind);
    page.append(
      tiles(tile(format.number(failed), "responses without a reward"), tile(format.share(failed / index.sample.length), `of ${format.number(index.sample.length)}`), tile(kinds.length, kinds.length === 1 ? "kind of cause" : "kinds of cause")),
      panel("By cause", table([
        { title: "cause", cell: ([kind, responses]) => h("a", { href: link("failures", run.number, kind) }, index.failureOf(responses[0])) },
        { title: "responses", number: true, cell: ([, responses]) => format.number(responses.length) },
        { title: "share", number: true, wide: true, cell: ([, responses]) => format.share(responses.length / index.sample.length) },
        { title: "ticks", number: true, cell: ([, responses]) => `${index.tickOf(responses[0])} … ${index.tickOf(responses[responses.length - 1])}` },
      ], kinds)),
      panel("Over the run", chart("Failed responses of every tick by cause", () => ({
        traces: kinds.map(([kind, responses], i) => ({ type: "bar", x: index.ticks, y: perTick(index, responses), name: kind, marker: { color: colour(i) } })),
        layout: { xaxis: { title: "tick" }, yaxis: { title: "responses" }, showlegend: kinds.length > 1, bargap: 0 },
      }), { onpoint: (point) => go("tick", run.number, point.x) })));
    const kind = names.includes(args[0]) ? args[0] : names[0], responses = causes.get(kind), examples = [];
    for (const response of responses) {
      if (examples.length >= 8) break;
      if (!index.groups.detail[index.groupOf[response]]) continue;
      const group = await run.group(index.tickOf(response), index.promptOf(response));
      const sample = group && group.samples.find((one) => one.sample_index === index.sample[response]);
      if (sample) examples.push({ response, group, sample });
    }
    page.append(h("h2", {}, `Examples of “${kind}”`), examples.length ? h("div", { class: "group" }, examples.map(({ response, group, sample }) => h("article", { class: "sample" },
      h("header", {}, h("h3", {}, h("a", { href: responseLink(run, index, response) }, `Tick ${index.tickOf(response)}, group ${group.prompt_index}, response ${sample.sample_index}`))),
      h("small", { class: "tag bad" }, `${sample.failure.kind}: ${sample.failure.detail}`),
      h("small", { class: "soft" }, "Prompt"), h("pre", { class: "text" }, group.prompt),
      h("small", { class: "soft" }, "Response"), h("pre", { class: "text" }, sample.text || "(empty)"),
      h("div", {}, h("small", { class: "soft" }, "Expected answer: "), answerText(group.answer))))) : note("None of them is among the responses whose text this page carries."));
  },
});

/** The kind of an exception, also an environment's, is its class; any other failure's its own. */
function kindOf(cause) {
  const found = /^((exception|environment): [\w.]+|\w+)/.exec(cause);
  return found ? found[0] : cause;
}

function perTick(index, responses) {
  const counts = new Map();
  for (const response of responses) counts.set(index.tickOf(response), (counts.get(index.tickOf(response)) || 0) + 1);
  return index.ticks.map((tick) => counts.get(tick) || 0);
}
