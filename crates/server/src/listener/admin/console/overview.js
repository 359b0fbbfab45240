// The overview: traffic in the last 15 minutes, the rules, the top talkers and the latest denials.

import { get, isRefusal, keyPath } from "./api.js";
import { sparkline, sum, trafficChart } from "./chart.js";
import { denialTable } from "./denials.js";
import { button, el, meter, panel, select, show, table, text } from "./dom.js";
import { bytes, count, keyText, percent, plural, rate, sentence } from "./format.js";
import { isHashed, keyLink, utilisation } from "./keys.js";

const BUCKETS = 180;
// The number of rows in the rules table, unless the operator asks for all rows.
const SHOWN_RULES = 50;
// The number of rules for which the busiest key's utilisation is read.
const MEASURED_RULES = 12;

const SERIES = ["requests", "denied", "shadow_denied"];

// Appends the newest buckets to the buckets that are already known. Returns null if there is a gap
// between the known and the new buckets.
function merge(known, next) {
  const bucket = next.bucket_ms;
  const end = next.from_ms + next.total.requests.length * bucket;
  const from = end - BUCKETS * bucket;
  const isWhole = next.total.requests.length >= BUCKETS;
  if (!isWhole && (!known || known.from_ms + BUCKETS * bucket < next.from_ms)) return null;
  const join = (old, fresh) =>
    Object.fromEntries(
      SERIES.map((name) => [
        name,
        Array.from({ length: BUCKETS }, (_, at) => {
          const begin = from + at * bucket;
          if (begin >= next.from_ms) return fresh?.[name][(begin - next.from_ms) / bucket] ?? 0;
          return old?.[name][(begin - known.from_ms) / bucket] ?? 0;
        }),
      ]),
    );
  const fresh = new Map(next.rules.map((series) => [series.rule, series]));
  const names = new Set([...(known?.rules.keys() ?? []), ...fresh.keys()]);
  const rules = new Map();
  for (const name of names) rules.set(name, join(known?.rules.get(name), fresh.get(name)));
  return {
    from_ms: from,
    bucket_ms: bucket,
    now_ms: next.now_ms,
    total: join(known?.total, next.total),
    rules,
  };
}

const QUIET = Object.fromEntries(SERIES.map((name) => [name, new Array(BUCKETS).fill(0)]));

// Returns the average rate, per second, over the last two complete buckets. The last bucket in the
// list is incomplete.
const latest = (list, bucketMs) => (sum(list.slice(-3, -1)) * 1000) / (2 * bucketMs);

function tile(label) {
  const value = el("p", { class: "value" }, "–");
  const more = el("p", { class: "more" }, "\u00a0");
  const node = el("div", { class: "tile" }, el("p", { class: "label" }, label), value, more);
  return {
    node,
    update: (shown, words) => {
      text(value, shown);
      text(more, words || "\u00a0");
    },
  };
}

export function overview(app) {
  let traffic = null;
  let rules = [];
  let blocks = null;
  let status = null;
  let rule = "";
  let showsAll = false;
  const usage = new Map();

  const tiles = {
    requests: tile("Requests per second"),
    denied: tile("Denied per second"),
    shadow: tile("Shadow denials"),
    blocks: tile("Blocked keys"),
    keys: tile("Keys in memory"),
  };
  tiles.denied.node.classList.add("is-denied");
  const chart = trafficChart();
  const chosen = select("Rule", [["", "All rules"]], choose);
  const legend = el(
    "ul",
    { class: "legend" },
    [
      ["allowed", "Allowed"],
      ["denied", "Denied"],
      ["shadow", "Shadow denials"],
    ].map(([name, title]) => el("li", { class: name }, title)),
  );
  const trafficPanel = panel("Traffic", { tools: [legend, chosen.node] }, chart.node);

  function choose(name) {
    rule = name;
    chosen.node.value = name;
    topRule.node.value = name;
    draw();
    app.refresh();
  }

  const ruleTable = table({
    caption: "Rules with their limits and the traffic from the last 15 minutes",
    columns: [
      { title: "Rule", class: "rule", main: true },
      { title: "Limits", class: "limits wide" },
      { title: "Last 15 min", class: "trend wide" },
      { title: "Requests", class: "num" },
      { title: "Denied", class: "num" },
      { title: "Shadow", class: "num" },
      { title: "Busiest key", class: "busiest" },
    ],
    key: ({ name }) => name,
    row: ruleRow,
    empty: "No rules are loaded: every request is allowed. Add rules to the rules file.",
  });
  const more = button(
    "",
    () => {
      showsAll = true;
      draw();
    },
    { class: "quiet more" },
  );
  const rulesPanel = panel(
    "Rules",
    { tools: [el("span", { class: "hint" }, "last 15 minutes, this server")] },
    ruleTable.node,
    more,
  );

  function ruleRow({ name, mode, when, key, limits }) {
    const title = button(name, () => choose(rule === name ? "" : name), {
      class: "link",
      title: "Show its traffic",
    });
    const trend = sparkline();
    const [requests, denied, share, shadow] = ["", "", "share", ""].map((name) =>
      el("span", { class: name }),
    );
    const used = meter();
    const busiest = el("span", { class: "sub" });
    const condition = when === "always" ? "every request" : when;
    const cells = [
      [
        el(
          "span",
          { class: "name" },
          title,
          mode === "shadow" && el("span", { class: "badge shadow" }, "shadow"),
        ),
        el("span", { class: "sub" }, condition),
        el("span", { class: "sub mono narrow" }, limits.join(", ")),
      ],
      [
        el("span", { class: "mono" }, limits.join(", ")),
        el(
          "span",
          { class: "sub" },
          key.length ? `per ${key.join(", ")}` : "one counter for all requests",
        ),
      ],
      trend.node,
      requests,
      [denied, share],
      shadow,
      [used.node, busiest],
    ];
    const update = () => {
      const series = traffic?.rules.get(name) ?? QUIET;
      const [all, no, would] = SERIES.map((list) => sum(series[list]));
      trend.update(series);
      text(requests, count(all));
      text(denied, count(no));
      denied.className = no ? "is-denied" : "";
      text(share, no ? percent(no, all) : "");
      text(shadow, count(would));
      title.setAttribute("aria-pressed", String(rule === name));
      const found = usage.get(name);
      show(used.node, Boolean(found));
      used.update(found?.part, found?.words ?? "");
      text(busiest, found ? keyText(found.key) : "–");
    };
    return { cells, update };
  }

  const topRule = select("Rule of the top talkers", [["", "All rules"]], choose);
  const topBy = select(
    "Rank by",
    [
      ["requests", "by requests"],
      ["denied", "by denials"],
      ["cost", "by cost"],
    ],
    () => app.refresh(),
  );
  const topOver = select(
    "Time",
    [
      ["5m", "last 5 minutes"],
      ["15m", "last 15 minutes"],
      ["1h", "last hour"],
      ["1d", "last day"],
    ],
    () => app.refresh(),
  );
  const topTable = table({
    caption: "Keys with the most requests, denials or cost",
    columns: [
      { title: "Key", class: "key", main: true },
      { title: "Count", class: "num" },
      { title: "Share", class: "busiest" },
    ],
    key: (row) => JSON.stringify([row.rule, row.key]),
    row: (first) => {
      const number = el("span");
      const error = el("span", { class: "sub" });
      const share = meter();
      const update = ({ estimate, error: excess, all }) => {
        text(number, count(estimate));
        text(error, excess ? `at least ${count(estimate - excess)}` : "");
        share.update(estimate / Math.max(1, all), percent(estimate, all));
      };
      return {
        cells: [
          [
            keyLink(first.rule, first.key),
            el("span", { class: "sub" }, first.rule ?? "limit of the request"),
          ],
          [number, error],
          share.node,
        ],
        update,
      };
    },
    empty: "No requests in this time.",
  });
  const topNote = el("p", { class: "hint" });
  const topPanel = panel(
    "Top talkers",
    { tools: [topRule.node, topBy.node, topOver.node] },
    topTable.node,
    topNote,
  );

  const denials = denialTable(app, "The latest denials", { key: true });
  const denialPanel = panel(
    "Latest denials",
    { tools: [el("a", { href: "#/denials" }, "All denials")] },
    denials.node,
  );

  const node = el(
    "div",
    { class: "view" },
    el(
      "div",
      { class: "tiles" },
      Object.values(tiles).map(({ node }) => node),
    ),
    trafficPanel,
    rulesPanel,
    el("div", { class: "pair" }, topPanel, denialPanel),
  );

  function draw() {
    const series = (rule ? traffic?.rules.get(rule) : traffic?.total) ?? QUIET;
    if (traffic) {
      const { bucket_ms: bucket, total } = traffic;
      const [requests, denied, shadow] = SERIES.map((name) => sum(total[name]));
      tiles.requests.update(rate(latest(total.requests, bucket)), `${count(requests)} in 15 min`);
      tiles.denied.update(
        rate(latest(total.denied, bucket)),
        `${count(denied)} in 15 min, ${percent(denied, requests)}`,
      );
      tiles.shadow.update(count(shadow), "in 15 min");
      chart.update({ from_ms: traffic.from_ms, bucket_ms: bucket, ...series });
    }
    if (blocks)
      tiles.blocks.update(count(blocks.length), blocks.length ? "by hand" : "none by hand");
    if (status)
      tiles.keys.update(
        count(status.store.keys_in_process),
        `${bytes(status.store.bytes_in_process)}${status.store.kind === "redis" ? ", fallback of this server" : ""}`,
      );
    const options = [["", "All rules"], ...rules.map(({ name }) => [name, name])];
    chosen.fill(options);
    topRule.fill(options);
    const shown = showsAll ? rules : rules.slice(0, SHOWN_RULES);
    ruleTable.update(shown);
    show(more, shown.length < rules.length);
    text(more, `Show all ${plural(rules.length, "rule")}`);
  }

  let completeUntil = 0;
  async function pollTraffic() {
    const isRecent = traffic && Date.now() - completeUntil < 10_000;
    let next = merge(traffic, await get("v1/traffic", isRecent ? { over: "20s" } : {}));
    next ??= merge(null, await get("v1/traffic"));
    traffic = next;
    completeUntil = Date.now();
    draw();
  }

  async function pollRules() {
    rules = await app.rules();
    draw();
  }

  async function pollBlocks() {
    blocks = (await get("v1/blocks")).blocks;
    draw();
  }

  async function pollTop() {
    const [rule, by, over] = [topRule, topBy, topOver].map((choice) => choice.node.value);
    try {
      const { rows, total, hint, servers } = await get("v1/top", { rule, by, over, n: 8 });
      topTable.say("No requests in this time.");
      topTable.update(rows.map((row) => ({ rule, ...row, all: total[by] })));
      text(topNote, hint ? sentence(hint) : servers > 1 ? `Of ${servers} servers.` : "");
    } catch (error) {
      if (!isRefusal(error)) throw error;
      topTable.say(sentence(error.message));
      topTable.update([]);
      text(topNote, "");
    }
  }

  // Reads the utilisation of each rule's busiest key, with one request at a time.
  async function pollUsage() {
    const { rows } = await get("v1/top", { by: "requests", over: "5m", n: 100 }).catch((error) => {
      if (isRefusal(error)) return { rows: [] };
      throw error;
    });
    for (const { name, key } of rules.slice(0, MEASURED_RULES)) {
      const top = key.length ? rows.find((row) => row.rule === name)?.key : [];
      if (!top || isHashed(top)) {
        usage.delete(name);
        continue;
      }
      try {
        const state = await get(keyPath("keys", name, top));
        usage.set(name, { key: top, ...utilisation(state) });
      } catch (error) {
        if (error.status === 401) throw error;
        // The request fails if the key contains a value that a browser cannot put into a path.
        usage.delete(name);
      }
    }
    draw();
  }

  async function pollDenials() {
    await denials.poll({ since: "1h", n: 8 });
  }

  return {
    title: "Overview",
    node,
    polls: [
      [2000, pollTraffic],
      [10_000, pollRules],
      [2000, pollDenials],
      [3000, pollTop],
      [10_000, pollUsage],
      [5000, pollBlocks],
    ],
    onStatus: (next) => {
      status = next;
      draw();
    },
  };
}
