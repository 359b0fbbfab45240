// Builds DOM elements. Data becomes text nodes and attribute values, and is never parsed as HTML.

function assign(node, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  return node;
}

function append(node, children) {
  const present = children
    .flat()
    .filter((child) => child !== undefined && child !== null && child !== false);
  node.append(...present);
  return node;
}

export function el(tag, props = {}, ...children) {
  return append(assign(document.createElement(tag), props), children);
}

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return append(assign(node, props), children);
}

// Sets a node's text only if the text differs, so that an update does not disturb a selection or a
// screen reader.
export function text(node, value) {
  const written = String(value);
  if (node.textContent !== written) node.textContent = written;
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

// Returns a function that updates the children of `parent` to match a list of items. `key` returns
// an item's identity; a few equal items may share it. `build` returns {node, update} for an item.
// Items that remain in the list keep their nodes and the focus.
export function keyed(parent, key, build) {
  let known = new Map();
  return (items) => {
    const focused = document.activeElement;
    const next = new Map();
    const numbers = new Map();
    let place = parent.firstChild;
    for (const item of items) {
      const number = (numbers.get(key(item)) ?? 0) + 1;
      numbers.set(key(item), number);
      const name = `${number} ${key(item)}`;
      const entry = known.get(name) ?? build(item);
      known.delete(name);
      next.set(name, entry);
      entry.update(item);
      if (entry.node === place) place = place.nextSibling;
      else parent.insertBefore(entry.node, place);
    }
    for (const { node } of known.values()) node.remove();
    known = next;
    if (focused !== document.activeElement && parent.contains(focused)) {
      focused.focus({ preventScroll: true });
    }
  };
}

// Creates a table whose columns keep their width while the rows change. A column is {title, class,
// main, hidden}. `row(item)` returns {cells, update}, with a node for each column. On a phone, each
// row is a block: the main column comes first, and the other columns follow with their titles. The
// ARIA roles are explicit, because browsers drop the implied roles of a table that has another
// layout.
export function table({ caption, columns, key, row, empty }) {
  const head = columns.map(({ title, class: name, hidden }) =>
    el(
      "th",
      { scope: "col", role: "columnheader", class: name },
      hidden ? el("span", { class: "hidden" }, title) : title,
    ),
  );
  const body = el("tbody", { role: "rowgroup" });
  const scroll = el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { role: "table", class: "list" },
      el("caption", { class: "hidden" }, caption),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, head)),
      body,
    ),
  );
  const nothing = el("p", { class: "empty" }, empty);
  const cell = ({ title, class: name, main, hidden }, content) =>
    el(
      "td",
      {
        role: "cell",
        class: `${name ?? ""}${main ? " main" : ""}`,
        "data-title": main || hidden ? false : title,
      },
      content,
    );
  const fill = keyed(body, key, (item) => {
    const { cells, update } = row(item);
    const node = el(
      "tr",
      { role: "row" },
      cells.map((content, at) => cell(columns[at], content)),
    );
    return { node, update: update ?? (() => {}) };
  });
  const update = (items) => {
    fill(items);
    show(scroll, items.length > 0);
    show(nothing, items.length === 0);
  };
  show(scroll, false);
  return { node: el("div", {}, scroll, nothing), update, say: (words) => text(nothing, words) };
}

export function panel(title, { tools, class: name, id } = {}, ...children) {
  const heading = el("h2", id ? { id } : {}, title);
  return el(
    "section",
    { class: `panel ${name ?? ""}` },
    el("div", { class: "head" }, heading, el("div", { class: "tools" }, tools)),
    ...children,
  );
}

export function button(label, onclick, props = {}) {
  return el("button", { type: "button", onclick, ...props }, label);
}

let fields = 0;

// Creates a label above an input.
export function field(label, input) {
  fields += 1;
  input.id ||= `field-${fields}`;
  return el("div", { class: "field" }, el("label", { for: input.id }, label), input);
}

export function select(label, options, onchange) {
  const node = el("select", { "aria-label": label, onchange: () => onchange?.(node.value) });
  const fill = (options) => {
    const value = node.value;
    const written = JSON.stringify(options);
    if (node.dataset.options === written) return;
    node.dataset.options = written;
    node.replaceChildren(...options.map(([value, title]) => el("option", { value }, title)));
    if (options.some(([known]) => known === value)) node.value = value;
  };
  fill(options);
  return { node, fill };
}

// Creates a bar that displays a fraction. A number with the same value stands next to it.
export function meter() {
  const fill = el("span", { class: "fill" });
  const number = el("span", { class: "number" });
  const update = (part, words) => {
    const share = Math.max(0, Math.min(1, part || 0));
    fill.style.width = `${(share * 100).toFixed(1)}%`;
    fill.classList.toggle("full", share >= 1);
    text(number, words);
  };
  const track = el("span", { class: "meter", "aria-hidden": "true" }, fill);
  return { node: el("span", { class: "measure" }, track, number), update };
}
