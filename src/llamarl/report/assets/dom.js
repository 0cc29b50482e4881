// Elements and numbers. Text from a run only ever becomes a text node or an attribute: markup in it is inert.

/** An element. `props`: attributes; `on…` are listeners; `data` a dataset; `style` an object. Children: nodes or text. */
function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return element;
}

const format = {
  /** At most `digits` significant digits, thousands apart, "–" for nothing. */
  number(value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(0, digits - 1));
    return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
  },
  share(value) {
    if (value === null || value === undefined) return "–";
    const percent = value * 100;
    return `${percent !== 0 && Math.abs(percent) < 10 ? percent.toFixed(1) : percent.toFixed(0)}\u202f%`;
  },
  seconds(value) {
    if (value === null || value === undefined) return "–";
    if (value < 1e-3) return `${format.number(value * 1e6)}\u202fµs`;
    if (value < 1) return `${format.number(value * 1e3)}\u202fms`;
    if (value < 120) return `${format.number(value)}\u202fs`;
    return value < 7200 ? `${format.number(value / 60)}\u202fmin` : `${format.number(value / 3600)}\u202fh`;
  },
  bytes(value) {
    if (value === null || value === undefined) return "–";
    for (const [scale, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (value >= scale) return `${format.number(value / scale)}\u202f${unit}`;
    return `${format.number(value)}\u202fB`;
  },
  count(number, one, many = `${one}s`) {
    return `${format.number(number)} ${number === 1 ? one : many}`;
  },
};

/** A panel with a heading. */
function panel(title, ...children) {
  return h("section", { class: "panel" }, title && h("h3", {}, title), ...children);
}

function tile(value, label, title) {
  return h("div", { class: "tile", title }, h("b", {}, value), h("span", {}, label));
}

function tiles(...items) {
  return h("div", { class: "tiles" }, items.filter(Boolean));
}

/**
 * A table. `columns`: [{title, words?, number?, text?, wide?, cell(row)}], `words` where the title is an element;
 * `wide` ones are left out on a narrow screen. `stack` puts the cells of a row below each other there. `href(row)`: where a click beside the links of a row leads.
 */
function table(columns, rows, { rowClass, href, stack = false } = {}) {
  const kind = (column) => [column.number && "number", column.text && "text", column.wide && "wide"].filter(Boolean).join(" ") || null;
  return h("table", { class: stack && "stack" },
    h("thead", {}, h("tr", {}, columns.map((column) => h("th", { class: kind(column), scope: "col" }, column.title)))),
    h("tbody", {}, rows.map((row) => h("tr", {
      class: rowClass && rowClass(row),
      ...(href && { onclick: (event) => { if (!event.target.closest("a, button") && !String(window.getSelection())) location.hash = href(row).replace(/^#/, ""); }, style: { cursor: "pointer" } }),
    },
      columns.map((column) => h("td", { class: kind(column), data: { title: column.words || column.title } }, h("div", {}, column.cell(row))))))));
}

/** A name or a value in one piece where it fits, else broken after a dot, a dash or a slash, and anywhere if a piece is long. */
function breakable(text) {
  const pieces = text.split(/(?<=[._/-])(?!\d)/);
  return h("span", { class: pieces.every((piece) => piece.length <= 16) ? "whole" : "long" }, pieces.flatMap((piece) => [piece, h("wbr")]));
}

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter((pair) => pair && pair[1] !== undefined && pair[1] !== null && pair[1] !== "")
    .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** Buttons of which one is pressed. `options`: [[value, label]]. */
function segments(label, options, chosen, onchange) {
  const buttons = options.map(([value, text]) => h("button", {
    type: "button", "aria-pressed": String(value === chosen), data: { value },
    onclick: (event) => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      onchange(value);
    },
  }, text));
  return h("div", { class: "field" }, h("span", { class: "soft", style: { fontSize: "13px" } }, label),
    h("div", { class: "segments", role: "group", "aria-label": label }, buttons));
}

function labelled(label, control) {
  return h("label", {}, h("span", { class: "soft", style: { fontSize: "13px" } }, label), control);
}

function select(options, chosen, onchange) {
  return h("select", { onchange: (event) => onchange(event.target.value) },
    options.map(([value, label]) => h("option", { value, selected: String(value) === String(chosen) }, label)));
}

function note(...children) {
  return h("div", { class: "note" }, ...children);
}

const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);

function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
