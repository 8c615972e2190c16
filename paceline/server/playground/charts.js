// Charts with axes and units, as SVG. Each is as wide as its box and says in words what it shows.

import { draw } from "./dom.js";

const TOGETHER_MS = 3; // between two arrivals of one message
const HEIGHT = 200;
const EDGE = { left: 52, right: 12, top: 22, bottom: 38 };

/** Finds round numbers from 0 to at least `most`, about four steps apart. */
export function ticksOf(most) {
  const rough = Math.max(most, 1e-9) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const count = Math.max(1, Math.ceil(most / step - 1e-9));
  return Array.from({ length: count + 1 }, (_, i) => Number((i * step).toPrecision(12)));
}

/** A frame with axes; `x` and `y` place values on it. */
class Frame {
  constructor(svg, { xs, ys, xTitle, yTitle, words, xLabels = xs }) {
    const width = Math.max(240, svg.clientWidth || 600);
    Object.assign(this, { svg, width, xs, ys });
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.setAttribute("aria-label", words);
    this.parts = [];
    for (const value of ys) {
      this.add("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: this.y(value), y2: this.y(value) });
      this.add(
        "text",
        { class: "tick y", x: EDGE.left - 8, y: this.y(value) + 4, "text-anchor": "end" },
        String(value),
      );
    }
    xs.forEach((value, i) =>
      this.add(
        "text",
        { class: "tick x", x: this.x(value), y: HEIGHT - EDGE.bottom + 16, "text-anchor": "middle" },
        String(xLabels[i]),
      ),
    );
    this.add("text", { class: "title", x: 0, y: 12 }, yTitle);
    this.add("text", { class: "title", x: width - EDGE.right, y: HEIGHT - 4, "text-anchor": "end" }, xTitle);
  }
  x(value) {
    const [first, last] = [this.xs[0], this.xs.at(-1)];
    return EDGE.left + ((this.width - EDGE.left - EDGE.right) * (value - first)) / (last - first || 1);
  }
  y(value) {
    return HEIGHT - EDGE.bottom - ((HEIGHT - EDGE.top - EDGE.bottom) * value) / this.ys.at(-1);
  }
  add(...shape) {
    this.parts.push(draw(...shape));
  }
  finish() {
    this.svg.replaceChildren(...this.parts);
  }
}

/** Draws values over the last `seconds`: points are {ago, value, low, high}. `rule` is a value to compare with. */
export function lineChart(svg, points, { seconds, yTitle, rule = null, words }) {
  const most = Math.max(...points.map((point) => point.high ?? point.value), rule === null ? 0 : 1.25 * rule, 1e-9);
  const xs = [-seconds, -0.75 * seconds, -0.5 * seconds, -0.25 * seconds, 0];
  const frame = new Frame(svg, {
    xs,
    ys: ticksOf(most),
    xTitle: "seconds before now",
    yTitle,
    words,
    xLabels: xs.map((x) => (x ? -x : "now")),
  });
  const place = (point, name = "value") => `${frame.x(-point.ago).toFixed(1)},${frame.y(point[name]).toFixed(1)}`;
  if (points.some((point) => point.low !== undefined)) {
    const edge = [
      ...points.map((point) => place(point, "low")),
      ...points.map((point) => place(point, "high")).reverse(),
    ];
    frame.add("polygon", { class: "band", points: edge.join(" ") });
  }
  if (rule !== null)
    frame.add("line", {
      class: "rule",
      x1: EDGE.left,
      x2: frame.width - EDGE.right,
      y1: frame.y(rule),
      y2: frame.y(rule),
    });
  frame.add("polyline", { class: "line", points: points.map((point) => place(point)).join(" ") });
  const last = points.at(-1);
  frame.add("circle", { class: "dot", cx: frame.x(-last.ago), cy: frame.y(last.value), r: 3.5 });
  frame.finish();
}

/** Draws shares (0 to 1) by position. */
export function barChart(svg, shares, { xTitle, yTitle, words }) {
  const places = Array.from({ length: Math.max(shares.length, 4) + 2 }, (_, i) => i);
  const labels = places.map((i) => (i === 0 || i > Math.max(shares.length, 4) ? "" : i));
  const frame = new Frame(svg, { xs: places, ys: [0, 25, 50, 75, 100], xTitle, yTitle, words, xLabels: labels });
  const wide = 0.7 * (frame.x(1) - frame.x(0));
  shares.forEach((share, i) => {
    const y = frame.y(100 * share);
    frame.add(
      "rect",
      { class: "accepted", x: frame.x(i + 1) - wide / 2, width: wide, y, height: frame.y(0) - y },
      "",
      `position ${i + 1}: ${(100 * share).toFixed(0)} %`,
    );
  });
  frame.finish();
}

/** Draws an answer step by step: a column for each, as wide as it lasted and as high as it has tokens. */
export function stepChart(svg, arrivals) {
  const rounds = spread(arrivals);
  const seconds = rounds.at(-1).to / 1000 || 1;
  const tokens = rounds.reduce((sum, round) => sum + round.origins.length, 0);
  const most = Math.max(4, ...rounds.map((round) => round.origins.length));
  const frame = new Frame(svg, {
    xs: secondsOf(seconds),
    ys: ticksOf(most).filter(Number.isInteger),
    xTitle: "seconds after the request",
    yTitle: "tokens in the step",
    words: `${tokens} tokens in ${rounds.length} steps, ${seconds.toFixed(2)} seconds`,
  });
  for (const round of rounds) {
    const [from, to] = [frame.x(round.from / 1000), frame.x(round.to / 1000)];
    const title = `step ${round.round}: ${round.origins.length} tokens in ${(round.to - round.from).toFixed(0)} ms`;
    round.origins.forEach((origin, i) => {
      const [low, high] = [frame.y(i), frame.y(i + 1)];
      frame.add(
        "rect",
        {
          class: origin ?? "plain",
          x: from,
          width: Math.max(to - from - 1, 0.6),
          y: high,
          height: Math.max(low - high - 1, 0.6),
        },
        "",
        title,
      );
    });
  }
  frame.finish();
}

/** Divides the time of steps that arrived together, and so seem to take none, evenly among them. */
export function spread(rounds) {
  const made = [];
  for (let i = 0; i < rounds.length;) {
    let end = i + 1;
    while (end < rounds.length && rounds[end].to - rounds[end - 1].to < TOGETHER_MS) end++;
    const [from, each] = [rounds[i].from, (rounds[end - 1].to - rounds[i].from) / (end - i)];
    for (let k = 0; i < end; i++, k++) made.push({ ...rounds[i], from: from + k * each, to: from + (k + 1) * each });
  }
  return made;
}

const secondsOf = (most) => (most < 0.02 ? [0, Number(most.toPrecision(2))] : ticksOf(most));
