//! Prints responses of the admin endpoint in readable form.
//!
//! Keys and reasons are untrusted input. Control characters in keys and reasons are escaped, so
//! that they cannot manipulate the terminal.

use std::fmt::Write as _;

use serde_json::Value;

/// The number of spaces between two columns.
const GAP: usize = 2;

/// Formats `/readyz`.
pub(crate) fn health(health: &Value) -> String {
    let mut out = format!("{}\n", text(&health["state"]));
    for problem in list(&health["degraded"]).chain(list(&health["mistakes"])) {
        let _ = writeln!(out, "  {}", text(problem));
    }
    out
}

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
        (_, "memory") if has_snapshot => {
            "snapshot failing: a restart loses changes since the last snapshot"
        }
        (_, "memory") => "lost on restart: set store.memory.snapshot to keep counters and blocks",
        _ => "not persistent across restarts",
    };
    let rules = match (&status["rules_file"], &status["promoted"]) {
        (Value::Null, _) => "no rules file: only limits sent with requests apply".to_owned(),
        (file, Value::String(promoted)) => format!(
            "{} active, promoted from {} until the next reload of {}",
            number(&status["rules"]),
            printable(promoted),
            text(file)
        ),
        (file, _) => format!("{} active, from {}", number(&status["rules"]), text(file)),
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
                "restart_required"
                    | "warnings"
                    | "inactive_blocks"
                    | "inactive_entry_blocks"
                    | "inactive_overrides"
                    | "hint"
            )
        })
        .map(|(what, value)| match value {
            Value::Number(count) => format!("{count} {what}"),
            value => format!("{what} {}", text(value)),
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

/// Formats the response of `/v1/rules/preview`.
pub(crate) fn rules_preview(preview: &Value) -> String {
    let mut out = format!(
        "the file has {} rules; nothing was applied\n",
        number(&preview["rules"])
    );
    for (label, name) in [("added", "added"), ("removed", "removed")] {
        for rule in list(&preview[name]) {
            let _ = writeln!(out, "{label}: {}", text(rule));
        }
    }
    for change in list(&preview["changed"]) {
        let _ = writeln!(out, "changed: {}", text(&change["rule"]));
        for name in ["mode", "limits", "when", "key"] {
            let values = &change[name];
            if !values.is_null() {
                let (before, after) = (joined(&values["before"]), joined(&values["after"]));
                let _ = writeln!(out, "  {name}: {before} -> {after}");
            }
        }
        if change["other"] == true {
            out.push_str("  other settings: cost, allow list, elastic limits or on_failure\n");
        }
        let last_hour = &change["last_hour"];
        if !last_hour.is_null() {
            let _ = writeln!(
                out,
                "  in the last hour, its current limits would have denied {} of {} requests",
                number(&last_hour["would_deny"]),
                number(&last_hour["requests"])
            );
        }
    }
    for warning in list(&preview["warnings"]) {
        let _ = writeln!(out, "warning: {}", text(warning));
    }
    out.extend(restart_required(preview));
    out
}

/// Formats a line with the changed settings that need a restart, if there are any.
fn restart_required(document: &Value) -> Option<String> {
    let settings: Vec<String> = list(&document["restart_required"]).map(text).collect();
    (!settings.is_empty()).then(|| {
        let settings = settings.join(", ");
        format!("note: changes to {settings} take effect after a restart or an upgrade\n")
    })
}

/// Formats a document's hint as a line, if the document has a hint.
fn hint(document: &Value) -> Option<String> {
    let hint = document["hint"].as_str()?;
    Some(format!("note: {}\n", printable(hint)))
}

/// Formats the end of a block.
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

/// Formats the end and the reason of a block.
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

/// Formats the blocks of keys and the blocks by entries.
pub(crate) fn blocks(document: &Value) -> String {
    let head = ["RULE", "KEY", "LEFT", "UNTIL", "REASON"];
    let all = || list(&document["entry_blocks"]).chain(list(&document["blocks"]));
    let rows: Vec<Vec<String>> = all().map(block_cells).collect();
    if rows.is_empty() {
        return "no blocks".to_owned();
    }
    let is_lost = all().any(|block| block["persistent"] == false);
    let has_inactive = all().any(|block| block["inactive"].is_string());
    let mut out = headed(&head, rows);
    if document["has_more_blocks"] == true || document["has_more_entry_blocks"] == true {
        out.push_str("note: there are more blocks; `tidegate blocks` lists all\n");
    }
    if has_inactive {
        out.push_str("note: inactive blocks deny no requests: the rule was removed or has another key, or no rule uses an entry of the block; lift them with `tidegate unblock`\n");
    }
    if let Some(hint) = hint(document) {
        out.push_str(&hint);
    } else if is_lost {
        out.push_str("note: these blocks are lost when the server restarts; set `store.memory.snapshot` to keep them\n");
    }
    out
}

/// Returns the table cells of a block of a key or of entries.
fn block_cells(block: &Value) -> Vec<String> {
    let has_end = !block["until_ms"].is_null();
    let is_of_all_rules = block["rule"].is_null() && block["inactive"].is_null();
    vec![
        match &block["entries"] {
            Value::Object(_) if is_of_all_rules => "(all rules)".to_owned(),
            _ => rule_of(block),
        },
        match &block["entries"] {
            Value::Null => joined(&block["key"]),
            entries => entry_list(entries),
        },
        match has_end {
            true => wait(&block["left_ms"]),
            false => "until lifted".to_owned(),
        },
        match has_end {
            true => text(&block["until"]),
            false => "-".to_owned(),
        },
        text(&block["reason"]),
    ]
}

/// Formats the entries of a block.
fn entry_list(entries: &Value) -> String {
    let entries = entries.as_object().into_iter().flatten();
    let pairs = entries.map(|(name, value)| format!("{}={}", printable(name), text(value)));
    pairs.collect::<Vec<_>>().join(" ")
}

/// Formats the response to a request that sets an override.
pub(crate) fn overridden(found: &Value) -> String {
    let mut out = format!("overrode {}: {}\n", key(found), change(found));
    let replaced = &found["replaced"];
    if !replaced.is_null() {
        let _ = writeln!(out, "replaced the override {}", change(replaced));
    }
    out.extend(hint(found));
    out
}

/// Describes the override of a key; `None` if the key has no override.
fn override_of_key(found: &Value) -> Option<String> {
    if found.is_null() {
        return None;
    }
    let of = match &found["pattern"] {
        Value::Null => "override".to_owned(),
        pattern => format!("override of {}", joined(pattern)),
    };
    let mut out = format!("{of}: {}\n", change(found));
    if let Some(inactive) = found["inactive"].as_str() {
        let inactive = printable(inactive);
        let _ = writeln!(
            out,
            "this override is inactive, so it has no effect: {inactive}"
        );
    }
    Some(out)
}

/// Describes an override: its limits, its end and its reason.
fn change(found: &Value) -> String {
    let reason = text(&found["reason"]);
    let reason = match reason.as_str() {
        "" | "-" => String::new(),
        reason => format!(" ({reason})"),
    };
    let end = match found["until"].as_str() {
        Some(until) => format!("until {}", printable(until)),
        None => "until removed".to_owned(),
    };
    format!("{}, {end}{reason}", replacement(found))
}

/// Formats the limits, the factor or the plan that an override sets.
fn replacement(found: &Value) -> String {
    let limits = list(&found["limits"])
        .map(text)
        .collect::<Vec<_>>()
        .join(", ");
    match (found["factor"].as_str(), found["plan"].as_str()) {
        (Some(factor), _) => printable(factor),
        (None, Some(plan)) => format!("plan {}", printable(plan)),
        (None, None) => limits,
    }
}

/// Formats `/v1/overrides`.
pub(crate) fn overrides(overrides: &Value) -> String {
    let head = ["RULE", "KEY", "LIMITS", "LEFT", "UNTIL", "REASON"];
    let rows: Vec<Vec<String>> = list(&overrides["overrides"])
        .map(|found| {
            let has_end = !found["until_ms"].is_null();
            let or_removed = |end: String| match has_end {
                true => end,
                false => "until removed".to_owned(),
            };
            vec![
                match long_inactive_reason(found) {
                    Some(_) => format!("{} (inactive)", text(&found["rule"])),
                    None => rule_of(found),
                },
                joined(&found["key"]),
                replacement(found),
                or_removed(wait(&found["left_ms"])),
                match has_end {
                    true => text(&found["until"]),
                    false => "-".to_owned(),
                },
                text(&found["reason"]),
            ]
        })
        .collect();
    let mut out = match rows.is_empty() {
        true => "no overrides\n".to_owned(),
        false => headed(&head, rows),
    };
    for found in list(&overrides["overrides"]) {
        if let Some(inactive) = long_inactive_reason(found) {
            let inactive = printable(inactive);
            let _ = writeln!(out, "note: {} is inactive: {inactive}", key(found));
        }
    }
    if list(&overrides["overrides"]).any(|found| found["inactive"].is_string()) {
        out.push_str("note: where an override is inactive, the limits of the plan or of the rule apply; remove it with `tidegate override RULE KEY --remove`, or restore the rule\n");
    }
    if let Some(next) = overrides["next"].as_str() {
        let _ = writeln!(out, "more overrides follow: --after {}", printable(next));
    }
    if list(&overrides["overrides"]).any(|found| found["persistent"] == false) {
        out.push_str("note: these overrides are lost when the server restarts; set `store.memory.snapshot` to keep them\n");
    }
    out
}

/// Returns why an override is inactive, if the reason is too long for a column of the table.
fn long_inactive_reason(found: &Value) -> Option<&str> {
    const MAX_IN_COLUMN: usize = 40;
    let inactive = found["inactive"].as_str()?;
    (inactive.len() > MAX_IN_COLUMN).then_some(inactive)
}

/// Formats the rule of a block. If the block is inactive, adds the reason.
fn rule_of(block: &Value) -> String {
    match (block["rule"].as_str(), block["inactive"].as_str()) {
        (None, Some(inactive)) => format!("({})", printable(inactive)),
        (Some(rule), Some(inactive)) => format!("{} ({})", printable(rule), printable(inactive)),
        _ => text(&block["rule"]),
    }
}

/// Formats `/v1/keys/…`.
pub(crate) fn inspected(inspected: &Value) -> String {
    // Without key values, `inspect` requests the path that lists the rule's keys.
    if inspected["keys"].is_array() {
        return keys(inspected);
    }
    let mut out = format!("{} ({})\n", key(inspected), text(&inspected["mode"]));
    let block = &inspected["block"];
    if !block.is_null() {
        let _ = writeln!(out, "blocked {}", until_and_reason(block));
    }
    out.extend(override_of_key(&inspected["override"]));
    let rows = list(&inspected["limits"]).map(|limit| limit_cells(limit, block));
    out.push_str(&headed(&LIMIT_COLUMNS, rows.collect()));
    out.extend(hint(inspected));
    out
}

/// Formats `/v1/events`, one event per line. The output has no column headings, because `--follow`
/// appends more lines.
pub(crate) fn events(list_of_events: &Value) -> String {
    let mut out = String::new();
    let missed = list_of_events["missed"].as_u64().unwrap_or(0);
    if missed > 0 {
        let _ = writeln!(out, "note: {missed} events are no longer in memory");
    }
    let events: Vec<&Value> = list(&list_of_events["events"]).collect();
    if events.is_empty() {
        out.push_str("no events\n");
    }
    for event in events {
        let _ = write!(
            out,
            "{}  {:<20}",
            text(&event["timestamp"]),
            text(&event["type"])
        );
        let is_surge = event["type"]
            .as_str()
            .is_some_and(|kind| kind.starts_with("traffic."));
        for (name, value) in event["data"].as_object().into_iter().flatten() {
            if is_surge && name == "rule" && value.is_null() {
                out.push_str("  rule=(all rules)");
            } else if !value.is_null() {
                let _ = write!(out, "  {}={}", printable(name), field(value));
            }
        }
        out.push('\n');
    }
    out
}

/// Formats the value of a field in an event.
fn field(value: &Value) -> String {
    match value {
        Value::Array(_)
            if value
                .as_array()
                .is_some_and(|list| list.iter().all(Value::is_string)) =>
        {
            joined(value)
        }
        Value::Array(_) | Value::Object(_) => printable(&value.to_string()),
        value => text(value),
    }
}

/// Formats `/v1/denials`.
pub(crate) fn denials(denials: &Value) -> String {
    let head = [
        "AT",
        "RULE",
        "KEY",
        "LIMIT",
        "RETRY AFTER",
        "LISTENER",
        "MODE",
    ];
    let row = |row: &Value| {
        vec![
            text(&row["at"]),
            match (&row["rule"], text(&row["reason"]).as_str()) {
                (Value::Null, "store") => "-".to_owned(),
                // A block by entries can deny a request to which no rule applies.
                (Value::Null, "blocked") if list(&row["key"]).next().is_none() => "-".to_owned(),
                (Value::Null, _) => "(sent with the request)".to_owned(),
                (rule, _) => text(rule),
            },
            joined(&row["key"]),
            match &row["policy"] {
                Value::Null if row["reason"] == "on_failure" => "(on_failure: closed)".to_owned(),
                Value::Null => format!("({})", text(&row["reason"])),
                policy => text(policy),
            },
            wait_or_never(&row["retry_after_ms"]),
            text(&row["listener"]),
            text(&row["mode"]),
        ]
    };
    let rows: Vec<Vec<String>> = list(&denials["rows"]).map(row).collect();
    let mut out = if rows.is_empty() {
        "no denials\n".to_owned()
    } else {
        headed(&head, rows)
    };
    let lost = denials["lost"].as_u64().unwrap_or(0);
    if lost > 0 {
        let _ = writeln!(
            out,
            "note: {lost} older denials are no longer in memory; to keep more, raise `denials.max_bytes`"
        );
    }
    out.extend(hint(denials));
    out
}

/// Formats `/v1/explain`: the decision, the rules that apply, and why the other rules do not apply.
pub(crate) fn explained(explained: &Value) -> String {
    let mut out = match (&explained["allowed"], &explained["allowed_by"]) {
        (Value::Bool(true), Value::String(item)) => {
            format!(
                "allowed: the request matches the allow list: {}\n",
                printable(item)
            )
        }
        (Value::Bool(true), _) => "allowed\n".to_owned(),
        (_, _) => format!(
            "denied ({}), {}\n",
            text(&explained["reason"]),
            passes(&explained["retry_after_ms"])
        ),
    };
    let block = &explained["block"];
    if !block.is_null() {
        let entries = entry_list(&block["entries"]);
        let _ = writeln!(out, "blocked {entries} {}", until_and_reason(block));
    }
    if let Some(source) = explained["source"].as_str() {
        let exactness = text(&explained["exactness"]);
        let _ = writeln!(out, "decided by {} ({exactness})", printable(source));
    }
    let is_applied = |rule: &&Value| rule["applies"] == true;
    for rule in list(&explained["rules"]).filter(is_applied) {
        out.push('\n');
        out.push_str(&explained_rule(rule));
    }
    let others = list(&explained["rules"]).filter(|rule| !is_applied(rule));
    let others: Vec<Vec<String>> = others
        .map(|rule| vec![text(&rule["rule"]), text(&rule["because"])])
        .collect();
    if !others.is_empty() {
        out.push('\n');
        out.push_str(&headed(&["RULE", "DOES NOT APPLY, BECAUSE"], others));
    }
    if let Some(omitted) = explained["omitted"].as_u64() {
        let _ = writeln!(out, "and {omitted} more rules that do not apply");
    }
    out.extend(hint(explained));
    out
}

/// Formats a rule that applies to the request: the rule's verdict and its limits.
fn explained_rule(rule: &Value) -> String {
    let is_shadow = rule["mode"] == "shadow";
    let verdict = match (&rule["allowed"], is_shadow, rule["reason"].as_str()) {
        (Value::Bool(true), ..) => "allows".to_owned(),
        // "Would deny" is correct only if the reason is a limit. A block denies requests even if
        // its rule is in shadow mode.
        (_, true, Some("limit")) => format!("would deny, {}", passes(&rule["retry_after_ms"])),
        (_, _, reason) => format!(
            "denies ({}), {}",
            printable(reason.unwrap_or("-")),
            passes(&rule["retry_after_ms"])
        ),
    };
    let mut out = format!("{} ({}): {verdict}\n", key(rule), text(&rule["mode"]));
    if let Some(because) = rule["because"].as_str() {
        let _ = writeln!(out, "{}", printable(because));
    }
    let block = &rule["block"];
    if !block.is_null() {
        let _ = writeln!(out, "blocked {}", until_and_reason(block));
    }
    out.extend(override_of_key(&rule["override"]));
    if let Some(plan) = rule["plan"].as_str() {
        let _ = writeln!(out, "plan: {}", printable(plan));
    }
    if rule["elastic"] == true {
        out.push_str("elastic: the limits are raised\n");
    }
    let limits = list(&rule["limits"]).map(|limit| limit_cells(limit, block));
    out.push_str(&headed(&LIMIT_COLUMNS, limits.collect()));
    out
}

/// Formats `/v1/keys/{rule}`.
pub(crate) fn keys(keys: &Value) -> String {
    let mut rows = Vec::new();
    for row in list(&keys["keys"]) {
        for (at, limit) in list(&row["limits"]).enumerate() {
            let key = match at {
                0 => joined(&row["key"]),
                _ => String::new(),
            };
            let cells = limit_cells(limit, &row["block"]);
            rows.push(std::iter::once(key).chain(cells).collect());
        }
    }
    let mut out = if rows.is_empty() {
        "no keys\n".to_owned()
    } else {
        let head: Vec<&str> = std::iter::once("KEY").chain(LIMIT_COLUMNS).collect();
        headed(&head, rows)
    };
    if let Some(next) = keys["next"].as_str() {
        let _ = writeln!(
            out,
            "note: more keys follow; to list them, pass --after {}",
            printable(next)
        );
    }
    out
}

/// Formats the time until a request is admitted, as part of a sentence.
fn passes(wait_ms: &Value) -> String {
    match wait_ms {
        Value::Null => "never passes".to_owned(),
        wait_ms => format!("passes {}", moment(wait_ms)),
    }
}

fn wait_or_never(wait_ms: &Value) -> String {
    match wait_ms {
        Value::Null => "never".to_owned(),
        wait_ms => wait(wait_ms),
    }
}

/// The headings of the columns that [`limit_cells`] fills.
const LIMIT_COLUMNS: [&str; 5] = ["LIMIT", "REMAINING", "OF", "NEXT REQUEST", "FULL AGAIN"];

/// Returns a limit's cells in the table. `block` is the block on the limit's key, or null.
fn limit_cells(limit: &Value, block: &Value) -> Vec<String> {
    let is_blocked = !block.is_null();
    let ends_with_block = |wait_ms: &Value| match (wait_ms.as_u64(), block["left_ms"].as_u64()) {
        (Some(wait), Some(left)) => wait <= left,
        (wait, _) => wait.is_none(),
    };
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
}

/// Formats `/v1/top`.
pub(crate) fn top(list: &Value) -> String {
    let (by, total) = (text(&list["by"]), &list["total"]);
    let rule = list["rule"].as_str();
    let of = rule.map_or_else(|| "all rules".to_owned(), printable);
    let servers = list["servers"].as_u64();
    let servers = servers.map_or_else(String::new, |servers| {
        format!(", {}", counted(servers, "server"))
    });
    let requests = total["requests"].as_u64().unwrap_or(0);
    let mut out = format!(
        "{of}, last {}{servers}: {}, {} denied, cost {}\n",
        wait(&list["over_ms"]),
        counted(requests, "request"),
        number(&total["denied"]),
        number(&total["cost"])
    );
    let whole = total[by.as_str()].as_u64().unwrap_or(0);
    let row = |row: &Value| {
        let (most, error) = (row["estimate"].as_u64(), row["error"].as_u64());
        let least = most
            .zip(error)
            .map(|(most, error)| most.saturating_sub(error));
        let mut cells = vec![
            number(&row["estimate"]),
            least.map_or_else(|| "-".to_owned(), |least| least.to_string()),
            share(most.unwrap_or(0), whole),
        ];
        if rule.is_none() {
            cells.push(match &row["rule"] {
                Value::Null => "(sent with the request)".to_owned(),
                rule => text(rule),
            });
        }
        cells.push(joined(&row["key"]));
        cells
    };
    let rows: Vec<Vec<String>> = self::list(&list["rows"]).map(row).collect();
    if rows.is_empty() {
        out.push_str("no keys\n");
        out.extend(hint(list));
        return out;
    }
    let mut head = vec!["AT MOST", "AT LEAST", "SHARE"];
    head.extend(rule.is_none().then_some("RULE"));
    head.push("KEY");
    out.push_str(&headed(&head, rows));
    out.extend(hint(list));
    out
}

/// Formats a number with its noun, such as `1 request`.
fn counted(number: u64, noun: &str) -> String {
    let ending = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{ending}")
}

/// Formats the top talkers of every period, and the blocks.
pub(crate) fn overview(document: &Value) -> String {
    let lists = list(&document["periods"]).map(top);
    let end = hint(document).unwrap_or_else(|| blocks(document));
    let parts: Vec<String> = lists.chain([end]).collect();
    parts.join("\n")
}

/// Formats `/v1/candidate`.
pub(crate) fn candidate(report: &Value) -> String {
    let count = |name: &str| report[name].as_u64().unwrap_or(0);
    let compared = count("compared");
    let mut out = format!(
        "{}, since {}: {} compared\n",
        text(&report["rules_file"]),
        instant(count("since_ms")),
        counted(compared, "request")
    );
    let change = |name: &str| format!("{} ({})", count(name), share(count(name), compared));
    let _ = writeln!(
        out,
        "newly denied: {}, no longer denied: {}, not compared: {}, lost: {}",
        change("newly_denied"),
        change("no_longer_denied"),
        count("not_compared"),
        count("lost")
    );
    if count("rejected") > 0 {
        let rejected = count("rejected");
        let _ = writeln!(
            out,
            "warning: the candidate rules reject {} as invalid (400); check whether the entry with the cost is missing",
            counted(rejected, "request")
        );
    }
    match (&report["ended"], &report["until"]) {
        (Value::Bool(true), until) => {
            let _ = writeln!(out, "ended at {}", text(until));
        }
        (_, Value::Null) => {}
        (_, until) => {
            let _ = writeln!(out, "ends at {}", text(until));
        }
    }
    out.push('\n');
    let rule = |rule: &Value| {
        let (requests, denied) = (rule["requests"].as_u64(), rule["denied"].as_u64());
        vec![
            text(&rule["rule"]),
            text(&rule["mode"]),
            number(&rule["requests"]),
            number(&rule["denied"]),
            share(denied.unwrap_or(0), requests.unwrap_or(0)),
            rule["note"].as_str().map_or_else(String::new, printable),
        ]
    };
    let rules: Vec<Vec<String>> = list(&report["rules"]).map(rule).collect();
    let head = ["RULE", "MODE", "REQUESTS", "DENIED", "SHARE", ""];
    out.push_str(&headed(&head, rules));
    let changed = [("newly denied", "newly"), ("no longer denied", "no_longer")];
    let keys: Vec<Vec<String>> = changed
        .iter()
        .flat_map(|(change, name)| {
            list(&report[*name]).map(move |key| {
                let time = |name: &str| key[name].as_u64().map_or_else(String::new, instant);
                vec![
                    (*change).to_owned(),
                    text(&key["rule"]),
                    joined(&key["key"]),
                    number(&key["requests"]),
                    time("first_ms"),
                    time("last_ms"),
                ]
            })
        })
        .collect();
    if !keys.is_empty() {
        out.push('\n');
        let head = ["CHANGE", "RULE", "KEY", "REQUESTS", "FIRST", "LAST"];
        out.push_str(&headed(&head, keys));
    }
    out.extend(hint(report));
    out
}

/// Formats the response of `/v1/candidate/promote`.
pub(crate) fn promoted(promoted: &Value) -> String {
    let mut out = format!(
        "promoted: {} rules of {} are active\n",
        number(&promoted["rules"]),
        text(&promoted["promoted"])
    );
    out.extend(hint(promoted));
    out
}

/// Formats `part` as a percentage of `whole`, rounded down to a tenth of a percent.
fn share(part: u64, whole: u64) -> String {
    let tenths = u128::from(part) * 1_000 / u128::from(whole.max(1));
    format!("{}.{}%", tenths / 10, tenths % 10)
}

/// Formats the rule and the values of a key, or the key of a limit that was sent with a request.
fn key(document: &Value) -> String {
    match (&document["rule"], &document["key"]) {
        (Value::Null, Value::Null) => entry_list(&document["entries"]),
        (rule, Value::Null) => {
            format!(
                "{} in rule {}",
                entry_list(&document["entries"]),
                text(rule)
            )
        }
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

/// Formats `text` as one line, with control characters escaped.
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

/// Formats a time relative to now; 0 is "now".
fn moment(millis: &Value) -> String {
    match millis.as_u64() {
        Some(0) => "now".to_owned(),
        _ => format!("in {}", wait(millis)),
    }
}

/// Formats a duration as in [`wait_ms`]; null is formatted as `-`.
fn wait(millis: &Value) -> String {
    millis.as_u64().map_or_else(|| "-".to_owned(), wait_ms)
}

/// Formats a time in milliseconds since the Unix epoch as a date: `2026-11-22T06:25:14Z`.
pub(crate) fn instant(millis: u64) -> String {
    let seconds = i64::try_from(millis / 1_000).ok();
    let instant = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    instant.map_or_else(|| "-".to_owned(), |instant| instant.to_string())
}

/// Formats a duration with at most two units, rounded up: `2d 3h`, `1min 30s`, `250ms`.
pub(crate) fn wait_ms(millis: u64) -> String {
    const UNITS: [(u64, &str); 4] = [
        (86_400_000, "d"),
        (3_600_000, "h"),
        (60_000, "min"),
        (1_000, "s"),
    ];
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

/// Formats a table with column headings.
pub(crate) fn headed(head: &[&str], rows: Vec<Vec<String>>) -> String {
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
    fn an_inactive_override_is_shown_as_inactive() {
        let mut document = json!({
            "rule": "api", "key": ["acme"], "mode": "enforce", "block": null, "limits": [],
            "override": {"factor": "2x", "until": null, "reason": "", "inactive": "limits: too many"},
        });
        let note = "override: 2x, until removed\n\
                    this override is inactive, so it has no effect: limits: too many\n";
        for printed in [inspected(&document), explained_rule(&document)] {
            assert!(printed.contains(note), "{printed}");
        }
        document["override"]["inactive"].take();
        for printed in [inspected(&document), explained_rule(&document)] {
            assert!(!printed.contains("inactive"), "{printed}");
        }
    }

    #[test]
    fn the_list_of_overrides_says_how_to_remove_an_inactive_one() {
        let list = |inactive: Value| {
            overrides(&json!({"next": null, "overrides": [{
                "rule": "former", "key": ["acme"], "factor": "2x", "reason": "", "until": null,
                "until_ms": null, "left_ms": null, "persistent": true, "inactive": inactive,
            }]}))
        };
        let printed = list(json!("rule no longer exists"));
        assert!(
            printed.contains("former (rule no longer exists)"),
            "{printed}"
        );
        assert!(
            printed.contains("remove it with `tidegate override RULE KEY --remove`"),
            "{printed}"
        );
        let long = "limits: \"10 at once\": the limit 10/min has the algorithm sliding_window_log";
        let printed = list(json!(long));
        let mut lines = printed.lines();
        let row = lines.nth(1).unwrap_or_default();
        assert!(row.starts_with("former (inactive)  acme  2x"), "{printed}");
        let note = format!("note: former acme is inactive: {long}");
        assert_eq!(lines.next(), Some(&*note));
        assert!(!list(Value::Null).contains("inactive"));
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
