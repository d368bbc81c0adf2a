// The slider: another snapshot's figures in the same places, each drawn when it comes into view.
const slider = byId("step");
const steps = JSON.parse(slider.dataset.steps);
let snapshots, shown = steps.length - 1, pending = false;

// A curve stays as it is; a line says where the slider stands.
also = (figure) => {
  const x = figure.layout.xaxis.ticktext?.indexOf(String(steps[shown])) ?? -1;
  if (x < 0 || !byId(figure.id).closest(".curves")) return [];
  return [{ type: "line", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: ink, width: 1, dash: "dot" } }];
};

function go(place) {
  shown = place;
  slider.value = place;
  const step = steps[place], { figures: now, records } = snapshots[step];
  for (const output of all("output.step")) output.textContent = `step ${step}`;
  slider.setAttribute("aria-valuetext", `step ${step}`);
  for (const body of all("tbody[data-step]")) body.hidden = body.dataset.step !== String(step);
  content.records = records;
  for (const div of all(".plot:not(.curves .plot)")) {
    div.closest("figure").hidden = !(div.id in now);
    delete figures[div.id];
    if (div.id in now) figures[div.id] = now[div.id];
  }
  renew(Object.keys(figures));
  card();
}

function told() {
  const place = steps.indexOf(Number(state.step || NaN));
  return place < 0 ? shown : place; // a hash that names no step, or a link within the page, changes nothing
}

slider.addEventListener("input", () => {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    go(Number(slider.value));
    state.step = String(steps[shown]);
    write();
  });
});

started.then(async () => {
  snapshots = JSON.parse(await unpacked("steps"));
  slider.disabled = false;
  go(told());
  // Paper shows the last step, whole.
  let before = shown;
  toPaper = () => {
    before = shown;
    go(steps.length - 1);
  };
  toScreen = () => go(before);
  addEventListener("hashchange", () => {
    if (told() !== shown) go(told());
    if (shown < steps.length - 1) state.step = String(steps[shown]);
  });
  document.documentElement.dataset.steps = "yes";
});
