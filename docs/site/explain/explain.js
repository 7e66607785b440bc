/* Why so few weights change: a page that computes what it shows. The only numbers it is given are those of figures.json. */
"use strict";
(() => {
  const {el, card, tiles} = kit, {bf16, valueOf, ulp, population, measured} = weights;
  const figures = kit.data("figures"), main = document.getElementById("page");
  const WALK = 400;
  const MODELS = [["0.6 B", 0.6e9], ["8 B", 8e9], ["70 B", 70e9], ["1 T", 1e12]];
  const LINKS = [["1 Gbit/s", 0.125e9], ["10 Gbit/s", 1.25e9], ["100 Gbit/s", 12.5e9], ["a fabric, 400 GB/s", 400e9]];

  const raised = (e) => [...String(e)].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] || "⁻").join("");
  function small(x) {
    if (x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4)) return kit.digits(x, 3);
    const [front, e] = x.toExponential(1).split("e");
    return (front === "1.0" ? "10" : front.replace(".0", "") + "\u00a0·\u00a010") + raised(+e);
  }
  const share = (x) => (x >= 0.0995 ? Math.round(100 * x) : kit.digits(100 * x, 2)) + "\u00a0%";

  const state = {rate: 1e-6, magnitude: 0.02, masters: true, model: MODELS[0][1], link: LINKS[1][1]};
  const watchers = [];
  const changed = () => watchers.forEach((call) => call());

  /* -- controls, which all cards share -- */

  function slider(label, low, high, key, each, id) {
    const shown = el("output", {for: id});
    const input = el("input", {type: "range", id, min: Math.round(Math.log10(low) * each), max: Math.round(Math.log10(high) * each), step: 1,
      on: {input: () => { state[key] = Number((10 ** (input.value / each)).toPrecision(2)); changed(); }}});
    function show() {
      input.value = Math.round(Math.log10(state[key]) * each);
      shown.textContent = small(state[key]);
      input.setAttribute("aria-valuetext", small(state[key]));
    }
    watchers.push(show);
    show();
    return el("label", {}, label, shown, input);
  }
  const rateSlider = (id) => slider("learning rate", 1e-8, 1e-2, "rate", 10, id);
  function kindChoice() {
    const made = kit.choice("How weights are kept", [["masters", "float32 masters"], ["direct", "bf16 alone"]], "masters", (value) => { state.masters = value === "masters"; changed(); });
    watchers.push(() => made.querySelectorAll("input").forEach((input) => { input.checked = (input.value === "masters") === state.masters; }));
    return made;
  }

  /* -- 1: one weight on its grid -- */

  function walk() {
    const start = valueOf(bf16(state.magnitude)), one = population(1, 147, {masters: state.masters, start});
    const master = [[0, 0]], published = [[0, 0]], unit = ulp(start);
    let flips = 0;
    for (let i = 1; i <= WALK; i += 1) {
      flips += one.step(state.rate);
      master.push([i, (one.weight[0] - start) / unit]);
      published.push([i, (valueOf(one.half[0]) - start) / unit]);
    }
    return {start, unit, master, published, flips};
  }
  function walkSpec(found) {
    const far = found.master.concat(found.published).reduce((most, p) => Math.max(most, Math.abs(p[1])), 0);
    const edge = Math.max(0.8, Math.min(far * 1.1, 1e6));
    const series = [{name: "published, bf16", mark: "steps", colour: 1, points: found.published}];
    if (state.masters) series.unshift({name: "float32 master", mark: "line", colour: 0, points: found.master});
    return {title: `${WALK} steps of one weight`, height: 280, series, x: {label: "step", format: kit.count},
      y: {label: "floats from where it began", min: -edge, max: edge, format: (v) => (Math.abs(v) < 1e-9 ? "0" : (v > 0 ? "+" : "−") + kit.digits(Math.abs(v), 2))},
      rules: edge < 4 ? [{y: 0.5, name: "midpoint: beyond it, it rounds up"}, {y: -0.5, name: "midpoint"}] : []};
  }
  function gridCard() {
    const bits = el("dl", {class: "bits"}), said = el("p", {class: "found", role: "status"});
    let found = walk();
    const plot = charts.lines(walkSpec(found));
    function show() {
      found = walk();
      plot.update(walkSpec(found));
      const text = bf16(found.start).toString(2).padStart(16, "0");
      const part = (name, value) => el("div", {class: name}, el("dt", {}, name), el("dd", {}, value));
      bits.replaceChildren(part("sign", text[0]), part("exponent", text.slice(1, 9)), part("mantissa", text.slice(9)),
        el("div", {}, el("dt", {}, "its value"), el("dd", {}, small(found.start))), el("div", {}, el("dt", {}, "the next float"), el("dd", {}, "+" + small(found.unit))));
      said.replaceChildren(`A step moves the weight by about ${small(state.rate / 3)}: ${share(state.rate / 3 / found.unit)} of the way to the next float. In ${WALK} steps it flipped `,
        el("strong", {}, kit.plural(found.flips, "time")), state.masters ? "." : "; what was rounded away is forgotten, so small steps add up to nothing.");
    }
    watchers.push(show);
    const made = card("1 · A weight on its grid", {id: "grid"}, el("p", {class: "say"},
      "bf16 keeps 8 bits of a number: an engine's weight is one of the floats on a coarse grid, and the next one is about 1/128 to 1/256 of it away. An optimizer whispers: at RL learning rates a step is a few thousandths of that. Move the sliders."),
    el("div", {class: "controls"}, rateSlider("rate-1"), slider("magnitude of the weight", 1e-6, 1, "magnitude", 10, "magnitude"), kindChoice()), bits, plot, said);
    show();
    return made;
  }

  /* -- 2: many weights -- */

  function byExponent(found) {
    const points = [];
    for (let field = 0; field < 255; field += 1) {
      if (found.here[field] >= 60 && found.byExponent[field]) points.push([2 ** (field - 127) * Math.SQRT2, found.byExponent[field] / found.here[field]]);
    }
    return points;
  }
  function crowdSpec(found, other) {
    return {title: "Share that flips in a step, by magnitude", height: 300,
      x: {label: "magnitude of the weight", scale: "log", format: small, min: 1e-5, max: 1}, y: {label: "flipped", scale: "log", min: 1e-5, max: 1, format: share},
      series: [{name: "with float32 masters", mark: "both", colour: 0, points: byExponent(found)}, {name: "in bf16 alone", mark: "both", colour: 1, points: byExponent(other)}],
      rules: [{x: Math.min(1, Math.max(1e-5, 256 * state.rate)), name: "|w|/256 = learning rate"}]};
  }
  function crowdCard() {
    const figuresHere = el("div", {class: "big"}), spec = () => crowdSpec(masters, direct);
    let masters = null, direct = null, plot = null;
    function show() {
      masters = measured(state.rate);
      direct = measured(state.rate, {masters: false});
      state.share = (state.masters ? masters : direct).share;
      if (plot) plot.update(spec());
      else plot = charts.lines(spec());
      const one = (found) => (found.flips ? `one of ${kit.count(1 / found.share)} weights` : "none of the weights");
      figuresHere.replaceChildren(tiles([
        {label: "flipped in a step, float32 masters", value: share(masters.share), under: one(masters)},
        {label: "flipped in a step, bf16 alone", value: share(direct.share), under: one(direct)},
        {label: "a mean update", value: small(masters.mean), under: "computed by Adam from noisy gradients"},
      ]));
    }
    watchers.unshift(show);  // first: the delta's card needs the share
    show();
    return card("2 · Twenty thousand weights", {id: "crowd"}, el("p", {class: "say"},
      "Here are 20,000 weights (log-normal magnitudes, median 0.012) under Adam, computed as you move the slider. Small weights lie on a fine grid and flip often; large ones hardly ever. With float32 masters an update of size s flips with the probability s over the step to the next float. In bf16 alone it flips only if it is larger than half a step: a threshold, near |w|/256."),
    el("div", {class: "controls"}, rateSlider("rate-2")), figuresHere, plot);
  }
  function sweepCard() {
    const rates = [];
    for (let e = -8; e <= -2; e += 0.5) rates.push(Number((10 ** e).toPrecision(2)));
    const sweep = (masters) => rates.map((rate) => [rate, measured(rate, {size: 4000, count: 3, settle: 12, masters}).share]);
    const series = [{name: "float32 masters", mark: "both", colour: 0, points: sweep(true)}, {name: "bf16 alone", mark: "both", colour: 1, points: sweep(false)}];
    const spec = () => ({title: "Share of weights that flip in a step", height: 260, series, rules: [{x: state.rate, name: "now"}],
      x: {label: "learning rate", scale: "log", format: small}, y: {label: "flipped", scale: "log", min: 1e-5, max: 1, format: share}});
    const plot = charts.lines(spec());
    watchers.push(() => plot.update(spec()));
    return card("At every learning rate", {size: "half"}, plot, el("p", {class: "note"}, "Computed here, 4,000 weights for each point. On the right most weights change in each step, on the left hardly any."));
  }

  /* -- 3: the delta -- */

  function deltaCard() {
    const table = el("div", {}), said = el("p", {class: "found", role: "status"});
    const choose = el("select", {id: "model", on: {change: () => { state.model = Number(choose.value); changed(); }}}, MODELS.map(([name, n]) => el("option", {value: n}, name + " parameters")));
    function show() {
      const {codecs} = figures, bits = state.masters ? codecs.masters : codecs.direct, full = 2 * state.model, flips = state.model * state.share;
      table.replaceChildren(kit.table({caption: "What a version takes", columns: [{name: "written as"}, {name: "bits per change, measured", number: true}, {name: "a version", number: true}, {name: "of a full copy", number: true}],
        rows: [["plain", bits.plain], ["gap", bits.gap], ["banded", bits.banded]].map(([name, each]) => [name, kit.digits(each), flips ? kit.bytes(flips * each / 8) : "nothing", flips ? "1 : " + kit.digits(full * 8 / (flips * each), 2) : "–"])}));
      said.replaceChildren(`A full copy is ${kit.bytes(full)}. At this learning rate ${share(state.share)} of the weights change: `, el("strong", {}, flips ? kit.bytes(flips * bits.banded / 8) : "nothing"), " has to travel.");
    }
    watchers.push(show);
    const made = card("3 · The delta", {size: "half", id: "delta"}, el("p", {class: "say"},
      "Only places and distances of the flips are sent. Since small weights flip most, the exponent that both sides know tells where to expect them: that is how banded needs fewest bits."),
    el("div", {class: "controls"}, el("label", {for: "model"}, "model", choose)), said, table,
    el("p", {class: "note"}, `Bits per change were measured on ${figures.codecs.machine}, ${figures.codecs.masters.changed_percent} % (float32 masters) and ${figures.codecs.direct.changed_percent.toFixed(2)} % (bf16) changed in a step; at other shares they differ, so the bytes here are an estimate.`));
    show();
    return made;
  }

  /* -- 4: from the trainer to the engine -- */

  function phases() {
    const p = figures.phases, full = 2 * figures.parameters / state.link, there = p.bytes / state.link;
    const stops = [["detect", p.publish_ms / 1e3, 3], ["encode, commit", (p.committed_ms - p.publish_ms) / 1e3, 2], ["travel", 2 * there, 0], ["fetch, decode, verify", p.mirror_ms / 1e3, 6], ["prepare", p.prepare_ms / 1e3, 5], ["write: paused", p.scatter_ms / 1e3, 4]];
    let at = 0;
    const spans = stops.map(([name, took, colour]) => { const begin = at; at += took; return {name, begin, end: at, colour}; });
    return {full, ours: at, spans};
  }
  function timeSpec(found) {
    return {title: "From the end of a step to an engine that uses it", x: {format: kit.seconds, label: "after the step"},
      rows: [{name: "full broadcast: trainer and engine wait", spans: [{name: "broadcast", begin: 0, end: found.full, colour: 1}]}, {name: "weightcast: the engine serves until the last phase", spans: found.spans}]};
  }
  function timeCard() {
    let found = phases();
    const keys = [["broadcast", 1], ...found.spans.map((span) => [span.name, span.colour])];
    const legend = el("ul", {class: "legend"}, keys.map(([name, colour]) => el("li", {},
      kit.svg("svg", {"aria-hidden": "true", viewBox: "0 0 22 12"}, kit.svg("rect", {x: 3, width: 16, height: 12, rx: 2, class: `s${colour} fill`})), name)));
    const plot = charts.timeline(timeSpec(found)), said = el("p", {class: "found", role: "status"});
    const choose = el("select", {id: "link", on: {change: () => { state.link = Number(choose.value); show(); }}}, LINKS.map(([name, n]) => el("option", {value: n}, name)));
    choose.value = state.link;
    function show() {
      found = phases();
      plot.update(timeSpec(found));
      const sooner = found.ours < found.full, p = figures.phases;
      said.replaceChildren(`Live after ${kit.seconds(found.ours)} instead of ${kit.seconds(found.full)}; the engine waits `, el("strong", {}, `${kit.digits(p.scatter_ms)} ms`), ` instead of ${kit.seconds(found.full)}. `,
        sooner ? "" : "On so fast a fabric a broadcast is there sooner: if trainer and engines share one, broadcast.");
    }
    const made = card("4 · Four phases, and a timeline", {id: "phases"}, el("p", {class: "say"},
      "Detect what flipped, encode and commit it, let each engine fetch and verify it while it serves, then pause and write. Below are recorded times of each phase for a model of 596 M parameters, and how long 1.19 GB take on the link you choose."),
    el("div", {class: "controls"}, el("label", {for: "link"}, "link", choose)), legend, plot, said,
    el("p", {class: "note"}, `Recorded on ${figures.phases.machine} (Measurements, “${figures.phases.section}”), by a release whose worker took what the mirror had staged. Travel, up and down, and the broadcast are computed: bytes over the link's rate, nothing else.`));
    show();
    return made;
  }

  document.getElementById("top").append(el("h1", {}, "Why so few weights change"), el("a", {href: "guides/analyze.html"}, "Measure it on a channel of yours"));
  main.append(el("p", {class: "lead"}, "From one step of reinforcement learning to the next, about 99 % of a model's bf16 weights are bit-identical. This page computes why, in your browser: everything that moves is calculated, and what was measured says where."));
  const grid = gridCard(), crowd = crowdCard();
  main.append(grid, crowd, sweepCard(), deltaCard(), timeCard());
  document.getElementById("foot").append("No request leaves this page. The same rounding as weightcast's own is tested on thousands of values.");
})();
