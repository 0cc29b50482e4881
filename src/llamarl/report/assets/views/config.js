// Configuration, machine and versions, and what differs between the runs on this page.

const configState = { text: "", only: true };

view("config", {
  title: "Configuration", section: "Setup",
  async render(run, page) {
    const all = await Promise.all(RUNS.map((one) => one.config())), several = RUNS.length > 1;
    const { flats, keys, differs } = settingsOf(all);
    const body = h("section", { class: "panel" });
    const fill = () => {
      const shown = keys.filter((key) => (!several || !configState.only || differs(key)) && key.toLowerCase().includes(configState.text.toLowerCase()));
      body.replaceChildren(h("h3", {}, several ? "Settings side by side" : "Settings"), h("p", { role: "status" }, several ? `${format.count(keys.filter(differs).length, "key")} differ${keys.filter(differs).length === 1 ? "s" : ""}; ${shown.length} shown.` : `${shown.length} of ${format.count(keys.length, "key")}.`),
        table([
          { title: "key", cell: (key) => h("code", {}, breakable(key)) },
          { title: "value", cell: (key) => (differs(key) ? facts(RUNS.map((one, i) => [breakable(one.name), settingText(flats[i][key])])) : settingText(flats[0][key])) },
        ], shown, { rowClass: (key) => (several && !configState.only && differs(key) ? "differs" : null) }));
    };
    const { job } = all[run.number];
    page.append(
      h("h1", {}, "Configuration"), h("p", { class: "lead" }, several ? "Settings, machine and versions of the runs side by side." : "Every setting as it was resolved, the machine, and the versions. Give llamarl report two runs to see what differs."),
      h("div", { class: "controls" },
        labelled("Find a key", h("input", { type: "search", value: configState.text, oninput: (event) => { configState.text = event.target.value; fill(); } })),
        several && segments("Show", [["differences", "Differences"], ["all", "All keys"]], configState.only ? "differences" : "all", (value) => { configState.only = value === "differences"; fill(); })),
      body);
    if (job.executors) page.append(
      panel("Executors", table([
        { title: "name", cell: (lane) => lane.name }, { title: "does", cell: (lane) => lane.detail }, { title: "ranks", number: true, cell: (lane) => lane.num_ranks }, { title: "threads", number: true, cell: (lane) => lane.threads }, { title: "device", cell: (lane) => lane.device },
      ], job.executors, { stack: true })),
      panel("Channels", table([
        { title: "name", cell: (edge) => edge.name }, { title: "from", cell: (edge) => edge.source }, { title: "to", cell: (edge) => edge.sink }, { title: "delay, ticks", number: true, cell: (edge) => edge.delay }, { title: "capacity", number: true, cell: (edge) => edge.capacity ?? "–" }, { title: "transport", cell: (edge) => edge.transport.replace(/_/g, " ") || "–" }, { title: "a version, of a rank", number: true, cell: (edge) => format.bytes(edge.version_bytes) },
      ], job.channels || [], { stack: true })),
      panel("Said at the start", facts(Object.entries(job.facts || {}))));
    else page.append(note("This run has no job.json, so its machine, executors and channels are not known."));
    fill();
  },
});

/** Settings and machine of each run by dotted key, all keys, and whether the runs differ in one. */
function settingsOf(all) {
  const flats = all.map(({ config, job }) => ({ ...flatten(config), ...flatten({ machine: job.machine || {} }) }));
  const differs = (key) => new Set(flats.map((flat) => JSON.stringify(flat[key]))).size > 1;
  return { flats, keys: [...new Set(flats.flatMap(Object.keys))], differs };
}

function flatten(value, prefix = "") {
  const found = {};
  for (const [key, inner] of Object.entries(value || {})) {
    if (inner !== null && typeof inner === "object" && !Array.isArray(inner)) Object.assign(found, flatten(inner, `${prefix}${key}.`));
    else found[prefix + key] = inner;
  }
  return found;
}

function settingText(value, most = Infinity) {
  const text = value === undefined ? "–" : typeof value === "string" && value !== "" ? value : JSON.stringify(value);
  return h("span", { class: "mono" }, breakable(text.length > most ? `${text.slice(0, most)} …` : text));
}
