"use strict";
// Prompts are hostile text: strings in the data block were escaped for Plotly where it was written, and nothing here is
// ever read as HTML.
const content = JSON.parse(document.getElementById("data").textContent);
const CONFIG = { displayModeBar: false, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", responsive: true };

// As `coloured` does in figures.py.
function scatter(figure, colour) {
  const { columns, hover } = content.records[figure.record];
  return columns[colour].map(({ rows, ...trace }) => ({
    ...trace, x: rows.map((i) => figure.x[i]), y: rows.map((i) => figure.y[i]), hovertext: rows.map((i) => hover[i]),
  }));
}

function plot(figure, colour) {
  const layout = { template: content.template, ...structuredClone(figure.layout) };
  return Plotly.react(figure.id, figure.data || scatter(figure, colour), layout, CONFIG);
}

function unpacked(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function start() {
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
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
const started = start();
