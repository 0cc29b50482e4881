// Views by name, addresses, and the runs of this page.

const VIEWS = new Map();
const TITLE = document.title;
let RUNS = [];

/** Registers a view: title, section of the navigation (or `parent`, the view it lies under), `render(run, page, args)`. */
function view(name, definition) {
  VIEWS.set(name, definition);
}

/** The address of a view: `#/timeline/0/generator/12` is the gap before tick 12 in run 0. */
function link(name, ...parts) {
  return `#/${[name, ...parts].map((part) => encodeURIComponent(part)).join("/")}`;
}

function go(name, ...parts) {
  location.hash = link(name, ...parts);
}

function place() {
  const [name, number, ...args] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const known = VIEWS.has(name) ? name : RUNS.length > 1 ? "runs" : "summary", run = Number(number);
  return { name: known, run: RUNS[Number.isInteger(run) && run >= 0 && run < RUNS.length ? run : 0], args };
}
