// The page's blocks, opened when they are needed: inlined in a report, fetched from the same address while a run is watched.

const WATCHING = document.documentElement.dataset.watch === "1";
const opened = new Map();
let stamps = {}; // block name -> what it changes with, while watching

async function unpack(text) {
  const held = atob(text), bytes = new Uint8Array(held.length);
  for (let i = 0; i < held.length; i++) bytes[i] = held.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function packedText(name) {
  const element = document.getElementById(`block:${name}`);
  if (element) return element.textContent;
  if (!WATCHING) throw new Error(`this page holds no block ${name}`);
  const answer = await fetch(`block/${name}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`block ${name}: ${answer.status}`);
  return answer.text();
}

/** A block's values. */
function block(name) {
  const known = opened.get(name);
  if (known && known.stamp === stamps[name]) return known.value;
  const value = packedText(name).then(unpack).then(JSON.parse);
  opened.set(name, { stamp: stamps[name], value });
  value.catch(() => opened.delete(name));
  return value;
}

/** One run: `run.info` is there at once, everything else is opened by name. */
class Run {
  constructor(number, info) {
    this.number = number;
    this.info = info;
  }
  get name() { return this.info.name; }
  metrics() { return block(`${this.number}/metrics`); }
  timeline() { return block(`${this.number}/timeline`); }
  config() { return block(`${this.number}/config`); }
  async index() { return withIndex(await block(`${this.number}/index`)); }
  /** Text and tokens of the groups of a tick that the page carries. */
  async detail(tick) {
    const index = await this.index();
    return index.detailTicks.has(tick) ? block(`${this.number}/detail/${tick}`) : { groups: [] };
  }
  async group(tick, prompt) {
    return (await this.detail(tick)).groups.find((group) => group.prompt_index === prompt) || null;
  }
}

/** What is shown of a prompt: of a long one its beginning, without the digest that tells it from others. */
const promptOfKey = (key) => key.replace(/\0[0-9a-f]{12}$/, " …");

/** Adds to the index where each group begins, which group each response is of, and what is found by tick. */
function withIndex(index) {
  if (index.groupOf) return index;
  const { groups } = index, size = index.sample.length;
  index.groupOf = new Int32Array(size);
  index.first = new Int32Array(groups.tick.length);
  index.groupsOfTick = new Map();
  index.detailTicks = new Set();
  let at = 0;
  groups.tick.forEach((tick, number) => {
    index.first[number] = at;
    index.groupOf.fill(number, at, at + groups.size[number]);
    at += groups.size[number];
    if (!index.groupsOfTick.has(tick)) index.groupsOfTick.set(tick, []);
    index.groupsOfTick.get(tick).push(number);
    if (groups.detail[number]) index.detailTicks.add(tick);
  });
  index.ticks = [...index.groupsOfTick.keys()];
  index.rewardOf = (response) => (index.reward[response] === null ? null : index.tables.reward[index.reward[response]]);
  index.failureOf = (response) => index.tables.failure[index.failure[response]];
  index.finishOf = (response) => index.tables.finish[index.finish[response]];
  index.taskOf = (response) => index.tables.task[index.task[response]];
  index.tickOf = (response) => groups.tick[index.groupOf[response]];
  index.promptOf = (response) => groups.prompt[index.groupOf[response]];
  index.promptKey = (group) => index.tables.prompt_text[groups.text[group]];
  index.promptText = (group) => promptOfKey(index.promptKey(group));
  index.members = (group) => Array.from({ length: groups.size[group] }, (_, i) => index.first[group] + i);
  index.flagsOf = (response) => index.flag_names.filter((_, bit) => (index.flags[response] >> bit) & 1);
  return index;
}
