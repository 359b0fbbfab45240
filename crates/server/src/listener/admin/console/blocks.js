// The view of manual blocks, and the dialogs for operations.

import { get, keyPath, request } from "./api.js";
import { button, el, field, panel, select, show, table, text } from "./dom.js";
import { duration, keyText, moment } from "./format.js";
import { keyLink } from "./keys.js";

// The maximum number of blocks by entries that the view shows.
const MAX_ENTRY_BLOCKS = 1000;

// Opens a dialog with a form. `submit` executes the operation. If it fails, the dialog shows the
// error and stays open. The returned promise resolves when the dialog is closed.
function openDialog(app, title, content, label, submit, onError) {
  const problem = el("p", { class: "problem", role: "alert", hidden: true });
  const confirm = el("button", { type: "submit", class: "primary" }, label);
  const heading = el("h2", { id: "dialog-title" }, title);
  const dialog = el(
    "dialog",
    { "aria-labelledby": "dialog-title" },
    el(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          confirm.disabled = true;
          show(problem, false);
          try {
            await submit();
            dialog.close();
          } catch (error) {
            onError?.(error);
            text(problem, error.message);
            show(problem, true);
          }
          confirm.disabled = false;
        },
      },
      heading,
      content,
      problem,
      el(
        "div",
        { class: "actions" },
        confirm,
        button("Cancel", () => dialog.close()),
      ),
    ),
  );
  document.body.append(dialog);
  const closed = new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve();
    });
  });
  dialog.showModal();
  app.dialogs.add(dialog);
  return closed.finally(() => app.dialogs.delete(dialog));
}

export const ask = (app, title, words, label, submit) =>
  openDialog(app, title, el("p", {}, words), label, submit);

// Opens a dialog that blocks `target`, or a key that the operator enters.
export async function blockDialog(app, target, done) {
  const rules = await app.rules();
  const rule = select(
    "Rule",
    rules.map(({ name }) => [name, name]),
    fillValues,
  );
  const values = el("div", { class: "values" });
  let inputs = [];
  function fillValues() {
    const key = rules.find(({ name }) => name === rule.node.value)?.key ?? [];
    inputs = key.map((name) =>
      el("input", {
        type: "text",
        name,
        autocomplete: "off",
        spellcheck: "false",
        autocapitalize: "off",
      }),
    );
    values.replaceChildren(...inputs.map((input) => field(input.name, input)));
  }
  fillValues();
  const time = select("Duration", [
    ["", "the longest window of the rule"],
    ["10min", "10 minutes"],
    ["1h", "1 hour"],
    ["1d", "1 day"],
    ["7d", "7 days"],
    ["forever", "until it is lifted"],
  ]);
  time.node.value = "1h";
  const reason = el("input", { type: "text", maxlength: "200", autocomplete: "off" });
  const shorten = el("input", { type: "checkbox", id: "shorten" });
  const raw = el("input", { type: "checkbox", id: "raw" });
  const shortenLine = el(
    "p",
    { class: "check" },
    shorten,
    el("label", { for: "shorten" }, "Let the block end earlier than the current block"),
  );
  const rawLine = el(
    "p",
    { class: "check" },
    raw,
    el(
      "label",
      { for: "raw" },
      "Services send this form of the key with raw: block the key unchanged",
    ),
  );
  show(shortenLine, false);
  show(rawLine, false);
  const fixed =
    target &&
    el("p", {}, el("strong", { class: "mono" }, keyText(target.key)), ` of rule ${target.rule}`);
  const content = el(
    "div",
    { class: "stack" },
    el("p", { class: "hint" }, "Every request of the key is denied, and none is charged."),
    fixed ?? [field("Rule", rule.node), values],
    field("Duration", time.node),
    field("Reason", reason),
    shortenLine,
    rawLine,
  );
  const submit = async () => {
    const { rule: name, key } = target ?? {
      rule: rule.node.value,
      key: inputs.map(({ value }) => value),
    };
    const body = { reason: reason.value };
    if (time.node.value) body.for = time.node.value;
    if (shorten.checked) body.shorten = true;
    if (raw.checked) body.raw = true;
    const made = await request("PUT", keyPath("blocks", name, key), body);
    app.say(
      `Blocked ${keyText(key)}${made.left_ms === null ? "" : ` for ${duration(made.left_ms)}`}.${made.hint ? ` Note: ${made.hint}.` : ""}`,
    );
  };
  const onError = (error) => {
    if (error.status === 409 && error.message.includes("--shorten")) show(shortenLine, true);
    if (error.status === 400 && error.message.includes("--raw")) show(rawLine, true);
  };
  await openDialog(
    app,
    target ? "Block this key?" : "Block a key",
    content,
    "Block",
    submit,
    onError,
  );
  await done?.();
}

// Describes what a block denies: a key of a rule, or entries.
const blockText = ({ key, entries }) => {
  if (entries) return keyText(Object.entries(entries).map(([name, value]) => `${name}=${value}`));
  return key ? keyText(key) : "unknown key";
};

// Returns the path of a block.
function blockPath({ rule, key, entries }) {
  if (!entries) return keyPath("blocks", rule, key);
  const [first, ...rest] = Object.entries(entries).flat();
  const path = keyPath("entry-blocks", first, rest);
  return rule === null ? path : `${path}?rule=${encodeURIComponent(rule)}`;
}

export function blocks(app) {
  const rows = table({
    caption: "Blocks",
    columns: [
      { title: "Key and rule", class: "key", main: true },
      { title: "Ends", class: "ends" },
      { title: "Reason", class: "reason wide" },
      { title: "Actions", class: "act", hidden: true },
    ],
    key: ({ rule, key, entries }) => JSON.stringify([rule, key, entries]),
    row: (block) => {
      const { rule, key, entries, reason, inactive } = block;
      const [ends, left] = [el("span"), el("span", { class: "sub" })];
      const isActive = !inactive && rule && key;
      const name = isActive
        ? keyLink(rule, key)
        : el("span", { class: "mono" }, blockText(block));
      const lift =
        entries || (rule && key)
          ? button("Unblock", () => unblock(block), { class: "operate" })
          : undefined;
      const update = ({ until_ms: until, left_ms: more }) => {
        text(ends, until === null ? "when it is lifted" : moment(until));
        text(left, until === null ? "" : `in ${duration(more)}`);
      };
      return {
        cells: [
          [
            name,
            el("span", { class: "sub" }, rule ?? (entries ? "all rules" : "unknown rule")),
            inactive && el("span", { class: "sub" }, `denies nothing: ${inactive}`),
            reason && el("span", { class: "sub narrow" }, reason),
          ],
          [ends, left],
          reason ?? "",
          lift ?? "",
        ],
        update,
      };
    },
    empty: "No blocks. To deny every request of a key, block it here or on the page of the key.",
  });
  const hint = el("p", { class: "hint" });
  const add = button("Block a key…", () => blockDialog(app, null, () => app.refresh()), {
    class: "primary operate",
  });
  const node = el("div", { class: "view" }, panel("Blocks", { tools: [add] }, rows.node, hint));

  async function unblock(block) {
    const blocked = blockText(block);
    const limits = block.rule ? `the limits of rule ${block.rule}` : "the limits of the rules";
    await ask(
      app,
      "Lift the block?",
      `Requests of ${blocked} are then decided by ${limits} again.`,
      "Unblock",
      async () => {
        await request("DELETE", blockPath(block));
        app.say(`Unblocked ${blocked}.`);
      },
    );
    await app.refresh();
  }

  async function poll() {
    const [found, byEntries] = await Promise.all([
      get("v1/blocks"),
      get("v1/entry-blocks", { n: MAX_ENTRY_BLOCKS }),
    ]);
    const all = [...byEntries.blocks, ...found.blocks];
    rows.update(all);
    const isLost = all.some(({ persistent }) => !persistent);
    text(
      hint,
      found.hint ??
        (isLost
          ? "These blocks are lost when the server restarts: its memory store has no snapshot. Set store.memory.snapshot to keep them."
          : ""),
    );
  }

  return { title: "Blocks", node, polls: [[3000, poll]] };
}
