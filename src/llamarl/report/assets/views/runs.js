// Several runs on one page: what came of each, beside the settings in which they differ.

const HELD_OUT = { "eval/accuracy": "Held-out accuracy", "eval/reward_mean": "Held-out reward", "eval/loss": "Held-out loss" };
const MOST_SETTINGS = 4;

view("runs", {
  title: "Runs", section: "",
  async render(run, page) {
    const all = await Promise.all(RUNS.map((one) => one.metrics()));
    const { flats, keys, differs } = settingsOf(await Promise.all(RUNS.map((one) => one.config())));
    const settings = keys.filter((key) => !/^(run[.](dir|mirror|num_ticks)|machine)/.test(key) && differs(key));
    const trained = RUNS.map((_, i) => sum(all[i].columns["tokens/trained"] || []));
    const total = (name) => (one) => one.info.totals[name];
    const held = [...new Set(RUNS.map(total("held_out")))];
    const charts = [...held, "reward/mean"].filter((key) => all.some((metrics) => metrics.columns[key]));
    page.append(
      h("h1", {}, "Runs"), h("p", { class: "lead" }, `${TITLE}: ${RUNS.length} runs. A name opens a run.`),
      panel(null, table([
        { title: "run", cell: (one) => h("a", { class: "run", href: link("summary", one.number) }, swatch(one.number), breakable(one.name)) },
        { title: "state", cell: (one) => statusWords(one.info).replace(/[.]$/, "") },
        ...held.filter((key) => charts.includes(key)).map((key) => ({
          title: HELD_OUT[key].toLowerCase(), number: true,
          cell: (one) => (total("held_out")(one) === key ? arrow(total("first_held_out")(one), total("last_held_out")(one)) : "–"),
        })),
        { title: "mean reward", number: true, cell: (one) => arrow(total("first_reward")(one), total("last_reward")(one)) },
        { title: "tokens trained", number: true, cell: (one) => format.number(trained[one.number]) },
        { title: "time up", number: true, cell: (one) => format.seconds(total("wall_s")(one)) },
        { title: "looks wrong", cell: (one) => one.info.got_worse || (one.info.findings[0] || { title: "–" }).title },
        ...settings.slice(0, MOST_SETTINGS).map((key) => ({
          title: breakable(key), words: key, cell: (one) => settingText(flats[one.number][key], 60),
        })),
      ], RUNS, { stack: true, href: (one) => link("summary", one.number) }),
      settings.length > MOST_SETTINGS && h("p", { class: "soft" }, `${settings.length - MOST_SETTINGS} more settings differ: `,
        h("a", { href: link("config", run.number) }, "Configuration"))),
      h("div", { class: "grid" }, charts.map((key) => curvePanel(key, HELD_OUT[key] || "Mean reward", all))));
  },
});
