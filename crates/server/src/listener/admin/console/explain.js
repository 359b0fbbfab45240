// The view that explains how a request would be decided. The request is not charged.

import { request } from "./api.js";
import { button, el, field, panel, show, text } from "./dom.js";
import { count, keyText, wait } from "./format.js";
import { blockWords, keyLink } from "./keys.js";

const REASONS = {
  limit: "a limit is exhausted",
  blocked: "its key or its entries are blocked",
  store: "the store is full or unreachable",
};
const PROPOSED = ["path", "method", "ip"];

export function explain(app) {
  const rows = el("div", { class: "entries" });
  const cost = el("input", { type: "number", min: "0", step: "1", value: "1", class: "short" });
  const problem = el("p", { class: "problem", role: "alert", hidden: true });
  const result = el("div", { class: "stack", "aria-live": "polite" });
  const names = el("datalist", { id: "entry-names" });
  const form = el(
    "form",
    {
      onsubmit: (event) => {
        event.preventDefault();
        run();
      },
    },
    names,
    rows,
    el(
      "div",
      { class: "actions" },
      button("Add an entry", () => addRow("", "").focus(), { class: "quiet" }),
    ),
    el(
      "div",
      { class: "actions" },
      field("Cost", cost),
      el("button", { type: "submit", class: "primary" }, "Explain"),
    ),
  );
  const input = panel(
    "Explain a request",
    {},
    el("p", { class: "hint" }, "Enter the entries of a request. Nothing is charged."),
    form,
    problem,
  );
  const node = el("div", { class: "view" }, el("div", { class: "pair" }, input, result));
  const nothing = panel(
    "Result",
    {},
    el("p", { class: "empty" }, "The rules that apply, and the result of each limit, appear here."),
  );

  function addRow(name, value) {
    const number = rows.childElementCount + 1;
    const nameInput = el("input", {
      type: "text",
      value: name,
      list: "entry-names",
      "aria-label": `Name of entry ${number}`,
      placeholder: "name",
      autocomplete: "off",
      spellcheck: "false",
      autocapitalize: "off",
      class: "entry-name",
    });
    const valueInput = el("input", {
      type: "text",
      value,
      "aria-label": `Value of entry ${number}`,
      placeholder: "value",
      autocomplete: "off",
      spellcheck: "false",
      autocapitalize: "off",
      class: "entry-value",
    });
    const row = el(
      "div",
      { class: "entry" },
      nameInput,
      valueInput,
      button("Remove", () => row.remove(), {
        class: "quiet",
        "aria-label": `Remove entry ${number}`,
      }),
    );
    rows.append(row);
    return nameInput;
  }

  function entries() {
    const pairs = [...rows.children].map((row) => [
      row.children[0].value.trim(),
      row.children[1].value,
    ]);
    return Object.fromEntries(pairs.filter(([name, value]) => name !== "" && value !== ""));
  }

  let runs = 0;
  async function run() {
    runs += 1;
    const mine = runs;
    show(problem, false);
    try {
      const given = cost.value === "" ? 1 : Number(cost.value);
      const found = await request("POST", "v1/explain", { entries: entries(), cost: given });
      if (mine === runs) draw(found);
    } catch (error) {
      text(problem, error.message);
      show(problem, true);
      result.replaceChildren(nothing);
    }
  }

  function draw({ allowed, rules, reason, allowed_by: listed, omitted, exactness, block }) {
    const applying = rules.filter(({ applies }) => applies);
    const others = rules.filter(({ applies }) => !applies);
    const words = allowed ? "The request would be allowed" : "The request would be denied";
    const why = reason ? `: ${REASONS[reason] ?? reason}` : "";
    const verdict = el(
      "p",
      { class: `verdict ${allowed ? "allowed" : "denied"}` },
      `${words}${why}.`,
    );
    const notes = [
      block && !applying.some((rule) => rule.block) && blockWords(block),
      listed && `The request matches the allow list (${listed}), so no rule charges it.`,
      !listed && applying.length === 0 && "No rule applies to it.",
      exactness && exactness !== "exact" && "Redis is unreachable, so the fallback policy decides.",
    ]
      .filter(Boolean)
      .map((note) => el("p", { class: "hint" }, note));
    const list = el("ul", { class: "rules" }, applying.map(applyingRule));
    const rest = others.length
      ? el(
          "details",
          { open: applying.length === 0 || others.length <= 5 },
          el("summary", {}, `Rules that do not apply: ${count(others.length)}`),
          el(
            "dl",
            { class: "because" },
            others.flatMap((rule) => [el("dt", {}, rule.rule), el("dd", {}, rule.because ?? "")]),
          ),
          omitted ? el("p", { class: "hint" }, `and ${count(omitted)} more`) : undefined,
        )
      : undefined;
    result.replaceChildren(panel("Result", {}, verdict, notes, list, rest));
  }

  function applyingRule({ rule, key, allowed, limits, mode, block, because }) {
    const badge = el(
      "span",
      { class: `badge ${allowed ? "allowed" : "denied"}` },
      allowed ? "allows" : "denies",
    );
    const shadow = mode === "shadow" ? el("span", { class: "badge shadow" }, "shadow") : undefined;
    const lines = limits.map((limit) => {
      const denies = limit.retry_after_ms !== 0;
      const left = `${count(limit.remaining)} of ${count(limit.limit)} left`;
      return el(
        "li",
        { class: denies ? "denied" : "" },
        el("span", { class: "mono" }, limit.policy),
        denies ? ` ${left}; this request passes ${wait(limit.retry_after_ms)}` : ` ${left}`,
      );
    });
    const notes = [block && blockWords(block), because].filter(Boolean);
    return el(
      "li",
      {},
      el("div", { class: "name" }, el("strong", {}, rule), badge, shadow),
      el("div", {}, "Key ", key ? keyLink(rule, key) : keyText(key)),
      notes.map((note) => el("p", { class: "hint" }, note)),
      el("ul", { class: "limits" }, lines),
    );
  }

  async function enter(parameters) {
    const rules = await app.rules();
    const known = new Set(rules.flatMap(({ key }) => key));
    names.replaceChildren(...[...PROPOSED, ...known].map((name) => el("option", { value: name })));
    rows.replaceChildren();
    const given = [...parameters];
    for (const name of PROPOSED) {
      if (!given.some(([known]) => known === name)) given.push([name, ""]);
    }
    for (const [name, value] of given) addRow(name, value);
    result.replaceChildren(nothing);
    show(problem, false);
    if (parameters.size) await run();
  }

  return { title: "Explain", node, polls: [], enter };
}
