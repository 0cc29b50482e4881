// Charts are Plotly's, whose script the page holds packed and opens with the first chart. Here: colours, defaults, redrawing.

// Okabe and Ito's palette, told apart with any colour vision; the second set is the same for a dark ground.
const PALETTE = {
  light: ["#0072b2", "#d55e00", "#009e73", "#aa4499", "#b08500", "#3f4d5a", "#56b4e9"],
  dark: ["#56b4e9", "#f09550", "#3ec79a", "#d99ac8", "#e6c145", "#b5c0ca", "#8fd0f5"],
};
const DASHES = ["solid", "dash", "dot"]; // where there are more runs than colours
let plotting = null;
const drawn = new Map(); // element -> function that draws it again

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function colour(number) {
  const palette = PALETTE[isDark() ? "dark" : "light"];
  return palette[number % palette.length];
}

/** How a run's lines are drawn. */
function stroke(number) {
  return { color: colour(number), dash: DASHES[Math.floor(number / PALETTE.light.length) % DASHES.length] };
}

function swatch(number) {
  return dot(stroke(number));
}

/** A line's or a bar's colour, as a legend shows it. */
function dot({ color, dash = "solid" }) {
  return h("i", { class: "dot", style: dash === "solid" ? { background: color } : { border: `2px ${dash === "dash" ? "dashed" : "dotted"} ${color}` } });
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function plotly() {
  plotting = plotting || (async () => {
    const code = WATCHING ? await (await fetch("charts.js")).text() : await unpack(document.getElementById("block:charts").textContent);
    await new Promise((painted) => requestAnimationFrame(() => setTimeout(painted, 0))); // words first: compiling takes a while
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
    return window.Plotly;
  })();
  return plotting;
}

/** Plotly reads a few tags in its texts: names from a run must not become any. */
function escapeMarkup(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function layoutOf(own) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true, fixedrange: true, exponentformat: "e", minexponent: 5, separatethousands: true, tickfont: { size: 12 }, title: { font: { size: 12 }, standoff: 6 } };
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 13, color: css("--soft") },
    margin: { l: 46, r: 10, t: 8, b: 36 }, hovermode: "x unified", dragmode: false,
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--ink"), size: 13 } },
    barmode: "stack", bargap: 0.12, ...own, showlegend: false,
  };
  layout.xaxis = { ...axis, ...(own.xaxis || {}) };
  layout.yaxis = { ...axis, rangemode: "tozero", ...(own.yaxis || {}) };
  for (const key of ["xaxis", "yaxis"]) if (typeof layout[key].title === "string") layout[key].title = { text: layout[key].title, font: { size: 12 }, standoff: 6 };
  return layout;
}

/**
 * A chart. `make()` returns {traces, layout}, and is called again when the colours change.
 * `label` is what a reader without eyes is told; `onpoint(point)` makes points answer a click. A legend, where the
 * layout asks for one, stands below as text of the page, so that it takes no room from the chart.
 */
function chart(label, make, { size = "", onpoint } = {}) {
  const element = h("div", { class: `chart ${size}`, role: "img", "aria-label": label });
  const names = h("div", { class: "legend" });
  let shown = false;
  const draw = async () => {
    const Plotly = await plotly();
    if (!element.isConnected) return;
    const { traces, layout } = make();
    await Plotly.react(element, traces.map((trace) => ({ ...trace, name: escapeMarkup(trace.name || "") })), layoutOf(layout || {}), { displayModeBar: false, responsive: true });
    if (onpoint && !shown) element.on("plotly_click", (event) => onpoint(event.points[0]));
    if (!shown) element.after(names);
    shown = true;
    names.replaceChildren(...(layout && layout.showlegend ? traces.filter((trace) => trace.name)
      .map((trace) => h("span", {}, dot({ color: trace.line ? trace.line.color : trace.marker.color, dash: trace.line && trace.line.dash }), trace.name)) : []));
    element.dataset.drawn = "1";
    performance.mark("llamarl:chart");
  };
  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    drawn.set(element, draw);
    draw();
  }, { rootMargin: "160px" });
  seen.observe(element);
  element.redraw = () => (shown ? draw() : null);
  return element;
}

function redrawAll() {
  for (const [element, draw] of drawn) {
    if (element.isConnected) draw();
    else drawn.delete(element);
  }
}

/** Exponential moving average with the start's bias taken out; gaps stay gaps. */
function smooth(values, weight) {
  if (!weight) return values;
  let total = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    total = weight * total + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return total / norm;
  });
}
