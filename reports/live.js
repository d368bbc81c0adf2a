// A small transformer of a wind tunnel, run in double precision, and the exact answer of its task beside it.
const NEAR = 1.4e-4; // largest difference from PyTorch's log-probabilities, in bits, that rounding can explain

// ---- the model --------------------------------------------------------------------------------------------------------

const sum = (values) => values.reduce((a, b) => a + b, 0);
const plus = (a, b) => a.map((value, i) => value + b[i]);
const row = ({ size: [, width], f32 }, i) => Array.from(f32.subarray(i * width, (i + 1) * width));

function linear({ w: { size: [outs, ins], f32 }, b }, x) {
  return Array.from({ length: outs }, (_, o) => {
    let total = b ? b.f32[o] : 0;
    for (let i = 0; i < ins; i++) total += f32[o * ins + i] * x[i];
    return total;
  });
}

// LayerNorm, or RMSNorm where nothing is subtracted.
function norm({ centred, eps }, { w, b }, x) {
  const mean = centred ? sum(x) / x.length : 0;
  const scale = 1 / Math.sqrt(sum(x.map((v) => (v - mean) ** 2)) / x.length + eps);
  return x.map((v, i) => (v - mean) * scale * w.f32[i] + (b ? b.f32[i] : 0));
}

// The Maclaurin series; beyond 4 it is 1 to eight digits.
function erf(x) {
  if (Math.abs(x) > 4) return Math.sign(x);
  let term = x, total = x;
  for (let n = 1; Math.abs(term) > 1e-12 * Math.abs(total); n++) {
    term *= (-x * x) / n;
    total += term / (2 * n + 1);
  }
  return (2 / Math.sqrt(Math.PI)) * total;
}
const ACTIVATIONS = {
  gelu: (x) => (x / 2) * (1 + erf(x / Math.SQRT2)),
  gelu_new: (x) => (x / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  silu: (x) => x / (1 + Math.exp(-x)),
};

// One head's query or key at a position; rotary embedding turns the pairs (i, i + half).
function turned({ theta }, x, at) {
  if (!theta) return x;
  const half = x.length / 2;
  return x.map((value, i) => {
    const angle = at / theta ** ((i % half) / half), other = i < half ? -x[i + half] : x[i - half];
    return value * Math.cos(angle) + other * Math.sin(angle);
  });
}

function attention(shape, layer, inputs) {
  const { heads, kv, window } = shape;
  const projected = (role, count, turn) =>
    inputs.map((x, t) => {
      const all = linear(layer[role], x), dim = all.length / count;
      return Array.from({ length: count }, (_, h) => turn(all.slice(h * dim, (h + 1) * dim), t));
    });
  const turn = (x, t) => turned(shape, x, t);
  const query = projected("query", heads, turn), key = projected("key", kv, turn), value = projected("value", kv, (x) => x);
  return inputs.map((_, t) => {
    const mixed = query[t].flatMap((q, h) => {
      const of = Math.floor(h / (heads / kv)), from = window ? Math.max(0, t - window + 1) : 0;
      const places = Array.from({ length: t - from + 1 }, (_, i) => from + i);
      const scores = places.map((j) => sum(q.map((v, i) => v * key[j][of][i])) / Math.sqrt(q.length));
      const most = Math.max(...scores), weight = scores.map((s) => Math.exp(s - most)), total = sum(weight);
      return value[t][of].map((_, i) => sum(places.map((j, k) => weight[k] * value[j][of][i])) / total);
    });
    return linear(layer.output, mixed);
  });
}

function mlp({ act }, layer, x) {
  const up = linear(layer.up, x), gate = layer.gate ? linear(layer.gate, x) : null;
  return linear(layer.down, up.map((v, i) => (gate ? ACTIVATIONS[act](gate[i]) * v : ACTIVATIONS[act](v))));
}

// log-probabilities in nats of the token after each position, over the whole vocabulary.
function forward({ shape, embed, place, layers, final, head }, ids) {
  let x = ids.map((id, t) => (place ? plus(row(embed, id), row(place, t)) : row(embed, id)));
  for (const layer of layers) {
    const written = attention(shape, layer, x.map((v) => norm(shape, layer.first, v)));
    const between = x.map((v, t) => plus(v, written[t])), read = shape.parallel ? x : between;
    x = between.map((v, t) => plus(v, mlp(shape, layer, norm(shape, layer.second, read[t]))));
  }
  return x.map((v) => logSoftmax(linear(head, norm(shape, final, v))));
}

function logSoftmax(logits) {
  const most = Math.max(...logits), log = most + Math.log(sum(logits.map((v) => Math.exp(v - most))));
  return logits.map((v) => v - log);
}

// ---- the tasks --------------------------------------------------------------------------------------------------------

const range = (n, from = 0) => Array.from({ length: n }, (_, i) => from + i);
const shares = (weights) => weights.map((w) => w / sum(weights));

// begin: what every sequence starts with. exact: the probability of each outcome, asked at the last token of a sequence.
// inputs: which tokens may come where nothing is asked. word: a token in words.
const TASKS = {
  coin: {
    begin: [2],
    exact({ prior }, ids) {
      const [kind, numbers] = prior.split(":"), values = numbers.split(",").map(Number);
      const heads = ids.filter((id) => id === 0).length, tails = ids.filter((id) => id === 1).length;
      if (kind === "beta") return shares([values[0] + heads, values[1] + tails]);
      const weight = shares(values.map((p) => p ** heads * (1 - p) ** tails)), p = sum(values.map((v, i) => v * weight[i]));
      return [p, 1 - p];
    },
    inputs: () => [],
    word: (task, id) => ["heads", "tails", "start"][id],
  },
  bijection: {
    begin: [],
    exact({ vocab }, ids) {
      const key = ids.at(-1), shown = ids.filter((_, t) => t % 2).map((id) => id - vocab);
      const before = range(shown.length).find((i) => ids[2 * i] === key);
      return shares(range(vocab).map((v) => Number(before === undefined ? !shown.includes(v) : shown[before] === v)));
    },
    inputs: ({ vocab, replacement }, ids) => range(vocab).filter((key) => replacement || !ids.includes(key)),
    word: ({ vocab }, id) => (id < vocab ? `key ${id}` : `value ${id - vocab}`),
  },
  markov: {
    begin: [],
    exact({ symbols, fixed, stay }, ids) {
      const from = ids.at(-1);
      if (!fixed) return shares(range(symbols).map((to) => 1 + ids.filter((id, t) => t && id === to && ids[t - 1] === from).length));
      const apart = (to) => Math.min(Math.abs(to - from), symbols - Math.abs(to - from));
      const once = shares(range(symbols).map((to) => (to === from ? stay : 1 / apart(to))));
      return once.map((p, to) => (1 - stay) * p + (to === from ? stay : 0));
    },
    inputs: ({ symbols }) => range(symbols),
    word: (task, id) => `symbol ${id}`,
  },
};

// ---- the part of the page ---------------------------------------------------------------------------------------------

const bits = (p) => -sum(p.filter((v) => v > 0).map((v) => v * Math.log2(v)));
const divergence = (p, logQ) => sum(p.map((v, k) => (v > 0 ? v * (Math.log2(v) - logQ[k] / Math.LN2) : 0)));
let live;

// JSON in which an array is its size and the base64 of little-endian float32.
const restored = (text) => JSON.parse(text, (key, value) => {
  if (value?.f32) value.f32 = new Float32Array(Uint8Array.from(atob(value.f32), (c) => c.charCodeAt(0)).buffer);
  return value;
});

// At each query of a sequence: the exact answer, the model's probability of each outcome, entropies and KL in bits. As in
// `grade`, all that is no outcome counts as one.
function answered(ids) {
  const { task } = live, said = ids.length ? forward(live, ids) : [];
  return task.query.filter((t) => t < ids.length).map((t) => {
    const exact = TASKS[task.name].exact(task, ids.slice(0, t + 1)), own = task.outcomes.map((token) => said[t][token]);
    const model = own.map(Math.exp), rest = Math.max(0, 1 - sum(model));
    return { at: t, exact, model, entropy: bits(exact), own: bits([...model, rest]), kl: divergence(exact, own) };
  });
}

// What may come next, with the probability that it does: by the exact answer where one is asked, else all alike.
function next(ids) {
  const { task } = live, { exact, inputs } = TASKS[task.name];
  if (ids.length >= task.length) return [];
  if (!task.query.includes(ids.length - 1)) return shares(inputs(task, ids).map(() => 1)).map((p, i) => [inputs(task, ids)[i], p]);
  return exact(task, ids).map((p, k) => [task.outcomes[k], p]).filter(([, p]) => p > 0);
}

function drawn(ids) {
  let lot = Math.random();
  const options = next(ids);
  return (options.find(([, p]) => (lot -= p) < 0) || options.at(-1))[0];
}

const word = (id) => TASKS[live.task.name].word(live.task, id);
const percent = (p) => `${(100 * p).toFixed(1)} %`;

function set(ids) {
  live.ids = ids;
  const found = answered(ids), here = found.at(-1), { query, length, outcomes } = live.task, asked = here?.at === ids.length - 1;
  byId("live-sequence").replaceChildren(...ids.map((id) => element("span", {}, word(id))));
  const add = ([id]) => element("button", { type: "button", onclick: () => set([...live.ids, id]) }, word(id));
  byId("live-next").replaceChildren(...(ids.length < length ? next(ids).map(add) : ["The sequence is as long as the task's."]));
  for (const button of all("[data-live=draw], [data-live=fill]")) button.disabled = ids.length >= length;
  for (const button of all("[data-live=undo], [data-live=clear]")) button.disabled = ids.length <= TASKS[live.task.name].begin.length;
  byId("live-said").textContent = asked
    ? `Query ${found.length} of ${query.length}: ${here.entropy.toFixed(3)} bits of uncertainty, by the model ${here.own.toFixed(3)}; KL ${here.kl.toPrecision(3)} bits.`
    : "Nothing is asked here.";
  const bar = (name, p) => {
    const made = element("span", { className: `bar ${name}` });
    made.style.width = `${100 * p}%`;
    return made;
  };
  const line = (token, k) => element("tr", {},
    element("th", { scope: "row" }, word(token)), element("td", {}, percent(here.exact[k])), element("td", {}, percent(here.model[k])),
    element("td", {}, bar("exact", here.exact[k]), bar("ours", here.model[k])));
  byId("live-answers").tBodies[0].replaceChildren(...(asked ? outcomes.map(line) : []));
  trace(found);
}

// The same figure, of this sequence.
function trace(found) {
  const figure = figures["live-figure"], columns = ["entropy", "own", "kl"].map((name) => found.map((one) => one[name]));
  figure.data = figure.data.map((one, i) => ({ ...one, x: found.map((_, k) => k + 1), y: columns[i] }));
  figure.numbers = [figure.head, ...found.map((one, i) => [i + 1, ...columns.map((column) => String(Number(column[i].toPrecision(4))))])];
  figure.label = `Three curves over ${found.length} queries`;
  renew([figure.id]);
}

// The largest difference of what is computed here from what PyTorch and the task computed: log-probabilities in bits.
function apart({ ids, logits, exact }) {
  const log = forward(live, ids), theirs = ids.map((_, t) => logSoftmax(row(logits, t)));
  const model = Math.max(...log.flatMap((one, t) => one.map((v, k) => Math.abs(v - theirs[t][k])))) / Math.LN2;
  const tasks = answered(ids).flatMap((one, i) => one.exact.map((p, k) => Math.abs(p - row(exact, i)[k])));
  return [model, Math.max(...tasks)];
}

started.then(async () => {
  live = restored(await unpacked("live-data"));
  const figure = figures["live-figure"], [model, task] = apart(live.example);
  figure.head = [...byId(figure.id).closest("figure").querySelectorAll("thead th")].map((cell) => cell.textContent);
  figure.caption = byId(figure.id).closest("figure").querySelector("figcaption").textContent;
  const good = model < NEAR && task < NEAR;
  byId("live-checked").textContent =
    `${good ? "" : "⚠ Do not trust it in this browser. "}On one sequence the log-probabilities differ from PyTorch's by at ` +
    `most ${model.toExponential(1)} bits, the exact answer from the task's own by at most ${task.toExponential(1)}.`;
  const begin = TASKS[live.task.name].begin, DO = {
    draw: () => set([...live.ids, drawn(live.ids)]),
    fill: () => {
      const ids = [...live.ids];
      while (ids.length < live.task.length) ids.push(drawn(ids));
      set(ids);
    },
    undo: () => set(live.ids.slice(0, -1)),
    clear: () => set(begin),
  };
  for (const button of all("[data-live]")) button.addEventListener("click", DO[button.dataset.live]);
  set(live.example.ids);
  document.documentElement.dataset.live = "yes";
});
