/* The dashboard: draws what `journal.since` says, from the file itself or by asking its server for what is new. */
"use strict";
(() => {
  const {el, name, plain} = kit;
  const EVERY = 2000, SLOWEST = 15000;
  const STEPS = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3];
  const PHASES = ["step", "detect", "resolve", "encode", "upload", "commit", "find", "fetch", "decode", "verify", "stage", "learn",
    "recognise", "compare", "fold", "pause", "apply", "prove", "resume", "load"];
  const COLOUR = {step: 5, detect: 0, resolve: 7, encode: 1, upload: 2, commit: 6, find: 5, fetch: 0, decode: 3, verify: 2, stage: 6,
    learn: 7, recognise: 7, compare: 5, fold: 5, pause: 4, apply: 4, prove: 2, resume: 5, load: 4};
  const SILENT = 180, MANY = 5;
  const byId = (id) => document.getElementById(id);
  const embedded = byId("state");

  const state = {epoch: "", revision: 0, now: 0, looked: 0, at: 0, parts: {}, rows: {versions: new Map(), heat: new Map()}, news: []};
  const view = {range: "100", heat: "layers", order: "after", version: null, picked: null, unanswered: null};

  /* -- what arrives -- */

  function take(answer) {
    if (answer.whole) Object.assign(state, {parts: {}, rows: {versions: new Map(), heat: new Map()}, news: []});
    const changed = new Set(answer.whole ? ["everything"] : Object.keys(answer.parts));
    Object.assign(state, {epoch: answer.epoch, revision: answer.revision, now: answer.now, looked: answer.looked, at: performance.now()});
    Object.assign(state.parts, answer.parts);
    for (const [kind, {oldest, new: found}] of Object.entries(answer.rows)) {
      const rows = state.rows[kind];
      for (const [version, row] of found) rows.set(version, row);
      for (const version of rows.keys()) if (version < oldest) rows.delete(version);
      changed.add(kind);
    }
    if (answer.news.length) { state.news = state.news.concat(answer.news).slice(-100); changed.add("news"); }
    for (const {needs, draw} of drawings) if (changed.has("everything") || needs.some((one) => changed.has(one))) draw();
  }
  const now = () => state.now + (embedded ? 0 : (performance.now() - state.at) / 1000);
  const versions = () => [...state.rows.versions.entries()].sort((a, b) => a[0] - b[0]);
  const good = () => versions().filter(([, row]) => row);
  const deltas = () => good().filter(([, row]) => !row.anchor);
  const newest = () => state.parts.head || null;
  const middle = (list) => { const s = [...list].sort((a, b) => a - b); return s.length ? s[Math.floor((s.length - 1) / 2)] : NaN; };
  function clock(seconds) {
    const day = new Date(seconds * 1000);
    return Number.isNaN(day.getTime()) ? "at no known time" : day.toISOString().replace("T", " ").slice(0, 19) + " UTC";
  }

  /* -- the frame -- */

  const notices = el("div", {class: "notices", role: "status"});
  const stateLine = el("div", {class: "state"}), pill = el("span", {class: "pill good", role: "status"}), age = el("span", {class: "soft"});
  stateLine.append(pill, age);
  const heading = el("p", {class: "channel"});
  byId("top").append(el("div", {}, el("h1", {}, "weightcast"), heading), stateLine);
  const tilesSlot = el("div", {class: "tiles-slot"});
  tilesSlot.style.gridColumn = "1 / -1";

  const versionText = {label: "version", whole: true, format: kit.count};
  const lines = (title, y, more) => charts.lines({title, untitled: true, height: 210, x: versionText, y, series: [], ...more});

  const sizes = lines("Bytes of each version", {label: "bytes", scale: "log", format: kit.bytes}, {height: 270});
  const ratios = lines("Size of a full copy over that of the version", {label: "times smaller", scale: "log", format: kit.times});
  const shares = lines("Share of elements that changed", {label: "changed", scale: "log", format: kit.percent});
  const arrivals = lines("Seconds from commit to live", {label: "seconds", scale: "log", format: kit.seconds});
  const heat = charts.heat({title: "What changed", untitled: true, rows: [], columns: [], values: [], steps: STEPS, format: kit.percent});
  const updates = charts.timeline({title: "Last update of each replica", note: "What its phases took, one after the other.", rows: [], x: {format: kit.seconds}});
  const phases = charts.timeline({title: "Phases of a version", untitled: true, rows: [], x: {format: kit.seconds}});

  const rangeChoice = kit.choice("Versions shown", [["100", "newest 100"], ["500", "newest 500"], ["all", "all"]], view.range, (value) => { view.range = value; drawSizes(); drawShares(); });
  const heatChoice = kit.choice("Heat map of", [["layers", "layers over time"], ["kinds", "modules over time"], ["grid", "one version"]], view.heat, (value) => { view.heat = value; drawHeat(); });
  const heatVersion = el("select", {on: {change: () => { view.picked = Number(heatVersion.value); drawHeat(); }}});
  const heatLabel = el("label", {}, "version", heatVersion);
  const heatNote = el("p", {class: "note"});
  const phaseVersion = el("select", {on: {change: () => { view.version = Number(phaseVersion.value); drawPhases(); }}});
  const phaseOrder = kit.choice("Phases", [["after", "one after the other"], ["clock", "by the clock"]], view.order, (value) => { view.order = value; drawPhases(); });
  const phaseBox = el("div", {}, el("div", {class: "controls"}, phaseOrder, el("label", {}, "version", phaseVersion)), phases);
  const phaseEmpty = el("p", {class: "empty"});
  const replicaTable = kit.table({caption: "Replicas", columns: [{name: "replica"}], rows: []});
  const replicaEmpty = el("p", {class: "empty"}, "No replica has reported. Followers report if they may write to the bucket.");
  const replicaNote = el("p", {class: "note"});
  const news = el("ul", {class: "news", tabindex: "0", "aria-label": "Newest first"});
  const findings = el("div", {}), checked = el("p", {class: "note"});
  const arrivalCard = kit.card("From commit to live", {size: "half", id: "arrivals"}, arrivals);

  byId("page").append(
    notices, tilesSlot,
    kit.card("Versions", {id: "versions", note: "Bytes on a logarithmic axis"}, el("div", {class: "controls"}, rangeChoice), sizes),
    kit.card("Smaller than a full copy", {size: "half", id: "ratio"}, ratios),
    kit.card("Elements that changed", {size: "half", id: "changed"}, shares),
    kit.card("Where they changed", {id: "heat"}, el("div", {class: "controls"}, heatChoice, heatLabel), heat, heatNote),
    kit.card("Replicas", {id: "replicas"}, replicaTable, replicaEmpty, replicaNote, updates),
    kit.card("From trainer to live", {id: "phases", note: "Phases of one version, as events tell of them"}, phaseBox, phaseEmpty),
    arrivalCard,
    kit.card("Integrity", {size: "half", id: "checks"}, findings, checked),
    kit.card("News", {size: "half", id: "news"}, news),
  );

  /* -- drawings: each again when a part that it needs has changed -- */

  function drawHeading() {
    const channel = state.parts.channel;
    heading.replaceChildren(name(channel.url, 120), ` · ${kit.plural(channel.tensors, "tensor")}, ${kit.bytes(channel.bytes)}${channel.signed ? " · signatures checked" : ""}`);
    document.title = (newest() ? `${kit.count(newest().version)} · ` : "") + "weightcast";
  }

  function notice(tone, ...text) { return el("div", {class: "notice " + tone}, ...text); }
  function drawNotices() {
    const {away, checks, replicas} = state.parts, made = [];
    if (view.unanswered) made.push(notice("bad", `This page's server has not answered since ${clock(view.unanswered)}. What it said last is shown.`));
    else if (away) made.push(notice("bad", `The channel cannot be read since ${clock(away.since)}: `, name(away.error, 300), ". What was seen last is shown."));
    else if (!embedded && state.now - state.looked > 30) made.push(notice("warn", `The bucket has not answered since ${clock(state.looked)}.`));
    if (checks && checks.total) made.push(notice("bad", `${kit.plural(checks.total, "object")} damaged or missing: `, name(checks.findings[0][0], 120), ", ", name(checks.findings[0][1], 200)));
    if (replicas && replicas.failing) {
      const first = replicas.rows.find((row) => row.error !== null);
      made.push(notice("bad", `${kit.plural(replicas.failing, "replica")} failing: `, name(first.name, 60), ", ", name(first.error, 200)));
    }
    const text = made.map((one) => one.textContent).join("\n");
    if (text !== notices.dataset.text) { notices.dataset.text = text; notices.replaceChildren(...made); }
    const bad = view.unanswered || away;
    const shown = embedded ? "report" : bad ? "not connected" : "live";
    if (pill.textContent !== shown) pill.textContent = shown;
    pill.className = "pill " + (bad ? "bad" : embedded ? "soft" : "good");
  }

  function drawTiles() {
    const head = newest(), {replicas, channel, writer, arrivals: seen} = state.parts;
    if (!head) { tilesSlot.replaceChildren(kit.tiles([{label: "Newest version", value: "none yet"}])); return; }
    const changes = deltas().slice(-20), bytes = middle(changes.map(([, row]) => row.bytes)), times = good().slice(-20).map(([, row]) => row.time);
    const gaps = times.slice(1).map((t, i) => t - times[i]).filter((t) => t >= 0);
    const counts = changes.map(([, row]) => row.changed / Math.max(channel.elements, 1));
    const step = head.step === null ? "" : `step ${kit.count(head.step)}, `;
    const list = [
      {label: "Newest version", value: kit.count(head.version), under: el("span", {}, step, kit.ago(now() - head.time), head.label ? [", ", name(head.label, 40)] : "")},
      {label: "A version", value: changes.length ? kit.bytes(bytes) : "–", under: changes.length ? `${kit.times(channel.bytes / bytes)} smaller than ${kit.bytes(channel.bytes)}` : "no delta yet"},
      {label: "Changed", value: changes.length ? kit.percent(middle(counts)) : "–", under: "of the elements, median of 20"},
      {label: "Every", value: gaps.length ? kit.seconds(middle(gaps)) : "–", under: writer ? el("span", {}, "by ", name(writer.name, 28)) : "between versions"},
    ];
    if (replicas) {
      const tone = replicas.failing ? "bad" : replicas.worst > MANY ? "warn" : replicas.total ? "good" : null;
      list.push({label: "Replicas up to date", value: `${kit.count(replicas.upToDate)} of ${kit.count(replicas.total)}`, tone,
        under: replicas.worst ? `the last is ${kit.plural(replicas.worst, "version")} behind` : replicas.total ? "when they last reported" : "none has reported"});
    }
    if (seen && seen.rows.length) list.push({label: seen.source === "events" ? "Live after" : "Reported after", value: kit.seconds(Math.max(0, middle(seen.rows.slice(-20).map((one) => one[3])))), under: "the commit, median"});
    tilesSlot.replaceChildren(kit.tiles(list));
  }

  function first() {
    const head = newest();
    return head && view.range !== "all" ? head.version - Number(view.range) + 1 : 0;
  }
  function drawSizes() {
    const from = first(), {channel, squashes = [], anchors = [], groups = []} = state.parts;
    const inside = deltas().filter(([v]) => v >= from);
    const series = [{name: "deltas", colour: 0, mark: "points", points: inside.map(([v, row]) => [v, row.bytes])}];
    const near = squashes.filter((s) => s[1] >= from), begin = anchors.filter((a) => a[0] >= from && !a[2]), outside = anchors.filter((a) => a[0] >= from && a[2]);
    if (near.length) series.push({name: "squashes", colour: 1, mark: "spans", points: near.map(([a, b, n]) => [Math.max(a, from), b, n])});
    if (begin.length) series.push({name: "anchors", colour: 2, mark: "points", points: begin.map(([v, n]) => [v, n])});
    if (outside.length) series.push({name: "anchors elsewhere", colour: 3, mark: "points", points: outside.map(([v, n]) => [v, n])});
    const old = groups.filter((g) => g[1] >= from);
    if (old.length) series.push({name: "older deltas, mean", colour: 5, mark: "line", points: old.map((g) => [Math.round((g[0] + g[1]) / 2), g[3] / g[2]])});
    const singles = Math.min(...[...state.rows.versions.keys()].concat([Infinity]));
    const note = old.length ? `Before version ${kit.count(singles)}, versions are drawn in groups: their mean size, from a listing.` : null;
    sizes.update({title: "Bytes of each version", untitled: true, height: 270, note, x: versionText, y: {label: "bytes", scale: "log", format: kit.bytes}, series, rules: [{y: channel.bytes, name: "a full copy"}]});
  }
  function drawShares() {
    const {channel, groups = []} = state.parts, from = first(), inside = deltas().filter(([v]) => v >= from);
    for (const id of ["ratio", "changed"]) byId(id).hidden = !inside.length;
    const old = groups.filter((g) => g[1] >= from);
    const series = [{name: "ratio", colour: 2, mark: inside.length < 60 ? "both" : "line", points: inside.map(([v, row]) => [v, channel.bytes / Math.max(row.bytes, 1)])}];
    if (old.length) series.push({name: "older, mean", colour: 5, mark: "line", points: old.map((g) => [Math.round((g[0] + g[1]) / 2), channel.bytes / Math.max(g[3] / g[2], 1)])});
    ratios.update({title: "Size of a full copy over that of the version", untitled: true, height: 210, x: versionText, y: {label: "times smaller", scale: "log", format: kit.times}, series});
    shares.update({title: "Share of elements that changed", untitled: true, height: 210, x: versionText, y: {label: "of all elements", scale: "log", format: kit.percent},
      series: [{name: "changed", colour: 0, mark: inside.length < 60 ? "both" : "line", points: inside.map(([v, row]) => [v, row.changed / Math.max(channel.elements, 1)])}]});
  }

  function options(select, list, chosen) {
    const text = list.join(), before = select.dataset.list;
    if (text !== before) { select.dataset.list = text; select.replaceChildren(...list.map((v) => el("option", {value: v}, kit.count(v)))); }
    select.value = String(chosen);
  }
  function drawHeat() {
    const axes = state.parts.axes, rows = [...state.rows.heat.entries()].sort((a, b) => a[0] - b[0]), known = rows.filter(([, one]) => one.shares);
    const seen = known.map(([v]) => v), x = {label: "version"}, title = "Share of elements that changed";
    const picked = seen.includes(view.picked) ? view.picked : seen[seen.length - 1];
    heat.hidden = !known.length;
    heatLabel.hidden = view.heat !== "grid" || !known.length;
    options(heatVersion, [...seen].reverse(), picked);
    if (view.heat === "grid" && known.length) {
      const {grid} = known.find(([v]) => v === picked)[1].shares, [height, width] = axes.inLayers;
      const flat = !height;
      heat.update(spec(flat ? axes.layers : axes.layers.slice(0, height), flat ? [String(picked)] : axes.kinds.slice(0, width),
        flat ? known.find(([v]) => v === picked)[1].shares.layers.map((v) => [v]) : grid, {label: "module"}, `${title} in version ${picked}, by layer and module`));
    } else if (known.length) {
      const names = view.heat === "kinds" ? axes.kinds : axes.layers;
      const values = names.map((_, r) => known.map(([, one]) => one.shares[view.heat === "kinds" ? "kinds" : "layers"][r]));
      heat.update({...spec(names, seen.map(String), values, x, `${title}, by ${view.heat === "kinds" ? "module" : "layer"} and version`),
        onPick: (column) => { view.heat = "grid"; view.picked = seen[column]; const radio = heatChoice.querySelector('[value="grid"]'); radio.checked = true; drawHeat(); }});
    }
    const unread = rows.filter(([, one]) => !one.shares);
    const open = view.heat === "grid" ? "" : " A click, or Enter, opens a version layer by module.";
    const parts = [`Share of the elements that changed, in the newest ${kit.plural(known.length, "delta")}. The darker or, on a dark page, the brighter, the more.${open}`];
    if (unread.length) parts.push(`Not shown: ${unread.slice(-4).map(([v, one]) => `version ${v} (${plain(one.unread, 80)})`).join(", ")}${unread.length > 4 ? " and others" : ""}.`);
    heatNote.textContent = known.length || unread.length ? parts.join(" ") : "No delta has been read yet.";
  }
  /* Limits of the eight levels: those of `weightcast show`, or finer ones where nearly all values lie close together. */
  function limits(values) {
    const known = values.flat().filter((v) => v > 0).sort((a, b) => a - b), low = known[Math.floor(known.length * 0.2)], high = known[Math.floor(known.length * 0.98)];
    if (known.length < 8 || high / low > 20 || high / low < 1.05) return STEPS;
    const made = STEPS.map((_, i) => Number((low * (high / low) ** (i / 6)).toPrecision(2)));
    return new Set(made).size === made.length ? made : STEPS;
  }
  function spec(rows, columns, values, x, title) {
    return {title, untitled: true, rows, columns, values, steps: limits(values), format: kit.percent, x, y: {label: "part"}};
  }

  function replicaRow(row) {
    const quiet = now() - row.heard > SILENT;
    const tone = row.error !== null ? "bad" : quiet || row.behind > MANY ? "warn" : "good";
    const behind = row.behind ? kit.plural(row.behind, "version") + " behind" : row.lag > 0 ? "up to date" : "at the head";
    const words = row.error !== null ? "failing" : row.lag === null ? "unknown" : quiet ? (row.lag > 0 ? `silent, ${kit.plural(row.lag, "version")} behind` : "silent") : behind;
    const heard = el("span", {class: quiet ? "warn" : null, "data-time": row.heard}, kit.ago(now() - row.heard));
    return [name(row.name, 60), kit.count(row.version), el("span", {class: "pill " + tone}, words), row.pause === null ? "" : kit.seconds(row.pause),
      row.seconds.length ? kit.seconds(row.seconds.reduce((sum, one) => sum + one[1], 0)) : "", row.ran === null ? "" : kit.count(row.ran), heard, row.error === null ? "" : el("span", {class: "error"}, name(row.error, 300))];
  }
  function drawReplicas() {
    const replicas = state.parts.replicas;
    if (!replicas) return;
    const columns = [{name: "replica"}, {name: "version", number: true}, {name: "state", whole: true}, {name: "pause", number: true}, {name: "last update", number: true},
      {name: "command at", number: true}, {name: "heard", number: true}, {name: "error", whole: true}];
    const rows = replicas.rows.map(replicaRow);
    const used = columns.map((_, i) => i < 5 || i === 6 || rows.some((row) => row[i] !== ""));
    const made = kit.table({caption: "Replicas", columns: columns.filter((_, i) => used[i]), rows: rows.map((row) => row.filter((_, i) => used[i]))});
    replicaTable.replaceChildren(made.firstChild);
    replicaTable.hidden = !rows.length;
    replicaEmpty.hidden = Boolean(rows.length);
    const hidden = replicas.total - rows.length + replicas.unread;
    replicaNote.hidden = !rows.length;
    replicaNote.textContent = "As of each replica's last heartbeat: followers send one at most every 5 s."
      + (hidden ? ` Failing replicas and those that are furthest behind come first; ${kit.plural(hidden, "more replica")} not shown.` : "");
    const timed = replicas.rows.filter((row) => row.seconds.length).map((row) => ({row, total: row.seconds.reduce((sum, one) => sum + one[1], 0)}));
    const slowest = timed.sort((a, b) => b.total - a.total).slice(0, 6);
    updates.hidden = !slowest.length;
    updates.update({title: slowest.length < timed.length ? `Last update of the ${slowest.length} slowest replicas` : "Last update of each replica", note: "What its phases took, one after the other.",
      x: {format: kit.seconds}, rows: slowest.map(({row}) => ({name: `${row.name}, version ${row.version}`, spans: endToEnd(row.seconds)}))});
  }
  function endToEnd(seconds) {
    let at = 0;
    const order = (phase) => (PHASES.includes(phase) ? PHASES.indexOf(phase) : 99);
    return [...seconds].sort((a, b) => order(a[0]) - order(b[0])).filter((one) => one[1] > 0).map(([phase, took]) => {
      at += took;
      return {name: phase, begin: at - took, end: at, colour: COLOUR[phase] ?? 5};
    });
  }

  function drawPhases() {
    const told = state.parts.phases, list = (told || []).filter((one) => one.rows.length);
    phaseBox.hidden = !list.length;
    phaseEmpty.hidden = Boolean(list.length);
    phaseEmpty.textContent = told === undefined
      ? "Trainers and followers write no events into the bucket. Give them --events FILE (or wc.JsonLines), and this page --events with the same file."
      : "The file of events has nothing of this channel yet.";
    if (!list.length) return;
    const both = list.filter((one) => one.rows.length > 1), chosen = list.some((one) => one.version === view.version) ? view.version : (both.length ? both : list).at(-1).version;
    options(phaseVersion, list.map((one) => one.version).reverse(), chosen);
    const one = list.find((found) => found.version === chosen), byClock = view.order === "clock";
    const began = Math.min(...one.rows.flatMap((row) => row.spans.map((span) => span[1])));
    const took = (row) => row.spans.reduce((sum, span) => sum + span[2], 0);
    const wrote = Math.max(0, ...one.rows.filter((row) => row.role === "trainer").map(took));
    const placed = (row) => (byClock ? row.spans.map(([phase, at, lasted]) => ({name: phase, begin: at - began, end: at - began + lasted, colour: COLOUR[phase] ?? 5}))
      : endToEnd(row.spans.map((span) => [span[0], span[2]])).map((span) => (row.role === "trainer" ? span : {...span, begin: span.begin + wrote, end: span.end + wrote})));
    phases.update({title: `Phases of version ${chosen}`, untitled: true, note: byClock ? "By the clocks of those who did it." : "What each phase took; waiting is left out.",
      x: {label: byClock ? "since the first phase began" : "", format: kit.seconds}, rules: wrote && !byClock ? [{x: wrote, name: "committed"}] : [],
      rows: one.rows.map((row) => ({name: `${row.name.startsWith(row.role) ? "" : row.role + " "}${plain(row.name, 40)} · ${kit.seconds(took(row))}`, spans: placed(row)}))});
  }
  function drawArrivals() {
    const {source, rows: seen} = state.parts.arrivals || {rows: []};
    arrivalCard.hidden = !seen.length;
    const above = (x) => Math.max(x, 0.001);
    arrivals.update({title: "Seconds from commit to live", untitled: true, height: 210,
      note: source === "events" ? "By events, and by the clocks of writer and replicas." : "Until a heartbeat told of it, which may be up to 5 s later, by the clocks of writer and replicas.",
      x: versionText, y: {label: "seconds", scale: "log", format: kit.seconds}, series: [
      {name: "slowest replica", colour: 1, mark: "both", points: seen.map((one) => [one[0], above(one[4])])},
      {name: "median", colour: 0, mark: "both", points: seen.map((one) => [one[0], above(one[3])])}]});
  }

  function drawNews() {
    const items = [...state.news].reverse();
    news.replaceChildren(...items.map((item) => el("li", {}, el("time", {datetime: clock(item.time), title: clock(item.time)}, clock(item.time).slice(11, 19)),
      el("span", {class: item.tone || null}, item.subject ? [name(item.subject, 80), " "] : "", name(item.text, 240)))));
    byId("news").hidden = Boolean(embedded) && !items.length;
    if (!items.length) news.append(el("li", {}, el("span", {}), "Nothing since this dashboard began to watch."));
  }
  function drawChecks() {
    const checks = state.parts.checks;
    if (!checks) { checked.textContent = "Nothing has been checked yet."; return; }
    findings.replaceChildren(checks.findings.length
      ? kit.table({caption: "Damaged objects", columns: [{name: "object"}, {name: "what is wrong", whole: true}], rows: checks.findings.map(([key, problem]) => [name(key, 80), el("span", {class: "error"}, name(problem, 240))])})
      : el("p", {class: "pill good"}, "nothing damaged was found"));
    checked.textContent = `Checked so far: sizes of the objects of ${kit.plural(checks.manifests, "version")} against the listing, and the SHA-256 of ${kit.plural(checks.objects, "delta")} among the newest ${state.parts.limits.heat} versions (${kit.bytes(checks.bytes)} read). Older deltas, large ones, squashes and the files of anchors are not read: weightcast verify --deep checks every bit.`;
  }

  const drawings = [
    {needs: ["channel", "head"], draw: drawHeading},
    {needs: ["away", "checks", "replicas"], draw: drawNotices},
    {needs: ["head", "versions", "replicas", "arrivals", "writer"], draw: drawTiles},
    {needs: ["versions", "squashes", "anchors", "groups", "head"], draw: drawSizes},
    {needs: ["versions", "groups", "head"], draw: drawShares},
    {needs: ["heat", "axes"], draw: drawHeat},
    {needs: ["replicas"], draw: drawReplicas},
    {needs: ["phases"], draw: drawPhases},
    {needs: ["arrivals"], draw: drawArrivals},
    {needs: ["news"], draw: drawNews},
    {needs: ["checks"], draw: drawChecks},
  ];

  /* -- live, or from the file -- */

  function tick() {
    age.textContent = embedded ? "as of " + clock(state.now) : state.now ? "seen " + kit.ago(now() - state.looked) : "";
    for (const one of document.querySelectorAll("[data-time]")) one.textContent = kit.ago(now() - Number(one.dataset.time));
  }
  let wait = EVERY;
  async function poll() {
    try {
      const answer = await fetch(`state?epoch=${encodeURIComponent(state.epoch)}&since=${state.revision}`, {cache: "no-store", signal: AbortSignal.timeout(SLOWEST)});
      if (!answer.ok) throw new Error("status " + answer.status);
      const found = await answer.json();
      view.unanswered = null;
      wait = EVERY;
      take(found);
    } catch (error) {
      view.unanswered = view.unanswered || state.now || Date.now() / 1000;
      wait = Math.min(wait * 1.5, SLOWEST);
    }
    if (state.parts.channel) drawNotices();
    setTimeout(poll, document.hidden ? SLOWEST : wait);
  }

  byId("foot").append(el("p", {}, embedded ? "A report by weightcast: one file, which asks for nothing." : "Only read from the bucket. The newest 500 versions are shown one by one, and at most 200 replicas."));
  if (embedded) { take(kit.data("state")); tick(); } else { poll(); setInterval(tick, 1000); }
})();
