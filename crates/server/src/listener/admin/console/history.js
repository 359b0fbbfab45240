// The history of a key: its requests and denials in each time slice of a period.

import { get } from "./api.js";
import { bars, HEIGHT, MARGIN, scale, sum } from "./chart.js";
import { el, panel, select, show, svg, text } from "./dom.js";
import { count, plural, shortTime } from "./format.js";

const PERIODS = [
  ["5m", "Last 5 minutes"],
  ["15m", "Last 15 minutes"],
  ["1h", "Last hour"],
  ["1d", "Last day"],
];

// Formats a count that lies between `estimate - error` and `estimate`.
const bounds = ({ estimate, error }) =>
  error ? `${count(estimate - error)} to ${count(estimate)}` : count(estimate);

export function keyHistory() {
  const drawing = svg("svg", { class: "chart", height: HEIGHT, role: "img" });
  const readout = el("p", { class: "readout" });
  const hint = el("p", { class: "hint", hidden: true });
  const rows = el("tbody");
  const head = ["Begins at", "Requests", "Denied"].map((title, at) =>
    el("th", { scope: "col", class: at ? "num" : "" }, title),
  );
  const numbers = el(
    "details",
    { class: "numbers" },
    el("summary", {}, "Numbers"),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el("caption", { class: "hidden" }, "Requests of the key over time"),
        el("thead", {}, el("tr", {}, head)),
        rows,
      ),
    ),
  );
  const over = select("Period", PERIODS, () => refresh());
  over.node.value = "1h";
  const node = panel(
    "History of this key",
    { tools: over.node },
    readout,
    drawing,
    numbers,
    hint,
  );
  let target = null;
  let document = null;

  function draw() {
    const width = Math.floor(drawing.getBoundingClientRect().width);
    if (!document || width < 60) return;
    const { slices, slice_ms: length } = document;
    const requests = slices.map((slice) => slice.requests.estimate);
    const denied = slices.map((slice) => slice.denied.estimate);
    const { most, ticks } = scale(Math.max(2, ...requests));
    const inner = width - MARGIN.left - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const each = inner / slices.length;
    const left = (at) => MARGIN.left + at * each;
    const x = (at) => [left(at).toFixed(1), (left(at + 1) - 1).toFixed(1)];
    const y = (value) => (bottom - (value / most) * (bottom - MARGIN.top)).toFixed(1);
    const right = width - MARGIN.right;
    const grid = ticks.flatMap((tick) => [
      svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(tick), y2: y(tick) }),
      svg(
        "text",
        { class: "label", x: MARGIN.left - 8, y: Number(y(tick)) + 4, "text-anchor": "end" },
        count(tick),
      ),
    ]);
    const every = Math.max(1, Math.ceil(56 / each));
    const labels = slices.flatMap((slice, at) =>
      at % every || left(at) > right - 24
        ? []
        : svg(
            "text",
            { class: "label", x: left(at), y: HEIGHT - 6, "text-anchor": "middle" },
            shortTime(slice.at_ms),
          ),
    );
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.replaceChildren(
      ...grid,
      ...labels,
      svg("path", { class: "allowed", d: bars(denied, requests, x, y) }),
      svg("path", { class: "denied", d: bars(requests.map(() => 0), denied, x, y) }),
    );
    const words = `${plural(sum(requests), "request")}, ${count(sum(denied))} denied`;
    const isExact = slices.every((slice) => slice.requests.error === 0);
    text(readout, `${isExact ? "" : "At most "}${words}, in slices of ${length / 60_000} min`);
    drawing.setAttribute("aria-label", `History of the key: ${words}`);
    rows.replaceChildren(
      ...[...slices]
        .reverse()
        .map((slice) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, shortTime(slice.at_ms)),
            el("td", { class: "num" }, bounds(slice.requests)),
            el("td", { class: "num" }, bounds(slice.denied)),
          ),
        ),
    );
  }

  async function refresh() {
    if (!target) return;
    const requested = target;
    let answer;
    try {
      answer = await get("v1/history", { ...requested, over: over.node.value });
    } catch (error) {
      // Without lists of top talkers, or for a rule without a list, there is no history.
      if (error.status !== 409) throw error;
      document = null;
      drawing.replaceChildren();
      text(readout, "");
      text(hint, error.message);
      show(hint, true);
      return;
    }
    if (requested !== target) return;
    document = answer;
    text(hint, answer.hint ?? "");
    show(hint, Boolean(answer.hint));
    draw();
  }

  new ResizeObserver(draw).observe(node);
  const poll = (next) => {
    target = next;
    return refresh();
  };
  return { node, poll };
}
