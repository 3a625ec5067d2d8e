// A curve by step as SVG: a thin line for what was measured, a bold one for its running mean.
const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 52, right: 10, top: 10, bottom: 40 };
const TICK = { across: 60, up: 38 }; // least distance of ticks (pixels)

export const short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))} k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
};

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough * (1 - 1e-9)) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + step * 1e-6; i++) found.push(i * step);
  const digits = clamp(-Math.floor(Math.log10(step) + 1e-9), 0, 20);
  const plain = high < 1e4 && digits <= 4;
  return found.map((t) => [t, plain ? t.toFixed(digits) : short(Number(t.toPrecision(6)))]);
}

function logTicks(low, high) {
  const found = [];
  for (const marks of [[1], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    found.length = 0;
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
      for (const m of marks) if (m * 10 ** p >= low && m * 10 ** p <= high) found.push(m * 10 ** p);
    if (found.length >= 3) break;
  }
  return (found.length >= 2 ? found : [low, high]).map((t) => [t, short(Number(t.toPrecision(3)))]);
}

// Groups of neighbours, so that there is about one per pixel: mean step, mean, least and greatest value.
function groups(points, most) {
  const size = Math.ceil(points.length / most);
  const found = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size);
    const values = part.map((p) => p[1]);
    const mean = (list) => list.reduce((sum, v) => sum + v, 0) / list.length;
    found.push({ step: mean(part.map((p) => p[0])), mean: mean(values), low: Math.min(...values), high: Math.max(...values) });
  }
  return { found, size };
}

function runningMean(values, reach) {
  const sums = [0];
  for (const v of values) sums.push(sums.at(-1) + v);
  return values.map((_, i) => {
    const from = Math.max(0, i - reach), to = Math.min(values.length, i + reach + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

function range(values, logarithmic) {
  let low = Infinity, high = -Infinity;
  for (const v of values) { low = Math.min(low, v); high = Math.max(high, v); }
  if (logarithmic) return [low / 1.08, high * 1.08];
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low < 0.5 * high ? 0 : low - pad, high + pad];
}

// Draw `points`, pairs of (step, value) by step, into `chart`. `tell` is given the words for the pointed or last step.
export function draw(chart, points, { logarithmic, tell, show }) {
  const width = Math.max(240, chart.clientWidth), height = width < 560 ? 220 : 300;
  const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.setAttribute("height", height);

  const [low, high] = range(points.map((p) => p[1]), logarithmic);
  const last = points.at(-1)[0], first = points[0][0] <= 0.05 * last ? 0 : points[0][0];
  const scale = logarithmic ? Math.log : (v) => v;
  const x = (step) => MARGIN.left + ((step - first) / (last - first || 1)) * (right - MARGIN.left);
  const y = (value) => bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (bottom - MARGIN.top);

  const parts = [];
  for (const [t, label] of logarithmic ? logTicks(low, high) : ticks(low, high, (bottom - MARGIN.top) / TICK.up)) {
    parts.push(shape("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(t), y2: y(t) }));
    parts.push(shape("text", { class: "y", x: MARGIN.left - 8, y: y(t) + 4, "text-anchor": "end" }, label));
  }
  parts.push(shape("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }));
  for (const [t, label] of last > first ? ticks(first, last, (right - MARGIN.left) / TICK.across) : [[last, String(last)]]) {
    if (!Number.isInteger(Number(t.toPrecision(12)))) continue;
    const anchor = x(t) > right - 14 ? "end" : "middle";
    parts.push(shape("text", { class: "x", x: x(t), y: bottom + 17, "text-anchor": anchor }, label));
  }
  parts.push(shape("text", { class: "name", x: (MARGIN.left + right) / 2, y: height - 4, "text-anchor": "middle" }, "step"));

  const { found, size } = groups(points, right - MARGIN.left);
  const line = (name, list) => {
    if (list.length === 1) list = [[list[0][0] - 3, list[0][1]], [list[0][0] + 3, list[0][1]]];
    parts.push(shape("polyline", { class: name, points: list.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ") }));
  };
  const reach = Math.floor(found.length / 40);
  const smooth = runningMean(found.map((g) => g.mean), reach);
  const averaged = (2 * reach + 1) * size;
  if (averaged > 1) line("raw", found.flatMap((g) => [...new Set([g.low, g.high])].map((v) => [x(g.step), y(v)])));
  line("curve", found.map((g, i) => [x(g.step), y(smooth[i])]));

  const mark = shape("circle", { class: "mark", r: 3.5 });
  parts.push(mark);
  chart.replaceChildren(...parts);

  const nearest = (list, step, of) => {
    let near = 0, far = list.length - 1; // by halving
    while (far - near > 1) { const middle = (near + far) >> 1; if (of(list[middle]) < step) near = middle; else far = middle; }
    return Math.abs(of(list[near]) - step) <= Math.abs(of(list[far]) - step) ? near : far;
  };
  const read = (at) => {
    const [step, value] = at === undefined ? points.at(-1) : points[nearest(points, at, (p) => p[0])];
    const mean = smooth[nearest(found, step, (g) => g.step)];
    mark.setAttribute("cx", x(step));
    mark.setAttribute("cy", y(value));
    tell(`step ${step.toLocaleString("en")}: ${show(value)}` + (averaged > 1 ? `, mean of ${averaged} steps ${show(mean)}` : ""));
  };
  read(chart.pointed);
  chart.onpointerleave = () => read((chart.pointed = undefined));
  chart.onpointermove = (event) => {
    const at = event.clientX - chart.getBoundingClientRect().left;
    read((chart.pointed = first + ((at - MARGIN.left) / (right - MARGIN.left)) * (last - first)));
  };
}
