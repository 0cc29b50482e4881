// One response: its turns, and every token with what is recorded of it.

const tokenState = { by: "logprob" };

view("response", {
  title: "Response", parent: "rollouts",
  async render(run, page, args) {
    const [tick, prompt, number] = args.map(Number), group = await run.group(tick, prompt), index = await run.index();
    page.append(
      crumbs([["Timeline", link("timeline", run.number)], [`Tick ${tick}`, link("tick", run.number, tick)], [`Group ${prompt}`, link("group", run.number, tick, prompt)], [`Response ${number}`]]),
      h("h1", {}, `Response ${number}`));
    const sample = group && group.samples.find((one) => one.sample_index === number);
    if (!sample) { page.append(note("The text of this response is not on this page, which carries a sample of them. ", h("code", {}, `${run.info.path}/rollouts/tick_${String(tick).padStart(6, "0")}.jsonl`), " holds it.")); return; }
    const tokens = tokensOf(sample, tick), order = group.samples.map((one) => one.sample_index), at = order.indexOf(number);
    const go_to = (step) => link("response", run.number, tick, prompt, order[at + step]);
    page.append(
      h("div", { class: "controls" },
        at > 0 && h("a", { class: "button", href: go_to(-1) }, "← response before"), at + 1 < order.length && h("a", { class: "button", href: go_to(1) }, "next response →")),
      panel(null, facts([
        ["Reward", sample.failure ? h("span", { class: "tag bad" }, `failed, ${sample.failure.kind}: ${sample.failure.detail}`) : format.number(sample.reward)],
        ...Object.entries(sample.parts).map(([name, value]) => [name, format.number(value)]),
        ["Advantage", sample.advantage === null ? "none: without a reward, or in no optimizer step yet" : format.number(sample.advantage)],
        ["Expected answer", answerText(group.answer)],
        ["Ended", finishWords(sample.finish)],
        sample.turns.length && ["Turns", sample.turns.length],
        ["Tokens", `${tokens.length}, ${tokens.filter((token) => token.trained).length} of them trained; the prompt has ${group.prompt_tokens}`],
        sample.sampled_by ? ["Sampled by", `${sample.sampled_by}: another model than the policy, so its tokens have no age`] : ["Versions", sample.versions.filter(([version]) => version >= 0).map(([version, count]) => `${version} (${format.count(count, "token")})`).join(", ") || "none"],
        ["Metadata", Object.keys(group.metadata).length ? h("code", {}, JSON.stringify(group.metadata)) : null],
      ])),
    );
    const readout = h("div", { class: "panel", "aria-live": "polite", id: "token" }, h("span", { class: "soft" }, "Point at a token, or step through them with the arrow keys."));
    const area = h("div", {}), key = h("div", { class: "legend" });
    const paint = () => paintTokens(area, key, tokens);
    page.append(
      h("div", { class: "controls" }, segments("Colour tokens by", tokenChoices(tokens), tokenState.by, (value) => { tokenState.by = value; paint(); })),
      key, h("div", { class: "turn prompt" }, h("h3", {}, "Prompt"), h("pre", { class: "text whole" }, group.prompt)), area, readout);
    if (sample.turns.length) area.before(episodeTable(sample.turns));
    for (const turn of turnsOf(tokens, sample.turns)) area.append(turnElement(turn, tokens, readout));
    const last = sample.turns[sample.turns.length - 1];
    if (last && last.end === tokens.length && last.observation) area.append(h("div", { class: "turn environment" }, h("h3", {}, "Environment, at the end: never shown to the model"), h("pre", { class: "text" }, last.observation)));
    if (!sample.pieces) page.append(note("No tokenizer was found for this run, so tokens are shown by their numbers. The whole text: "), h("pre", { class: "text whole panel" }, sample.text));
    page.append(h("p", { class: "soft" }, tokens.some((token) => token.policy !== null)
      ? "Gap and ratio hold the trainer's log-probability, before the update that the token was part of, against the generator's when it was sampled."
      : sample.failure ? "It has no reward, so it was not trained, and the trainer has no log-probability of its tokens."
      : "What the trainer made of these tokens (its log-probability, hence gap and ratio, and clipping) is not recorded: the tick is still being trained, the response was in no optimizer step, it has no advantage and was not computed (trainer.skip_zero_advantage), or the run is of an earlier release. Means over every tick are among the curves."));
    paint();
  },
});

function tokensOf(sample, tick) {
  const texts = sample.pieces || sample.ids.map((id) => `⟨${id}⟩`), spread = (runs) => runs.flatMap(([value, count]) => Array(count).fill(value));
  const versions = spread(sample.versions), mask = spread(sample.mask), policy = sample.policy_logprobs || [], clipped = spread(sample.clipped || []);
  return texts.map((text, i) => ({
    text, number: i, logprob: sample.logprobs[i], version: versions[i], trained: mask[i] === 1 && !sample.failure, policy: policy[i] ?? null, clipped: clipped[i] === 1,
    staleness: versions[i] >= 0 && !sample.sampled_by ? tick - versions[i] : null,
    gap: policy[i] === null || policy[i] === undefined || sample.logprobs[i] === null ? null : policy[i] - sample.logprobs[i],
  }));
}

function tokenChoices(tokens) {
  const compared = tokens.some((token) => token.gap !== null);
  return [["logprob", "Log-prob"], ...(compared ? [["gap", "Gap"], ["ratio", "Ratio, clipped"]] : []), ["version", "Version"], ["mask", "Mask"], ["none", "Nothing"]];
}

/** Stretches that the policy wrote, and stretches that came from its environment (tools, users). `written`: the turns on record. */
function turnsOf(tokens, written) {
  const turns = [], starts = new Map(written.map((turn, i) => [turn.start, { ...turn, number: i + 1 }]));
  for (const token of tokens) {
    const who = token.version >= 0 ? "model" : "environment", begins = starts.get(token.number);
    if (!turns.length || turns[turns.length - 1].who !== who || begins) turns.push({ who, written: begins, tokens: [] });
    turns[turns.length - 1].tokens.push(token);
  }
  return turns;
}

/** Who said what, turn by turn; closed until somebody opens it. */
function episodeTable(turns) {
  const rewards = turns.map((turn) => format.number(turn.reward)).join(", ");
  return h("details", { class: "panel", id: "turns" }, h("summary", {}, `${format.count(turns.length, "turn")}, rewards ${rewards}`), table([
    { title: "Turn", number: true, cell: (turn) => turns.indexOf(turn) + 1 },
    { title: "Model", wide: true, cell: (turn) => h("pre", { class: "text" }, turn.reply) },
    { title: "Environment", wide: true, cell: (turn) => h("pre", { class: "text" }, turn.observation) },
    { title: "Reward", number: true, cell: (turn) => format.number(turn.reward) },
    { title: "Parts", cell: (turn) => Object.entries(turn.parts).map(([name, value]) => `${name} ${format.number(value)}`).join(", ") },
    { title: "Tokens", number: true, cell: (turn) => turn.end - turn.start },
    { title: "Ended", cell: (turn) => turn.finish },
  ], turns));
}

function turnTitle(turn) {
  if (turn.who !== "model") return "Environment or tool";
  return turn.written ? `Model, turn ${turn.written.number}: reward ${format.number(turn.written.reward)}, ${turn.written.finish}` : "Model";
}

function turnElement(turn, all, readout) {
  const show = (number) => {
    document.querySelectorAll(".tokens .current").forEach((element) => element.classList.remove("current"));
    const element = document.querySelector(`.tokens [data-token="${number}"]`);
    if (!element) return;
    element.classList.add("current");
    element.scrollIntoView({ block: "nearest" });
    readout.replaceChildren(tokenFacts(all[number]));
  };
  const area = h("div", {
    class: "tokens", tabindex: 0, role: "textbox", "aria-readonly": "true", "aria-multiline": "true", "aria-label": turn.who === "model" ? "Response, token by token: step with the arrow keys" : "From the environment",
    onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const current = document.querySelector(".tokens .current"), from = current ? Number(current.dataset.token) : turn.tokens[0].number - step;
      show(Math.max(0, Math.min(all.length - 1, from + step)));
    },
    onmouseover: (event) => { const { token } = event.target.dataset; if (token !== undefined) show(Number(token)); },
    onclick: (event) => { const { token } = event.target.dataset; if (token !== undefined) show(Number(token)); },
  }, turn.tokens.map((token) => h("span", { data: { token: token.number }, class: [token.trained ? "" : "masked", token.clipped ? "clipped" : ""].join(" ").trim() || null }, visible(token.text))));
  return h("div", { class: `turn ${turn.who}` }, h("h3", {}, turnTitle(turn)), area);
}

/** A token of white space alone must be seen too; one without text is part of a character. */
function visible(text) {
  if (text === "") return "·";
  return text.includes("\n") ? text.replace(/\n/g, "⏎\n") : text;
}

function tokenFacts(token) {
  return facts([
    ["Token", h("code", {}, `${token.number}: ${JSON.stringify(token.text)}`)],
    ["Log-prob", token.logprob === null ? "none: the policy did not write it" : `${token.logprob.toFixed(3)} nats (probability ${format.number(Math.exp(token.logprob))}), as it was sampled`],
    token.gap !== null && ["Gap", `${token.gap > 0 ? "+" : ""}${token.gap.toFixed(3)} nats: trainer ${token.policy.toFixed(3)}`],
    token.gap !== null && ["Ratio", `${format.number(Math.exp(token.gap))}${token.clipped ? ", clipped" : ""}`],
    ["Version", token.staleness === null ? "not written by the policy" : `${token.version}, staleness ${token.staleness}`],
    ["Mask", token.trained ? "trained" : "not trained"],
  ].filter(Boolean));
}

function paintTokens(area, key, tokens) {
  const by = tokenState.by, reach = Math.min(1, Math.max(0.05, ...tokens.map((token) => Math.abs(token.gap || 0)))), versions = [...new Set(tokens.map((token) => token.version))].sort((a, b) => a - b);
  const shade = (token) => {
    if (by === "logprob") return token.logprob === null ? "" : mix(colour(1), Math.min(1, -token.logprob / 3));
    if (by === "gap" || by === "ratio") return token.gap === null ? "" : mix(token.gap > 0 ? colour(0) : colour(1), Math.min(1, Math.abs(token.gap) / reach));
    if (by === "version") return token.version < 0 ? "" : mix(colour(versions.indexOf(token.version)), 0.45);
    if (by === "mask") return token.trained ? mix(colour(2), 0.4) : "";
    return "";
  };
  for (const element of area.querySelectorAll("[data-token]")) element.style.background = shade(tokens[Number(element.dataset.token)]);
  const ramp = (from, to) => h("i", { class: "ramp", style: { background: `linear-gradient(90deg, ${from}, ${to})` } });
  key.replaceChildren(...({
    logprob: ["sure (0 nats)", ramp("transparent", colour(1)), "surprised (−3 nats or less)"],
    gap: [`trainer less sure than generator (−${format.number(reach, 2)} nats)`, ramp(colour(1), "transparent"), ramp("transparent", colour(0)), `surer (+${format.number(reach, 2)})`],
    ratio: [`ratio ${format.number(Math.exp(-reach), 2)}`, ramp(colour(1), "transparent"), "1", ramp("transparent", colour(0)), `${format.number(Math.exp(reach), 2)}; clipped tokens are underlined`],
    version: versions.filter((version) => version >= 0).map((version) => h("span", {}, dot({ color: mix(colour(versions.indexOf(version)), 0.45) }), `version ${version}`)),
    mask: [dot({ color: mix(colour(2), 0.4) }), "trained; the others are shown faint"],
    none: [],
  }[by] || []));
}

function mix(shade, part) {
  return `color-mix(in srgb, ${shade} ${Math.round(part * 75)}%, transparent)`;
}
