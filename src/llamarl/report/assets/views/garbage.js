// Signs that responses are garbage: loops, cut by length, another script than the prompt's, empty; and rewards that say nothing.

const GARBAGE = {
  repetition: "A loop of up to 60 characters fills 80 characters or more at the end, or the text packs to less than an eighth.",
  cut: "The response reached the length limit (finish reason “length”).",
  script: "More than 30 % of the letters are in scripts that neither the prompt nor the expected answer uses.",
  empty: "Nothing but white space.",
};

view("garbage", {
  title: "Garbage", section: "Learning",
  async render(run, page, args) {
    const index = await run.index(), flagged = new Map(index.flag_names.map((name) => [name, []]));
    index.flags.forEach((flags, response) => index.flag_names.forEach((name, bit) => { if ((flags >> bit) & 1) flagged.get(name).push(response); }));
    page.append(h("h1", {}, "Garbage detector"), h("p", { class: "lead" }, "Signs that a policy broke, or that its reward says nothing. They are hints: look at the responses."));
    if (!index.sample.length) { page.append(note("No response was written.")); return; }
    const mixed = mixedGroups(index), silent = index.groups.tick.map((_, group) => group).filter((group) => !mixed.has(group));
    const values = index.tables.reward, total = index.sample.length, counts = index.ticks.map((tick) => sum(index.groupsOfTick.get(tick).map((group) => index.groups.size[group])));
    page.append(
      tiles(...index.flag_names.map((name) => tile(format.share(flagged.get(name).length / total), FLAG_WORDS[name], GARBAGE[name])), tile(format.share(silent.length / index.groups.tick.length), "groups with equal rewards"), tile(values.length === 1 ? "constant" : format.number(values.length), values.length === 1 ? `reward: always ${format.number(values[0])}` : "different rewards")),
      panel("Over the run", chart("Share of each tick's responses with each sign", () => ({
        traces: [
          ...index.flag_names.map((name, i) => ({ x: index.ticks, y: perTick(index, flagged.get(name)).map((count, at) => count / counts[at]), mode: "lines", name: FLAG_WORDS[name], line: { color: colour(i), width: 2 }, hovertemplate: "%{y:.0%}" })),
          { x: index.ticks, y: index.ticks.map((tick) => { const groups = index.groupsOfTick.get(tick); return groups.filter((group) => !mixed.has(group)).length / groups.length; }), mode: "lines", name: "groups with equal rewards", line: { color: css("--soft"), width: 1.5, dash: "dot" }, hovertemplate: "%{y:.0%}" },
        ], layout: { xaxis: { title: "tick" }, yaxis: { tickformat: ".0%", range: [0, 1.02] }, showlegend: true },
      }), { onpoint: (point) => go("tick", run.number, point.x) })));
    const chosen = index.flag_names.includes(args[0]) ? args[0] : index.flag_names.reduce((best, name) => (flagged.get(name).length > flagged.get(best).length ? name : best));
    const responses = flagged.get(chosen), withText = responses.filter((response) => index.groups.detail[index.groupOf[response]]);
    page.append(
      h("div", { class: "controls" }, segments("Show responses that are", index.flag_names.map((name) => [name, `${FLAG_WORDS[name]} (${format.number(flagged.get(name).length)})`]), chosen, (name) => go("garbage", run.number, name))),
      panel(null, h("p", { class: "soft" }, GARBAGE[chosen]), responses.length ? await responseTable(run, index, spreadOut(withText.length ? withText : responses, 20)) : h("p", {}, "None.")));
  },
});

/** At most `most` of them, from beginning to end. */
function spreadOut(items, most) {
  return items.length <= most ? items : Array.from({ length: most }, (_, i) => items[Math.floor((i * (items.length - 1)) / (most - 1))]);
}
