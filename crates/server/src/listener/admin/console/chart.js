// Charts of requests and denials over time, drawn as SVG at the size of their element.

import { el, svg, text } from "./dom.js";
import { count, plural, rate, shortTime, time } from "./format.js";

export const HEIGHT = 220;
export const MARGIN = { left: 48, right: 8, top: 12, bottom: 24 };

// Returns a round number that is at least `value`, and the axis ticks up to this number.
export function scale(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const [step, parts] = [
    [1, 2],
    [2, 4],
    [3, 3],
    [4, 4],
    [5, 5],
    [6, 3],
    [8, 4],
    [10, 2],
  ].find(([step]) => step * power >= value);
  const most = step * power;
  return { most, ticks: Array.from({ length: parts + 1 }, (_, part) => (most * part) / parts) };
}

// Returns an SVG path with the outlines of all bars. Each bar reaches from `low` to `high`.
export function bars(low, high, x, y) {
  let path = "";
  for (let at = 0; at < high.length; at += 1) {
    if (high[at] <= low[at]) continue;
    const [left, right] = x(at);
    path += `M${left} ${y(low[at])}V${y(high[at])}H${right}V${y(low[at])}Z`;
  }
  return path;
}

// Returns the SVG path of a step line over `values`. The line is interrupted where a value is 0.
function steps(values, x, y) {
  let path = "";
  let drawing = false;
  for (let at = 0; at < values.length; at += 1) {
    if (values[at] === 0) {
      drawing = false;
      continue;
    }
    const [left, right] = x(at);
    path += `${drawing ? "V" : `M${left} `}${y(values[at])}H${right}`;
    drawing = true;
  }
  return path;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// Creates the chart of the overview. `update` takes {from_ms, bucket_ms, requests, denied,
// shadow_denied}.
export function trafficChart() {
  const drawing = svg("svg", {
    class: "chart",
    height: HEIGHT,
    role: "img",
    "aria-label": "Traffic",
  });
  const readout = el("p", { class: "readout" });
  const rows = el("tbody");
  const numbers = el(
    "details",
    { class: "numbers" },
    el("summary", {}, "Numbers per minute"),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el("caption", { class: "hidden" }, "Traffic per minute"),
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ["Minute", "Requests", "Denied", "Shadow denials"].map((title, at) =>
              el("th", { scope: "col", class: at ? "num" : "" }, title),
            ),
          ),
        ),
        rows,
      ),
    ),
  );
  const node = el("div", { class: "traffic" }, readout, drawing, numbers);
  let data;
  let hovered = null;

  function draw() {
    const width = Math.floor(drawing.getBoundingClientRect().width);
    if (!data || width < 60) return;
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const seconds = data.bucket_ms / 1000;
    const buckets = data.requests.length;
    const [requests, denied, shadow] = [data.requests, data.denied, data.shadow_denied].map(
      (list) => list.map((number) => number / seconds),
    );
    const { most, ticks } = scale(Math.max(1, ...requests, ...shadow));
    const inner = width - MARGIN.left - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const each = inner / buckets;
    const gap = each >= 4 ? 1 : 0;
    const left = (at) => MARGIN.left + at * each;
    const x = (at) => [left(at).toFixed(1), (left(at + 1) - gap).toFixed(1)];
    const y = (value) => (bottom - (value / most) * (bottom - MARGIN.top)).toFixed(1);
    const none = requests.map(() => 0);
    const grid = ticks.flatMap((tick) => [
      svg("line", {
        class: "grid",
        x1: MARGIN.left,
        x2: width - MARGIN.right,
        y1: y(tick),
        y2: y(tick),
      }),
      svg(
        "text",
        { class: "label", x: MARGIN.left - 8, y: Number(y(tick)) + 4, "text-anchor": "end" },
        `${tick % 1 ? tick.toFixed(1) : count(tick)}/s`,
      ),
    ]);
    const every = width < 600 ? 5 : 3;
    const labels = [];
    for (let at = 0; at < buckets; at += 1) {
      const begin = data.from_ms + at * data.bucket_ms;
      if (begin % (every * 60_000) >= data.bucket_ms) continue;
      if (left(at) < MARGIN.left + 16 || left(at) > width - MARGIN.right - 16) continue;
      labels.push(
        svg(
          "text",
          { class: "label", x: left(at), y: HEIGHT - 6, "text-anchor": "middle" },
          shortTime(begin),
        ),
      );
    }
    const mark =
      hovered === null
        ? []
        : [
            svg("rect", {
              class: "mark",
              x: left(hovered),
              y: MARGIN.top,
              width: Math.max(1, each),
              height: bottom - MARGIN.top,
            }),
          ];
    drawing.replaceChildren(
      ...mark,
      ...grid,
      ...labels,
      svg("path", { class: "allowed", d: bars(denied, requests, x, y) }),
      svg("path", { class: "denied", d: bars(none, denied, x, y) }),
      svg("path", { class: "shadow", d: steps(shadow, x, y) }),
    );
    describe();
  }

  function describe() {
    const [requests, denied, shadow] = [data.requests, data.denied, data.shadow_denied];
    const words = (at, until) => {
      const of = (list) => sum(list.slice(at, until));
      const total = plural(of(requests), "request");
      return `${total}, ${count(of(denied))} denied, ${plural(of(shadow), "shadow denial")}`;
    };
    drawing.setAttribute(
      "aria-label",
      `Traffic from the last 15 minutes: ${words(0, requests.length)}`,
    );
    if (hovered === null) return text(readout, `15 minutes: ${words(0, requests.length)}`);
    const begin = data.from_ms + hovered * data.bucket_ms;
    return text(
      readout,
      `${time(begin)}: ${words(hovered, hovered + 1)}, ${rate(
        (requests[hovered] * 1000) / data.bucket_ms,
      )} per second`,
    );
  }

  // Sums the buckets of each clock minute. The first and the last minute are incomplete.
  function fillNumbers() {
    if (!data || !numbers.open) return;
    const minutes = new Map();
    data.requests.forEach((_, at) => {
      const begin = Math.floor((data.from_ms + at * data.bucket_ms) / 60_000) * 60_000;
      const sums = minutes.get(begin) ?? [0, 0, 0];
      [data.requests, data.denied, data.shadow_denied].forEach((list, which) => {
        sums[which] += list[at];
      });
      minutes.set(begin, sums);
    });
    rows.replaceChildren(
      ...[...minutes].reverse().map(([begin, sums]) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, shortTime(begin)),
          sums.map((total) => el("td", { class: "num" }, count(total))),
        ),
      ),
    );
  }

  drawing.addEventListener("pointermove", (event) => {
    if (!data) return;
    const box = drawing.getBoundingClientRect();
    const inner = box.width - MARGIN.left - MARGIN.right;
    const at = Math.floor(
      ((event.clientX - box.left - MARGIN.left) / inner) * data.requests.length,
    );
    hovered = at >= 0 && at < data.requests.length ? at : null;
    draw();
  });
  drawing.addEventListener("pointerleave", () => {
    hovered = null;
    draw();
  });
  numbers.addEventListener("toggle", fillNumbers);
  new ResizeObserver(draw).observe(node);
  const update = (next) => {
    data = next;
    draw();
    fillNumbers();
  };
  return { node, update };
}

// Creates a small chart without axes, for a row of a table.
export function sparkline() {
  const width = 96;
  const height = 24;
  const points = 45;
  const allowed = svg("path", { class: "allowed" });
  const refused = svg("path", { class: "denied" });
  const would = svg("path", { class: "shadow" });
  const node = svg(
    "svg",
    { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    allowed,
    refused,
    would,
  );
  const update = ({ requests, denied, shadow_denied }) => {
    const joined = Math.ceil(requests.length / points);
    const join = (list) =>
      Array.from({ length: Math.ceil(list.length / joined) }, (_, at) =>
        sum(list.slice(at * joined, (at + 1) * joined)),
      );
    const [all, no, shadow] = [requests, denied, shadow_denied].map(join);
    const most = Math.max(1, ...all, ...shadow);
    const x = (at) => [
      ((at * width) / all.length).toFixed(1),
      (((at + 1) * width) / all.length).toFixed(1),
    ];
    const y = (value) => (height - 1 - (value / most) * (height - 2)).toFixed(1);
    allowed.setAttribute("d", bars(no, all, x, y));
    refused.setAttribute(
      "d",
      bars(
        all.map(() => 0),
        no,
        x,
        y,
      ),
    );
    would.setAttribute("d", steps(shadow, x, y));
  };
  return { node, update };
}

export { sum };
