/* Weights as computers hold them, and an optimizer: bfloat16 by its bits, a seeded generator, Adam, a population of weights.
   Nothing here draws. `window.weights` has all of it. */
"use strict";
window.weights = (() => {
  const f32 = new Float32Array(1), u32 = new Uint32Array(f32.buffer);

  /* The bits of a float32, rounded to bfloat16: to nearest, ties to even, overflow to infinity, one NaN (SPEC 3). */
  function rounded(bits) {
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return ((bits >>> 16) + (((bits & 0xffff) + 0x7fff + ((bits >>> 16) & 1)) >>> 16)) & 0xffff;
  }
  const bitsOf = (x) => { f32[0] = x; return u32[0]; };
  const bf16 = (x) => rounded(bitsOf(x));
  const valueOf = (half) => { u32[0] = half << 16; return f32[0]; };
  /* The step from a bfloat16 to the next one away from zero. */
  const ulp = (x) => 2 ** (Math.max(1, (bf16(x) >> 7) & 255) - 134);

  /* A generator that gives the same numbers for the same seed (mulberry32), evenly and normally distributed. */
  function generator(seed) {
    let state = seed >>> 0;
    const even = () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let t = state;
      t = Math.imul(t ^ (t >>> 15), t | 1);
      t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    const normal = () => Math.sqrt(-2 * Math.log(1 - even())) * Math.cos(2 * Math.PI * even());
    return {even, normal};
  }

  /* Gradients are mostly noise around a small signal of each weight's own, as in reinforcement learning. */
  const SIGNAL = 0.35, BETA1 = 0.9, BETA2 = 0.999;
  /* Magnitudes of weights are log-normal. */
  const MEDIAN = 0.012, SPREAD = 1.5;

  /* Weights to begin with, and what Adam makes of their gradients: its updates at a learning rate of 1, step by step. They
     are the same at every learning rate, so they are computed once. */
  const courses = new Map();
  function course(size, seed) {
    const key = size + " " + seed;
    if (courses.has(key)) return courses.get(key);
    const {even, normal} = generator(seed);
    const begin = new Float32Array(size), signal = new Float32Array(size), m = new Float64Array(size), v = new Float64Array(size);
    for (let i = 0; i < size; i += 1) {
      begin[i] = (even() < 0.5 ? -1 : 1) * MEDIAN * Math.exp(SPREAD * normal());
      signal[i] = SIGNAL * normal();
    }
    const made = [];
    function updates(step) {
      while (made.length < step) {
        const one = 1 - BETA1 ** (made.length + 1), two = 1 - BETA2 ** (made.length + 1), row = new Float32Array(size);
        for (let i = 0; i < size; i += 1) {
          const gradient = signal[i] + normal();
          m[i] = BETA1 * m[i] + (1 - BETA1) * gradient;
          v[i] = BETA2 * v[i] + (1 - BETA2) * gradient * gradient;
          row[i] = m[i] / one / (Math.sqrt(v[i] / two) + 1e-8);
        }
        made.push(row);
      }
      return made[step - 1];
    }
    courses.set(key, {begin, updates});
    return courses.get(key);
  }

  /* Weights under Adam, each with a master in float32, or rounded to bfloat16 after each step. */
  function population(size, seed, {masters = true, start} = {}) {
    const {begin, updates} = course(size, seed), weight = Float32Array.from(begin), half = new Uint16Array(size);
    let steps = 0;
    if (start !== undefined) weight.fill(start);
    for (let i = 0; i < size; i += 1) {
      half[i] = bf16(weight[i]);
      if (!masters) weight[i] = valueOf(half[i]);
    }
    /* One step; returns how many of the published weights flipped, and calls each(i, old bits, update). */
    function step(rate, each) {
      steps += 1;
      const row = updates(steps);
      let flips = 0;
      for (let i = 0; i < size; i += 1) {
        weight[i] -= rate * row[i];
        const old = half[i], now = bf16(weight[i]);
        if (old !== now) flips += 1;
        half[i] = now;
        if (!masters) weight[i] = valueOf(now);
        if (each) each(i, old, rate * row[i]);
      }
      return flips;
    }
    return {weight, half, step};
  }

  /* After some steps, in which the moments settle, count the flips of the next ones, by exponent. */
  function measured(rate, {size = 20000, seed = 1, masters = true, settle = 20, count = 4} = {}) {
    const crowd = population(size, seed, {masters});
    for (let i = 0; i < settle; i += 1) crowd.step(rate);
    const here = new Float64Array(256), flips = new Float64Array(256);
    let all = 0, moved = 0;
    for (let i = 0; i < count; i += 1) {
      all += crowd.step(rate, (at, old, update) => {
        const field = (old >> 7) & 255;
        here[field] += 1;
        if (old !== crowd.half[at]) flips[field] += 1;
        moved += Math.abs(update);
      });
    }
    return {share: all / (size * count), flips: all, weights: size * count, mean: moved / (size * count), here, byExponent: flips};
  }

  return {rounded, bitsOf, bf16, valueOf, ulp, generator, population, measured};
})();
