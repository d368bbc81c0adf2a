"use strict";
// Prompts are hostile text: strings that Plotly reads were escaped for it where the data block was written, and nothing
// here is ever read as HTML.
const byId = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const content = JSON.parse(byId("data").textContent);
const figures = Object.fromEntries(content.figures.map((figure) => [figure.id, figure]));
const CONFIG = { displayModeBar: false, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", responsive: true };
const NEAREST = 5, PLACES = "section, article, h2, figure, .fold, .plot";
const dark = matchMedia("(prefers-color-scheme: dark)").matches, ink = dark ? "#e8e8e8" : "#1a1a1a";
if (dark) {
  const { layout } = content.template, paper = "#16181c", grid = "#43474d";
  Object.assign(layout, { paper_bgcolor: paper, plot_bgcolor: paper, font: { ...layout.font, color: ink } });
  for (const axis of [layout.xaxis, layout.yaxis]) Object.assign(axis, { gridcolor: grid, linecolor: "#8a8f96" });
  layout.hoverlabel = { ...layout.hoverlabel, bgcolor: paper, font: { ...layout.hoverlabel.font, color: ink } };
}

function element(tag, given = {}, ...inside) {
  const { data = {}, ...props } = given;
  const made = Object.assign(document.createElement(tag), props);
  Object.assign(made.dataset, data);
  made.append(...inside);
  return made;
}

// ---- what is shown, and how it stands in the address ----------------------------------------------------------------

// layer: null is each record's last. at: the figure in which the prompt was pointed at. s: the section gone to.
// attend: LAYER.HEAD of the attention that the panel shows, HEAD "mean" for the mean over heads; empty as at first.
const state = { s: "", layer: null, hide: new Set(), colour: "", record: 0, prompt: -1, pinned: false, at: "", step: "", attend: "" };
const domains = all("input[data-domain]").map((input) => input.dataset.domain);

// `visit` makes an entry of the history, so that Back returns.
function write(visit = false) {
  const { s, layer, hide, colour, record, prompt, pinned, step, attend } = state;
  const told = {
    s, layer: layer ?? "", hide: [...hide].map(encodeURIComponent).join(), colour: encodeURIComponent(colour),
    prompt: pinned ? `${record}.${prompt}` : "", step, attend: pinned ? attend : "",
  };
  const parts = Object.entries(told).filter(([, value]) => value !== "").map((pair) => pair.join("="));
  const hash = parts.length ? `#${parts.join("&")}` : "";
  if (hash !== location.hash) history[visit ? "pushState" : "replaceState"](null, "", hash || "#");
}

// What the address does not say, or says of something that is not there, is as at first.
function read() {
  const raw = location.hash.slice(1), asked = {};
  for (const part of raw.split("&")) {
    const [key, value = ""] = part.split("=");
    try {
      asked[key] = value.split(",").map(decodeURIComponent);
    } catch { /* no address of ours */ }
  }
  const [word] = asked.s || [raw], slider = byId("layer"), layer = Number.parseInt(asked.layer?.[0]);
  const [, record, prompt] = /^(\d+)\.(\d+)$/.exec(asked.prompt?.[0]) || [];
  Object.assign(state, {
    s: byId(word)?.matches(PLACES) ? word : "", at: word in figures ? word : "",
    layer: slider && layer >= 0 && layer < slider.max ? layer : null,
    hide: new Set(domains.filter((domain) => asked.hide?.includes(domain))),
    colour: content.records.some(({ columns }) => Object.hasOwn(columns, asked.colour?.[0] ?? "")) ? asked.colour[0] : "",
    pinned: false, prompt: -1, step: asked.step?.[0] ?? "", attend: asked.attend?.[0] ?? "",
  });
  if (content.records[record]?.rows[prompt]) Object.assign(state, { record: +record, prompt: +prompt, pinned: true });
}

// ---- figures ----------------------------------------------------------------------------------------------------------

const layerOf = (n) => Math.min(state.layer ?? n - 1, n - 1);
const places = (figure) => (figure.layers ? figure.layers[layerOf(figure.layers.length)] : figure);
const hidden = (record, i) => record.domain >= 0 && state.hide.has(record.rows[i][record.domain]);
const chosen = (record) => state.prompt >= 0 && content.records[record]?.of === content.records[state.record].of;

// As `coloured` does in figures.py, without what is hidden.
function scatter(figure) {
  const record = content.records[figure.record], { x, y } = places(figure), { columns, hover } = record;
  return columns[Object.hasOwn(columns, state.colour) ? state.colour : figure.colour].map(({ rows: every, ...trace }) => {
    const kept = [...every.keys()].filter((k) => !hidden(record, every[k])), rows = kept.map((k) => every[k]);
    const { color } = trace.marker;
    trace.marker = { ...trace.marker, line: { ...trace.marker.line, color: ink } }; // a dark dot is seen on a dark page
    if (kept.length < every.length && Array.isArray(color)) {
      // The same entropy keeps its colour.
      const range = { cmin: Math.min(...color), cmax: Math.max(...color) };
      trace.marker = { ...trace.marker, ...range, color: kept.map((k) => color[k]) };
    }
    const pick = (values) => rows.map((i) => values[i]);
    return { ...trace, x: pick(x), y: pick(y), hovertext: pick(hover), customdata: rows };
  });
}

let also = () => []; // the marks of another script
function marks(figure) {
  const shapes = [...(figure.layout.shapes ?? []), ...also(figure)], thin = { color: ink, width: 1.5, dash: "dot" };
  if (figure.layer === "x" && state.layer !== null) {
    const lines = figure.data.filter(({ hoverinfo }) => hoverinfo === "text").map((line) => line.x);
    const along = lines.reduce((a, b) => (b.length > a.length ? b : a)), x = along[layerOf(along.length)];
    shapes.push({ type: "line", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: thin });
  } else if (figure.layer === "y" && state.layer !== null) {
    const y = layerOf(figure.data[0].z.length);
    shapes.push({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: y - 0.5, y1: y + 0.5, line: { color: "#fff", width: 2 } });
  } else if ("record" in figure && chosen(figure.record) && !hidden(content.records[figure.record], state.prompt)) {
    const { x, y } = places(figure), at = { xanchor: x[state.prompt], yanchor: y[state.prompt] };
    for (const [r, line] of [[11, { color: "#fff", width: 6 }], [11, { color: "#D55E00", width: 3 }]])
      shapes.push({ type: "circle", xsizemode: "pixel", ysizemode: "pixel", x0: -r, x1: r, y0: -r, y1: r, ...at, line });
  }
  return shapes;
}

// Plotly is unpacked when the first figure comes into view.
let unpacking;
const library = () => (unpacking ??= unpacked("plotly").then((source) => {
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
}));
function plot(figure) {
  if (!window.Plotly) return library().then(() => plot(figure));
  const div = byId(figure.id), first = !div.classList.contains("js-plotly-plot");
  if (first) div.textContent = "";
  const layout = { template: content.template, ...structuredClone(figure.layout), shapes: marks(figure) };
  const done = Plotly.react(div, figure.data || scatter(figure), layout, CONFIG);
  if (first && "record" in figure) listen(div);
  describe(figure, div.closest("figure"));
  return done;
}

// What is said of a figure whose numbers change: of another step, or another layer.
function describe(figure, box) {
  if (figure.numbers) {
    byId(figure.id).setAttribute("aria-label", figure.label);
    box.querySelector("figcaption").textContent = figure.caption;
  }
  let rows = figure.numbers?.slice(1);
  const output = box.querySelector(".shown output");
  if (figure.layers && output) {
    const last = figure.layers.length - 1, layer = layerOf(last + 1), { x, y } = places(figure);
    output.textContent = `layer ${layer}${layer === last ? ", the last" : "; metrics are of the last"}`;
    const short = (value) => String(Number(value.toPrecision(4))), before = Number(box.dataset.layer ?? last);
    if (layer !== last ? rows || before !== layer : !rows && before !== layer) rows = x.map((value, i) => [i, short(value), short(y[i])]);
    box.dataset.layer = layer;
  }
  if (!rows) return;
  const { tHead, tBodies: [body] } = box.querySelector("table");
  if (figure.numbers) tHead.rows[0].replaceChildren(...figure.numbers[0].map((word) => element("th", { scope: "col" }, word)));
  body.replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, String(cell))))));
}

// Only what is on the screen is drawn again; the rest when it comes there.
const stale = new Set(), inView = new Set();
function refresh(id) {
  if (stale.delete(id)) plot(figures[id]);
}
function renew(ids) {
  for (const id of ids) {
    stale.add(id);
    if (inView.has(id)) refresh(id);
  }
}
const scatters = () => Object.keys(figures).filter((id) => "record" in figures[id]);

// ---- one prompt, everywhere -------------------------------------------------------------------------------------------

function choose(record, prompt, pinned, at = state.at) {
  Object.assign(state, { record, prompt, pinned, at });
  dots();
  for (const id of scatters())
    if (!stale.has(id) && inView.has(id)) Plotly.relayout(id, { shapes: marks(figures[id]) });
    else stale.add(id);
  card();
  write();
}
const clear = () => choose(0, -1, false);

// The small multiples of the first screen: each dot is a prompt.
const dotted = all("circle[data-prompt]");
const planeOf = (r) => scatters().find((id) => id.endsWith("value_manifold--scores") && figures[id].record === r) ?? "";
function dots() {
  for (const dot of dotted)
    dot.classList.toggle("chosen", chosen(+dot.dataset.record) && +dot.dataset.prompt === state.prompt);
}
for (const [name, pins] of [["mouseover", false], ["click", true]])
  document.addEventListener(name, ({ target, clientX }) => {
    const { record, prompt } = target.dataset ?? {};
    if (!target.matches?.("[data-prompt]") || (state.pinned && !pins)) return;
    byId("panel").classList.toggle("left", clientX > innerWidth / 2); // not over what is pointed at
    choose(+record, +prompt, pins && !(state.pinned && chosen(+record) && state.prompt === +prompt), planeOf(+record));
  });

function listen(div) {
  const record = () => figures[div.id].record;
  div.on("plotly_hover", ({ points: [{ customdata }] }) => state.pinned || choose(record(), customdata, false, div.id));
  div.on("plotly_click", ({ points: [{ customdata: i }] }) => choose(record(), i, !(state.pinned && chosen(record()) && state.prompt === i), div.id));
  steered(div, record, () => places(figures[div.id]), div.id);
}

// The arrow keys go through the prompts of a figure by what it draws along each axis, Enter pins.
function steered(node, record, drawn, at) {
  node.addEventListener("keydown", (event) => {
    const way = { ArrowRight: ["x", 1], ArrowLeft: ["x", -1], ArrowUp: ["y", 1], ArrowDown: ["y", -1] }[event.key];
    const { rows } = content.records[record()], here = chosen(record()) ? state.prompt : -1;
    if (way) {
      const values = drawn()[way[0]];
      const order = [...rows.keys()].filter((i) => !hidden(content.records[record()], i)).sort((a, b) => values[a] - values[b] || a - b);
      const next = here < 0 ? (way[1] > 0 ? 0 : order.length - 1) : Math.max(0, Math.min(order.length - 1, order.indexOf(here) + way[1]));
      if (order.length) choose(record(), order[next], state.pinned, at);
    } else if ((event.key === "Enter" || event.key === " ") && here >= 0) choose(record(), here, !state.pinned, at);
    else return;
    event.preventDefault();
  });
}
for (const plane of all(".panels svg[tabindex]")) {
  const circles = all("circle[data-prompt]", plane), x = circles.map((dot) => +dot.getAttribute("cx")), y = circles.map((dot) => -dot.getAttribute("cy"));
  steered(plane, () => +circles[0].dataset.record, () => ({ x, y }), planeOf(+circles[0].dataset.record));
}

const ending = (text) => (text.length > 26 ? `…${text.slice(-25)}` : text);
function nearest() {
  const of = content.records[state.record].of, fits = (id) => id in figures && content.records[figures[id].record]?.of === of;
  const id = [state.at, ...scatters()].find(fits);
  if (!id) return [];
  const { x, y } = places(figures[id]), i = state.prompt, record = content.records[figures[id].record];
  const far = (j) => Math.hypot(x[j] - x[i], y[j] - y[i]);
  const found = [...x.keys()].filter((j) => j !== i && !hidden(record, j)).sort((a, b) => far(a) - far(b) || a - b);
  const go = (j) => element("button", { type: "button", onclick: () => choose(state.record, j, true) }, `${j}`);
  const list = found.slice(0, NEAREST).map((j) => element("li", { title: record.rows[j][0] }, go(j), " ", ending(record.rows[j][0])));
  const last = figures[id].layers?.length - 1, here = layerOf(last + 1), layer = here < last ? `, but at layer ${here}` : "";
  return [element("h4", {}, "Nearest prompts"), element("p", { className: "where" }, `by distance in the figure “${figures[id].name}”${layer}`), element("ol", { className: "nearest" }, ...list)];
}

function likely({ next, label, head, rows }, several) {
  const i = state.prompt, h = head.indexOf("entropy [bits]");
  const table = (next[i] || []).map(([piece, p]) => {
    const bar = element("span", { className: "bar" });
    bar.style.width = `${(100 * p).toFixed(1)}%`;
    return element("tr", {}, element("th", { scope: "row" }, piece.replace(/^ /, "·")), element("td", {}, bar), element("td", {}, `${(100 * p).toFixed(1)} %`));
  });
  const said = element("p", {}, `${several ? `${label}: ` : ""}entropy ${h < 0 ? "not recorded" : `${Number(Number(rows[i][h]).toPrecision(3))} bits`}`);
  return table.length ? [said, element("table", { className: "next" }, element("caption", {}, "likeliest next tokens (· a space)"), element("tbody", {}, ...table))] : [said];
}

// Attention of the last token over the prompt, by layer and head: a token is as dark as its share of the largest weight.
function attended({ attention, pieces, label }, several) {
  const layers = attention[state.prompt] ?? [], words = pieces[state.prompt] ?? [];
  if (!layers.length || !words.length) return [];
  const weights = layers.map((layer) => Uint8Array.from(atob(layer), (c) => c.charCodeAt(0)));
  const heads = weights[0].length / words.length, told = state.attend.split(".");
  const list = (name, options, at) => {
    const select = element("select", { onchange: paint }, ...options.map((value) => element("option", { value }, `${value}`)));
    select.value = options.map(String).includes(at) ? at : `${options[0]}`;
    return [select, element("label", {}, `${name} `, select)];
  };
  const [layer, layerLabel] = list("layer", [...layers.keys()].reverse(), told[0]);
  const [head, headLabel] = list("head", ["mean", ...Array(heads).keys()], told[1]);
  const line = element("p", { className: "attended" }), most = element("p", { className: "where" });
  function paint(event) {
    const of = weights[layer.value], n = words.length;
    const share = words.map((_, i) => {
      const column = head.value === "mean" ? [...Array(heads).keys()].map((h) => of[h * n + i]) : [of[head.value * n + i]];
      return column.reduce((a, b) => a + b) / column.length / 255;
    });
    line.style.setProperty("--most", Math.max(...share, 0.001)); // the token with most weight has the full colour
    line.replaceChildren(...words.map((word, i) => {
      const piece = element("span", { title: `${(100 * share[i]).toFixed(1)} %` }, word);
      piece.style.setProperty("--weight", `${Math.round(100 * share[i])}%`);
      return piece;
    }));
    const order = [...share.keys()].sort((a, b) => share[b] - share[a] || a - b).slice(0, 3);
    most.textContent = `most on ${order.map((i) => `“${words[i].trim() || words[i]}” (token ${i}) ${(100 * share[i]).toFixed(0)} %`).join(", ")}`;
    if (!event) return;
    state.attend = `${layer.value}.${head.value}`;
    write();
  }
  paint();
  return [element("h4", {}, `Attention of the last token${several ? `, ${label}` : ""}`), element("p", { className: "controls" }, layerLabel, headLabel), line, most];
}

function card() {
  const { record: r, prompt: i, pinned } = state, record = content.records[r];
  for (const row of all("tr[aria-current]")) row.removeAttribute("aria-current");
  byId("panel").classList.toggle("open", i >= 0);
  byId("said").textContent = i < 0 ? "" : `prompt ${i}${pinned ? ", pinned" : ""}`;
  if (i < 0) return byId("card").replaceChildren();
  content.records.forEach((one, k) => chosen(k) && rowsOf[k]?.[i]?.setAttribute("aria-current", "true"));
  const pieces = (record.pieces[i] || [record.rows[i][0]]).map((piece, k) => element("span", { className: record.bos && !k ? "special" : "" }, piece));
  const button = (text, does) => element("button", { type: "button", onclick: does }, text);
  const facts = record.head.flatMap((name, k) => (k && record.rows[i][k] ? [element("dt", {}, name), element("dd", {}, record.rows[i][k])] : []));
  const same = content.records.filter((one, k) => chosen(k));
  byId("card").replaceChildren(
    element("p", {}, button(pinned ? "unpin" : "pin", () => choose(r, i, !pinned)), " ", button("clear", clear)),
    element("p", { className: "pieces" }, ...pieces),
    ...same.flatMap((one) => likely(one, same.length > 1)),
    ...same.flatMap((one) => attended(one, same.length > 1)),
    ...nearest(),
    element("dl", {}, ...facts),
  );
}

// ---- controls ---------------------------------------------------------------------------------------------------------

// The rows of each record's table by prompt, whatever order they are in.
const rowsOf = content.records.map((_, r) => all(`#record-${r}-prompts tbody tr`));
function sift() {
  rowsOf.forEach((rows, r) => {
    const input = document.querySelector(`input[data-table="record-${r}-prompts"]`), wanted = input?.value.toLowerCase();
    rows.forEach((row, i) => (row.hidden = hidden(content.records[r], i) || !row.textContent.toLowerCase().includes(wanted)));
    if (input) byId(`record-${r}-prompts-count`).textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} prompts`;
    const stop = rows.find((row) => row.tabIndex === 0);
    if (!stop?.hidden) return;
    stop.tabIndex = -1;
    (rows.find((row) => !row.hidden) ?? stop).tabIndex = 0;
  });
}

// Everything as the state says; `what` has to be drawn again.
function show(what = Object.keys(figures)) {
  const slider = byId("layer"), layer = state.layer === null ? "last" : `${state.layer}`;
  if (slider) {
    slider.value = state.layer ?? slider.max;
    slider.setAttribute("aria-valuetext", state.layer === null ? "last layer" : `layer ${layer}`);
    byId("layer-said").textContent = layer;
  }
  for (const input of all("input[data-domain]")) input.checked = !state.hide.has(input.dataset.domain);
  for (const select of all("select[data-figure]"))
    if ([...select.options].some(({ value }) => value === state.colour)) select.value = state.colour;
  sift();
  renew(what);
  card();
  dots();
}

// Go to a place of the page: whatever is folded around it or is it opens.
function arrive(id, above = byId(id)) {
  const inside = above.querySelector(":scope > details.fold");
  if (inside) inside.open = true;
  for (let place = above; place; place = place.parentElement) if (place.matches("details")) place.open = true;
  (above.closest("figure") ?? above).scrollIntoView(); // a figure with the buttons above it
}

let waiting = false;
byId("layer")?.addEventListener("input", ({ target }) => {
  state.layer = +target.value < +target.max ? +target.value : null;
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    show(Object.keys(figures).filter((id) => figures[id].layers || figures[id].layer));
    write();
  });
});
for (const input of all("input[data-domain]"))
  input.addEventListener("change", () => {
    state.hide[input.checked ? "delete" : "add"](input.dataset.domain);
    show(scatters());
    write();
  });
for (const select of all("select[data-figure]"))
  select.addEventListener("change", () => {
    state.colour = select.value;
    show(scatters());
    write();
  });
for (const input of all("input[data-table]")) input.addEventListener("input", sift);
addEventListener("keydown", (event) => event.key === "Escape" && state.prompt >= 0 && clear());
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#']");
  if (!link) return;
  event.preventDefault(); // the address holds more than where one is
  state.s = link.hash.slice(1);
  arrive(state.s);
  write(true);
});
byId("copy").addEventListener("click", async () => {
  if (state.pinned && state.at) state.s = state.at; // the link opens at its figure
  write();
  const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  byId("copied").textContent = copied ? "copied" : location.href;
});

for (const button of all(".prompts th button, .sortable th button"))
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const cell = (row) => row.cells[head.cellIndex].textContent;
    const order = "number" in head.dataset ? (a, b) => parseFloat(cell(a)) - parseFloat(cell(b)) : (a, b) => (cell(a) < cell(b) ? -1 : cell(a) > cell(b));
    const body = head.closest("table").tBodies[0];
    body.append(...[...body.rows].sort((a, b) => (down ? -order(a, b) : order(a, b))));
  });
// A table of prompts is one stop of the Tab key, and the arrow keys go through its rows.
rowsOf.forEach((rows, r) => {
  const body = rows[0]?.parentNode;
  if (!body) return;
  rows[0].tabIndex = 0; // where it is hidden, `sift` finds another
  body.addEventListener("click", ({ target }) => choose(r, rows.indexOf(target.closest("tr")), true));
  body.addEventListener("keydown", (event) => {
    const shown = [...body.rows].filter((row) => !row.hidden), here = event.target.closest("tr");
    const to = shown[shown.indexOf(here) + { ArrowDown: 1, ArrowUp: -1, Enter: 0 }[event.key]];
    if (!to) return;
    event.preventDefault();
    [here.tabIndex, to.tabIndex] = to === here ? [0, 0] : [-1, 0];
    to.focus();
    choose(r, rows.indexOf(to), event.key === "Enter" || state.pinned);
  });
});

// ---- saving, without a blob -------------------------------------------------------------------------------------------

// A cell that a spreadsheet would take for a formula is made text.
const quoted = (cell) => `"${(/^[=+\-@\t\r]/.test(cell) && Number.isNaN(Number(cell)) ? `'${cell}` : cell).replaceAll('"', '""')}"`;
function numbers(figure) {
  const rows = [...byId(figure.id).closest("figure").querySelector("table").rows].map((row) => [...row.cells].map((cell) => cell.textContent));
  const of = content.records[figure.record];
  return of ? rows.map((row, i) => [...row, ...(i ? of.rows[i - 1] : of.head)]) : rows;
}
const SAVED = {
  svg: (figure, size) => Plotly.toImage(figure.id, { format: "svg", ...size }),
  png: async (figure, { width, height }) => {
    const image = new Image(), canvas = element("canvas", { width: 2 * width, height: 2 * height });
    image.src = await SAVED.svg(figure, { width, height });
    await image.decode();
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    return canvas.toDataURL("image/png");
  },
  csv: (figure) => `data:text/csv;charset=utf-8,${encodeURIComponent(numbers(figure).map((row) => row.map(quoted).join()).join("\r\n"))}`,
  json: (figure) => {
    const [columns, ...rows] = numbers(figure), { data, layout } = byId(figure.id), { id, name } = figure;
    const caption = byId(id).closest("figure").querySelector("figcaption").textContent;
    return `data:application/json;charset=utf-8,${encodeURIComponent(JSON.stringify({ id, name, caption, columns, rows, data, layout }))}`;
  },
};
for (const button of all("button[data-save]"))
  button.addEventListener("click", async () => {
    const { figure, save } = button.dataset, { width, height } = byId(figure).getBoundingClientRect();
    const size = { width: Math.round(width), height: Math.round(height) };
    element("a", { href: await SAVED[save](figures[figure], size), download: `${figure}.${save}` }).click();
  });

// ---- paper ------------------------------------------------------------------------------------------------------------

// It has no clicks and another width: open what is folded, fit the figures, say what is shown, and put all back after.
let folded = [], toPaper = () => {}, toScreen = () => {}; // the last two: what another script has to do first
const resize = (width) => all(".js-plotly-plot").forEach((div) => Plotly.relayout(div, { width, autosize: !width }));
addEventListener("beforeprint", () => {
  toPaper();
  folded = all("details:not([open])");
  for (const details of folded) details.open = true;
  [...stale].forEach(refresh);
  const told = [`layer ${state.layer ?? "last of each record"}`, ...[...state.hide].map((domain) => `without ${domain}`)];
  if (state.prompt >= 0) told.push(`prompt ${state.prompt} of ${content.records[state.record].label} marked`);
  document.querySelector(".printed").textContent = `Shown in the figures: ${told.join("; ")}. ${location.hash}`;
  resize(680);
});
addEventListener("afterprint", () => {
  toScreen();
  for (const details of folded) details.open = false;
  resize(null);
});

// ---- start ------------------------------------------------------------------------------------------------------------

const unpacked = (id) => {
  const packed = Uint8Array.from(atob(byId(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Response(packed).body.pipeThrough(new DecompressionStream("gzip"))).text();
};
async function start() {
  const more = JSON.parse(await unpacked("more"));
  more.records.forEach((one, r) => Object.assign(content.records[r], one));
  for (const [id, layers] of Object.entries(more.layers)) figures[id].layers = layers;
  read();
  Object.keys(figures).forEach((id) => stale.add(id));
  const watch = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      inView[isIntersecting ? "add" : "delete"](target.id);
      if (isIntersecting && target.id in figures) refresh(target.id);
    }
    byId("panel").classList.toggle("near", scatters().some((id) => inView.has(id)));
  }, { rootMargin: "300px" });
  for (const div of all(".plot")) watch.observe(div);
  // Above the figures that it stands next to, the panel floats.
  const loose = document.querySelector(".loose"); // no figure is of prompts: it floats always
  const aside = ([{ isIntersecting }]) => byId("panel").classList.toggle("floating", !isIntersecting || loose !== null);
  new IntersectionObserver(aside, { rootMargin: "0px 0px -40% 0px" }).observe(document.querySelector(".linked"));
  show([]);
  if (state.s) arrive(state.s);
  addEventListener("hashchange", () => {
    read();
    show();
    if (state.s) arrive(state.s);
  });
  setTimeout(library, 1500); // by then whatever was in view is drawn; printing needs it
  document.documentElement.dataset.ready = "yes";
}
const started = start();
