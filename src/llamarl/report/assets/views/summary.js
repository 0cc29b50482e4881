// The first view: does the run learn, and if not, what looks wrong.

view("summary", {
  title: "Summary", section: "",
  async render(run, page) {
    const { info } = run, { totals } = info;
    const metrics = await run.metrics(), { job } = await run.config(), steps = metrics.columns.step || [];
    const samples = totals.tokens_generated > 0, rate = totals.tokens_generated / totals.wall_s, held = HELD_OUT[totals.held_out];
    const busiest = Object.entries(totals.idle).sort((a, b) => a[1] - b[1])[0];
    page.append(
      h("h1", {}, info.name),
      h("p", { class: "lead" }, statusWords(info), info.facts.model ? ` ${info.facts.algorithm} trains ${info.facts.model} on ${info.facts.task}.` : ""),
      ...findingCards(run),
      tiles(
        totals.last_held_out !== null && tile(arrow(totals.first_held_out, totals.last_held_out), `${held.toLowerCase()}, first to last`),
        totals.first_reward !== null && tile(arrow(totals.first_reward, totals.last_reward), "mean reward, first to last tick"),
        samples && tile(format.number(rate), "tokens generated a second"),
        steps.length && tile(format.seconds(totals.wall_s), "time up"),
        samples && totals.staleness_mean !== null && tile(`${format.number(totals.staleness_mean)} / ${totals.staleness_max}`, "staleness, mean / largest"),
        busiest && tile(format.share(busiest[1]), `idle: ${busiest[0]}, the busiest`),
      ),
      h("div", { class: "grid" }, [[totals.held_out, held], ["reward/mean", "Mean reward"], ...(samples ? [] : [IMITATION])]
        .map(([key, title]) => metrics.columns[key] && curvePanel(key, title, [metrics], [run]))),
      await lastSamples(run),
      h("div", { class: "grid" },
        job.facts && panel("Setup", facts(SETUP.map((name) => [name, job.facts[name]]))),
        panel("What is recorded", facts([
          ["Folder", info.path],
          ["Ticks", info.num_ticks ? `${info.ticks} of ${info.num_ticks}` : `${info.ticks}`],
          ["Responses", info.responses ? `${format.number(info.responses)}${textShare(info)}` : "none"],
          ...info.missing.map((text) => ["Missing", text]),
        ]))));
  },
});

const SETUP = ["model", "task", "batch", "learning rate", "algorithm", "evaluation", "staleness"];

/** What the policy wrote last: the best and the worst response to a prompt. */
async function lastSamples(run) {
  const tick = run.info.last_tick_with_text;
  if (tick === null) return null;
  const { groups } = await block(`${run.number}/detail/${tick}`), value = (sample) => (sample.failure ? -Infinity : sample.reward);
  const group = groups.find(({ samples }) => new Set(samples.map(value)).size > 1) || groups[0];
  const ordered = [...group.samples].sort((a, b) => value(b) - value(a)), shown = new Set([ordered[0], ordered[ordered.length - 1]]);
  return panel(h("a", { href: link("group", run.number, tick, group.prompt_index) }, `What the policy wrote in tick ${tick}`),
    h("pre", { class: "text" }, group.prompt), facts([["Expected answer", answerText(group.answer)]]),
    h("div", { class: "group" }, [...shown].map((sample) => sampleCard(run, tick, group.prompt_index, sample, Math.abs(sample.advantage) || 1))));
}

function textShare(info) {
  if (info.responses_with_text === info.responses) return ", all of them with text and tokens on this page";
  return `; this page carries text and tokens of ${format.number(info.responses_with_text)}, sampled in whole groups over all ticks. Counts, filters and charts cover every one`;
}

function statusWords(info) {
  const ticks = info.num_ticks ? `${format.number(info.ticks)} of ${format.count(info.num_ticks, "tick")}` : format.count(info.ticks, "tick");
  if (!info.ticks) return info.status === "running" ? "Running; no tick is done yet." : "No tick was done.";
  if (info.status === "running") return `Running, ${ticks} done.`;
  if (info.status === "done") return `Done, ${format.count(info.ticks, "tick")}.`;
  return info.status === "stopped" ? `Stopped after ${ticks}.` : `${format.count(info.ticks, "tick")}.`;
}

function arrow(first, last, show = format.number) {
  if (first === null || first === undefined) return "–";
  return `${show(first)} → ${show(last)}`;
}

function findingCards(run) {
  const { info } = run;
  const worse = info.got_worse && h("article", { class: "finding bad" }, h("h3", {}, sentence(info.got_worse)), h("div", { class: "actions" },
    h("a", { class: "button", href: link("curves", run.number) }, "See the curves")));
  if (!info.findings.length && worse) return [worse];
  if (!info.findings.length) {
    if (!info.ticks) return [];
    const short = info.ticks < info.window;
    return [h("article", { class: "finding good" }, h("h3", {}, "Nothing looks wrong"),
      h("p", {}, !info.totals.tokens_generated ? "Looked at: held-out loss, skipped updates, idle time." : short
        ? `Looked at with ${format.count(info.ticks, "tick")}: failed and constant rewards, cut, repeated and empty responses, groups without a signal, mismatch. Rules on trends need ${info.window} ticks.`
        : "Looked at: failed and constant rewards, groups without a signal, cut, repeated and empty responses, mismatch between policy and data, entropy, skipped updates, idle time."))];
  }
  return [worse, ...info.findings.map((finding) => h("article", { class: `finding ${finding.level}` },
    h("h3", {}, finding.title),
    h("p", {}, sentence(finding.text)),
    h("div", { class: "actions" },
      h("a", { class: "button", href: link(finding.view, run.number, ...(FINDING_TARGETS[finding.kind] || [])) }, FINDING_WORDS[finding.view] || "Look"),
      h("a", { class: "button", href: link("tick", run.number, finding.first_tick) }, `Tick ${finding.first_tick}, where it was seen first`),
      finding.level === "bad" && !finding.now && h("span", { class: "tag" }, "over by the last ticks"))))];
}

const FINDING_WORDS = { failures: "See the failures", rollouts: "See responses beside the expected answers", garbage: "See such responses", curves: "See the curves", ledger: "See where the tokens went", timeline: "See the timeline" };
const FINDING_TARGETS = { mostly_cut: ["cut"], repetition: ["repetition"], script: ["script"], empty: ["empty"] };

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
