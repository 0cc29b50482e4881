// Responses: all of them with filters, those of a tick, a group side by side, one token by token.

const rolloutState = { from: "", to: "", outcome: "", low: "", high: "", shortest: "", longest: "", task: "", text: "", page: 0 };
const PAGE = 40;

view("rollouts", {
  title: "Rollouts", section: "Learning",
  async render(run, page) {
    const index = await run.index();
    page.append(h("h1", {}, "Rollouts"), h("p", { class: "lead" }, `${format.count(index.sample.length, "response")} of ${format.count(index.ticks.length, "tick")}${index.sample.length ? textShare(run.info) : ""}.`));
    if (!index.sample.length) { page.append(note("No response was written: nothing was sampled yet, or observability.rollouts was off.")); return; }
    if (index.unreadable) page.append(note(`${format.count(index.unreadable, "line")} could not be read and ${index.unreadable === 1 ? "is" : "are"} left out.`));
    const results = h("div", {}), state = rolloutState;
    if (!index.tables.task.includes(state.task)) state.task = ""; // chosen in another run
    const update = async () => { state.page = 0; await list(run, index, results); };
    const box = (label, key, props = {}) => labelled(label, h("input", { type: "number", value: state[key], ...props, onchange: (event) => { state[key] = event.target.value; update(); } }));
    const outcomes = [["", "any"], ["scored", "scored"], ["failed", "failed"], ["mixed", "in a group with a signal"], ["text", "with text here"], ...index.flag_names.map((name) => [name, FLAG_WORDS[name]])];
    page.append(
      h("form", { class: "controls", onsubmit: (event) => event.preventDefault(), role: "search" },
        box("From tick", "from", { min: 0 }), box("To tick", "to", { min: 0 }),
        labelled("Outcome", select(outcomes, state.outcome, (value) => { state.outcome = value; update(); })),
        box("Reward from", "low", { step: "any" }), box("to", "high", { step: "any" }),
        box("Tokens from", "shortest", { min: 0 }), box("to", "longest", { min: 0 }),
        index.tables.task.length > 1 && labelled("Task", select([["", "any"], ...index.tables.task.map((task) => [task, task])], state.task, (value) => { state.task = value; update(); })),
        labelled("Text in prompt or response", h("input", { type: "search", value: state.text, onchange: (event) => { state.text = event.target.value; update(); } })),
        h("button", { type: "button", onclick: () => { for (const key of Object.keys(state)) state[key] = key === "page" ? 0 : ""; go("rollouts", run.number); render(); } }, "Clear")),
      results);
    await list(run, index, results);
  },
});

const FLAG_WORDS = { repetition: "runs in circles", cut: "cut by length", script: "another script", empty: "empty" };

async function matching(run, index, state) {
  const number = (text) => (text === "" ? null : Number(text));
  const [from, to, low, high, shortest, longest] = [state.from, state.to, state.low, state.high, state.shortest, state.longest].map(number);
  const bit = index.flag_names.indexOf(state.outcome), mixed = state.outcome === "mixed" ? mixedGroups(index) : null;
  let found = [];
  for (let response = 0; response < index.sample.length; response++) {
    const tick = index.tickOf(response), reward = index.rewardOf(response);
    if ((from !== null && tick < from) || (to !== null && tick > to)) continue;
    if (low !== null && !(reward !== null && reward >= low)) continue;
    if (high !== null && !(reward !== null && reward <= high)) continue;
    if ((shortest !== null && index.length[response] < shortest) || (longest !== null && index.length[response] > longest)) continue;
    if (state.task && index.taskOf(response) !== state.task) continue;
    if (state.outcome === "scored" && reward === null) continue;
    if (state.outcome === "failed" && !index.failureOf(response)) continue;
    if (state.outcome === "text" && !index.groups.detail[index.groupOf[response]]) continue;
    if (mixed && !mixed.has(index.groupOf[response])) continue;
    if (bit >= 0 && !((index.flags[response] >> bit) & 1)) continue;
    found.push(response);
  }
  if (state.text) {
    const wanted = state.text.toLowerCase(), hits = new Set();
    for (const tick of new Set(found.map((response) => index.tickOf(response)).filter((tick) => index.detailTicks.has(tick)))) {
      for (const group of (await run.detail(tick)).groups) {
        const inPrompt = group.prompt.toLowerCase().includes(wanted);
        for (const sample of group.samples) if (inPrompt || sample.text.toLowerCase().includes(wanted)) hits.add(`${tick}/${group.prompt_index}/${sample.sample_index}`);
      }
    }
    found = found.filter((response) => hits.has(`${index.tickOf(response)}/${index.promptOf(response)}/${index.sample[response]}`));
  }
  return found;
}

function mixedGroups(index) {
  const found = new Set();
  index.groups.tick.forEach((_, group) => { if (new Set(index.members(group).map(index.rewardOf).filter((reward) => reward !== null)).size > 1) found.add(group); });
  return found;
}

async function list(run, index, into) {
  const state = rolloutState, found = await matching(run, index, state);
  const show = async () => {
    const rows = found.slice(state.page * PAGE, (state.page + 1) * PAGE);
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    const body = await responseTable(run, index, rows);
    into.replaceChildren(
      h("p", { id: "found", role: "status" }, h("b", {}, format.count(found.length, "response")), state.text ? ` hold “${state.text}”, among those whose text is on this page` : " match", "."),
      ...(found.length ? [h("div", { class: "grid", style: { marginBottom: "14px" } },
        panel("Rewards", histogram("Rewards of the responses found", found.map(index.rewardOf).filter((reward) => reward !== null), "reward")),
        panel("Lengths", histogram("Lengths of the responses found", found.map((response) => index.length[response]), "response tokens"))),
      h("section", { class: "panel" }, body, h("div", { class: "controls", style: { marginTop: "12px" } },
        h("button", { type: "button", disabled: state.page === 0, onclick: () => { state.page--; show(); } }, "← before"),
        h("span", {}, `${state.page + 1} of ${pages}`),
        h("button", { type: "button", disabled: state.page + 1 >= pages, onclick: () => { state.page++; show(); } }, "next →")))] : []));
  };
  await show();
}

function histogram(label, values, title) {
  return chart(`${label}: ${values.length} values, mean ${format.number(mean(values))}`, () => ({
    traces: [{ type: "histogram", x: values, nbinsx: 24, marker: { color: colour(0) }, hovertemplate: "%{x}: %{y}<extra></extra>" }],
    layout: { xaxis: { title }, yaxis: { title: "responses" }, bargap: 0.05 },
  }), { size: "short" });
}

async function responseTable(run, index, responses) {
  const texts = new Map();
  for (const tick of new Set(responses.map(index.tickOf))) {
    for (const group of (await run.detail(tick)).groups) for (const sample of group.samples) texts.set(`${tick}/${group.prompt_index}/${sample.sample_index}`, { text: sample.text, answer: group.answer });
  }
  const detailOf = (response) => texts.get(`${index.tickOf(response)}/${index.promptOf(response)}/${index.sample[response]}`);
  const textOf = (response) => detailOf(response)?.text, answerOf = (response) => detailOf(response)?.answer ?? null;
  const answers = responses.some((response) => answerOf(response) !== null);
  return table([
    { title: "tick", number: true, cell: (response) => h("a", { href: link("tick", run.number, index.tickOf(response)) }, index.tickOf(response)) },
    { title: "group", number: true, wide: true, cell: (response) => h("a", { href: groupLink(run, index, index.groupOf[response]) }, index.promptOf(response)) },
    { title: "prompt", text: true, wide: true, cell: (response) => oneLine(index.promptText(index.groupOf[response])) || "(empty)" },
    { title: "response", text: true, cell: (response) => h("a", { href: responseLink(run, index, response) }, textOf(response) === undefined ? `number ${index.sample[response]} (text not on this page)` : oneLine(textOf(response)) || "(empty)") },
    ...(answers ? [{ title: "expected", wide: true, cell: (response) => oneLine(String(answerOf(response) ?? "–")) }] : []),
    { title: "reward", number: true, cell: (response) => (index.failureOf(response) ? h("span", { class: "tag bad" }, "failed") : format.number(index.rewardOf(response))) },
    { title: "tokens", number: true, cell: (response) => index.length[response] },
    { title: "staleness", number: true, wide: true, cell: (response) => (index.oldest[response] < 0 ? "–" : index.oldest[response]) },
    { title: "signs", wide: true, cell: (response) => index.flagsOf(response).map((name) => h("span", { class: "tag bad" }, FLAG_WORDS[name])) },
  ], responses, { href: (response) => responseLink(run, index, response) });
}

const oneLine = (text) => `${text.slice(0, 120).replace(/\s+/g, " ").trim()}${text.length > 120 ? " …" : ""}`;
const groupLink = (run, index, group) => link("group", run.number, index.groups.tick[group], index.groups.prompt[group]);
const responseLink = (run, index, response) => link("response", run.number, index.tickOf(response), index.promptOf(response), index.sample[response]);

// One tick -------------------------------------------------------------------------------------------------------------

view("tick", {
  title: "Tick", parent: "rollouts",
  async render(run, page, args) {
    const tick = Number(args[0]), metrics = await run.metrics(), line = await run.timeline(), index = await run.index();
    const at = (metrics.columns.step || []).indexOf(tick), value = (key) => (metrics.columns[key] || [])[at];
    const last = Math.max(...(metrics.columns.step || [0]), ...index.ticks, 0);
    page.append(
      crumbs([["Timeline", link("timeline", run.number)], [`Tick ${tick}`]]),
      h("h1", {}, `Tick ${tick}`),
      h("div", { class: "controls" },
        h("a", { class: "button", href: link("tick", run.number, Math.max(0, tick - 1)) }, "← tick before"),
        h("a", { class: "button", href: link("tick", run.number, Math.min(last, tick + 1)) }, "next tick →")),
    );
    const judged = value("reward/mean") !== undefined; // a job that imitates judges nothing
    if (at >= 0) page.append(tiles(
      judged ? tile(format.number(value("reward/mean")), "mean reward") : tile(format.number(value("loss/policy"), 4), "training loss"), tile(format.number(value("entropy")), "entropy, nats a token"),
      judged && tile(format.number(value("response/length_mean")), "mean response length"), judged && tile(`${format.number(value("staleness/mean"))} / ${format.number(value("staleness/max"))}`, "staleness, mean / largest"),
      tile(format.seconds(value("time/step_s")), "this tick took"), judged && tile(`${format.number(value("groups/no_signal"))} of ${format.number(value("groups/generated"))}`, "groups without a signal")));
    else page.append(note("metrics.jsonl has no row of this tick."));
    const rows = line.lanes.map((lane) => ({ lane, i: lane.tick.indexOf(tick), gap: lane.gap_tick.indexOf(tick) })).filter((row) => row.i >= 0);
    if (rows.length) page.append(panel("What each executor did", table([
      { title: "executor", cell: ({ lane }) => lane.name },
      { title: "worked", number: true, cell: ({ lane, i }) => format.seconds(lane.length[i] / 1e3) },
      { title: "idle before", number: true, cell: ({ lane, gap }) => (gap < 0 ? "0" : h("a", { href: link("timeline", run.number, lane.name, tick) }, format.seconds(lane.gap_length[gap] / 1e3))) },
      { title: "waited for", cell: ({ lane, gap }) => (gap < 0 || !lane.gap_cause[gap] ? "–" : `${lane.gap_cause[gap]}, tick ${lane.gap_cause_tick[gap]}`) },
    ], rows)));
    page.append(await tickGroups(run, tick));
    if (at >= 0) page.append(h("details", { class: "panel" }, h("summary", {}, "All metrics of this tick"), table([
      { title: "key", cell: (key) => h("code", {}, breakable(key)) }, { title: "value", number: true, cell: (key) => format.number(value(key), 5) },
      { title: "unit", cell: (key) => metrics.units[key] || "" }, { title: "meaning", wide: true, cell: (key) => metrics.meanings[key] || "" },
    ], Object.keys(metrics.columns).filter((key) => value(key) !== null && value(key) !== undefined), { stack: true })));
  },
});

async function tickGroups(run, tick) {
  const index = await run.index(), groups = index.groupsOfTick.get(tick) || [];
  if (!groups.length && !run.info.totals.tokens_generated) return null; // nothing is sampled
  if (!groups.length) return panel("Groups", h("p", {}, "No responses of this tick were written (observability.rollouts)."));
  return panel(`${format.count(groups.length, "group")} of tick ${tick}`, table([
    { title: "group", number: true, cell: (group) => h("a", { href: groupLink(run, index, group) }, index.groups.prompt[group]) },
    { title: "prompt", text: true, cell: (group) => h("a", { href: groupLink(run, index, group) }, oneLine(index.promptText(group)) || "(empty)") },
    { title: "rewards", cell: (group) => dots(index, group) },
    { title: "mean", number: true, cell: (group) => format.number(mean(index.members(group).map(index.rewardOf).filter((reward) => reward !== null))) },
    { title: "text here", wide: true, cell: (group) => (index.groups.detail[group] ? "yes" : "no") },
  ], groups));
}

/** A dot a response: full for the group's best reward, hollow for its worst, a cross where it failed. */
function dots(index, group) {
  const rewards = index.members(group).map(index.rewardOf), known = rewards.filter((reward) => reward !== null);
  const low = Math.min(...known), high = Math.max(...known), shown = rewards.slice(0, 32);
  const words = `${known.map((reward) => format.number(reward)).join(", ")}${known.length < rewards.length ? `; ${rewards.length - known.length} failed` : ""}`;
  return h("span", { title: words, "aria-label": `rewards ${words}`, role: "img", class: "mono", style: { letterSpacing: "1px", whiteSpace: "nowrap" } },
    shown.map((reward) => (reward === null ? "×" : high === low ? (high > 0 ? "●" : "○") : reward === high ? "●" : reward === low ? "○" : "◐")).join(""), rewards.length > 32 ? "…" : "");
}

function crumbs(steps) {
  return h("div", { class: "crumbs" }, steps.map(([title, href]) => (href ? h("a", { href }, title) : h("span", {}, title))));
}

// One group ------------------------------------------------------------------------------------------------------------

view("group", {
  title: "Group", parent: "rollouts",
  async render(run, page, args) {
    const [tick, prompt] = args.map(Number), index = await run.index();
    const number = (index.groupsOfTick.get(tick) || []).find((group) => index.groups.prompt[group] === prompt);
    page.append(crumbs([["Timeline", link("timeline", run.number)], [`Tick ${tick}`, link("tick", run.number, tick)], [`Group ${prompt}`]]), h("h1", {}, `Group ${prompt} of tick ${tick}`));
    if (number === undefined) { page.append(note("No such group was written.")); return; }
    const around = index.groupsOfTick.get(tick), at = around.indexOf(number), members = index.members(number), group = await run.group(tick, prompt);
    const rewards = members.map(index.rewardOf), known = rewards.filter((reward) => reward !== null);
    page.append(
      h("div", { class: "controls" },
        at > 0 && h("a", { class: "button", href: groupLink(run, index, around[at - 1]) }, "← group before"),
        at + 1 < around.length && h("a", { class: "button", href: groupLink(run, index, around[at + 1]) }, "next group →"),
        h("a", { class: "button", href: link("prompts", run.number, index.groups.text[number]) }, "This prompt in other ticks")),
      tiles(tile(format.number(mean(known)), "mean reward, the baseline of a group mean"), tile(known.length ? `${format.number(Math.min(...known))} … ${format.number(Math.max(...known))}` : "–", "rewards"),
        tile(new Set(known).size > 1 ? "yes" : "no", "signal: rewards differ"), rewards.length > known.length && tile(rewards.length - known.length, "without a reward")),
      panel("Prompt", h("pre", { class: "text" }, group ? group.prompt : index.promptText(number)), facts([["Expected answer", group ? answerText(group.answer) : "not on this page"], ["Task", index.taskOf(members[0])]])),
    );
    if (!group) {
      page.append(note("The text of this group is not on this page, which carries a sample of the responses; the numbers are. ", h("code", {}, `${run.info.path}/rollouts/tick_${String(tick).padStart(6, "0")}.jsonl`), " holds it all."), panel("Responses", await responseTable(run, index, members)));
      return;
    }
    const advantages = group.samples.map((sample) => sample.advantage), largest = Math.max(...advantages.map((value) => Math.abs(value || 0)), 1e-9);
    page.append(h("div", { class: "group" }, group.samples.map((sample) => sampleCard(run, tick, prompt, sample, largest))));
    page.append(h("p", { class: "soft" }, advantages.some((value) => value !== null) ? "Advantages as they were trained." : "No advantages yet: the tick is still being trained, or nothing of this group was."));
  },
});

function sampleCard(run, tick, prompt, sample, largest) {
  const parts = Object.entries(sample.parts).map(([name, value]) => `${name} ${format.number(value)}`);
  return h("article", { class: "sample" },
    h("header", {},
      h("h3", {}, h("a", { href: link("response", run.number, tick, prompt, sample.sample_index) }, `Response ${sample.sample_index}`)),
      sample.failure ? h("span", { class: "tag bad" }, "failed") : h("span", { class: "value" }, format.number(sample.reward))),
    sample.advantage !== null ? advantageBar(sample.advantage, largest) : null,
    h("small", { class: "soft" }, [`${sample.logprobs.length} tokens`, finishWords(sample.finish), ...parts].join(" · ")),
    h("pre", { class: "text", tabindex: 0 }, sample.text || "(empty)"),
    sample.failure && h("small", { class: "tag bad" }, `${sample.failure.kind}: ${sample.failure.detail}`));
}

const answerText = (answer) => (answer === null || answer === undefined ? "the task has none" : answer === "" ? "(empty)" : h("span", { class: "mono" }, answer));
const finishWords = (finish) => ({ stop: "stopped by itself", length: "cut at the length limit" }[finish] || finish);

function advantageBar(advantage, largest) {
  const size = (Math.abs(advantage) / largest) * 50, side = advantage < 0 ? { right: "50%" } : { left: "50%" };
  return h("div", {}, h("div", { class: "advantage", "aria-hidden": "true" }, h("i", { style: { ...side, width: `${size}%`, background: advantage < 0 ? colour(1) : colour(0) } })),
    h("small", { class: "soft" }, `advantage ${advantage > 0 ? "+" : ""}${format.number(advantage)}`));
}
