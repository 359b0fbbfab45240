// Formats numbers, times and keys as text.

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
});
const minute = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", {
  day: "numeric",
  month: "short",
  hour: "2-digit",
  minute: "2-digit",
});

export function count(number) {
  return number >= 100_000 ? compact.format(number) : whole.format(number);
}

export function rate(perSecond) {
  if (perSecond === 0) return "0";
  if (perSecond < 0.1) return "< 0.1";
  return perSecond < 10 ? perSecond.toFixed(1) : count(Math.round(perSecond));
}

export function percent(part, all) {
  if (!all || !part) return "0 %";
  const share = (part / all) * 100;
  if (share < 0.1) return "< 0.1 %";
  return `${share < 10 || (share > 99 && share < 100) ? share.toFixed(1) : Math.round(share)} %`;
}

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  let value = number;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

// Formats a duration with its two largest units, such as "1 h 5 min".
export function duration(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const units = [
    ["d", 86_400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ];
  let left = Math.ceil(ms / 1000);
  if (ms < 10_000 && ms % 1000) return `${(Math.ceil(ms / 100) / 10).toFixed(1)} s`;
  const parts = [];
  for (const [name, seconds] of units) {
    const number = Math.floor(left / seconds);
    left -= number * seconds;
    if (number || parts.length) parts.push([number, name]);
    if (parts.length === 2) break;
  }
  return parts
    .filter(([number]) => number)
    .map(([number, name]) => `${number} ${name}`)
    .join(" ");
}

export const wait = (ms) =>
  ms === null || ms === undefined || ms === Infinity
    ? "never"
    : ms === 0
      ? "now"
      : `in ${duration(ms)}`;

export const time = (ms) => clock.format(ms);
export const shortTime = (ms) => minute.format(ms);

// Formats a time. Today's date is omitted.
export function moment(ms) {
  const today = new Date().toDateString() === new Date(ms).toDateString();
  return today ? clock.format(ms) : day.format(ms);
}

// Formats a key for display. A rule without key entries has one key for all requests.
export const keyText = (values) =>
  values?.length ? values.map(visible).join(" · ") : "all requests";

// Escapes characters that would change the direction or the line breaks of the surrounding text.
function visible(value) {
  if (value === "") return "(empty)";
  return value.replace(
    /[\p{Cc}\p{Cf}\u2028\u2029]/gu,
    (char) => `\\u{${char.codePointAt(0).toString(16)}}`,
  );
}

// Formats an error message as a sentence.
export const sentence = (words) =>
  `${words.charAt(0).toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}`;

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
