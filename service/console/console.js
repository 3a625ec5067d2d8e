// The page of the control plane. Text from outside enters the page through textContent only.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const FINISHED = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
const POLL = 2000; // milliseconds
const LOG_LINES = 500;

let view = new AbortController(); // what the current view started; aborted when another opens

// ---- the API ----

async function api(path, options = {}) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch(path, { signal: view.signal, ...options, headers });
    if (response.ok) return response;
    const problem = await response.json().catch(() => ({ detail: `the service answers ${response.status}` }));
    if (response.status !== 401) throw Object.assign(new Error(problem.detail), { code: problem.code });
    if (sessionStorage.getItem("token") === token) await askToken(token);
  }
}
const json = async (path, options) => (await api(path, options)).json();

let asking = null;
function askToken(refused) {
  asking ??= new Promise((resolve) => {
    if (refused) sessionStorage.removeItem("token");
    $("token").value = "";
    $("ask").oncancel = (event) => event.preventDefault();
    $("ask").onclose = () => {
      sessionStorage.setItem("token", $("token").value.trim());
      asking = null;
      resolve();
    };
    $("ask").showModal();
  });
  return asking;
}

// Run `step` now and every POLL milliseconds while the view is open, until it returns true.
async function poll(step) {
  const { signal } = view;
  while (!signal.aborted) {
    try {
      if (await step()) return;
      $("trouble").hidden = true;
    } catch (error) {
      if (signal.aborted) return;
      $("trouble").textContent = error instanceof TypeError ? "The service does not answer." : error.message;
      $("trouble").hidden = false;
      if (error.code === "no_such_job") return;
    }
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, POLL);
      signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
    });
  }
}

// ---- small things ----

function node(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
const clock = (time) => (time ? new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "");
function took(job) {
  if (!job.started_at) return "";
  const end = job.finished_at ? new Date(job.finished_at) : new Date();
  const s = Math.max(0, Math.round((end - new Date(job.started_at)) / 1000));
  return s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}
const short = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
};

// ---- list of jobs ----

function showList() {
  document.title = "Jobs";
  let pages = 1;
  const update = async () => {
    const jobs = [];
    let cursor = null;
    for (let page = 0; page < pages; page++) {
      const part = await json(`/jobs?limit=50${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`);
      jobs.push(...part.jobs);
      cursor = part.next_cursor;
      if (!cursor) break;
    }
    $("jobs").tBodies[0].replaceChildren(...jobs.map(row));
    $("jobs").hidden = jobs.length === 0;
    $("empty").hidden = jobs.length > 0;
    $("older").hidden = !cursor;
  };
  $("older").onclick = () => { pages += 1; update().catch(() => {}); };
  poll(update);
}

function row(job) {
  const line = document.createElement("tr");
  const name = node("td");
  name.append(node("a", job.name, { href: `#/jobs/${job.id}` }), node("small", job.id));
  const state = node("td");
  state.append(node("span", job.state, { class: `state ${job.state}` }));
  line.append(name, state, node("td", clock(job.created_at)), node("td", took(job)), node("td", job.reason ?? ""));
  return line;
}

// ---- one job ----

function showJob(id) {
  const path = `/jobs/${encodeURIComponent(id)}`;
  let records = [];
  let pictureAt = 0;
  for (const part of ["name", "state", "reason", "log", "spec", "reading"]) $(part).textContent = "";
  $("figures").replaceChildren();
  $("picture").hidden = true;
  const redraw = () => draw(records, $("log-y").checked);
  $("log-y").onchange = redraw;
  $("cancel").onclick = async () => {
    if (!confirm("Cancel this job?")) return;
    try { render(await json(`${path}/cancel`, { method: "POST" })); } catch (error) { alert(error.message); }
  };
  redraw();

  function render(job) {
    document.title = `${job.name} – ${job.state.toLowerCase()}`;
    $("name").textContent = job.name;
    $("state").textContent = job.state;
    $("state").className = `state ${job.state}`;
    $("reason").textContent = job.reason ?? "";
    $("reason").className = `reason ${job.state}`;
    $("reason").hidden = !job.reason;
    $("cancel").hidden = FINISHED.has(job.state) || job.state === "CANCELLING";
  }

  poll(async () => {
    const job = await json(path);
    render(job);
    $("spec").textContent = JSON.stringify(job.spec, null, 2);
    const now = job.metrics ?? {};
    const share = typeof now.data_wait_share === "number" ? `${(100 * now.data_wait_share).toFixed(1)} %` : "–";
    figures({
      Step: now.step === undefined ? `– of ${job.spec.steps}` : `${now.step} of ${job.spec.steps}`,
      Loss: short(now.loss), "Tokens per second": short(now.tokens_per_s), "Waiting for data": share,
      "Seconds per step": short(now.step_seconds), "Learning rate": short(now.lr), Ran: took(job) || "–", Workers: job.spec.parallel.workers,
    });
    // A resumed job repeats steps: ask again from a little earlier, newer records win.
    const from = records.length ? records[Math.max(0, records.length - 200)].step : -1;
    const fresh = await json(`${path}/metrics?after_step=${from}`);
    records = records.filter((r) => r.step <= from).concat(fresh);
    redraw();
    if (Date.now() - pictureAt > 10 * POLL || FINISHED.has(job.state)) {
      pictureAt = Date.now();
      await picture(path);
    }
    return FINISHED.has(job.state);
  });
  follow(path);
}

function figures(values) {
  $("figures").replaceChildren(...Object.entries(values).map(([name, value]) => {
    const cell = node("div");
    cell.append(node("dt", name), node("dd", String(value)));
    return cell;
  }));
}

async function picture(path) {
  try {
    const blob = await (await api(`${path}/artifacts/reconstruction.png`)).blob();
    URL.revokeObjectURL($("reconstruction").src);
    $("reconstruction").src = URL.createObjectURL(blob);
    $("picture").hidden = false;
  } catch (error) {
    if (error.code !== "not_written" && error.code !== "output_unreadable") throw error;
  }
}

// The log as it is written; after a broken connection, on from the same byte. The page keeps the last lines only.
async function follow(path) {
  const { signal } = view;
  const decoder = new TextDecoder();
  let offset = 0;
  let lines = [""];
  poll(async () => {
    const response = await api(`${path}/logs?follow=true&offset=${offset}`);
    const reader = response.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done || signal.aborted) return true;
      offset += value.length;
      const parts = decoder.decode(value, { stream: true }).split("\n");
      lines[lines.length - 1] += parts[0];
      lines = lines.concat(parts.slice(1)).slice(-LOG_LINES);
      const box = $("log");
      const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      box.textContent = lines.join("\n").replace(/\x1b\[[0-9;]*[A-Za-z]/g, ""); // no colour codes
      if (atEnd) box.scrollTop = box.scrollHeight;
    }
  });
}

// ---- the loss curve ----

const BOX = { left: 58, right: 888, top: 10, bottom: 268 };

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) found.push(Number(t.toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const m of [1, 2, 5]) if (m * 10 ** p >= low && m * 10 ** p <= high) found.push(m * 10 ** p);
  return found.length >= 2 ? found : [low, high];
}

function draw(records, logarithmic) {
  const chart = $("chart");
  const points = records.filter((r) => typeof r.loss === "number" && (!logarithmic || r.loss > 0)).map((r) => [r.step, r.loss]);
  if (points.length === 0) {
    chart.replaceChildren(shape("text", { x: 450, y: 150, "text-anchor": "middle" }, "the first step is still to come"));
    $("reading").textContent = "";
    return;
  }
  let low = Infinity, high = -Infinity;
  for (const [, loss] of points) { low = Math.min(low, loss); high = Math.max(high, loss); }
  const pad = logarithmic ? 1.05 : (high - low || Math.abs(high) || 1) * 0.05;
  [low, high] = logarithmic ? [low / pad, high * pad] : [low - pad, high + pad];
  const first = points[0][0], last = Math.max(points.at(-1)[0], first + 1);
  const scale = logarithmic ? Math.log : (v) => v;
  const x = (step) => BOX.left + ((step - first) / (last - first)) * (BOX.right - BOX.left);
  const y = (loss) => BOX.bottom - ((scale(loss) - scale(low)) / (scale(high) - scale(low))) * (BOX.bottom - BOX.top);

  const parts = [];
  for (const t of logarithmic ? logTicks(low, high) : ticks(low, high, 5)) {
    parts.push(shape("line", { class: "grid", x1: BOX.left, x2: BOX.right, y1: y(t), y2: y(t) }));
    parts.push(shape("text", { x: BOX.left - 8, y: y(t) + 4, "text-anchor": "end" }, short(t)));
  }
  for (const t of ticks(first, last, 8).filter(Number.isInteger))
    parts.push(shape("text", { x: x(t), y: BOX.bottom + 18, "text-anchor": "middle" }, t));
  parts.push(shape("text", { x: BOX.right, y: BOX.bottom + 31, "text-anchor": "end" }, "step"));

  // At most two points per pixel column; then a running mean over about a fortieth of them.
  const every = Math.max(1, Math.ceil(points.length / 1600));
  const thin = points.filter((_, i) => i % every === 0 || i === points.length - 1);
  const line = (list) => list.map(([s, l]) => `${x(s).toFixed(1)},${y(l).toFixed(1)}`).join(" ");
  const reach = Math.floor(thin.length / 80);
  if (reach < 1) parts.push(shape("polyline", { class: "curve", points: line(thin) }));
  else {
    const smooth = thin.map(([s], i) => {
      const near = thin.slice(Math.max(0, i - reach), i + reach + 1);
      return [s, near.reduce((sum, [, l]) => sum + l, 0) / near.length];
    });
    parts.push(shape("polyline", { class: "raw", points: line(thin) }), shape("polyline", { class: "curve", points: line(smooth) }));
  }
  const mark = shape("circle", { class: "mark", r: 3.5 });
  parts.push(mark);
  const read = ([step, loss]) => {
    mark.setAttribute("cx", x(step));
    mark.setAttribute("cy", y(loss));
    $("reading").textContent = `step ${step}: ${loss.toPrecision(5)}`;
  };
  read(points.at(-1));
  chart.onpointerleave = () => read(points.at(-1));
  chart.onpointermove = (event) => {
    const at = ((event.clientX - chart.getBoundingClientRect().left) / chart.clientWidth) * 900;
    const step = first + ((at - BOX.left) / (BOX.right - BOX.left)) * (last - first);
    let near = 0, far = points.length - 1; // nearest step, by halving
    while (far - near > 1) { const middle = (near + far) >> 1; if (points[middle][0] < step) near = middle; else far = middle; }
    read(Math.abs(points[near][0] - step) < Math.abs(points[far][0] - step) ? points[near] : points[far]);
  };
  chart.replaceChildren(...parts);
}

// ---- the frame ----

async function health() {
  try {
    const response = await fetch("/readyz");
    const answer = await response.json();
    $("health").textContent = response.ok ? "cluster reachable" : answer.detail;
    $("health").className = response.ok ? "" : "bad";
  } catch {
    $("health").textContent = "the service does not answer";
    $("health").className = "bad";
  }
  setTimeout(health, 5 * POLL);
}

function route() {
  view.abort();
  view = new AbortController();
  $("trouble").hidden = true;
  const job = location.hash.match(/^#\/jobs\/([0-9a-f]+)$/);
  $("list").hidden = Boolean(job);
  $("job").hidden = !job;
  if (job) showJob(job[1]);
  else showList();
}

window.addEventListener("hashchange", route);
route();
health();
