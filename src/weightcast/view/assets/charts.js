/* Charts as SVG, without libraries. Each call returns a <figure> with a title, a legend, the plot, and the same data as a
   table in a <details>; `figure.update(spec)` draws it again with other data. A chart has few elements however many points
   it has: one path for each series. The plot takes the focus; arrow keys move through its points, Escape leaves them.

   charts.lines({title, note, height, x, y, series, rules, marks})
       x, y     {label, format: f(number) → text, scale: "linear" | "log", min, max, whole: true for integers alone}
       series   [{name, points: [[x, y], …], mark: "line" | "points" | "both" | "spans" | "steps", colour: 0…7}]
                spans are [[from, to, y], …]; each series has its own symbol and dashes
       rules    [{y or x, name}]: a labelled dashed line
   charts.bars({title, note, height, x: {label}, y, names: […], series: [{name, values, colour}], stacked: true})
   charts.heat({title, note, rows: […], columns: […], values: [[number | null]], steps: [7 limits], format, x, y,
                across: true for many columns, picked: column, onPick: f(column)})
   charts.timeline({title, note, x: {label, format}, rows: [{name, spans: [{name, begin, end, colour}]}], rules: [{x, name}]})
   All text is text: names from outside are cleaned (kit.plain).
*/
"use strict";
const charts = (() => {
  const {el, svg, plain} = kit;
  const ROWS = 200;
  const known = new WeakMap();
  const watcher = new ResizeObserver((entries) => {
    for (const entry of entries) known.get(entry.target)?.(Math.floor(entry.contentRect.width));
  });

  /* -- scales -- */

  function ticks(low, high, most, whole) {
    const raw = (high - low) / Math.max(most, 1) || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    let step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999) || raw;
    if (whole) step = Math.max(1, Math.round(step));
    const made = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && made.length < 50; i += 1) made.push(+(i * step).toPrecision(12));
    return made;
  }
  function logTicks(low, high, most) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const by = Math.max(1, Math.ceil((last - first) / Math.max(most, 1)));
    const within = (steps) => {
      const made = [];
      for (let e = first; e <= last; e += by) for (const m of steps) made.push(m * 10 ** e);
      return made.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    };
    const decades = within([1]);
    if (decades.length >= 3 || by > 1) return decades;
    const finer = within(decades.length === 2 ? [1, 3] : [1, 2, 3, 5, 7]);
    return finer.length >= 3 ? finer : ticks(low, high, Math.min(most, 4), false);
  }
  function scaleOf(axis, values, from, to) {
    const log = axis.scale === "log";
    const good = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
    let low = axis.min ?? (good.length ? good.reduce((a, b) => Math.min(a, b)) : log ? 1 : 0);
    let high = axis.max ?? (good.length ? good.reduce((a, b) => Math.max(a, b)) : log ? 10 : 1);
    if (log && !(low > 0)) low = high > 0 ? high / 10 : 1;
    if (high <= low) { if (log) { low /= 2; high = low * 4; } else if (axis.whole) { low -= 1; high = low + 2; } else high = low + Math.max(1e-9, Math.abs(low) || 1); }
    else if (log) { low /= 1.25; high *= 1.25; }
    const f = log ? Math.log10 : (v) => v;
    const a = f(low), b = f(high);
    const at = (v) => from + ((f(v) - a) / (b - a)) * (to - from);
    const room = Math.abs(to - from);
    return {at, low, high, ticks: (px) => (log ? logTicks(low, high, room / px) : ticks(low, high, Math.max(1, room / px), axis.whole))};
  }
  const say = (axis) => axis.format || ((v) => kit.digits(v));
  const fixed = (x) => Math.round(x * 10) / 10;

  /* -- marks: one path each -- */

  const SYMBOLS = [
    (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
    (x, y, r) => `M${x} ${y - 1.35 * r}L${x + 1.35 * r} ${y}L${x} ${y + 1.35 * r}L${x - 1.35 * r} ${y}Z`,
    (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
    (x, y, r) => `M${x} ${y - 1.2 * r}L${x + 1.2 * r} ${y + r}L${x - 1.2 * r} ${y + r}Z`,
    (x, y, r) => `M${x - r} ${y - 0.4 * r}h${2 * r}v${0.8 * r}h${-2 * r}ZM${x - 0.4 * r} ${y - r}h${0.8 * r}v${2 * r}h${-0.8 * r}Z`,
  ];
  const symbol = (i, x, y, r) => SYMBOLS[i % SYMBOLS.length](fixed(x), fixed(y), r);
  function pathOf(points, steps) {
    let d = "", before = null;
    for (const [x, y] of points) {
      if (!Number.isFinite(y)) { before = null; continue; }
      d += before === null ? `M${fixed(x)} ${fixed(y)}` : steps ? `H${fixed(x)}V${fixed(y)}` : `L${fixed(x)} ${fixed(y)}`;
      before = y;
    }
    return d;
  }
  function legend(series) {
    if (series.length < 2) return null;
    return el("ul", {class: "legend"}, series.map((one, i) => {
      const colour = "s" + (one.colour ?? i), drawn = svg("svg", {"aria-hidden": "true", viewBox: "0 0 22 12"});
      if (one.mark === "bar") drawn.append(svg("rect", {x: 3, width: 16, height: 12, rx: 2, class: colour + " fill"}));
      else if (one.mark !== "points") drawn.append(svg("path", {d: "M0 6H22", class: `line stroke ${colour} dash${i % 4}`}));
      if (one.mark === "points" || one.mark === "both") drawn.append(svg("path", {d: symbol(i, 11, 6, 3.4), class: colour + " fill"}));
      return el("li", {}, drawn, plain(one.name, 40));
    }));
  }

  /* -- the frame that all share -- */

  function figure(first, draw, describe, keysOf = (spec) => legend(spec.series || [])) {
    let spec = first, width = 0, stops = [], at = -1, columns = 0;
    const plot = el("div", {class: "plot", tabindex: "0", role: "group"});
    const tip = el("div", {class: "tip", hidden: true});
    const spoken = el("div", {class: "unseen", role: "status"});
    const heading = el("h3", {}), note = el("p", {class: "note"}), keys = el("div", {}), listing = el("div", {});
    const details = el("details", {on: {toggle: list}}, el("summary", {}, "Show as a table"), listing);
    const made = el("figure", {}, el("figcaption", {}, heading, note), keys, plot, spoken, details);

    function list() {
      listing.replaceChildren();
      if (!details.open) return;
      const {columns: names, rows, newest} = describe(spec);
      const cut = newest ? rows.slice(-ROWS) : rows.slice(0, ROWS);
      if (cut.length < rows.length) listing.append(el("p", {class: "note"}, `${newest ? "The last" : "The first"} ${ROWS} of ${kit.count(rows.length)} rows.`));
      listing.append(kit.table({columns: names, rows: cut, caption: plain(spec.title), blocks: false}));
    }
    function redraw() {
      if (!width) return;
      const found = draw(spec, width);
      stops = found.stops;
      columns = found.columns || 0;
      found.drawing.setAttribute("role", "img");
      found.drawing.setAttribute("aria-label", plain(found.label || spec.title, 300));
      found.drawing.setAttribute("viewBox", `0 0 ${width} ${found.height}`);
      found.drawing.setAttribute("height", found.height);
      plot.replaceChildren(found.drawing, tip);
      if (at >= stops.length) at = -1;
      show(at, false);
    }
    function show(i, aloud) {
      at = i;
      const stop = stops[i];
      tip.hidden = !stop;
      plot.querySelector(".cursor")?.remove();
      if (!stop) { spoken.textContent = ""; return; }
      const lines = stop.lines();
      tip.replaceChildren(...lines.map((line) => el("div", {}, line)));
      if (stop.cursor) plot.querySelector("svg").append(svg("path", {d: stop.cursor, class: "cursor"}));
      const left = stop.x + 14 + tip.offsetWidth > width ? stop.x - 14 - tip.offsetWidth : stop.x + 14;
      tip.style.left = Math.max(0, left) + "px";
      tip.style.top = Math.max(-6, stop.y - tip.offsetHeight - 8) + "px";
      if (aloud) spoken.textContent = lines.join(", ");
    }
    function nearest(event) {
      const box = plot.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      let best = -1, least = Infinity;
      stops.forEach((stop, i) => {
        const away = Math.abs(stop.x - x) + (stop.flat ? 0 : 1.5 * Math.abs(stop.y - y));
        if (away < least) { least = away; best = i; }
      });
      return best;
    }
    plot.addEventListener("pointermove", (event) => show(nearest(event), false));
    plot.addEventListener("pointerleave", () => { if (document.activeElement !== plot) show(-1, false); });
    plot.addEventListener("blur", () => show(-1, false));
    plot.addEventListener("click", (event) => { const stop = stops[nearest(event)]; if (stop && spec.onPick) spec.onPick(stop.pick); });
    plot.addEventListener("keydown", (event) => {
      const moves = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -(columns || 1), ArrowDown: columns || 1, PageUp: -20, PageDown: 20};
      if (event.key === "Escape") show(-1, false);
      else if (event.key === "Enter" && stops[at] && spec.onPick) spec.onPick(stops[at].pick);
      else if (event.key === "Home") show(0, true);
      else if (event.key === "End") show(stops.length - 1, true);
      else if (event.key in moves) {
        const next = at < 0 ? (moves[event.key] > 0 ? 0 : stops.length - 1) : at + moves[event.key];
        show(Math.max(0, Math.min(stops.length - 1, next)), true);
      } else return;
      event.preventDefault();
    });
    made.update = (next) => {
      spec = next;
      const title = plain(spec.title);
      heading.textContent = title;
      heading.hidden = Boolean(spec.untitled);
      note.textContent = spec.note || "";
      note.hidden = !spec.note;
      keys.replaceChildren(...[keysOf(spec)].filter(Boolean));
      plot.setAttribute("aria-label", `${title}. Arrow keys read the values.`);
      redraw();
      if (details.open) list();
    };
    known.set(plot, (found) => { if (found && found !== width) { width = found; redraw(); } });
    watcher.observe(plot);
    made.update(first);
    return made;
  }

  /* Axes with ticks; returns the group, where the plot lies, and both scales. */
  function axes(spec, width, xs, ys) {
    const height = spec.height || 240, x = spec.x || {}, y = spec.y || {};
    const trial = scaleOf(y, ys, height - 34, 14), labels = trial.ticks(44);
    const left = Math.min(width / 3, 12 + labels.reduce((most, t) => Math.max(most, say(y)(t).length), 2) * 6.7);
    const place = {left, right: width - 10, top: y.label ? 24 : 12, bottom: height - (x.label ? 40 : 24), height};
    const across = scaleOf(x, xs, place.left, place.right), up = scaleOf(y, ys, place.bottom, place.top);
    const g = svg("svg", {});
    for (const t of up.ticks(44)) {
      const at = fixed(up.at(t));
      g.append(svg("path", {d: `M${place.left} ${at}H${place.right}`, class: "tick"}),
        svg("text", {x: place.left - 7, y: at + 4, "text-anchor": "end"}, say(y)(t)));
    }
    if (!spec.names) for (const t of across.ticks(78)) {
      const at = fixed(across.at(t));
      g.append(svg("text", {x: at, y: place.bottom + 17, "text-anchor": at > place.right - 16 ? "end" : "middle"}, say(x)(t)));
    }
    g.append(svg("path", {d: `M${place.left} ${place.bottom}H${place.right}`, class: "axis"}));
    if (x.label) g.append(svg("text", {x: place.right, y: height - 3, "text-anchor": "end"}, plain(x.label)));
    if (y.label) g.append(svg("text", {x: 0, y: 11}, plain(y.label)));
    return {g, place, across, up};
  }

  /* -- lines, points, spans -- */

  function drawLines(spec, width) {
    const series = spec.series, rules = spec.rules || [], x = spec.x || {}, y = spec.y || {};
    const log = y.scale === "log";
    const xs = rules.flatMap((r) => (r.x === undefined ? [] : [r.x])), ys = rules.flatMap((r) => (r.y === undefined ? [] : [r.y]));
    for (const one of series) for (const p of one.points) {
      xs.push(p[0]);
      if (one.mark === "spans") xs.push(p[1]);
      ys.push(p[p.length - 1]);
    }
    const {g, place, across, up} = axes(spec, width, xs, ys);
    const near = new Map();
    series.forEach((one, i) => {
      const colour = "s" + (one.colour ?? i), good = one.points.filter((p) => Number.isFinite(p[p.length - 1]) && (!log || p[p.length - 1] > 0));
      if (one.mark === "spans") {
        g.append(svg("path", {class: `line stroke ${colour}`, "stroke-width": 3,
          d: good.map(([a, b, v]) => { const h = fixed(up.at(v)); return `M${fixed(across.at(a))} ${h - 3}v6m0 -3H${fixed(across.at(b))}m0 -3v6`; }).join("")}));
      } else {
        const placed = one.points.map(([a, v]) => [across.at(a), log && !(v > 0) ? NaN : up.at(v)]);
        if (one.mark !== "points") g.append(svg("path", {class: `line stroke ${colour} dash${i % 4}`, d: pathOf(placed, one.mark === "steps")}));
        const radius = good.length > 400 ? 1.8 : good.length > 120 ? 2.4 : 3.2;
        if (one.mark === "points" || one.mark === "both" || good.length === 1) g.append(svg("path", {class: colour + " fill",
          d: placed.filter((p) => Number.isFinite(p[1])).map(([a, b]) => symbol(i, a, b, radius)).join("")}));
      }
      for (const p of good) {
        const key = one.mark === "spans" ? p[1] : p[0], v = p[p.length - 1];
        let stop = near.get(key);
        if (!stop) {
          const found = [];
          stop = {key, x: across.at(key), y: up.at(v), flat: true, pick: key, found,
            lines: () => [`${plain(x.label || "", 24)} ${say(x)(key)}`.trim(), ...found.map(([it, q]) => `${plain(it.name, 40)}: ${it.mark === "spans" ? `${say(x)(q[0])} to ${say(x)(q[1])}: ` : ""}${say(y)(q[q.length - 1])}`)]};
        }
        if (stop.found.length < 12) stop.found.push([one, p]);
        stop.y = Math.min(stop.y, up.at(v));
        near.set(key, stop);
      }
    });
    for (const rule of rules) {
      const upright = rule.x !== undefined, at = fixed(upright ? across.at(rule.x) : up.at(rule.y));
      g.append(svg("path", {class: "rule", d: upright ? `M${at} ${place.top}V${place.bottom}` : `M${place.left} ${at}H${place.right}`}));
      const flip = upright && at > width * 0.7;
      g.append(svg("text", upright ? {x: at + (flip ? -5 : 5), y: place.top + 9, "text-anchor": flip ? "end" : "start"} : {x: place.right, y: at - 5, "text-anchor": "end"}, plain(rule.name, 40)));
    }
    const stops = [...near.values()].sort((a, b) => a.key - b.key);
    for (const stop of stops) stop.cursor = `M${fixed(stop.x)} ${place.top}V${place.bottom}`;
    return {drawing: g, height: place.height, stops, label: `${spec.title}: ${series.map((one) => `${one.name}, ${kit.plural(one.points.length, "point")}`).join("; ")}`};
  }
  function listLines(spec) {
    const x = spec.x || {}, y = spec.y || {};
    const rows = spec.series.flatMap((one) => one.points.map((p) => [p[0], [one.mark === "spans" ? `${say(x)(p[0])} to ${say(x)(p[1])}` : say(x)(p[0]), kit.name(one.name, 40), say(y)(p[p.length - 1])]]));
    return {columns: [{name: x.label || "x"}, {name: "series"}, {name: y.label || "value", number: true}], rows: rows.sort((a, b) => a[0] - b[0]).map((row) => row[1]), newest: true};
  }

  /* -- bars -- */

  function drawBars(spec, width) {
    const {names, series} = spec, stacked = Boolean(spec.stacked), y = spec.y || {};
    const totals = names.map((_, i) => series.reduce((sum, one) => sum + (one.values[i] || 0), 0));
    const most = stacked ? totals : series.flatMap((one) => one.values.map((v) => v || 0));
    const floor = y.scale === "log" ? {} : {min: 0};
    const {g, place, up} = axes({...spec, y: {...floor, ...y}}, width, [0], most);
    const slot = (place.right - place.left) / Math.max(names.length, 1), bar = Math.min(56, slot * 0.72);
    const base = up.at(up.low), bottom = names.map(() => (y.scale === "log" ? up.low : 0));
    series.forEach((one, s) => {
      const each = stacked ? bar : bar / series.length;
      const d = one.values.map((v, i) => {
        if (!(v > 0)) return "";
        const x = place.left + slot * (i + 0.5) - bar / 2 + (stacked ? 0 : s * each), from = stacked ? up.at(bottom[i]) : base;
        const to = up.at(stacked && y.scale !== "log" ? bottom[i] + v : v);
        if (stacked) bottom[i] += v;
        return `M${fixed(x)} ${fixed(from)}V${fixed(to)}h${fixed(Math.max(1, each - 1.5))}V${fixed(from)}Z`;
      }).join("");
      g.append(svg("path", {d, class: `s${one.colour ?? s} fill`}));
    });
    const every = Math.max(1, Math.ceil(names.reduce((m, n) => Math.max(m, plain(n, 18).length), 1) * 7 / Math.max(slot, 1)));
    names.forEach((text, i) => { if (i % every === 0 && names.length / every <= 60) g.append(svg("text", {x: fixed(place.left + slot * (i + 0.5)), y: place.bottom + 17, "text-anchor": "middle"}, plain(text, 18))); });
    const stops = names.map((text, i) => ({x: place.left + slot * (i + 0.5), y: up.at(Math.max(up.low, most[i] || up.low)), flat: true, pick: i,
      lines: () => [plain(text, 60), ...series.map((one) => `${plain(one.name, 40)}: ${say(y)(one.values[i])}`)]}));
    return {drawing: g, height: place.height, stops, label: `${spec.title}: ${kit.plural(names.length, "bar")}`};
  }
  function listBars(spec) {
    const y = spec.y || {};
    return {columns: [{name: (spec.x || {}).label || ""}, ...spec.series.map((one) => ({name: plain(one.name, 40), number: true}))],
      rows: spec.names.map((text, i) => [kit.name(text, 60), ...spec.series.map((one) => say(y)(one.values[i]))])};
  }

  /* -- heat maps: one path for each of eight levels -- */

  const levelOf = (steps, v) => steps.reduce((n, step) => n + (v >= step ? 1 : 0), 0);
  function heatLegend(spec) {
    const form = say(spec), made = el("ul", {class: "legend"});
    made.append(el("li", {}, swatch("h0 none"), "none"));
    for (let i = 0; i <= spec.steps.length; i += 1) made.append(el("li", {}, swatch("h" + i), i < spec.steps.length ? "< " + form(spec.steps[i]) : "more"));
    return made;
  }
  const swatch = (kind) => svg("svg", {"aria-hidden": "true", viewBox: "0 0 22 12"}, svg("rect", {width: 22, height: 12, rx: 3, class: kind}));
  function drawHeat(spec, width) {
    const {rows, columns, values, steps} = spec, form = say(spec);
    const left = Math.min(width * 0.36, 14 + rows.reduce((m, r) => Math.max(m, plain(r, 22).length), 2) * 6.9), fits = Math.max(6, Math.floor((left - 12) / 6.9));
    const cell = (width - left - 2) / Math.max(columns.length, 1), high = Math.max(7, Math.min(22, spec.tall || 420 / Math.max(rows.length, 1)));
    const top = 4, height = top + high * rows.length + ((spec.x || {}).label ? 40 : 24), gap = cell > 5 && high > 8 ? 1 : 0;
    const g = svg("svg", {}), paths = Array.from({length: 8}, () => ""), stops = [];
    let none = "";
    rows.forEach((row, r) => {
      const y = fixed(top + r * high);
      columns.forEach((column, c) => {
        const v = values[r][c], x = fixed(left + c * cell), box = `M${x} ${y}h${fixed(cell - gap)}v${fixed(high - gap)}h${-fixed(cell - gap)}Z`;
        const missing = v === null || v === undefined;
        if (!missing && v > 0) paths[Math.min(7, levelOf(steps, v))] += box;
        else if (!missing) none += `M${fixed(x + cell / 2 - 1)} ${fixed(y + high / 2)}h2`;
        stops.push({x: x + cell / 2, y: y + high / 2, pick: c, cursor: box,
          lines: () => [plain(row, 80), `${plain((spec.x || {}).label || "", 24)} ${plain(column, 40)}`.trim(), missing ? "not known" : form(v)]});
      });
    });
    paths.forEach((d, i) => { if (d) g.append(svg("path", {d, class: "h" + i})); });
    if (none) g.append(svg("path", {d: none, class: "rule"}));
    const each = Math.max(1, Math.ceil(13 / high));
    rows.forEach((row, r) => { if (r % each === 0) g.append(svg("text", {x: left - 8, y: fixed(top + r * high + high / 2 + 4), "text-anchor": "end"}, plain(row, fits))); });
    const apart = Math.max(1, Math.ceil((10 + columns.reduce((m, c) => Math.max(m, plain(c, 14).length), 1) * 7) / cell)), below = top + high * rows.length + 15;
    columns.forEach((column, c) => { if ((columns.length - 1 - c) % apart === 0) g.append(svg("text", {x: fixed(left + cell * (c + 0.5)), y: fixed(below), "text-anchor": "middle"}, plain(column, 14))); });
    if ((spec.x || {}).label) g.append(svg("text", {x: width - 2, y: height - 4, "text-anchor": "end"}, plain(spec.x.label)));
    if (spec.picked >= 0) g.append(svg("path", {class: "mark", d: `M${fixed(left + spec.picked * cell - 1)} ${top - 2}h${fixed(cell + 1)}v${fixed(high * rows.length + 3)}h${-fixed(cell + 1)}Z`}));
    return {drawing: g, height, stops, columns: columns.length, label: `${spec.title}: ${kit.plural(rows.length, "row")} by ${kit.plural(columns.length, "column")}`};
  }
  function listHeat(spec) {
    const last = spec.columns.slice(-24), from = spec.columns.length - last.length, form = say(spec);
    return {columns: [{name: (spec.y || {}).label || ""}, ...last.map((c) => ({name: plain(c, 14), number: true}))],
      rows: spec.rows.map((row, r) => [kit.name(row, 60), ...last.map((_, c) => { const v = spec.values[r][from + c]; return v === null || v === undefined ? "not known" : form(v); })])};
  }

  /* -- timelines -- */

  function drawTimeline(spec, width) {
    const rows = spec.rows, x = spec.x || {}, high = 44, top = (spec.rules || []).length ? 20 : 6, height = top + rows.length * high + (x.label ? 44 : 28);
    const all = rows.flatMap((row) => row.spans.flatMap((s) => [s.begin, s.end])).concat((spec.rules || []).map((r) => r.x));
    const across = scaleOf({min: 0, ...x}, all, 2, width - 12), g = svg("svg", {}), stops = [], bottom = top + rows.length * high;
    for (const t of across.ticks(84)) {
      const at = fixed(across.at(t));
      g.append(svg("path", {d: `M${at} ${top}V${bottom}`, class: "tick"}), svg("text", {x: at, y: bottom + 17, "text-anchor": at < 16 ? "start" : at > width - 22 ? "end" : "middle"}, say(x)(t)));
    }
    rows.forEach((row, r) => {
      const y = top + r * high;
      g.append(svg("text", {x: 2, y: y + 13, class: "row"}, plain(row.name, Math.max(12, Math.floor(width / 8)))));
      row.spans.slice(0, 64).forEach((span) => {
        const from = across.at(span.begin), to = Math.max(from + 1.5, across.at(span.end)), text = plain(span.name, 24);
        g.append(svg("rect", {x: fixed(from), y: y + 18, width: fixed(to - from), height: 20, rx: Math.min(4, (to - from) / 2), class: `s${span.colour || 0} fill`}));
        if (to - from > text.length * 6.6 + 8) g.append(svg("text", {x: fixed(from + 6), y: y + 32, class: "inside"}, text));
        stops.push({x: (from + to) / 2, y: y + 28, pick: r, lines: () => [plain(span.name, 60), plain(row.name, 60), say(x)(span.end - span.begin)]});
      });
    });
    for (const rule of spec.rules || []) {
      const at = fixed(across.at(rule.x)), flip = at > width * 0.7;
      g.append(svg("path", {class: "rule", d: `M${at} ${top}V${bottom}`}), svg("text", {x: at, y: 12, "text-anchor": flip ? "end" : at < 60 ? "start" : "middle"}, plain(rule.name, 40)));
    }
    if (x.label) g.append(svg("text", {x: width - 2, y: height - 3, "text-anchor": "end"}, plain(x.label)));
    return {drawing: g, height, stops, label: `${spec.title}: ${kit.plural(rows.length, "row")}`};
  }
  function listTimeline(spec) {
    const form = say(spec.x || {});
    return {columns: [{name: "row"}, {name: "phase"}, {name: "from", number: true}, {name: "took", number: true}],
      rows: spec.rows.flatMap((row) => row.spans.map((s) => [kit.name(row.name, 60), kit.name(s.name, 40), form(s.begin), form(s.end - s.begin)]))};
  }

  return {
    lines: (spec) => figure(spec, drawLines, listLines),
    bars: (spec) => figure({...spec, series: spec.series.map((s) => ({mark: "bar", ...s}))}, drawBars, listBars),
    heat: (spec) => figure(spec, drawHeat, listHeat, heatLegend),
    timeline: (spec) => figure(spec, drawTimeline, listTimeline),
  };
})();
