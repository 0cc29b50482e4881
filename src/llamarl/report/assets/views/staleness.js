// How old the tokens are that are trained.

view("staleness", {
  title: "Staleness", section: "Time",
  async render(run, page) {
    const index = await run.index(), { tick, staleness, tokens } = index.staleness;
    page.append(h("h1", {}, "Staleness"), h("p", { class: "lead" }, "The policy version that trains on a token less the version that sampled it. Open a response and colour it by version to see it token by token."));
    const total = sum(tokens);
    if (total) {
      const counts = new Map();
      staleness.forEach((late, i) => counts.set(late, (counts.get(late) || 0) + tokens[i]));
      const levels = [...counts.keys()].sort((a, b) => a - b);
      page.append(
        tiles(
          tile(format.number(sum(tokens.map((count, i) => count * staleness[i])) / total), "mean over tokens"), tile(levels[levels.length - 1], "largest"),
          run.info.facts.max_staleness !== undefined && run.info.facts.max_staleness !== null && tile(run.info.facts.max_staleness, "max_staleness of the schedule"),
          tile(format.number(total), "tokens with a version, in scored responses")),
        h("div", { class: "grid" },
          panel("Tokens by staleness", chart(levels.map((level) => `${level}: ${counts.get(level)} tokens`).join(", "), () => ({
            traces: [{ type: "bar", x: levels, y: levels.map((level) => counts.get(level)), marker: { color: colour(0) }, text: levels.map((level) => format.share(counts.get(level) / total)), textposition: "outside", cliponaxis: false, hovertemplate: "staleness %{x}: %{y} tokens<extra></extra>" }],
            layout: { xaxis: { title: "staleness, versions", dtick: 1 }, yaxis: { title: "tokens" }, margin: { t: 24, l: 56, r: 10, b: 40 } },
          }))),
          panel("Share of tokens, tick by tick", chart("Share of each staleness in every tick", () => {
            const of = new Map();
            tick.forEach((one, i) => of.set(one, (of.get(one) || 0) + tokens[i]));
            return {
              traces: levels.map((level, number) => {
                const at = tick.map((_, i) => i).filter((i) => staleness[i] === level);
                return { type: "bar", x: at.map((i) => tick[i]), y: at.map((i) => tokens[i] / of.get(tick[i])), name: `staleness ${level}`, marker: { color: colour(number) }, hovertemplate: "%{y:.0%}" };
              }),
              layout: { xaxis: { title: "tick" }, yaxis: { tickformat: ".0%", range: [0, 1] }, showlegend: true, bargap: 0 },
            };
          }, { onpoint: (point) => go("tick", run.number, point.x) }))));
    } else page.append(note("No rollout with versions was written."));
  },
});
