//! Prints responses of the admin endpoint in readable form.
//!
//! Keys and reasons are untrusted texts. Control characters in them are escaped, so that they
//! cannot manipulate the terminal.

use std::fmt::Write as _;

use serde_json::Value;

/// The number of spaces between two columns.
const GAP: usize = 2;

/// Formats `/v1/status`.
pub(crate) fn status(status: &Value) -> String {
    let version = text(&status["version"]);
    let uptime = wait(&status["uptime_ms"]);
    let mut out = format!(
        "tidegate {version}, up {uptime}, {}\n",
        text(&status["state"])
    );
    for problem in list(&status["degraded"]).chain(list(&status["mistakes"])) {
        let _ = writeln!(out, "  {}", text(problem));
    }
    let store = &status["store"];
    let has_snapshot = store["snapshot"] == true;
    let kept = match (&store["persistent"], text(&store["kind"]).as_str()) {
        (Value::Bool(true), "memory") => "persistent across restarts",
        (Value::Bool(true), _) => "kept as long as Redis keeps its data",
        (_, "memory") if has_snapshot => "snapshot failing: a restart loses later changes",
        (_, "memory") => "lost on restart: set store.memory.snapshot to keep counters and blocks",
        _ => "not persistent across restarts",
    };
    let rules = match &status["rules_file"] {
        Value::Null => "no rules file: only limits sent with requests".to_owned(),
        file => format!("{} active, from {}", number(&status["rules"]), text(file)),
    };
    let listeners: Vec<String> = list(&status["listeners"])
        .map(|listener| format!("{} {}", text(&listener["name"]), text(&listener["address"])))
        .collect();
    let keys = number(&store["keys_in_process"]);
    let rows = vec![
        vec![
            "store".to_owned(),
            format!(
                "{}, {keys} keys in this process, {kept}",
                text(&store["kind"])
            ),
        ],
        vec![
            "rules".to_owned(),
            format!("{rules}; last reload: {}", text(&status["last_reload"])),
        ],
        vec!["listeners".to_owned(), listeners.join(", ")],
    ];
    out.push_str(&table(&rows));
    out.extend(restart_required(status));
    out
}

/// Formats `/v1/rules`.
pub(crate) fn rules(rules: &Value) -> String {
    let head = ["RULE", "MODE", "KEY", "LIMITS", "WHEN"];
    let rows: Vec<Vec<String>> = list(&rules["rules"])
        .map(|rule| {
            vec![
                text(&rule["name"]),
                text(&rule["mode"]),
                joined(&rule["key"]),
                joined(&rule["limits"]),
                text(&rule["when"]),
            ]
        })
        .collect();
    if rows.is_empty() {
        return "no rules".to_owned();
    }
    headed(&head, rows)
}

/// Formats `/v1/reload`.
pub(crate) fn reloaded(reloaded: &Value) -> String {
    let members = reloaded.as_object().into_iter().flatten();
    let parts: Vec<String> = members
        .filter(|(what, _)| {
            !matches!(
                what.as_str(),
                "restart_required" | "warnings" | "inactive_blocks" | "hint"
            )
        })
        .map(|(what, came)| match came {
            Value::Number(count) => format!("{count} {what}"),
            came => format!("{what} {}", text(came)),
        })
        .collect();
    let mut out = format!("reloaded: {}\n", parts.join(", "));
    for warning in list(&reloaded["warnings"]) {
        let _ = writeln!(out, "warning: {}", text(warning));
    }
    out.extend(restart_required(reloaded));
    out.extend(hint(reloaded));
    out
}

/// Returns the line about settings of the rules file that need a restart, if there are any.
fn restart_required(document: &Value) -> Option<String> {
    let settings: Vec<String> = list(&document["restart_required"]).map(text).collect();
    (!settings.is_empty()).then(|| {
        let settings = settings.join(", ");
        format!("note: changes to {settings} take effect after a restart of the server\n")
    })
}

/// Returns the hint of a document as a line, if it has one.
fn hint(document: &Value) -> Option<String> {
    let hint = document["hint"].as_str()?;
    Some(format!("note: {}\n", printable(hint)))
}

/// Returns the end of a block.
fn until(block: &Value) -> String {
    match &block["until_ms"] {
        Value::Null => "until it is lifted".to_owned(),
        _ => format!(
            "until {} ({})",
            text(&block["until"]),
            wait(&block["left_ms"])
        ),
    }
}

/// Returns the end and the reason of a block.
fn until_and_reason(block: &Value) -> String {
    let until = until(block);
    match block["reason"].as_str() {
        None | Some("") => until,
        Some(reason) => format!("{until}: {}", printable(reason)),
    }
}

/// Formats a response to `PUT /v1/blocks/…`.
pub(crate) fn blocked(block: &Value) -> String {
    let until = until(block);
    let mut out = format!("blocked {} {until}\n", key(block));
    let replaced = &block["replaced"];
    if !replaced.is_null() {
        let _ = writeln!(out, "replaced the block {}", until_and_reason(replaced));
    }
    out.extend(hint(block));
    out
}

/// Formats a response that only confirms success.
pub(crate) fn done(what: &str, done: &Value) -> String {
    format!("{what} {}", key(done))
}

/// Formats `/v1/blocks`.
pub(crate) fn blocks(blocks: &Value) -> String {
    let head = ["RULE", "KEY", "LEFT", "UNTIL", "REASON"];
    let rows: Vec<Vec<String>> = list(&blocks["blocks"])
        .map(|block| {
            let has_end = !block["until_ms"].is_null();
            let or_lifted = |end: String| {
                if has_end {
                    end
                } else {
                    "until lifted".to_owned()
                }
            };
            vec![
                rule_of(block),
                joined(&block["key"]),
                or_lifted(wait(&block["left_ms"])),
                if has_end {
                    text(&block["until"])
                } else {
                    "-".to_owned()
                },
                text(&block["reason"]),
            ]
        })
        .collect();
    if rows.is_empty() {
        return "no blocks".to_owned();
    }
    let is_lost = list(&blocks["blocks"]).any(|block| block["persistent"] == false);
    let has_inactive = list(&blocks["blocks"]).any(|block| block["inactive"].is_string());
    let mut out = headed(&head, rows);
    if has_inactive {
        out.push_str("note: a block of a former rule or key is inactive; lift it with `tidegate unblock`, the name of that rule and the key\n");
    }
    if let Some(hint) = hint(blocks) {
        out.push_str(&hint);
    } else if is_lost {
        out.push_str("note: these blocks are lost when the server restarts; set `store.memory.snapshot` to keep them\n");
    }
    out
}

/// Returns the rule of a block, and why the block is inactive if that is so.
fn rule_of(block: &Value) -> String {
    match (block["rule"].as_str(), block["inactive"].as_str()) {
        (None, Some(inactive)) => format!("({})", printable(inactive)),
        (Some(rule), Some(inactive)) => format!("{} ({})", printable(rule), printable(inactive)),
        _ => text(&block["rule"]),
    }
}

/// Formats `/v1/keys/…`.
pub(crate) fn inspected(inspected: &Value) -> String {
    let mut out = format!("{} ({})\n", key(inspected), text(&inspected["mode"]));
    let block = &inspected["block"];
    if !block.is_null() {
        let _ = writeln!(out, "blocked {}", until_and_reason(block));
    }
    let head = ["LIMIT", "REMAINING", "OF", "NEXT REQUEST", "FULL AGAIN"];
    let is_blocked = !block.is_null();
    let ends_with_block = |wait_ms: &Value| match (wait_ms.as_u64(), block["left_ms"].as_u64()) {
        (Some(wait), Some(left)) => wait <= left,
        (wait, _) => wait.is_none(),
    };
    let rows = list(&inspected["limits"]).map(|limit| {
        let next = match &limit["retry_after_ms"] {
            wait_ms if is_blocked && ends_with_block(wait_ms) => "after the block".to_owned(),
            Value::Null => "never".to_owned(),
            wait_ms => moment(wait_ms),
        };
        vec![
            text(&limit["policy"]),
            number(&limit["remaining"]),
            number(&limit["limit"]),
            next,
            moment(&limit["reset_after_ms"]),
        ]
    });
    out.push_str(&headed(&head, rows.collect()));
    out.extend(hint(inspected));
    out
}

/// Returns the rule and the values of a key, or the key of a limit that was sent with a request.
fn key(document: &Value) -> String {
    match (&document["rule"], &document["key"]) {
        (Value::Null, key) => joined(key),
        (rule, Value::Array(values)) if values.is_empty() => text(rule),
        (rule, key) => format!("{} {}", text(rule), joined(key)),
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn joined(value: &Value) -> String {
    match value {
        Value::Array(values) if values.is_empty() => "-".to_owned(),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(text).collect();
            values.join(", ")
        }
        other => text(other),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => printable(text),
        other => other.to_string(),
    }
}

fn number(value: &Value) -> String {
    value
        .as_u64()
        .map_or_else(|| "-".to_owned(), |number| number.to_string())
}

/// Returns a text on one line, with control characters escaped.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// Returns a time from now; 0 is "now".
fn moment(millis: &Value) -> String {
    match millis.as_u64() {
        Some(0) => "now".to_owned(),
        _ => format!("in {}", wait(millis)),
    }
}

/// Returns a duration in its two largest units, rounded up: `2d 3h`, `1min 30s`, `250ms`.
fn wait(millis: &Value) -> String {
    const UNITS: [(u64, &str); 4] = [
        (86_400_000, "d"),
        (3_600_000, "h"),
        (60_000, "min"),
        (1_000, "s"),
    ];
    let Some(millis) = millis.as_u64() else {
        return "-".to_owned();
    };
    let Some(at) = UNITS.iter().position(|(unit, _)| millis >= *unit) else {
        return format!("{millis}ms");
    };
    let (smaller, name) = UNITS.get(at + 1).copied().unwrap_or((1_000, "s"));
    let rounded = millis.div_ceil(smaller).saturating_mul(smaller);
    let at = UNITS
        .iter()
        .position(|(unit, _)| rounded >= *unit)
        .unwrap_or(at);
    let (unit, first) = UNITS[at];
    let rest = rounded % unit / smaller;
    if rest == 0 || smaller >= unit {
        format!("{}{first}", rounded / unit)
    } else {
        format!("{}{first} {rest}{name}", rounded / unit)
    }
}

fn headed(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let head = head.iter().map(|name| (*name).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    table(&rows)
}

/// Aligns rows in columns. Each column is as wide as its widest cell.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            let padding = (width + GAP).saturating_sub(cell.chars().count());
            line.extend(std::iter::repeat_n(' ', padding));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn waits_have_two_units_and_are_rounded_up() {
        for (millis, expected) in [
            (0, "0ms"),
            (999, "999ms"),
            (1_000, "1s"),
            (1_001, "2s"),
            (59_001, "1min"),
            (90_000, "1min 30s"),
            (3_599_001, "1h"),
            (7_140_001, "2h"),
            (36_000_000, "10h"),
            (86_400_000, "1d"),
            (90_000_000, "1d 1h"),
        ] {
            assert_eq!(wait(&json!(millis)), expected, "{millis}");
        }
        assert_eq!(wait(&Value::Null), "-");
    }

    #[test]
    fn control_characters_in_keys_are_escaped() {
        let block = json!({"blocks": [{
            "rule": "r", "key": ["\u{1b}[2J\nx"], "reason": "", "until": null, "until_ms": null,
            "left_ms": null, "persistent": true,
        }]});
        let printed = blocks(&block);
        assert!(!printed.contains('\u{1b}'), "{printed}");
        assert_eq!(printed.lines().count(), 2, "{printed}");
        assert!(printed.contains("until lifted"), "{printed}");
    }
}
