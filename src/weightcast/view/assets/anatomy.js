/* Anatomy of a delta: what `weightcast analyze` found, as plots. It computes shares and means of the numbers it is given. */
"use strict";
(() => {
  const {el, card, tiles} = kit;
  const found = kit.data("found"), source = found.source;
  const main = document.getElementById("page");
  const KINDS = {
    masters: "masters of higher precision, rounded for publishing",
    direct: "weights that are rounded after each update, without masters",
  };
  const raised = (e) => [...String(e)].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] || "⁻").join("");
  function small(x) {
    if (x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4)) return kit.digits(x);
    const [front, e] = x.toExponential(1).split("e");
    return (front === "1.0" ? "10" : front + "\u00a0·\u00a010") + raised(+e);
  }
  const share = (x) => (x < 0 ? "−" + share(-x) : (x >= 0.0995 ? Math.round(100 * x) : x === 0 || x >= 1e-5 ? kit.digits(100 * x, 2) : small(100 * x)) + "\u00a0%");
  const floats = found.dtypes.filter((one) => one.exponents);
  let one = floats[0];

  /* -- above -- */

  function head() {
    const where = source.url !== undefined
      ? [kit.name(source.url, 80), `, versions ${source.first} to ${source.last}`]
      : [kit.name(source.old, 60), " → ", kit.name(source.new, 60)];
    document.getElementById("top").append(el("h1", {}, "Anatomy of a delta"), el("p", {class: "soft"}, ...where));
    const banded = found.codecs.find((codec) => codec.codec === "banded"), each = banded.bytes / found.steps;
    const fit = one && one.fits.length ? one.fits[0] : null;
    main.append(tiles([
      {label: "changed in a step", value: share(found.density), under: found.density ? `one of ${kit.count(1 / found.density)} elements` : "nothing"},
      {label: "a version, banded", value: kit.bytes(each), under: `of ${kit.bytes(found.model_bytes)}: 1 : ${kit.count(found.model_bytes / each)}`},
      {label: "bits per change", value: banded.bits_per_change === null ? "–" : kit.digits(banded.bits_per_change), under: "place, direction and distance"},
      {label: "largest update", value: fit && one.looks_like !== "neither" ? small(fit.largest_update) : "–", under: fit && one.looks_like !== "neither" ? `explains ${share(1 - fit.misplaced)} of flips` : "no model fits"},
      {label: "flips that return", value: found.returned_share === null ? "–" : share(found.returned_share), under: "to bits of an earlier version"},
    ]));
  }

  /* -- why so few, by exponent -- */

  /* Exponents of one weight in 100,000 and more: what is rarer is listed in the table of the terminal, and says nothing here. */
  function common() {
    const all = one.exponents.reduce((sum, row) => sum + row.weights, 0);
    return one.exponents.filter((row) => row.weights > 0 && row.weights >= all / 1e5);
  }
  const middle = (row) => (row.smallest || row.ulp) * Math.SQRT2;
  function ratePlot() {
    const rows = common();
    const lowest = rows.reduce((least, row) => (row.flips ? Math.min(least, row.flips / row.weights) : least), 1) / 3;
    const series = [{name: "measured", mark: "points", colour: 0, points: rows.filter((row) => row.flips).map((row) => [middle(row), row.flips / row.weights])}];
    one.fits.forEach((fit, i) => series.push({
      name: i ? `otherwise: ${fit.kind === "masters" ? "masters" : "no masters"}` : `predicted: ${fit.kind === "masters" ? "masters" : "no masters"}`,
      mark: "line", colour: i ? 5 : 1,
      points: rows.filter((row) => row.predicted[fit.kind] / row.weights >= lowest).map((row) => [middle(row), row.predicted[fit.kind] / row.weights]),
    }));
    const fit = one.fits[0], rules = fit ? [{x: 256 * fit.largest_update, name: "|w|/256 = largest update"}] : [];
    return charts.lines({
      title: "Share of weights that flip in a step, by magnitude", height: 340, rules, series,
      note: "Each power of two has its own step to the next float: a weight twice as large needs an update twice as large.",
      x: {label: "magnitude of the weight", scale: "log", format: small}, y: {label: "flipped", scale: "log", format: share, min: lowest, max: 1},
    });
  }
  function verdict() {
    const [fit, other] = one.fits;
    if (!fit) return card("Why so few", {size: "third"}, el("p", {}, `Nothing of ${one.dtype} flipped.`));
    const parts = one.looks_like === "neither"
      ? [`Neither kind of training explains the flips: the better model puts ${share(fit.misplaced)} of them elsewhere. Updates may differ between tensors, or the weights were changed by something else than small steps.`]
      : one.looks_like === "either" ? [
        `Updates are as large as the steps between floats: one number, the largest update of ${small(fit.largest_update)}, places all but ${share(fit.misplaced)} of the flips, whether weights have masters of higher precision or not.`,
      ] : [
        `The flips look like those of ${KINDS[fit.kind]}: one number, the largest update of ${small(fit.largest_update)}, places all but ${share(fit.misplaced)} of them.`,
        fit.kind === "masters"
          ? "An update of size s changes the published weight only if it crosses a midpoint between two floats. That happens with the probability s over the step to the next float, or always if s is larger."
          : "Each weight lies on a float. An update smaller than half the step to the next one is rounded away, and nothing remembers it; a larger one flips.",
        `Of the weights, ${share(one.visible_share)} have a float nearer than twice the largest update. All others ${fit.kind === "masters" ? "flip now and then, as their masters drift" : "are predicted not to flip at all"}.`,
        `If these were ${KINDS[other.kind]}, ${share(other.misplaced)} of the flips would be elsewhere.`,
      ];
    return card("Why so few", {size: "third"}, ...parts.map((text) => el("p", {}, text)), el("p", {class: "note"},
      "The model: sizes of updates are spread evenly from 0 to the largest. That is an assumption, and the only one; the fit is the value that misplaces the fewest flips."));
  }
  function wherePlot() {
    const rows = common();
    const all = rows.reduce((sum, row) => sum + row.weights, 0), flips = Math.max(1, one.changed);
    return charts.lines({
      title: "Where the weights are, and where the flips are", height: 260,
      x: {label: "magnitude of the weight", scale: "log", format: small}, y: {label: "share of all", format: share, min: 0},
      series: [{name: "weights", mark: "steps", colour: 5, points: rows.map((row) => [middle(row), row.weights / all])},
        {name: "flips", mark: "steps", colour: 0, points: rows.map((row) => [middle(row), row.flips / flips])}],
    });
  }
  function residualPlot() {
    const fit = one.fits[0], total = Math.max(1, one.changed);
    const points = common().filter((row) => row.predicted[fit.kind] !== undefined).map((row) => [middle(row), (row.flips - row.predicted[fit.kind]) / total]);
    return charts.lines({
      title: "Flips measured less predicted, as a share of all flips", height: 260, rules: [{y: 0, name: "as predicted"}],
      x: {label: "magnitude of the weight", scale: "log", format: small}, y: {format: share},
      series: [{name: "measured less predicted", mark: "both", colour: 1, points}],
    });
  }
  function distancePlot() {
    const names = one.distances.map((_, i) => (i < 2 ? String(i + 1) : `${2 ** (i - 1) + 1}–${2 ** i}`)), flips = Math.max(1, one.changed);
    return charts.bars({
      title: "How far weights move, in floats", height: 240, x: {label: "floats further"}, y: {format: share}, names: names.slice(0, 16),
      note: `${share(one.away / flips)} away from zero, ${share(one.towards / flips)} towards it, ${share(one.across / flips)} across.`,
      series: [{name: "flips", colour: 2, values: one.distances.slice(0, 16).map((n) => n / flips)}],
    });
  }
  function explained() {
    if (!one) return [card("Why so few", {size: "half"}, el("p", {}, "No tensor is one of floats, so there are no exponents to explain flips by.")), card("Codecs", {size: "half"}, codecTable())];
    const made = [card("Flips by exponent", {size: "two-thirds"}, ratePlot()), verdict(), card("Weights and flips", {size: "half"}, wherePlot())];
    if (one.fits.length) made.push(card("What the model leaves over", {size: "half"}, residualPlot()));
    if (one.changed) made.push(card("Distances and directions", {size: "half"}, distancePlot()));
    made.push(card("Codecs", {size: "half"}, codecTable()));
    return made;
  }

  /* -- syncs, codecs, cadence -- */

  function unionPlot() {
    const rows = found.intervals, all = Math.max(1, found.model_elements);
    return charts.lines({
      title: "Changed weights, by versions between two syncs", height: 240,
      note: "A weight that flips twice is shipped once, and one that returns not at all.",
      x: {label: "versions between two syncs", scale: "log", format: kit.digits}, y: {label: "share of the model", format: share, min: 0},
      series: [{name: "if no weight flipped twice", mark: "line", colour: 5, points: rows.map((row) => [row.versions, row.versions * rows[0].changed / all])},
        {name: "flipped at any time", mark: "both", colour: 1, points: rows.map((row) => [row.versions, row.touched / all])},
        {name: "different at the end", mark: "both", colour: 0, points: rows.map((row) => [row.versions, row.changed / all])}],
    });
  }
  function patchPlot() {
    const rows = found.intervals;
    return charts.bars({
      title: "Bytes of one patch for several versions", height: 240, x: {label: "versions"}, y: {format: kit.bytes}, names: rows.map((row) => String(row.versions)),
      series: [{name: "one by one", colour: 5, values: rows.map((row) => row.bytes_one_by_one)}, {name: "in one patch (a squash)", colour: 0, values: rows.map((row) => row.bytes)}],
    });
  }
  function codecTable() {
    return kit.table({caption: "Bytes of a version by codec", columns: [{name: "codec"}, {name: "a version", number: true}, {name: "bits per change", number: true}, {name: "of the model", number: true}],
      rows: found.codecs.map((row) => [row.codec, kit.bytes(row.bytes / found.steps), row.bits_per_change === null ? "–" : kit.digits(row.bits_per_change), "1 : " + kit.count(found.model_bytes * found.steps / row.bytes)])});
  }
  function stepPlot() {
    const first = source.first === undefined ? 0 : source.first;
    return charts.lines({
      title: "Bytes of each version", height: 220, x: {label: "version", whole: true, format: kit.count}, y: {scale: "log", format: kit.bytes},
      series: found.codecs.map((row, i) => ({name: row.codec, mark: "both", colour: i, points: row.by_step.map((n, at) => [first + 1 + at, n])})),
    });
  }
  function cadence() {
    const {assumed, ways} = found.cadence;
    const levels = (way) => (way.squash_levels.length ? "every " + way.squash_levels.join(", ") : "none");
    const anchors = (way) => (way.anchor_every ? "every " + way.anchor_every : "the first alone");
    const columns = ["squashes", "anchors", "moved a version", "uploaded", "a join", "a return", "stored"].map((name, i) => ({name, number: i > 1}));
    const rows = ways.map((way) => [levels(way), anchors(way), ...["moved", "uploaded", "join", "back", "stored"].map((key) => kit.bytes(way[key]))]);
    const note = `An estimate: ${kit.plural(assumed.replicas, "replica")} follow every version, and in a hundred versions each joins with nothing, and comes back late, ${kit.digits(assumed.joins_per_hundred_versions)} times. `
      + `Measured sizes repeat over ${assumed.versions} versions; patches over more versions than were measured continue their growth.`;
    return card("Which squashes and anchors are cheapest", {}, el("p", {class: "note"}, note), kit.table({caption: "Ways to cut, the cheapest first", columns, rows}));
  }

  /* -- where -- */

  function heats() {
    return found.layers.map((stack) => {
      const at = new Map(stack.cells.map((cell) => [cell.layer + " " + cell.kind, cell.density]));
      return card(stack.stack ? "Where: " + kit.plain(stack.stack, 40) : "Where", {}, charts.heat({
        title: "Share that changes in a step, by layer and kind", rows: stack.kinds, columns: stack.layers.map(String), format: share,
        x: {label: "layer"}, y: {label: "kind"}, steps: [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3],
        values: stack.kinds.map((kind) => stack.layers.map((layer) => at.get(layer + " " + kind) ?? null)),
      }));
    });
  }
  function tensors() {
    const rows = found.tensors.map((row) => [kit.name(row.name, 80), row.dtype, row.shape.join("×") || "scalar", kit.count(row.changed), share(row.density)]);
    const left = found.tensors_left_out ? el("p", {class: "note"}, `${kit.plural(found.tensors_left_out, "more tensor")} changed less.`) : null;
    const list = kit.table({caption: "Tensors, the most changed first", rows,
      columns: [{name: "tensor"}, {name: "dtype"}, {name: "shape"}, {name: "flips", number: true}, {name: "in a step", number: true}]});
    return card("Tensors", {}, el("details", {}, el("summary", {}, `Show ${kit.plural(rows.length, "tensor")}`), list), left);
  }

  /* -- all of it -- */

  head();
  const why = el("div", {class: "grid"});
  why.style.gridColumn = "span 12";
  why.style.padding = "0";
  const draw = () => why.replaceChildren(...explained());
  draw();
  if (floats.length > 1) main.append(kit.choice("Dtype", floats.map((f) => [f.dtype, f.dtype]), one.dtype, (name) => { one = floats.find((f) => f.dtype === name); draw(); }));
  main.append(why);
  if (found.intervals.length > 1) main.append(card("What waiting saves", {size: "half"}, unionPlot()), card("What one patch for several versions saves", {size: "half"}, patchPlot()));
  if (found.steps > 1) main.append(card("Versions", {}, stepPlot()));
  main.append(...heats());
  if (found.cadence) main.append(cadence());
  main.append(tensors());
  document.getElementById("foot").append(`Counted bit by bit over ${kit.plural(found.steps, "step")} of ${kit.count(found.model_elements)} elements in ${kit.plural(found.model_tensors, "tensor")}. Patches were encoded to measure them.`);
})();
