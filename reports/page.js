"use strict";
// Prompts are hostile text: strings in the data block were escaped for Plotly where it was written, and nothing here is
// ever read as HTML.
const content = JSON.parse(document.getElementById("data").textContent);
// The eighth stands for all categories beyond seven.
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#9a9a9a"];
const SHAPES = ["circle", "square", "diamond", "cross", "triangle-up", "x", "star", "circle-open"];
const CONFIG = { displayModeBar: false, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", responsive: true };
const FONT = { family: "system-ui, sans-serif", size: 14, color: "#1a1a1a" };
const AXIS = {
  automargin: true, zeroline: false, showline: true, gridcolor: "#e4e4e4", linecolor: "#767676", ticks: "outside",
  exponentformat: "power", title: { standoff: 10, font: { size: 15 } },
};
const TEMPLATE = {
  layout: {
    height: 420, margin: { l: 70, r: 24, t: 16, b: 60 }, xaxis: AXIS, yaxis: AXIS, hovermode: "closest",
    font: FONT, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    hoverlabel: { align: "left", bgcolor: "#fff", bordercolor: "#1a1a1a", font: FONT },
  },
  data: { heatmap: [{ colorscale: "Cividis" }] },
};

function scatter(figure, colour) {
  const { columns, hover } = content.records[figure.record];
  const column = columns[colour];
  const trace = (keep, marker, name) => ({
    x: figure.x.filter(keep), y: figure.y.filter(keep), mode: "markers", name, hoverinfo: "text",
    hovertext: figure.x.map((_, i) => (column ? hover[i] : `${i}`)).filter(keep),
    marker: { size: 9, line: { width: 0.75, color: "#1a1a1a" }, ...marker },
  });
  if (!column) return [trace(() => true, { color: COLOURS[0] })];
  if (!column.names) {
    const colorbar = { title: { text: column.title, side: "top", font: FONT } };
    return [trace(() => true, { color: column.values, colorscale: "Cividis", colorbar })];
  }
  return column.names.map((name, code) =>
    trace((_, i) => column.values[i] === code, { color: COLOURS[code], symbol: SHAPES[code] }, name));
}

function plot(figure, colour) {
  const side = { x: 1.02, y: 1, yanchor: "top", orientation: "v" };
  const data = figure.data || scatter(figure, colour);
  const layout = { template: TEMPLATE, ...structuredClone(figure.layout) };
  if (!figure.data) Object.assign(layout, { legend: side, showlegend: data.length > 1 || Boolean(data[0].name) });
  return Plotly.react(figure.id, data, layout, CONFIG);
}

async function start() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  for (const figure of content.figures) {
    document.getElementById(figure.id).textContent = "";
    await plot(figure, figure.colour);
    await new Promise((done) => setTimeout(done));
  }
  document.documentElement.dataset.ready = "yes";
}

const figures = Object.fromEntries(content.figures.map((figure) => [figure.id, figure]));
for (const select of document.querySelectorAll("select[data-figure]"))
  select.addEventListener("change", () => plot(figures[select.dataset.figure], select.value));
for (const button of document.querySelectorAll("button[data-save]"))
  button.addEventListener("click", () => {
    const { figure, save } = button.dataset;
    const { width, height } = document.getElementById(figure).getBoundingClientRect();
    Plotly.downloadImage(figure, { format: save, filename: figure, width, height, scale: save === "png" ? 2 : 1 });
  });

for (const input of document.querySelectorAll("input[data-table]")) {
  const rows = [...document.getElementById(input.dataset.table).tBodies[0].rows];
  const count = document.getElementById(`${input.dataset.table}-count`);
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} prompts`;
  });
}
for (const button of document.querySelectorAll(".prompts th button"))
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const cell = (row) => row.cells[head.cellIndex].textContent;
    const order = "number" in head.dataset ? (a, b) => cell(a) - cell(b) : (a, b) => (cell(a) < cell(b) ? -1 : cell(a) > cell(b));
    const body = head.closest("table").tBodies[0];
    body.append(...[...body.rows].sort((a, b) => (down ? -order(a, b) : order(a, b))));
  });

// Paper has no clicks and another width: open what is folded, fit the figures, and put all back afterwards.
let folded = [];
const resize = (width) => document.querySelectorAll(".js-plotly-plot").forEach((div) => Plotly.relayout(div, { width, autosize: !width }));
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const details of folded) details.open = true;
  resize(680);
});
addEventListener("afterprint", () => {
  for (const details of folded) details.open = false;
  resize(null);
});
start();
