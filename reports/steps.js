// The slider: another snapshot's figures in the same places, each drawn when it comes into view.
const slider = document.getElementById("step");
const steps = JSON.parse(slider.dataset.steps);
const plots = [...document.querySelectorAll(".plot")];
const stale = new Set(), inView = new Set();
let snapshots, shown = steps.length - 1, waiting = false;

const cells = (row, tag, words) => row.append(...words.map((word) => Object.assign(document.createElement(tag), { textContent: word })));

function refresh(id) {
  if (!stale.delete(id)) return;
  const div = document.getElementById(id), box = div.closest("figure"), figure = figures[id];
  if (div.closest(".curves")) {
    // A curve stays as it is; a line says where the slider stands.
    const x = figure.layout.xaxis.ticktext.indexOf(String(steps[shown]));
    const line = { type: "line", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: "#1a1a1a", width: 1, dash: "dot" } };
    Plotly.relayout(id, { shapes: x < 0 ? [] : [line] });
    return;
  }
  plot(figure, box.querySelector("select")?.value);
  div.setAttribute("aria-label", figure.label);
  box.querySelector("figcaption").textContent = figure.caption;
  const [head, ...rows] = figure.numbers, table = box.querySelector("table");
  table.tHead.rows[0].replaceChildren();
  cells(table.tHead.rows[0], "th", head);
  table.tBodies[0].replaceChildren(...rows.map((row) => {
    const tr = document.createElement("tr");
    cells(tr, "td", row);
    return tr;
  }));
}

function show(place) {
  shown = place;
  slider.value = place;
  const step = steps[place], { figures: now, records } = snapshots[step];
  for (const output of document.querySelectorAll("output.step")) output.textContent = `step ${step}`;
  slider.setAttribute("aria-valuetext", `step ${step}`);
  for (const body of document.querySelectorAll("tbody[data-step]")) body.hidden = body.dataset.step !== String(step);
  content.records = records;
  for (const div of plots) {
    if (!div.closest(".curves")) {
      div.closest("figure").hidden = !(div.id in now);
      if (!(div.id in now)) continue;
      figures[div.id] = now[div.id];
    }
    stale.add(div.id);
    if (inView.has(div.id)) refresh(div.id);
  }
}

function told() {
  const asked = /[#&]step=(\d+)/.exec(location.hash);
  const place = asked ? steps.indexOf(Number(asked[1])) : -1;
  return place < 0 ? shown : place; // a hash that names no step, or a link within the page, changes nothing
}

slider.addEventListener("input", () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    show(Number(slider.value));
    history.replaceState(null, "", `#step=${steps[shown]}`);
  });
});
addEventListener("hashchange", () => snapshots && told() !== shown && show(told()));

// Paper shows the last step, whole; before page.js fits the figures to it.
let before = shown;
addEventListener("beforeprint", () => {
  before = shown;
  show(steps.length - 1);
  for (const id of [...stale]) refresh(id);
}, { capture: true });
addEventListener("afterprint", () => show(before));

started.then(async () => {
  snapshots = JSON.parse(await unpacked("steps"));
  const watch = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      inView[isIntersecting ? "add" : "delete"](target.id);
      if (isIntersecting) refresh(target.id);
    }
  }, { rootMargin: "300px" });
  for (const div of plots) watch.observe(div);
  slider.disabled = false;
  show(told());
  document.documentElement.dataset.steps = "yes";
});
