// The page: navigation, runs, theme, drawing the view that the address names, and looking for news while a run is watched.

const SECTIONS = ["", "Learning", "Time", "Setup"];
const NEWS_EVERY_MS = 3000;
let drawing = 0;

async function render({ keepScroll = false } = {}) {
  const mine = ++drawing, { name, run, args } = place(), definition = VIEWS.get(name), main = document.getElementById("main");
  showNavigation(name, run);
  const page = h("div", { data: { view: name, run: run.number } }), at = window.scrollY;
  try {
    await definition.render(run, { append: (...nodes) => page.append(...nodes.filter(Boolean)) }, args);
  } catch (error) {
    console.error(error);
    page.append(h("div", { class: "finding bad" }, h("h3", {}, "This view could not be drawn"), h("p", {}, String(error && error.message ? error.message : error))));
  }
  if (mine !== drawing) return; // another view was asked for meanwhile
  main.replaceChildren(page);
  document.title = `${definition.title} · ${run.name} · llamarl`;
  if (keepScroll) window.scrollTo(0, at);
  else if (!document.getElementById("gap-panel")) window.scrollTo(0, 0);
  page.dataset.ready = "1";
  performance.mark("llamarl:words");
}

function showNavigation(name, run) {
  const current = VIEWS.get(name).parent || name;
  const several = RUNS.length > 1, here = ([key, definition]) => key !== "runs" || several ? definition.section : null;
  document.getElementById("nav").replaceChildren(...SECTIONS.flatMap((section) => [
    section && h("h3", {}, section),
    ...[...VIEWS].filter((entry) => here(entry) === section).map(([key, definition]) => h("a", { href: link(key, run.number), "aria-current": key === current ? "page" : null }, definition.title)),
  ]), ...(several && current !== "runs" ? [h("h3", {}, "Run"), ...RUNS.map((one) => h("a", {
    class: "run", href: link(current, one.number), "aria-current": one === run ? "true" : null,
  }, swatch(one.number), breakable(one.name)))] : []));
  document.getElementById("runs").textContent = current === "runs" ? TITLE : run.name;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redrawAll();
}

function beginTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => { setTheme(isDark() ? "light" : "dark"); render({ keepScroll: true }); });
}

async function readRuns() {
  const numbers = WATCHING ? [...new Set(Object.keys(stamps).map((name) => name.split("/")[0]))].map(Number)
    : [...document.querySelectorAll('[id^="block:"][id$="/run"]')].map((element) => Number(element.id.slice(6).split("/")[0]));
  RUNS = await Promise.all(numbers.sort((a, b) => a - b).map(async (number) => new Run(number, await block(`${number}/run`))));
}

async function readNews() {
  const answer = await fetch("state", { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  const news = await answer.json(), changed = JSON.stringify(news.blocks) !== JSON.stringify(stamps);
  stamps = news.blocks;
  return changed;
}

function beginWatching() {
  const live = document.getElementById("live");
  live.hidden = false;
  live.textContent = "live";
  const busy = () => ["INPUT", "SELECT"].includes(document.activeElement && document.activeElement.tagName);
  let waiting = false;
  setInterval(async () => {
    try {
      waiting = (await readNews()) || waiting;
      live.dataset.state = "";
      live.textContent = RUNS.some((run) => run.info.status === "running") ? "live" : "run has ended";
      if (!waiting || busy()) return; // not under somebody's hands
      waiting = false;
      await readRuns();
      await render({ keepScroll: true });
    } catch (error) {
      live.dataset.state = "lost";
      live.textContent = error instanceof TypeError ? "llamarl watch has ended; this is how it stood" : error.message; // fetch found nobody
    }
  }, NEWS_EVERY_MS);
}

(async () => {
  beginTheme();
  if (WATCHING) await readNews();
  await readRuns();
  window.addEventListener("hashchange", () => render());
  await render();
  if (WATCHING) beginWatching();
  document.documentElement.dataset.ready = "1";
})();
