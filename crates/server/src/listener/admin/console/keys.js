// The view of one key: its limits, its block, its denials, and the operations on it.

import { get, keyPath, request } from "./api.js";
import { ask, blockDialog } from "./blocks.js";
import { denialTable } from "./denials.js";
import { button, el, field, meter, panel, select, show, table, text } from "./dom.js";
import { count, duration, keyText, moment, percent, wait } from "./format.js";
import { keyHistory } from "./history.js";

// Returns the URL of the view of a key.
export const keyAddress = (rule, key) =>
  `#/keys?${new URLSearchParams([["rule", rule], ...key.map((value) => ["key", value])])}`;

// Returns whether `key` contains hashes. With `privacy: {keys: hashed}`, lists contain hashes
// instead of values.
export const isHashed = (key) => [key].flat().some((value) => /^hash:[0-9a-f]{16}$/.test(value));

// Returns a link to the view of a key. There is no view for a hashed key, or for the key of a limit
// that was sent with a request, because that key has no rule.
export const keyLink = (rule, key) =>
  rule && !isHashed(key)
    ? el("a", { href: keyAddress(rule, key), class: "mono" }, keyText(key))
    : el("span", { class: "mono" }, keyText([key ?? []].flat()));

export function keys(app) {
  let rules = [];
  let target = null;
  let inputs = [];

  const rule = select("Rule", [], (name) => {
    location.hash = keyAddress(name, []);
  });
  const values = el("div", { class: "values" });
  const problem = el("p", { class: "problem", role: "alert", hidden: true });
  const form = el(
    "form",
    {
      class: "lookup",
      onsubmit: (event) => {
        event.preventDefault();
        location.hash = keyAddress(
          rule.node.value,
          inputs.map(({ value }) => value),
        );
      },
    },
    field("Rule", rule.node),
    values,
    el("button", { type: "submit", class: "primary" }, "Look up"),
  );
  const lookup = panel("Look up a key", {}, form, problem);

  const list = table({
    caption: "Keys of the rule",
    columns: [
      { title: "Key", class: "key", main: true },
      { title: "Used of the tightest limit", class: "busiest whole" },
      { title: "Next request", class: "num" },
    ],
    key: ({ key }) => JSON.stringify(key),
    row: ({ rule, key }) => {
      const used = meter();
      const next = el("span");
      const update = (state) => {
        const { part, words } = utilisation(state);
        used.update(part, words);
        const waits = state.limits.map(({ retry_after_ms: ms }) => ms ?? Infinity);
        text(next, wait(Math.max(0, ...waits)));
      };
      return { cells: [keyLink(rule, key), used.node, next], update };
    },
    empty: "The rule has counted no request yet, or all its keys have expired.",
  });
  const first = button("First page", () => turn(null));
  const following = button("Next page", () => turn(page.next));
  const listTitle = el("h2", {}, "");
  const listed = el(
    "section",
    { class: "panel" },
    el("div", { class: "head" }, listTitle),
    list.node,
    el("div", { class: "actions" }, first, following),
  );
  let page = { after: null, next: null };

  const name = el("h2", {}, "");
  const facts = el("p", { class: "hint" });
  const blocked = el("p", { class: "blocked" });
  const hint = el("p", { class: "hint" });
  const limits = table({
    caption: "Limits of the key",
    columns: [
      { title: "Limit", class: "policy", main: true },
      { title: "Used", class: "busiest whole" },
      { title: "Remaining", class: "num" },
      { title: "Next request", class: "num" },
      { title: "Full again", class: "num" },
    ],
    key: ({ at }) => at,
    row: (first) => {
      const used = meter();
      const [remaining, next, full] = [el("span"), el("span"), el("span")];
      const update = (limit) => {
        const spent = limit.limit - limit.remaining;
        used.update(
          limit.limit ? spent / limit.limit : 0,
          `${count(spent)} of ${count(limit.limit)}`,
        );
        text(remaining, count(limit.remaining));
        text(next, wait(limit.retry_after_ms));
        text(full, wait(limit.reset_after_ms));
      };
      return {
        cells: [el("span", { class: "mono" }, first.policy), used.node, remaining, next, full],
        update,
      };
    },
    empty: "The rule has no limits.",
  });
  const actions = el(
    "div",
    { class: "actions operate" },
    button("Block…", () => blockDialog(app, target, refresh), { class: "primary" }),
    button("Unblock", unblock),
    button("Reset counters…", reset),
  );
  const [, unblockButton] = actions.children;
  const explain = el("a", { class: "act" }, "Explain a request of this key");
  const state = el(
    "section",
    { class: "panel", "aria-live": "off" },
    el("div", { class: "head" }, name, explain),
    facts,
    blocked,
    limits.node,
    hint,
    actions,
  );
  const rows = denialTable(app, "Denials of the key", { listener: true });
  const denials = panel("Denials of this key", {}, rows.node);
  const history = keyHistory();
  const result = el("div", { class: "stack" }, state, history.node, denials);
  const node = el("div", { class: "view" }, lookup, listed, result);
  show(result, false);

  function turn(after) {
    page = { after, next: null };
    return app.refresh();
  }

  function fillInputs(key) {
    const found = rules.find(({ name }) => name === rule.node.value);
    inputs = (found?.key ?? []).map((name, at) =>
      el("input", {
        type: "text",
        name,
        value: key[at] ?? "",
        autocomplete: "off",
        spellcheck: "false",
        autocapitalize: "off",
      }),
    );
    values.replaceChildren(
      ...inputs.map((input) => field(input.name, input)),
      ...(found && !inputs.length
        ? [el("p", { class: "hint" }, "This rule has one counter for all requests.")]
        : []),
    );
  }

  async function enter(parameters) {
    rules = await app.rules();
    rule.fill(rules.map(({ name }) => [name, name]));
    const given = parameters.get("rule");
    const known = rules.find(({ name }) => name === given);
    if (known) rule.node.value = given;
    const key = parameters.getAll("key");
    // If no key is given, the rule's keys are listed, unless the rule has one counter for all
    // requests.
    const isListed = given === null || (known && known.key.length > 0 && key.length === 0);
    const listedRule = rule.node.value;
    target = isListed ? null : { rule: given, key };
    page = { after: null, next: null };
    text(listTitle, `Keys of rule ${listedRule}`);
    fillInputs(key);
    list.update([]);
    list.say("");
    show(listed, isListed && rules.length > 0);
    show(result, false);
    show(problem, false);
  }

  async function pollList() {
    const name = rule.node.value;
    const found = rules.find((known) => known.name === name);
    if (!found?.key.length) return;
    const { after } = page;
    const document = await get(keyPath("keys", name, []), { n: 50, after });
    if (after !== page.after || name !== rule.node.value || target) return;
    page.next = document.next;
    const end = after
      ? "No more keys."
      : "The rule has counted no request yet, or all its keys have expired.";
    list.say(document.next === null ? end : "No key of the rule is on this page.");
    list.update(document.keys.map((key) => ({ rule: name, ...key })));
    show(first, after !== null);
    show(following, page.next !== null);
  }

  async function poll() {
    if (!target) return pollList();
    const requested = target;
    let found;
    try {
      found = await get(keyPath("keys", requested.rule, requested.key));
    } catch (error) {
      if (error.status === 0 || error.status === 401) throw error;
      text(problem, error.message);
      show(problem, true);
      show(result, false);
      return;
    }
    if (requested !== target) return;
    show(problem, false);
    text(name, keyText(found.key));
    text(
      facts,
      `Rule ${found.rule}${found.mode === "shadow" ? ", in shadow mode: it counts and denies nothing" : ""}`,
    );
    show(blocked, Boolean(found.block));
    // A block by entries is lifted in the view of the blocks.
    show(unblockButton, Boolean(found.block) && !found.block.entries);
    if (found.block) text(blocked, blockWords(found.block));
    limits.update(found.limits.map((limit, at) => ({ ...limit, at })));
    text(hint, found.hint ?? "");
    show(hint, Boolean(found.hint));
    explain.href = app.explainLink(requested.rule, requested.key);
    show(result, true);
    return undefined;
  }

  async function pollDenials() {
    if (!target) return;
    await rows.poll({ rule: target.rule, key: target.key, since: "1h", n: 50 });
  }

  async function pollHistory() {
    await history.poll(target);
  }

  function refresh() {
    return app.refresh();
  }

  async function unblock() {
    const { rule, key } = target;
    await ask(
      app,
      "Lift the block?",
      `Requests of ${keyText(key)} are then decided by the limits of rule ${rule} again.`,
      "Unblock",
      async () => {
        await request("DELETE", keyPath("blocks", rule, key));
        app.say(`Unblocked ${keyText(key)}.`);
      },
    );
    refresh();
  }

  async function reset() {
    const { rule, key } = target;
    await ask(
      app,
      "Reset the counters?",
      `${keyText(key)} can then use the limits of rule ${rule} in full again. A block on the key is kept.`,
      "Reset",
      async () => {
        await request("DELETE", keyPath("keys", rule, key));
        app.say(`Reset the counters of ${keyText(key)}.`);
      },
    );
    refresh();
  }

  return {
    title: "Keys",
    node,
    polls: [
      [2000, poll],
      [3000, pollDenials],
      [10_000, pollHistory],
    ],
    enter,
  };
}

// Returns the key's utilisation: the used fraction of its most used limit. A blocked key has the
// utilisation 1.
export function utilisation({ limits, block }) {
  if (block) return { part: 1, words: "blocked" };
  const parts = limits
    .filter(({ limit }) => limit > 0)
    .map(({ limit, remaining }) => (limit - remaining) / limit);
  const part = Math.max(0, ...parts);
  return { part, words: percent(part, 1) };
}

// Describes a block in one sentence.
export function blockWords({ until_ms: until, left_ms: left, reason, entries }) {
  const pairs = Object.entries(entries ?? {}).map(([name, value]) => `${name}=${value}`);
  const what = entries ? ` by the entries ${pairs.join(", ")}` : "";
  const end =
    until === null ? "until it is lifted" : `until ${moment(until)}, for ${duration(left)} more`;
  return `Blocked${what} ${end}${reason ? `: ${reason}` : "."}`;
}
