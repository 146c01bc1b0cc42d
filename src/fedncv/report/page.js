"use strict";
// Charts and sortable tables. The numbers come from the JSON block; everything else on the page is plain HTML.
let data = JSON.parse(document.getElementById("data").textContent);
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "14 5"];
const MOST = 13; // lines that a reader can distinguish; of more, the best are shown at first
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, parent = null, text = null) {
  const node = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// A method's colour and line are the same in all charts, and in the figures beside the page.
const look = (i) => ({ colour: `var(--c${data.methods[i].colour})`, dash: DASHES[data.methods[i].line] });

// Round steps of 1, 2 or 5 times a power of ten, about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

function short(value, unit = "") {
  const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, letter] of steps) if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)} ${letter}${unit}`;
  return `${+value.toPrecision(3)}${unit ? " " + unit : ""}`;
}

// A point is [round or clients, samples, bytes, mean, low, high, seeds].
const X = { round: [0, "rounds", ""], samples: [1, "samples trained on", ""], bytes: [2, "bytes, up and down", "B"], clients: [0, "clients", ""] };
const [MEAN, LOW, HIGH, SEEDS] = [3, 4, 5, 6];

function chart(root) {
  if (root.update) return; // it is one already
  const groups = () => data[root.dataset.chart];
  const state = { group: 0, metric: null, x: root.dataset.x.split(" ")[0], off: new Set(), cursor: null, focus: null };
  const controls = make("div", { class: "controls" }, root);
  const plot = make("div", { class: "plot" }, root), canvas = make("div", {}, plot), side = make("div", {}, plot);
  const svg = make("svg:svg", { tabindex: 0, role: "img" }, canvas);
  const note = make("p", { class: "small soft", "aria-live": "polite" }, side);
  const legend = make("ul", { class: "legend" }, side);

  function choose(label, options, pick) {
    const select = make("select", {}, make("label", {}, controls, label + " "));
    options.forEach(([value, text]) => make("option", { value }, select, text));
    select.addEventListener("change", () => { pick(select.value); state.cursor = null; draw(); });
    return select;
  }
  const metricsOf = (group) => [...new Set([...Object.keys(group.metrics), ...Object.keys(group.begun || {})])];
  const groupSelect = choose("Dataset", [], (v) => { state.group = +v; fillMetrics(); });
  function fill(select, options, value) { // without closing it if nothing has changed
    const now = JSON.stringify(options);
    if (select.dataset.filled !== now) {
      select.replaceChildren();
      options.forEach(([value, text]) => make("option", { value }, select, text));
      select.dataset.filled = now;
    }
    select.value = value;
  }
  function fillGroups() {
    state.group = Math.min(state.group, groups().length - 1);
    groupSelect.parentNode.hidden = groups().length < 2;
    fill(groupSelect, groups().map((g, i) => [i, g.title]), state.group);
    fillMetrics();
  }
  const metricSelect = choose(data.score[0].toUpperCase() + data.score.slice(1), [], (v) => { state.metric = v; });
  if (root.dataset.kind !== "score") metricSelect.parentNode.firstChild.textContent = "Metric ";
  function fillMetrics() {
    const metrics = metricsOf(groups()[state.group]);
    if (!metrics.includes(state.metric)) state.metric = metrics[0];
    fill(metricSelect, metrics.map((m) => [m, data.metrics[m] || m]), state.metric);
  }
  const axes = root.dataset.x.split(" ");
  if (axes.length > 1) {
    const field = make("fieldset", { class: "segments" }, controls);
    make("legend", {}, field, "Against");
    for (const axis of axes) {
      const label = make("label", {}, field), input = make("input", { type: "radio", name: root.id + "-x", value: axis }, label);
      input.checked = axis === state.x;
      input.addEventListener("change", () => { state.x = axis; state.cursor = null; draw(); });
      make("span", {}, label, { round: "rounds", samples: "samples", bytes: "bytes" }[axis]);
    }
  }
  const all = make("button", { class: "plain", type: "button" }, controls, "All"), none = make("button", { class: "plain", type: "button" }, controls, "None"), five = make("button", { class: "plain", type: "button" }, controls, "Best five");
  all.onclick = () => { state.off.clear(); draw(); };
  none.onclick = () => { lines().forEach((l) => state.off.add(l.method)); draw(); };
  five.onclick = () => { state.off = new Set(lines().slice(5).map((l) => l.method)); draw(); };

  // Sorted by the final value, best first: the legend's order. `begun` are the curves of unfinished runs so far.
  function lines() {
    const group = groups()[state.group], done = group.metrics[state.metric] || {}, begun = (group.begun || {})[state.metric] || {};
    const better = costs() ? -1 : 1;
    return [...new Set([...Object.keys(done), ...Object.keys(begun)])]
      .map((method) => ({ method, points: done[method] || [], begun: begun[method] || [], index: data.methods.findIndex((m) => m.id === method) }))
      .filter((line) => line.index >= 0)
      .sort((a, b) => better * (valueOf(b) - valueOf(a)));
  }
  const every = (line) => line.begun.flatMap((part) => part.points).concat(line.points);
  const closest = (points, column) => (state.cursor === null ? points.at(-1) : points.reduce((best, p) => (Math.abs(p[column] - state.cursor) < Math.abs(best[column] - state.cursor) ? p : best)));
  // The mean over finished runs; without one, that of the unfinished runs so far.
  function valueOf(line, column = 0) {
    if (line.points.length) return closest(line.points, column)[MEAN];
    const values = line.begun.map((part) => closest(part.points, column)[MEAN]);
    return values.reduce((sum, v) => sum + v, 0) / values.length;
  }
  const costs = () => /^(loss|variance)|_(rmse|mae|ece|log_loss|brier)(_client_mean)?$/.test(state.metric || "");
  const percent = () => data.percent.includes(state.metric);
  const show = (v) => (percent() ? (100 * v).toFixed(1) + " %" : String(+v.toPrecision(4)));

  function draw() {
    if (!groups()[state.group]) return; // the runs are gone, and this chart with them
    const width = Math.max(280, canvas.clientWidth - 20), height = Math.round(Math.min(480, Math.max(270, width * 0.58)));
    const everyone = lines(), visible = everyone.filter((l) => !state.off.has(l.method));
    // bands of many lines, or of few seeds, are hard to read: then each line has a bar at its end, the highlighted one a band
    const many = visible.length > 6 || visible.some((l) => l.points.length && l.points.at(-1)[SEEDS] < 5), each = root.dataset.chart === "scale";
    const beside = Math.min(4, 60 / Math.max(1, visible.length));
    const pad = { left: 46, right: 14 + (many && !each ? beside * (visible.length + 1) : 0), top: 24, bottom: 42 };
    const [column, axisName, unit] = X[state.x];
    const xs = visible.flatMap((l) => every(l).map((p) => p[column]));
    const floor = percent() && root.dataset.kind === "score" ? groups()[state.group].floor : null;
    const ys = visible.flatMap((l) => every(l).map((p) => p[MEAN])).concat(floor === null ? [] : [floor]);
    let [x0, x1] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    let [y0, y1] = ys.length ? [Math.min(...ys), Math.max(...ys)] : [0, 1];
    if (x0 === x1) { x0 -= 1; x1 += 1; }
    const room = (y1 - y0 || 0.02) * 0.06;
    y0 = percent() ? Math.max(0, y0 - room) : y0 - room; y1 = percent() ? Math.min(1, y1 + room) : y1 + room;
    const px = (v) => pad.left + ((v - x0) / (x1 - x0)) * (width - pad.left - pad.right);
    const py = (v) => height - pad.bottom - ((v - y0) / (y1 - y0)) * (height - pad.top - pad.bottom);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", `${groups()[state.group].title}: ${data.metrics[state.metric] || state.metric} against ${axisName}; arrow keys move along it`);
    svg.classList.toggle("many", many);
    const scale = percent() ? 100 : 1;
    for (const v of ticks(y0 * scale, y1 * scale, 6)) {
      make("svg:line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: py(v / scale), y2: py(v / scale) }, svg);
      make("svg:text", { x: pad.left - 7, y: py(v / scale) + 4, "text-anchor": "end" }, svg, percent() ? `${+v.toFixed(2)}` : short(v));
    }
    for (const v of ticks(x0, x1, width < 500 ? 4 : 8)) make("svg:text", { x: px(v), y: height - pad.bottom + 18, "text-anchor": "middle" }, svg, short(v, unit));
    make("svg:text", { x: width - pad.right, y: height - 6, "text-anchor": "end" }, svg, axisName);
    if (percent()) make("svg:text", { x: pad.left - 7, y: 11, "text-anchor": "end" }, svg, "%");
    const clip = make("svg:clipPath", { id: root.id + "-clip" }, svg);
    make("svg:rect", { x: pad.left, y: pad.top, width: width - pad.left - pad.right, height: height - pad.top - pad.bottom }, clip);
    if (floor !== null && floor !== undefined) {
      make("svg:line", { class: "floorline", x1: pad.left, x2: width - pad.right, y1: py(floor), y2: py(floor) }, svg);
      make("svg:text", { class: "floorname", x: pad.left + 4, y: py(floor) - 6 }, svg, "label prior alone");
    }
    for (const [order, line] of [...visible.entries()].reverse()) {
      const { colour, dash } = look(line.index), at = line.points.map((p) => [px(p[column]), py(p[MEAN])]);
      const names = [line.method === data.ours ? "ours" : "", state.focus ? (state.focus === line.method ? "focus" : "dim") : ""].join(" ");
      const group = make("svg:g", { class: names.trim(), "data-method": line.method }, svg);
      const banded = line.points.filter((p) => p[LOW] !== null);
      if (banded.length > 1) {
        const up = banded.map((p) => `${px(p[column])},${py(p[HIGH])}`), down = banded.map((p) => `${px(p[column])},${py(p[LOW])}`).reverse();
        make("svg:polygon", { class: "band", points: [...up, ...down].join(" "), fill: colour, "clip-path": `url(#${root.id}-clip)` }, group);
      }
      // intervals that are not bands, clipped at the edge of the chart
      for (const p of banded.filter((p) => each || (many && p === line.points.at(-1)))) {
        const x = px(p[column]) + (each ? (order - visible.length / 2) * 2 : beside * (order + 1));
        const [top, low] = [Math.max(pad.top, py(p[HIGH])), Math.min(height - pad.bottom, py(p[LOW]))];
        if (low > top) make("svg:line", { class: "ends", x1: x, x2: x, y1: top, y2: low, stroke: colour }, group);
      }
      for (const part of line.begun) {
        const so_far = part.points.map((p) => [px(p[column]), py(p[MEAN])]), [x, y] = so_far.at(-1), end = part.points.at(-1);
        make("svg:polyline", { class: "begun", points: so_far.map((p) => p.join(",")).join(" "), stroke: colour, "stroke-dasharray": dash }, group);
        const circle = make("svg:circle", { class: "open", cx: x, cy: y, r: 3.2, stroke: colour, "data-x": end[column], "data-y": end[MEAN] }, group);
        make("svg:title", {}, circle, `seed ${part.seed}, unfinished: round ${end[0]}`);
      }
      if (at.length) make("svg:polyline", { class: "line", points: at.map((p) => p.join(",")).join(" "), stroke: colour, "stroke-dasharray": dash }, group);
      line.points.forEach((p, i) => {
        const last = i === line.points.length - 1 || line.points.length < 9;
        make("svg:circle", { cx: at[i][0], cy: at[i][1], r: last ? 3 : 1.6, fill: colour, "data-x": p[column], "data-y": p[MEAN] }, group);
      });
    }
    if (state.cursor !== null) make("svg:line", { class: "cursor", x1: px(state.cursor), x2: px(state.cursor), y1: pad.top, y2: height - pad.bottom }, svg);
    svg.at = (clientX) => {
      const box = svg.getBoundingClientRect(), v = x0 + (((clientX - box.left) / box.width) * width - pad.left) / (width - pad.left - pad.right) * (x1 - x0);
      return nearest(xs, v);
    };
    svg.stops = [...new Set(xs)].sort((a, b) => a - b);
    note.textContent = state.cursor === null ? (everyone.some((l) => l.begun.length) ? "At the end, or so far:" : "At the end:") : `At ${short(state.cursor, unit)} ${axisName.split(",")[0]}:`;
    list(everyone, column);
  }
  const nearest = (values, v) => (values.length ? values.reduce((best, x) => (Math.abs(x - v) < Math.abs(best - v) ? x : best)) : null);

  function list(everyone, column) {
    const held = document.activeElement && legend.contains(document.activeElement) ? document.activeElement.dataset.method : null;
    legend.replaceChildren();
    for (const line of everyone) {
      const { colour, dash } = look(line.index), item = make("li", {}, legend);
      const button = make("button", { type: "button", "aria-pressed": !state.off.has(line.method), "data-method": line.method }, item);
      const swatch = make("svg:svg", { viewBox: "0 0 34 12", "aria-hidden": true }, button);
      make("svg:line", { x1: 1, x2: 33, y1: 6, y2: 6, stroke: colour, "stroke-width": line.method === data.ours ? 4 : 2.5, "stroke-dasharray": dash }, swatch);
      const name = make("span", { class: "name" }, button, data.methods[line.index].label);
      if (line.begun.length) make("small", {}, name, ` ${line.begun.length} unfinished`);
      make("span", { class: line.points.length ? "value" : "value so-far" }, button, show(valueOf(line, column)));
      button.onclick = () => { state.off.has(line.method) ? state.off.delete(line.method) : state.off.add(line.method); draw(); };
      const focus = (on) => { state.focus = on && !state.off.has(line.method) ? line.method : null; paint(); };
      button.onmouseenter = () => focus(true); button.onmouseleave = () => focus(false);
      button.onfocus = () => focus(true); button.onblur = () => focus(false);
      if (held === line.method) button.focus();
    }
  }
  // Change only classes while the pointer moves over the legend.
  function paint() {
    for (const group of svg.querySelectorAll("g[data-method]")) {
      group.classList.toggle("dim", state.focus !== null && group.dataset.method !== state.focus);
      group.classList.toggle("focus", group.dataset.method === state.focus);
    }
  }
  const move = (value) => { if (value !== state.cursor) { state.cursor = value; draw(); } };
  svg.addEventListener("pointermove", (event) => move(svg.at(event.clientX)));
  svg.addEventListener("pointerleave", () => move(null));
  svg.addEventListener("keydown", (event) => {
    const i = state.cursor === null ? svg.stops.length : svg.stops.indexOf(state.cursor);
    if (event.key === "ArrowLeft") move(svg.stops[Math.max(0, i - 1)] ?? null);
    else if (event.key === "ArrowRight") move(svg.stops[Math.min(svg.stops.length - 1, i + 1)] ?? null);
    else if (event.key === "Escape") move(null);
    else return;
    event.preventDefault();
  });
  fillGroups();
  if (lines().length > MOST) state.off = new Set(lines().filter((l) => l.method !== data.ours).slice(MOST - 1).map((l) => l.method));
  let width = 0;
  new ResizeObserver(() => { if (canvas.clientWidth !== width) { width = canvas.clientWidth; draw(); } }).observe(canvas);
  root.update = () => { if (groups().length) { fillGroups(); draw(); } };
}

function sortable(table) {
  if (table.resort) return;
  const body = table.tBodies[0], heads = [...table.querySelectorAll("thead th[data-column]")];
  let order = [...body.rows];
  function sort() {
    const head = heads.find((h) => h.getAttribute("aria-sort") !== "none"), rows = [...order];
    if (head) rows.sort((a, b) => {
      const [u, v] = [a, b].map((row) => row.cells[+head.dataset.column].dataset.value);
      if (!u || !v) return (u ? 0 : 1) - (v ? 0 : 1); // rows without a value stay at the bottom
      const sign = head.getAttribute("aria-sort") === "ascending" ? 1 : -1;
      return sign * (isNaN(u) || isNaN(v) ? u.localeCompare(v) : u - v);
    });
    body.append(...rows);
  }
  for (const head of heads) head.querySelector("button").addEventListener("click", () => {
    const now = head.getAttribute("aria-sort"), next = now === "descending" ? "ascending" : now === "ascending" ? "none" : "descending";
    heads.forEach((h) => h.setAttribute("aria-sort", h === head ? next : "none"));
    sort();
  });
  table.unsort = () => body.append(...order);
  table.resort = () => { order = [...body.rows]; sort(); };
}

function start(scope) {
  for (const root of scope.querySelectorAll("[data-chart]")) chart(root);
  for (const table of scope.querySelectorAll("table.sortable")) sortable(table);
}
start(document);
