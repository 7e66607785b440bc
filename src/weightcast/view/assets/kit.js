/* Elements, numbers and text for a page without libraries. Everything that comes from outside becomes text, never markup.

   kit.el(tag, {class, attribute, on: {event: f}}, ...children)   an HTML element; strings become text nodes
   kit.svg(tag, attributes, ...children)                           the same for SVG
   kit.name(text, most)           text from outside: <bdi>, control and invisible characters spelled out, cut in the middle
   kit.plain(text, most)          the same as a string, for attributes and SVG
   kit.card(heading, {size: "half" | "third" | "two-thirds", note}, ...children)
   kit.tiles([{label, value, under, tone}])     figures at a glance; tone is "good", "warn" or "bad"
   kit.table({columns: [{name, number, whole}], rows, caption})    rows are lists of strings or elements; the first is the row's name
   kit.choice(label, [[value, text]], chosen, f)    a few options, one of which is chosen; calls f(value)
   kit.data(id)                   what page.py embedded under this name
   kit.bytes, kit.seconds, kit.percent, kit.count, kit.times, kit.ago      numbers as people read them
*/
"use strict";
const kit = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MOST = 96;

  function fill(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
      else made.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(3)) if (child !== null && child !== undefined) made.append(child);
    return made;
  }
  const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  /* Controls, formats (bidi, zero width), private use, surrogates and other white space than a blank. */
  const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Cs}\p{Zl}\p{Zp}\u115f\u1160\u3164\uffa0\u034f\ufe00-\ufe0f]/gu;
  /* More combining marks than any script needs, which draw over other lines. */
  const STACKED = /(\p{M}{3})\p{M}+/gu;
  function clean(text) {
    return String(text).slice(0, 4096).replace(HIDDEN, (one) => "\\u{" + one.codePointAt(0).toString(16) + "}").replace(STACKED, "$1…");
  }
  function plain(text, most = MOST) {
    const letters = Array.from(clean(text));
    if (letters.length <= most) return letters.join("");
    const front = Math.ceil((most - 1) * 0.6);
    return letters.slice(0, front).join("") + "…" + letters.slice(letters.length - (most - 1 - front)).join("");
  }
  function name(text, most = MOST) {
    const whole = plain(text, 1000), shown = plain(text, most);
    return el("bdi", {title: shown === whole ? null : whole}, shown);
  }

  const JOINED = "\u00a0";  // between a number and its unit no line breaks
  const finite = (x) => typeof x === "number" && Number.isFinite(x);
  function digits(x, most = 3) {
    if (!finite(x)) return "–";
    if (x === 0) return "0";
    const places = Math.max(0, Math.min(6, most - 1 - Math.floor(Math.log10(Math.abs(x)))));
    return x.toLocaleString("en-US", {maximumFractionDigits: places});
  }
  const count = (x) => (finite(x) ? x.toLocaleString("en-US", {maximumFractionDigits: 0}) : "–");
  function scaled(x, units, step) {
    if (!finite(x)) return "–";
    let at = 0;
    while (Math.abs(x) >= step * 0.9995 && at < units.length - 1) { x /= step; at += 1; }
    return digits(x) + JOINED + units[at];
  }
  const bytes = (x) => scaled(x, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);
  function seconds(x) {
    if (!finite(x)) return "–";
    const a = Math.abs(x);
    if (a === 0) return "0" + JOINED + "s";
    if (a < 1e-3) return digits(x * 1e6) + JOINED + "µs";
    if (a < 1) return digits(x * 1e3) + JOINED + "ms";
    if (a < 120) return digits(x) + JOINED + "s";
    if (a < 7200) return digits(x / 60, 2) + JOINED + "min";
    return a < 172800 ? digits(x / 3600, 2) + JOINED + "h" : digits(x / 86400, 2) + JOINED + "d";
  }
  function percent(x) {
    if (!finite(x)) return "–";
    return x > 0 && x < 1e-6 ? "<0.0001 %" : digits(100 * x) + JOINED + "%";
  }
  const times = (x) => (finite(x) ? digits(x) + "×" : "–");
  const ago = (x) => (!finite(x) ? "–" : x < -2 ? "in " + seconds(-x) : x < 2 ? "just now" : seconds(x < 120 ? Math.round(x) : x) + " ago");
  const plural = (n, one, many) => count(n) + " " + (n === 1 ? one : many || one + "s");

  function card(heading, options, ...children) {
    const {size = "", note, id} = options || {};
    const title = el("h2", {id: id ? id + "-title" : null}, heading);
    const top = el("header", {}, title, note ? el("p", {}, note) : null);
    return el("section", {class: ("card " + size).trim(), id, "aria-label": heading}, top, ...children);
  }
  function tiles(list) {
    const made = (tile) => el("div", {class: "tile"}, el("dt", {}, tile.label),
      el("dd", {class: tile.tone}, tile.value), tile.under ? el("dd", {class: "under"}, tile.under) : null);
    return el("dl", {class: "tiles"}, list.map(made));
  }
  function table({columns, rows, caption, blocks = true}) {
    const top = columns.map((one) => el("th", {scope: "col", class: one.number ? "number" : null}, one.name));
    const line = (row) => el("tr", {}, row.map((value, i) => i === 0 ? el("th", {scope: "row"}, value)
      : el("td", {class: [columns[i].number ? "number" : "", columns[i].whole ? "whole" : ""].join(" ").trim() || null,
        "data-column": columns[i].name}, value === "" ? null : value)));
    const made = el("table", {class: blocks ? "blocks" : null}, caption ? el("caption", {class: "unseen"}, caption) : null,
      el("thead", {}, el("tr", {}, top)), el("tbody", {}, rows.map(line)));
    return el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption ? "Table: " + caption : "Table"}, made);
  }
  let choices = 0;
  function choice(label, options, chosen, call) {
    const group = "choice" + (choices += 1);
    const one = ([value, text]) => {
      const input = el("input", {type: "radio", name: group, value, on: {change: () => call(value)}});
      input.checked = value === chosen;
      return el("label", {}, input, el("span", {}, text));
    };
    return el("div", {class: "choice", role: "radiogroup", "aria-label": label}, options.map(one));
  }
  const data = (id) => JSON.parse(document.getElementById(id).textContent);

  return {el, svg, clean, plain, name, digits, count, bytes, seconds, percent, times, ago, plural, card, tiles, table, choice, data};
})();
