// The view of recent events.

import { get, isRefusal } from "./api.js";
import { el, panel, select, table, text } from "./dom.js";
import { count, duration, moment, plural, sentence } from "./format.js";
import { keyLink } from "./keys.js";

const SHOWN = 200;

const TITLES = {
  "key.denied": "Key denied",
  "key.would_be_denied": "Key would be denied",
  "key.near_limit": "Key near its limit",
  "traffic.surge": "Surge began",
  "traffic.surge_ended": "Surge ended",
  "store.lost": "Redis lost",
  "store.recovered": "Redis recovered",
  "rules.reloaded": "Rules reloaded",
  "rules.reload_failed": "Reload failed",
  "candidate.promoted": "Candidate promoted",
  "block.added": "Block added",
  "block.lifted": "Block lifted",
  "key.reset": "Counters reset",
};

// The event type groups that the operator can select.
const GROUPS = [
  ["", "All events"],
  ["key.", "Keys"],
  ["traffic.", "Surges"],
  ["store.", "Redis"],
  ["block. key.reset rules. candidate.", "Changes"],
];

// Describes an event, except for its rule and key.
function details({ type, data }) {
  const [group] = type.split(".");
  if (type === "key.reset") return "";
  if (type === "key.near_limit") return `${data.policy}: ${count(data.remaining)} left`;
  if (group === "key") {
    const wait = data.retry_after_ms === null ? "never" : duration(data.retry_after_ms ?? 0);
    return `${data.policy ?? data.reason}, retry after ${wait}`;
  }
  if (group === "traffic") {
    const rule = data.rule === null ? "all rules" : data.rule;
    return `${data.measure} of ${rule}: ${count(data.count_in_10s)} in 10 s, usually ${count(data.usual_in_10s)}`;
  }
  if (type === "store.lost") return data.problem;
  if (type === "store.recovered") {
    const decided = count(data.local_decisions + data.policy_decisions);
    return `after ${duration(data.lasted_ms)}; ${decided} decisions without Redis`;
  }
  if (type === "rules.reload_failed") return data.mistakes?.[0] ?? "";
  if (group === "rules" || group === "candidate") {
    return `${plural(data.after.rules, "rule")}, before ${count(data.before.rules)}`;
  }
  const block = data.after ?? data.before;
  if (!block) return "";
  const until = block.until_ms === null ? "until it is lifted" : `until ${moment(block.until_ms)}`;
  return block.reason ? `${until}: ${block.reason}` : until;
}

export function events(app) {
  const group = select("Kind of event", GROUPS, () => app.refresh());
  const rows = table({
    caption: "Events, the newest first",
    columns: [
      { title: "Time", class: "time" },
      { title: "Event", class: "key", main: true },
      { title: "Details", class: "policy" },
      { title: "By", class: "via wide" },
    ],
    key: ({ id }) => String(id),
    row: (event) => {
      const at = new Date(event.at_ms).toISOString();
      const { rule, key, by } = event.data;
      const badge = event.data.mode === "shadow" && el("span", { class: "badge shadow" }, "shadow");
      return {
        cells: [
          el("time", { datetime: at, title: at }, moment(event.at_ms)),
          [
            el("span", { class: "name" }, TITLES[event.type] ?? event.type, badge),
            key && el("span", { class: "sub" }, rule ? keyLink(rule, key) : key.join(", ")),
            key && rule && el("span", { class: "sub" }, rule),
          ].filter(Boolean),
          details(event) || " ",
          by ?? "–",
        ],
      };
    },
    empty: "No events since the server started.",
  });
  const note = el("p", { class: "hint" });
  const list = panel("Recent events", { tools: group.node }, rows.node, note);

  async function poll() {
    const prefixes = group.node.value.split(" ");
    try {
      const found = await get("v1/events", { n: 1024 });
      const chosen = found.events.filter(({ type }) =>
        prefixes.some((prefix) => type.startsWith(prefix)),
      );
      rows.say(`No events${group.node.value ? " of this kind" : ""} since the server started.`);
      rows.update(chosen.reverse().slice(0, SHOWN));
      text(note, chosen.length ? `At most ${SHOWN} of the last 1024 events are shown.` : "");
    } catch (error) {
      if (!isRefusal(error)) throw error;
      rows.say(sentence(error.message));
      rows.update([]);
    }
  }

  return { title: "Events", node: el("div", { class: "view" }, list), polls: [[2000, poll]] };
}
