// Login, navigation between the views, and polling.
//
// Only the current view polls, and only while the page is visible and polling is not paused. A
// failed poll is not repeated early; the next poll follows after the usual interval.

import { ApiError, forgetToken, get, hasToken, setLogoutHandler, setToken } from "./api.js";
import { blocks } from "./blocks.js";
import { denials } from "./denials.js";
import { button, el, show, text } from "./dom.js";
import { events } from "./events.js";
import { explain } from "./explain.js";
import { keys } from "./keys.js";
import { overview } from "./overview.js";
import { server } from "./server.js";

const VIEWS = { overview, denials, events, keys, explain, blocks, server };
const STATUS_MS = 3000;
const RULES_MS = 5000;
const MESSAGE_MS = 10_000;

const [main, nav, notice, message, state, live, theme, logout] = [
  "main",
  "nav",
  "notice",
  "message",
  "state",
  "live",
  "theme",
  "logout",
].map((id) => document.getElementById(id));

let views = null;
let current = null;
let isPaused = false;
let lastStatus = null;
// The poll timers of the current view. Results of polls that started in an earlier generation are
// ignored.
let generation = 0;
let timers = [];
let problems = new Map();
let messageTimer;
let knownRules = { at: 0, promise: null };

const app = {
  dialogs: new Set(),

  // Returns the rules of the server. The rules are cached for a few seconds.
  rules() {
    if (Date.now() - knownRules.at > RULES_MS) {
      const promise = get("v1/rules").then((found) => found.rules);
      promise.catch(() => {
        knownRules.at = 0;
      });
      knownRules = { at: Date.now(), promise };
    }
    return knownRules.promise;
  },

  // Reloads all data of the current view.
  async refresh() {
    if (current) await Promise.all(restart(current));
  },

  say(words) {
    text(message, words);
    message.classList.add("shown");
    clearTimeout(messageTimer);
    messageTimer = setTimeout(() => {
      message.classList.remove("shown");
      text(message, "");
    }, MESSAGE_MS);
  },

  // Returns a link to the explanation of a request. The request has the given entries or, if there
  // are none, the key's entries.
  explainLink(rule, key, entries = {}) {
    const given = Object.entries(entries);
    return `#/explain?${new URLSearchParams(given.length ? given : entriesOf(rule, key))}`;
  },
};

let ruleKeys = new Map();

function entriesOf(rule, key) {
  const names = ruleKeys.get(rule) ?? [];
  return (key ?? []).slice(0, names.length).map((value, at) => [names[at], value]);
}

function showProblems() {
  const degraded = lastStatus?.degraded ?? [];
  const words = [...new Set(problems.values()), ...degraded];
  notice.replaceChildren(...words.map((line) => el("p", {}, line)));
  notice.classList.toggle("is-severe", problems.size > 0);
  show(notice, words.length > 0);
}

function closeDialogs() {
  for (const dialog of app.dialogs) dialog.close();
}

function stopPolls() {
  generation += 1;
  timers.forEach(clearTimeout);
  timers = [];
}

// Starts every poll of `view` now, and repeats each poll at its interval. Returns the promises of
// the first polls.
function restart(view) {
  stopPolls();
  if (isPaused || document.hidden) return [];
  const mine = generation;
  return [[STATUS_MS, pollStatus], ...view.polls].map(([ms, poll], at) => {
    const run = async () => {
      try {
        await poll();
        if (mine === generation) problems.delete(at);
      } catch (error) {
        if (mine === generation && error.status !== 401) problems.set(at, error.message);
        if (!(error instanceof ApiError)) throw error;
      } finally {
        if (mine === generation) {
          showProblems();
          timers[at] = setTimeout(run, ms);
        }
      }
    };
    return run();
  });
}

async function pollStatus() {
  applyStatus(await get("v1/status"));
}

function applyStatus(status) {
  lastStatus = status;
  text(state, status.state);
  state.className = `state ${status.state === "ready" ? "is-ready" : "is-degraded"}`;
  state.title = `Tidegate ${status.version}`;
  show(state, true);
  document.documentElement.classList.toggle("read-only", status.may_operate === false);
  current?.onStatus?.(status);
}

async function readRules() {
  ruleKeys = new Map((await app.rules()).map(({ name, key }) => [name, key]));
}

async function navigate() {
  if (!views) return;
  const [name, query] = location.hash.replace(/^#\/?/, "").split("?");
  const shown = Object.hasOwn(views, name) ? name : "overview";
  const view = views[shown];
  const isOther = view !== current;
  current = view;
  problems = new Map();
  closeDialogs();
  for (const link of nav.children) {
    if (link.dataset.view === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view.title} · Tidegate`;
  if (isOther) {
    main.replaceChildren(el("h1", { class: "hidden" }, view.title), view.node);
    scrollTo(0, 0);
  }
  try {
    await readRules();
    await view.enter?.(new URLSearchParams(query));
  } catch (error) {
    problems.set("enter", error.message);
    showProblems();
  }
  if (view !== current || !views) return;
  if (lastStatus) view.onStatus?.(lastStatus);
  restart(view);
}

function start(status) {
  views = Object.fromEntries(Object.entries(VIEWS).map(([name, create]) => [name, create(app)]));
  nav.replaceChildren(
    ...Object.entries(views).map(([name, { title }]) =>
      el("a", { href: `#/${name}`, "data-view": name }, title),
    ),
  );
  show(nav, true);
  show(live, true);
  show(logout, hasToken());
  current = null;
  applyStatus(status);
  navigate();
}

function showLogin(words) {
  stopPolls();
  views = null;
  current = null;
  lastStatus = null;
  knownRules = { at: 0, promise: null };
  closeDialogs();
  for (const node of [nav, live, logout, state, notice]) show(node, false);
  document.title = "Log in · Tidegate";
  const token = el("input", {
    type: "password",
    autocomplete: "current-password",
    required: true,
    id: "token",
  });
  const problem = el("p", { class: "problem", role: "alert", hidden: !words }, words ?? "");
  const submit = el("button", { type: "submit", class: "primary" }, "Log in");
  const shown = button(
    "Show",
    () => {
      const isHidden = token.type === "password";
      token.type = isHidden ? "text" : "password";
      text(shown, isHidden ? "Hide" : "Show");
    },
    { class: "quiet", "aria-label": "Show or hide the token" },
  );
  const form = el(
    "form",
    {
      class: "login panel",
      onsubmit: async (event) => {
        event.preventDefault();
        submit.disabled = true;
        setToken(token.value.trim());
        try {
          start(await get("v1/status"));
        } catch (error) {
          forgetToken();
          // After a 401, `onLogout` has replaced this form with one that shows the reason.
          const after = error.problem?.after ? ` Try again in ${error.problem.after} s.` : "";
          text(problem, `${error.message}${error.status === 429 ? after : ""}`);
          show(problem, true);
          submit.disabled = false;
        }
      },
    },
    el("h1", {}, "Log in"),
    el(
      "div",
      { class: "field" },
      el("label", { for: "token" }, "Admin token"),
      el("div", { class: "secret" }, token, shown),
    ),
    problem,
    el("div", { class: "actions" }, submit),
    el(
      "p",
      { class: "hint" },
      "Enter a token that admin.tokens, admin.token or admin.token_env sets in the rules file. The token stays in this tab until you log out or close the tab.",
    ),
  );
  main.replaceChildren(form);
  token.focus();
}

async function begin() {
  try {
    start(await get("v1/status"));
    show(notice, false);
  } catch (error) {
    if (error.status === 401) {
      if (!main.querySelector(".login")) showLogin();
      return;
    }
    notice.replaceChildren(el("p", {}, error.message));
    notice.classList.add("is-severe");
    show(notice, true);
    setTimeout(begin, STATUS_MS);
  }
}

const THEMES = ["auto", "light", "dark"];

function applyTheme(name) {
  document.documentElement.dataset.theme = name;
  text(theme, `Theme: ${name}`);
}

applyTheme(THEMES.find((name) => name === localStorage.getItem("tidegate-theme")) ?? "auto");

theme.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("tidegate-theme", next);
  applyTheme(next);
});

live.addEventListener("click", () => {
  isPaused = !isPaused;
  text(live, isPaused ? "Resume" : "Pause");
  live.classList.toggle("is-paused", isPaused);
  if (!current) return;
  if (isPaused) stopPolls();
  else restart(current);
});

logout.addEventListener("click", () => {
  forgetToken();
  showLogin();
});

document.addEventListener("visibilitychange", () => {
  if (!current) return;
  if (document.hidden) stopPolls();
  else restart(current);
});

window.addEventListener("hashchange", navigate);
setLogoutHandler(showLogin);
begin();
