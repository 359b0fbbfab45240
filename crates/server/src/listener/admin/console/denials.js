// The view of recent denials.

import { get, isRefusal } from "./api.js";
import { button, el, panel, select, show, table, text } from "./dom.js";
import { count, duration, moment, plural, sentence } from "./format.js";
import { isHashed, keyLink } from "./keys.js";

const SHOWN = 200;

// The display texts of denial reasons, where they differ from the reason itself.
const REASONS = { on_failure: "on_failure: closed" };

// Describes the origin of a denial that is not by a rule.
const source = ({ entries, reason }) => {
  if (reason === "store") return "the store is full";
  return entries?.domain ? `Envoy, domain ${entries.domain}` : "limit of the request";
};

// Creates a table of denials, newest first. `shows` determines whether the table has a key column
// and a listener column.
export function denialTable(app, caption, shows = { key: true, listener: true }) {
  const limit = { title: "Limit", class: shows.key ? "policy wide" : "policy", main: !shows.key };
  const columns = [
    { title: "Time", class: "time" },
    shows.key && { title: "Key and rule", class: "key", main: true },
    limit,
    shows.listener && { title: "Listener", class: "via wide" },
    { title: "Retry after", class: "num" },
    { title: "Actions", class: "act", hidden: true },
  ];
  const built = table({
    caption,
    columns: columns.filter(Boolean),
    key: (row) => JSON.stringify([row.at_ms, row.rule, row.key, row.policy, row.listener]),
    row: (row) => {
      const at = new Date(row.at_ms).toISOString();
      const badge = row.mode === "shadow" && el("span", { class: "badge shadow" }, "shadow");
      const policy = el("span", { class: "mono" }, row.policy || REASONS[row.reason] || row.reason || "block");
      const cells = [
        el("time", { datetime: at, title: at }, moment(row.at_ms)),
        shows.key && [
          el("span", { class: "name" }, keyLink(row.rule, row.key), badge),
          el("span", { class: "sub" }, row.rule ?? source(row)),
          el("span", { class: "sub mono narrow" }, policy.textContent),
        ],
        shows.key ? policy : el("span", { class: "name" }, policy, badge),
        shows.listener && (row.listener ?? "–"),
        row.retry_after_ms === null ? "never" : duration(row.retry_after_ms ?? 0),
        // Hashed entries match no rule, so an explanation based on them would be wrong.
        row.rule && !isHashed(Object.values(row.entries))
          ? el("a", { href: app.explainLink(row.rule, row.key, row.entries) }, "Explain")
          : " ",
      ];
      return { cells: cells.filter(Boolean) };
    },
    empty: "No denials in the last hour.",
  });
  // Reads the denials that match `parameters`. Returns the document, or null if the server refuses
  // the request.
  const poll = async (parameters, empty = "No denials in the last hour.") => {
    try {
      const found = await get("v1/denials", parameters);
      built.say(found.hint ? sentence(found.hint) : empty);
      built.update(found.rows);
      return found;
    } catch (error) {
      if (!isRefusal(error)) throw error;
      built.say(sentence(error.message));
      built.update([]);
      return null;
    }
  };
  return { node: built.node, poll };
}

export function denials(app) {
  const rule = select("Rule", [["", "All rules"]], () => app.refresh());
  const since = select(
    "Time",
    [
      ["15m", "last 15 minutes"],
      ["1h", "last hour"],
      ["1d", "last day"],
    ],
    () => app.refresh(),
  );
  since.node.value = "1h";
  const rows = denialTable(app, "Denials, the newest first");
  const note = el("p", { class: "hint" });
  const clear = button(
    "All rules",
    () => {
      rule.node.value = "";
      app.refresh();
    },
    { class: "quiet" },
  );
  const list = panel("Recent denials", { tools: [rule.node, clear, since.node] }, rows.node, note);

  async function poll() {
    rule.fill([["", "All rules"], ...(await app.rules()).map(({ name }) => [name, name])]);
    const chosen = rule.node.value;
    show(clear, chosen !== "");
    const time = since.node.selectedOptions[0].textContent;
    const found = await rows.poll(
      { rule: chosen, since: since.node.value, n: SHOWN },
      `No denials${chosen ? ` of rule ${chosen}` : ""} in the ${time}.`,
    );
    const lost = found?.lost
      ? ` Not listed: up to ${plural(found.lost, "denial")}.`
      : "";
    text(
      note,
      found?.rows.length ? `${count(found.rows.length)} shown, at most ${SHOWN}.${lost}` : lost,
    );
  }

  return { title: "Denials", node: el("div", { class: "view" }, list), polls: [[2000, poll]] };
}
