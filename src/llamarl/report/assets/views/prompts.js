// One prompt wherever it came: what later versions make of it, in this run and in the others.

view("prompts", {
  title: "Same prompt", section: "Learning",
  async render(run, page, args) {
    const indexes = await Promise.all(RUNS.map((one) => one.index())), places = new Map();
    indexes.forEach((index, number) => index.groups.tick.forEach((tick, group) => {
      const text = index.promptKey(group);
      if (!places.has(text)) places.set(text, []);
      places.get(text).push({ run: RUNS[number], index, group, tick });
    }));
    const often = [...places.entries()].filter(([, where]) => where.length > 1).sort((a, b) => b[1].length - a[1].length);
    const own = indexes[run.number], asked = args.length ? own.tables.prompt_text[Number(args[0])] : undefined;
    page.append(h("h1", {}, "The same prompt over versions"), h("p", { class: "lead" }, "Prompts that came in more than one tick, or in more than one of the runs on this page."));
    const text = asked !== undefined ? asked : often.length ? often[0][0] : undefined;
    if (!often.length) page.append(note(places.size ? `None of the ${format.number(places.size)} prompts came twice so far: the run is still in its first pass over its data, or its task makes new ones.` : "No response was written."));
    if (text === undefined) return;
    const where = places.get(text);
    page.append(
      often.length ? h("div", { class: "controls" }, labelled("Prompt", select(often.slice(0, 200).map(([one, list]) => [own.tables.prompt_text.indexOf(one), `${list.length} × ${oneLine(one).slice(0, 32)}`]).filter(([number]) => number >= 0), own.tables.prompt_text.indexOf(text), (number) => go("prompts", run.number, number)))) : null,
      panel("Prompt", h("pre", { class: "text" }, promptOfKey(text))),
      panel("Reward over versions", chart("Mean reward of each group with this prompt, by tick", () => ({
        traces: RUNS.map((one) => ({ one, list: where.filter((place) => place.run === one) })).filter(({ list }) => list.length).map(({ one, list }) => ({
          x: list.map((place) => place.tick), y: list.map((place) => mean(place.index.members(place.group).map(place.index.rewardOf).filter((reward) => reward !== null))),
          mode: "lines+markers", name: one.name, line: { ...stroke(one.number), width: 2 }, customdata: list.map((place) => [one.number, place.tick, place.index.groups.prompt[place.group]]),
        })),
        layout: { xaxis: { title: "tick" }, yaxis: { title: "mean reward" }, showlegend: RUNS.length > 1 },
      }), { onpoint: (point) => go("group", ...point.customdata) })));
    const cards = [];
    for (const place of spreadOut(where, 12)) {
      const group = await place.run.group(place.tick, place.index.groups.prompt[place.group]), sample = group && group.samples[0];
      cards.push(h("article", { class: "sample" },
        h("header", {}, h("h3", {}, h("a", { href: groupLink(place.run, place.index, place.group) }, `${RUNS.length > 1 ? `${place.run.name}, ` : ""}tick ${place.tick}`)), h("span", {}, dots(place.index, place.group))),
        h("small", { class: "soft" }, versionWords(place)),
        sample ? h("pre", { class: "text" }, sample.text || "(empty)") : h("small", { class: "soft" }, "text not on this page")));
    }
    page.append(h("h2", {}, "What was answered"), h("div", { class: "group" }, cards));
  },
});

function versionWords({ index, group, tick }) {
  const members = index.members(group).filter((response) => index.oldest[response] >= 0);
  if (!members.length) return "no version";
  const oldest = tick - Math.max(...members.map((response) => index.oldest[response])), newest = tick - Math.min(...members.map((response) => index.newest[response]));
  return oldest === newest ? `version ${oldest}` : `versions ${oldest} to ${newest}`;
}
