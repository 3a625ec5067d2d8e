// The page of the control plane. Text from outside enters the page through textContent only.
import { draw, short } from "./chart.js";

const $ = (id) => document.getElementById(id);
const FINISHED = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
const POLL = 2000; // milliseconds
const RECENT = 20; // steps of which speeds are the median
const LOG_LINES = 500;

let view = new AbortController(); // what the current view started; aborted when another opens

// ---- the API ----

async function api(signal, path, options = {}) {
  for (;;) {
    signal.throwIfAborted();
    const token = sessionStorage.getItem("token");
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch(path, { signal, ...options, headers });
    if (response.ok) return response;
    const problem = await response.json().catch(() => ({ detail: `the service answers ${response.status}` }));
    if (response.status !== 401) throw Object.assign(new Error(problem.detail), { code: problem.code });
    if (sessionStorage.getItem("token") === token) await askToken(token);
  }
}
const json = async (signal, path, options) => (await api(signal, path, options)).json();

let asking = null;
function askToken(refused) {
  asking ??= new Promise((resolve) => {
    if (refused) sessionStorage.removeItem("token");
    $("token").value = "";
    $("ask-why").textContent = refused ? "It refused the one that was given." : "It was set with SFM_TOKEN where the service runs.";
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
async function poll(signal, step) {
  let said = "";
  while (!signal.aborted) {
    try {
      const done = await step();
      if (said && $("trouble").textContent === said) trouble("");
      said = "";
      if (done) return;
    } catch (error) {
      if (signal.aborted) return;
      if (!error.code) console.error(error); // not an answer of the service
      trouble((said = error instanceof TypeError ? "The service does not answer; this page shows what it last said." : error.message));
      if (error.code === "no_such_job") return void ($("job").hidden = true);
    }
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, POLL);
      signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
    });
  }
}

function trouble(sentence) {
  write($("trouble"), sentence);
  $("trouble").hidden = !sentence;
}

// ---- small things ----

// What does not change is not touched, so that a selection or the focus in it stays.
const write = (element, text) => { if (element.textContent !== text) element.textContent = text; };

function node(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function clock(time) {
  const at = new Date(time);
  const year = at.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return at.toLocaleString("en", { day: "numeric", month: "short", year, hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds)), m = Math.floor(s / 60), h = Math.floor(m / 60);
  return s < 60 ? `${s} s` : m < 60 ? `${m} min ${s % 60} s` : h < 24 ? `${h} h ${m % 60} min` : `${Math.floor(h / 24)} d ${h % 24} h`;
}

function took(job) {
  if (!job.started_at) return "";
  const end = job.finished_at ? new Date(job.finished_at) : new Date();
  return duration((end - new Date(job.started_at)) / 1000);
}

function median(values) {
  const sorted = values.filter((v) => typeof v === "number").sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : undefined;
}

const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;

// ---- list of jobs ----

function showList() {
  const { signal } = view;
  document.title = "Jobs – Seismic foundation models";
  let pages = 1;
  const known = new Map(); // rows by id
  const update = async () => {
    const jobs = [];
    let cursor = null;
    for (let page = 0; page < pages; page++) {
      const part = await json(signal, `/jobs?limit=50${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`);
      jobs.push(...part.jobs);
      cursor = part.next_cursor;
      if (!cursor) break;
    }
    const rows = jobs.map((job) => {
      if (!known.has(job.id)) known.set(job.id, newRow(job));
      return known.get(job.id)(job);
    });
    const old = [...$("jobs").tBodies];
    if (rows.length !== old.length || rows.some((body, i) => body !== old[i])) {
      for (const body of old) body.remove();
      $("jobs").append(...rows);
    }
    $("jobs").hidden = jobs.length === 0;
    $("empty").hidden = jobs.length > 0;
    $("older").hidden = !cursor;
  };
  $("older").onclick = () => { pages += 1; update().catch(() => {}); };
  poll(signal, update);
}

// A job's rows: its facts and, below, why it waits or failed. Returns what brings them up to date.
function newRow(job) {
  const name = node("td");
  name.append(node("a", job.name, { href: `#/jobs/${job.id}` }), node("small", job.id));
  const state = node("span"), ran = node("td"), reason = node("td", "", { colspan: 4 });
  const cell = node("td");
  cell.append(state);
  const line = node("tr"), why = node("tr", "", { class: "why" }), body = node("tbody");
  reason.append(node("p"));
  line.append(name, cell, node("td", clock(job.created_at)), ran);
  why.append(reason);
  body.append(line, why);
  return (now) => {
    write(state, now.state);
    state.className = `state ${now.state}`;
    write(ran, took(now));
    write(reason.firstChild, now.reason ?? "");
    reason.firstChild.title = now.reason ?? "";
    why.hidden = !now.reason;
    return body;
  };
}

// ---- one job ----

function showJob(id) {
  const { signal } = view;
  const path = `/jobs/${encodeURIComponent(id)}`;
  let records = [];
  let job = null;
  for (const part of ["name", "state", "about", "reason", "log", "spec", "reading", "held-out"]) $(part).textContent = "";
  for (const part of ["reason", "cancel", "figures", "picture", "log"]) $(part).hidden = true;
  $("no-log").hidden = false;
  $("chart").pointed = undefined;

  const redraw = () => curve(records, job);
  $("quantity").onchange = $("log-y").onchange = redraw;
  const resized = new ResizeObserver(redraw);
  resized.observe($("chart").parentElement);
  signal.addEventListener("abort", () => resized.disconnect());

  $("cancel").onclick = () => {
    $("sure").returnValue = "";
    $("sure").onclose = async () => {
      if ($("sure").returnValue !== "cancel") return;
      try { render(await json(signal, `${path}/cancel`, { method: "POST" })); } catch (error) { trouble(error.message); }
    };
    $("sure").showModal();
  };

  function render(now) {
    job = { ...job, ...now };
    document.title = `${job.name} – ${job.state.toLowerCase()}`;
    write($("name"), job.name);
    write($("state"), job.state);
    $("state").className = `state ${job.state}`;
    write($("reason"), job.reason ?? "");
    $("reason").className = `notice ${job.state}`;
    $("reason").hidden = !job.reason;
    $("cancel").hidden = FINISHED.has(job.state) || job.state === "CANCELLING";
  }

  poll(signal, async () => {
    render(await json(signal, path));
    write($("about"), about(job));
    write($("spec"), JSON.stringify(job.spec, null, 2));
    // A resumed job repeats steps: ask again from a little earlier, newer records win.
    const from = records.length ? records[Math.max(0, records.length - 200)].step : -1;
    const fresh = await json(signal, `${path}/metrics?after_step=${from}`);
    records = records.filter((r) => r.step <= from).concat(fresh);
    figures(job, records);
    redraw();
    if (job.state === "SUCCEEDED" && job.spec.window.held_out) await picture(signal, path); // written at the end
    return FINISHED.has(job.state);
  });
  follow(signal, path, () => job !== null && FINISHED.has(job.state));
}

function about(job) {
  const { context, engine } = job.spec.parallel;
  const split = context > 1 ? `, context parallel over ${context}` : "";
  return `${job.id} · submitted ${clock(job.created_at)} · ${engine}${split}\n${job.output}`;
}

function figures(job, records) {
  const last = records.at(-1);
  const recent = (name) => median(records.slice(-RECENT).map((r) => r[name]));
  const seconds = recent("step_seconds"), share = recent("data_wait_share");
  const known = (value, how = short) => (value === undefined ? "–" : how(value));
  const values = last && {
    Step: `${last.step.toLocaleString("en")} of ${job.spec.steps.toLocaleString("en")}`,
    Loss: last.loss === null ? "not finite" : known(last.loss),
    "Tokens per second": known(recent("tokens_per_s")),
    "Waiting for data": known(share, percent),
    "Seconds per step": known(seconds),
    Ran: took(job) || "–",
    ...(job.finished_at
      ? { Ended: clock(job.finished_at) }
      : { "Time left, about": known(seconds, (s) => duration(s * (job.spec.steps - last.step))) }),
    Workers: String(job.spec.parallel.workers),
  };
  $("figures").hidden = !last;
  if (!last) return;
  const cells = $("figures").children;
  for (const [i, [name, value]] of Object.entries(values).entries()) {
    if (!cells[i]) {
      const cell = node("div");
      cell.append(node("dt"), node("dd"));
      $("figures").append(cell);
    }
    write(cells[i].firstChild, name);
    write(cells[i].lastChild, value);
  }
}

const NO_STEPS = {
  QUEUED: "No steps yet: the job waits for room on the cluster.",
  SUBMITTING: "No steps yet: the job is being started.",
  RUNNING: "No steps yet: the workers are starting.",
  CANCELLING: "No steps: the job is being cancelled.",
};

function curve(records, job) {
  const name = $("quantity").value;
  const logarithmic = $("log-y").checked;
  const unit = name === "data_wait_share" ? 100 : 1; // shares are drawn in percent
  const points = records.filter((r) => typeof r[name] === "number" && (!logarithmic || r[name] > 0)).map((r) => [r.step, unit * r[name]]);
  const none = points.length === 0;
  $("quantity").parentElement.hidden = records.length === 0;
  $("chart").toggleAttribute("hidden", none);
  $("no-steps").hidden = !none;
  if (none) {
    const nothing = records.length ? "There is no such value that can be drawn." : (NO_STEPS[job?.state] ?? "The job ended before its first step.");
    write($("no-steps"), job ? nothing : "");
    write($("reading"), "");
    return;
  }
  const title = $("quantity").selectedOptions[0].text;
  $("chart").setAttribute("aria-label", `${title} by step`);
  const show = (v) => (unit === 100 ? `${v.toFixed(1)} %` : short(v));
  draw($("chart"), points, { logarithmic, show, tell: (words) => write($("reading"), words) });
}

async function picture(signal, path) {
  const optional = async (name) => {
    try { return await api(signal, `${path}/artifacts/${name}`); } catch (error) {
      if (error.code !== "not_written") throw error;
    }
  };
  const image = await optional("reconstruction.png");
  if (!image) return;
  URL.revokeObjectURL($("reconstruction").src);
  $("reconstruction").onload = () => { $("picture").hidden = false; };
  $("reconstruction").src = URL.createObjectURL(await image.blob());
  const summary = await (await optional("summary.json"))?.json();
  if (typeof summary?.held_out_model === "number")
    $("held-out").textContent = `error on ${count(summary.held_out_windows, "held-out window")}: ${short(summary.held_out_model)}`
      + (typeof summary.held_out_baseline === "number" ? `, mean of visible neighbours: ${short(summary.held_out_baseline)}` : "");
}

// The log, from the byte after the last one seen; the page keeps the last lines only. Asked for again and again
// instead of followed: a browser holds six connections to a host, and people open more tabs than that.
function follow(signal, path, ended) {
  const decoder = new TextDecoder();
  const box = $("log");
  let offset = 0;
  let lines = [""];
  poll(signal, async () => {
    const last = ended(); // asked before reading: what was printed before the end is always read
    const before = offset;
    const reader = (await api(signal, `${path}/logs?offset=${offset}`)).body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      offset += value.length;
      const parts = decoder.decode(value, { stream: true }).split("\n");
      lines[lines.length - 1] += parts[0];
      lines = lines.concat(parts.slice(1)).slice(-LOG_LINES);
    }
    if (signal.aborted) return true;
    if (offset > before) {
      const atEnd = box.hidden || box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      write(box, lines.join("\n").replace(/\x1b\[[0-9;]*[A-Za-z]/g, "")); // no colour codes
      box.hidden = false;
      $("no-log").hidden = true;
      if (atEnd) box.scrollTop = box.scrollHeight;
    } else if (last && offset === 0) write($("no-log"), "The job printed nothing.");
    return last;
  });
}

// ---- the frame ----

async function health() {
  let words = "the service does not answer", state = "bad";
  try {
    const response = await fetch("/readyz");
    [words, state] = response.ok ? ["cluster reachable", "good"] : [(await response.json()).detail, "bad"];
  } catch { /* said above */ }
  write($("health"), words);
  $("health").className = state;
  setTimeout(health, 5 * POLL);
}

function route() {
  view.abort();
  view = new AbortController();
  trouble("");
  $("sure").close();
  const job = location.hash.match(/^#\/jobs\/([0-9a-f]+)$/);
  $("list").hidden = Boolean(job);
  $("job").hidden = $("up").hidden = !job;
  if (job) showJob(job[1]);
  else showList();
  scrollTo(0, 0);
}

window.addEventListener("hashchange", route);
route();
health();
