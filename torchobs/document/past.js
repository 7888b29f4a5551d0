// Draws the curves of the runs that are chosen in the list, and tells their values under the pointer or by arrow keys.
"use strict";
(() => {
  const MOST = 6, FIRST = 3, HEIGHT = 320, LEFT = 64, BELOW = 26, TICKS = 4;
  const at = (id) => document.getElementById(id), chart = at("chart");
  if (!chart) return;
  const runs = new Map(), hint = at("said").textContent;
  let lines = [], range = [0, 1], here = null;

  const made = (name, attributes, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.textContent = text;
    return node;
  };
  const short = (value) => value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6)
    ? String(+value.toPrecision(4)) : value.toExponential(2);
  const unit = (s) => at("axis").value === "step" ? [1, ""] : s < 120 ? [1, " s"] : s < 7200 ? [60, " min"] : [3600, " h"];
  const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });
  const place = (x) => `${at("axis").value === "step" ? "step" : "after"} ${count(x / unit(x)[0])}${unit(x)[1]}`;

  // Some four multiples of 1, 2 or 5 times a power of ten between the two.
  function rounds(low, high) {
    const room = (high - low) / TICKS, power = 10 ** Math.floor(Math.log10(room));
    const step = [1, 2, 5, 10].map((part) => part * power).find((one) => one >= 0.8 * room);
    if (!step) return [low];
    const first = Math.ceil(low / step), last = Math.floor(high / step);
    return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
  }

  // The mean of what came before, which weighs less the longer ago it was; corrected for its beginning.
  function smoothed(values, share) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      sum = share * sum + (1 - share) * value;
      weight = share * weight + 1 - share;
      return sum / weight;
    });
  }

  function draw() {
    const axis = at("axis").value, log = at("log").checked, width = Math.max(chart.clientWidth, 200);
    lines = [...runs].filter(([, run]) => run.course).map(([key, run]) => {
      const values = run.course[at("what").value], known = values.map((value, index) => index)
        .filter((index) => values[index] !== null && (!log || values[index] > 0));
      return { key, name: run.name, colour: run.colour, xs: known.map((index) => run.course[axis][index]),
        ys: smoothed(known.map((index) => values[index]), +at("smooth").value) };
    });
    const xs = lines.flatMap((line) => line.xs), scaled = (y) => log ? Math.log10(y) : y;
    const ys = lines.flatMap((line) => line.ys.map(scaled)), least = (all) => all.reduce((a, b) => Math.min(a, b), Infinity);
    const most = (all) => all.reduce((a, b) => Math.max(a, b), -Infinity);
    range = xs.length ? [least(xs), most(xs)] : [0, 1];
    const [low, high] = ys.length ? [least(ys), most(ys)] : [0, 1], svg = made("svg", { "aria-hidden": "true" });
    const x = (value) => LEFT + (width - LEFT - 8) * (value - range[0]) / (range[1] - range[0] || 1);
    const y = (value) => 8 + (HEIGHT - BELOW - 16) * (1 - (scaled(value) - low) / (high - low || 1));
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const value of ys.length ? rounds(low, high) : []) {
      const real = log ? 10 ** value : value;
      svg.append(made("path", { d: `M${LEFT} ${y(real)}H${width - 8}`, class: "grid" }));
      svg.append(made("text", { x: LEFT - 6, y: y(real) + 4, "text-anchor": "end" }, short(real)));
    }
    const [scale, named] = unit(range[1]);
    for (const value of xs.length ? rounds(range[0] / scale, range[1] / scale) : []) {
      const along = x(value * scale), end = along > width - 40 ? "end" : "middle";
      svg.append(made("text", { x: along, y: HEIGHT - 4, "text-anchor": end }, count(value) + named));
    }
    for (const line of lines) {
      const d = line.xs.map((value, index) => `${index ? "L" : "M"}${x(value).toFixed(1)} ${y(line.ys[index]).toFixed(1)}`);
      svg.append(made("path", { d: d.join(""), class: `line s${line.colour}` }));
    }
    chart.replaceChildren(svg);
    Object.assign(chart, { ariaValueMin: range[0], ariaValueMax: range[1], toX: x, toY: y });
    tell(here);
  }

  const nearest = (xs, wanted) => xs.reduce((best, x, index) => Math.abs(x - wanted) < Math.abs(xs[best] - wanted) ? index : best, 0);

  // The values at a place of the axis; without one the last ones. It is the legend as well.
  function tell(wanted) {
    here = wanted;
    chart.querySelectorAll(".cursor").forEach((node) => node.remove());
    const said = lines.map((line) => {
      const index = wanted === null ? line.xs.length - 1 : nearest(line.xs, wanted);
      const words = line.xs.length ? `${place(line.xs[index])}: ${short(line.ys[index])}` : "no value";
      if (wanted !== null && line.xs.length) chart.firstChild.append(made("circle",
        { cx: chart.toX(line.xs[index]), cy: chart.toY(line.ys[index]), r: 4, class: `cursor s${line.colour}` }));
      return [line, words];
    });
    if (wanted !== null && lines.length) chart.firstChild.append(made("path",
      { d: `M${chart.toX(wanted)} 0V${HEIGHT - BELOW}`, class: "cursor grid" }));
    at("values").replaceChildren(...said.map(([line, words]) => {
      const item = document.createElement("li"), key = Object.assign(document.createElement("i"), { className: `key s${line.colour}` });
      item.append(key, Object.assign(document.createElement("bdi"), { textContent: line.name }), ` ${words}`);
      return item;
    }));
    chart.ariaValueNow = wanted === null ? range[1] : wanted;
    chart.ariaValueText = said.map(([line, words]) => `${line.name}, ${words}`).join("; ") || "No run is chosen";
  }

  // Each run's link to its steps becomes a box to draw it.
  const boxes = [...document.querySelectorAll("tbody a")].map((link, index) => {
    const box = Object.assign(document.createElement("input"), { type: "checkbox", value: link.href, checked: index < FIRST });
    const label = document.createElement("label");
    label.append(box, ...link.childNodes);
    link.replaceWith(label);
    return box;
  });

  async function choose(box) {
    const taken = new Set([...runs.values()].map((run) => run.colour));
    at("said").textContent = hint;
    if (!box.checked) runs.delete(box.value);
    else if (runs.size === MOST) {
      box.checked = false;
      at("said").textContent = "Six runs are drawn at most: take one away first.";
    } else {
      const run = { name: box.parentNode.textContent.trim(), colour: [0, 1, 2, 3, 4, 5].find((colour) => !taken.has(colour)) };
      runs.set(box.value, run);
      const answer = await fetch(box.value).catch(() => ({ ok: false }));
      if (answer.ok) run.course = await answer.json();
      else at("said").textContent = `${run.name} cannot be read.`;
      if (answer.ok && run.course.before[0] === null) run.name += " (from its own first step)";
    }
    draw();
  }

  const moved = (event) => {
    const box = chart.getBoundingClientRect(), share = (event.clientX - box.left - LEFT) / (box.width - LEFT - 8);
    tell(range[0] + Math.min(1, Math.max(0, share)) * (range[1] - range[0]));
  };
  chart.addEventListener("pointermove", moved);
  chart.addEventListener("pointerdown", moved);
  chart.addEventListener("pointerleave", () => tell(null));
  chart.addEventListener("keydown", (event) => {
    const all = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b), by = Math.ceil(all.length / 20);
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -by, PageUp: by, Home: -all.length, End: all.length };
    if (!(event.key in steps) || !all.length) return;
    event.preventDefault();
    const now = here === null ? all.length - 1 : nearest(all, here);
    tell(all[Math.min(all.length - 1, Math.max(0, now + steps[event.key]))]);
  });
  for (const id of ["what", "axis", "smooth", "log"]) at(id).addEventListener("input", () => { here = null; draw(); });
  boxes.forEach((box) => box.addEventListener("change", () => choose(box)));
  boxes.filter((box) => box.checked).forEach(choose);
  new ResizeObserver(draw).observe(chart);
})();
