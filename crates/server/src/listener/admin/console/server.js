// The view of the server: health, store, Redis, listeners and reloads.

import { request } from "./api.js";
import { button, el, panel, show, table, text } from "./dom.js";
import { bytes, count, duration } from "./format.js";

// Creates a list of names and values. `update` takes pairs of [name, value].
function facts() {
  const node = el("dl", { class: "facts" });
  let written = "";
  const update = (pairs) => {
    const given = pairs.filter(
      ([, value]) => value !== undefined && value !== null && value.length !== 0,
    );
    if (JSON.stringify(given) === written) return;
    written = JSON.stringify(given);
    node.replaceChildren(
      ...given.flatMap(([name, value]) =>
        [el("dt", {}, name), [value].flat().map((line) => el("dd", {}, line))].flat(),
      ),
    );
  };
  return { node, update };
}

export function server(app) {
  const [state, store, redis, files] = [facts(), facts(), facts(), facts()];
  const listeners = table({
    caption: "Listeners",
    columns: [
      { title: "Listener", main: true },
      { title: "Address", class: "key" },
      { title: "Connections", class: "num" },
    ],
    key: ({ name, address }) => `${name} ${address}`,
    row: ({ name, address }) => {
      const open = el("span");
      return {
        cells: [name, el("span", { class: "mono" }, address), open],
        update: ({ connections }) => text(open, count(connections)),
      };
    },
    empty: "No listeners.",
  });
  const result = el("div", { class: "result", role: "status" });
  const reload = button("Reload files", run, { class: "operate" });
  const redisPanel = panel("Redis", {}, redis.node);
  const node = el(
    "div",
    { class: "view grid" },
    panel("Server", {}, state.node),
    panel("Rules and files", { tools: [reload] }, files.node, result),
    panel("Store", {}, store.node),
    redisPanel,
    panel("Listeners", {}, listeners.node),
  );

  async function run() {
    reload.disabled = true;
    try {
      const {
        rules,
        warnings = [],
        restart_required: restart = [],
        hint,
      } = await request("POST", "v1/reload");
      const notes = [
        ...warnings,
        ...(restart.length ? [`These settings need a restart: ${restart.join(", ")}`] : []),
        ...(hint ? [hint] : []),
      ];
      result.replaceChildren(
        el("p", {}, rules === undefined ? "Reloaded." : `Reloaded: ${count(rules)} rules.`),
        ...(notes.length
          ? [
              el(
                "ul",
                {},
                notes.map((note) => el("li", {}, note)),
              ),
            ]
          : []),
      );
    } catch (error) {
      const mistakes = error.problem?.mistakes ?? [];
      result.replaceChildren(
        el("p", { class: "problem" }, error.message),
        ...(mistakes.length
          ? [
              el(
                "ul",
                {},
                mistakes.map((mistake) => el("li", {}, mistake)),
              ),
            ]
          : []),
      );
    }
    reload.disabled = false;
    await app.refresh();
  }

  function onStatus(status) {
    state.update([
      ["State", status.state],
      ["Problems", status.degraded],
      ["Version", status.version],
      ["Started", status.started],
      ["Uptime", duration(Math.floor(status.uptime_ms / 60_000) * 60_000 || 1000)],
    ]);
    files.update([
      ["Rules", count(status.rules)],
      ["Rules file", status.rules_file ?? "none"],
      ["Last reload", status.last_reload],
      ["Errors", status.mistakes],
      ["Need a restart", status.restart_required?.join(", ")],
    ]);
    const {
      kind,
      keys_in_process: keys,
      bytes_in_process: size,
      persistent,
      snapshot,
    } = status.store;
    store.update([
      [
        "Kind",
        kind === "redis"
          ? "Redis, with this server's memory as the fallback"
          : "memory of this server",
      ],
      ["Keys in memory", count(keys)],
      ["Memory", bytes(size)],
      [
        "After a restart",
        persistent ? "counters and blocks are kept" : "counters and blocks are lost",
      ],
      [
        "Snapshot",
        kind === "redis"
          ? ""
          : snapshot
            ? "configured"
            : "not configured: set store.memory.snapshot",
      ],
    ]);
    show(redisPanel, Boolean(status.redis));
    if (status.redis) {
      const {
        state: health,
        servers,
        up,
        unserved_slots: slots,
        problem,
        warnings,
      } = status.redis;
      redis.update([
        ["State", health],
        ["Servers", `${up} of ${servers} reachable`],
        ["Slots without a node", slots ? count(slots) : ""],
        ["Problem", problem],
        ["Warnings", warnings],
      ]);
    }
    listeners.update(status.listeners);
  }

  return { title: "Server", node, polls: [], onStatus };
}
