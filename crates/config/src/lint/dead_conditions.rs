//! Warns about conditions that no request can meet and entries that no listener provides.
//!
//! Callers of `/v1/check` and of the Redis protocol may send any entries, so their entries cannot
//! be checked. The proxy and forward-auth derive the standard entries themselves, always in one
//! form. If the proxy is the only listener, no other entries exist.

use tidegate_identity::{bare_host, normalize_path};
use tidegate_net::{
    TlsFiles,
    input::{nearest, shown},
};

use super::misread;
use crate::{
    Config, Upstream,
    conditions::{self, Comparison, PatternText},
    report::Report,
    value::{Fields, Value},
};

/// The codes of the warnings, for log searches.
pub(super) const NO_MATCH: &str = "no-match";
const NO_ENTRY: &str = "no-entry";

/// The entries that the proxy derives from every request.
const PROXY_ENTRIES: &[&str] = &["method", "path", "host", "ip", "ip.exact"];

/// More entries with a fixed name, which only forward-auth derives.
const FORWARD_AUTH_ENTRIES: &[&str] = &["scheme", "country", "asn"];

/// Prefixes of the entries that are read from the parts of a request.
const DERIVED_PREFIXES: &[&str] = &["header.", "cookie.", "query."];

/// The maximum number of these warnings.
const MAX_WARNINGS: usize = 20;

/// Warns about the conditions and keys in `file`, which was parsed into `config`.
pub(crate) fn warn(file: &Fields<'_>, config: &Config, report: &mut Report) {
    let rooms: Vec<String> = config
        .proxy
        .iter()
        .flat_map(|proxy| &proxy.upstreams)
        .map(Upstream::room_entry)
        .collect();
    let known = known(config, &rooms);
    let mut room = MAX_WARNINGS;
    let mut say = |value: &Value<'_>, message: Option<String>| {
        if let Some(message) = message
            && room > 0
        {
            room -= 1;
            value.warn(report, message);
        }
    };
    for (entry, pattern) in held(file) {
        for PatternText {
            value, comparison, ..
        } in conditions::texts(&pattern)
        {
            let message = value.scalar().and_then(|text| {
                misread::message(entry, comparison, text)
                    .or_else(|| unmatchable_text(entry, comparison, text))
            });
            say(&value, message);
        }
        say(&pattern, misspelt(entry));
        // A `room.*` entry of an upstream without `adaptive` has a separate warning
        // (`untold-room`).
        let known = known
            .as_ref()
            .filter(|_| misspelt(entry).is_none())
            .filter(|_| !rooms.iter().any(|room| room == entry));
        let message = known.and_then(|known| unknown_entry(entry, known));
        say(&pattern, message);
    }
    let counted = counted_by(file);
    let names: Vec<&str> = counted.iter().filter_map(Value::scalar).collect();
    for value in counted {
        if known.is_none() {
            let message = value.scalar().and_then(|entry| unlikely(entry, &names));
            say(&value, message);
        }
        say(&value, value.scalar().and_then(misspelt));
        let message = value
            .scalar()
            .filter(|entry| misspelt(entry).is_none())
            .and_then(|entry| unknown_entry(entry, known.as_ref()?));
        say(&value, message);
    }
}

/// Returns the names of all entries that can exist, except those with [`DERIVED_PREFIXES`]. Returns
/// `None` if the HTTP or the RESP listener is on, because its callers choose the entries.
fn known<'c>(config: &'c Config, rooms: &'c [String]) -> Option<Vec<&'c str>> {
    let proxy = config.proxy.as_ref()?;
    if config.listen.http.is_some() || config.listen.resp.is_some() {
        return None;
    }
    let derived = config.identity.derived.iter().map(|(name, _)| &**name);
    let places = config.geoip.iter().map(|(place, _)| place.as_str());
    let has_names = |tls: &TlsFiles| tls.client_ca.is_some();
    let client = proxy.tls.as_ref().is_some_and(has_names);
    let client = client.then_some("tls.client");
    let of_proxy = PROXY_ENTRIES.iter().copied();
    let rooms = proxy.upstreams.iter().zip(rooms);
    let rooms = rooms.filter_map(|(upstream, room)| upstream.adaptive.as_ref().map(|_| &**room));
    let known = of_proxy
        .chain(derived)
        .chain(places)
        .chain(client)
        .chain(rooms);
    Some(known.collect())
}

/// Returns a warning for an entry that differs from a standard one only in case. A service might
/// send it, but forward-auth and the proxy never do.
fn misspelt(entry: &str) -> Option<String> {
    let mut usual = PROXY_ENTRIES.iter().chain(FORWARD_AUTH_ENTRIES);
    let meant = usual.find(|usual| usual.eq_ignore_ascii_case(entry))?;
    (*meant != entry).then(|| {
        let entry = shown(entry);
        format!(
            "{NO_ENTRY}: entry names are case-sensitive, and no listener provides an entry \"{entry}\"; write `{meant}`"
        )
    })
}

/// Probable misspellings of the prefixes in [`DERIVED_PREFIXES`].
const NEARLY_FOUND: [(&str, &str); 6] = [
    ("headers.", "header."),
    ("cookies.", "cookie."),
    ("params.", "query."),
    ("param.", "query."),
    ("header-", "header."),
    ("header_", "header."),
];

/// Returns a warning for a key entry of a rule that is probably misspelt, for listeners whose
/// callers choose the entries. The name is similar to that of a standard entry, or of an entry that
/// more rules use. `names` are the entries of all rules.
fn unlikely(entry: &str, names: &[&str]) -> Option<String> {
    let prefixed = NEARLY_FOUND.iter().find_map(|(wrong, right)| {
        entry
            .strip_prefix(wrong)
            .map(|rest| format!("{right}{rest}"))
    });
    let is_usual = PROXY_ENTRIES.contains(&entry) || FORWARD_AUTH_ENTRIES.contains(&entry);
    let count = |name: &str| names.iter().filter(|known| **known == name).count();
    let first = |name: &str| names.iter().position(|known| *known == name);
    let is_rarer = |name: &&str| {
        let (own, other) = (count(entry), count(name));
        own < other || (own == other && first(entry) > first(name))
    };
    let near = |known: &&str| is_slip(entry, known);
    let mut usual = PROXY_ENTRIES.iter().chain(FORWARD_AUTH_ENTRIES).copied();
    let of_rules = || names.iter().copied().filter(is_rarer).find(near);
    let meant = match prefixed {
        Some(meant) => meant,
        None if is_usual => return None,
        None => usual.find(near).or_else(of_rules)?.to_owned(),
    };
    let (entry, meant) = (shown(entry), shown(&meant));
    Some(format!(
        "{NO_ENTRY}: no listener derives an entry \"{entry}\" from requests, so this rule applies only if a \
         caller sends it; did you mean `{meant}`?"
    ))
}

/// Returns whether `word` is `known` with one letter inserted, one letter missing, or two letters
/// swapped. A substituted letter does not count, because it may be intended, as in `key_a` and
/// `key_b`.
fn is_slip(word: &str, known: &str) -> bool {
    let is_long = word.len().min(known.len()) >= 4;
    let is_exchange = word.len() == known.len() && {
        let sorted = |text: &str| {
            let mut bytes = text.as_bytes().to_vec();
            bytes.sort_unstable();
            bytes
        };
        sorted(word) == sorted(known)
    };
    let near = strsim::damerau_levenshtein(word, known) == 1;
    is_long && near && (word.len() != known.len() || is_exchange)
}

/// Returns a warning for an entry that is not in `known`.
fn unknown_entry(entry: &str, known: &[&str]) -> Option<String> {
    let is_known = known.contains(&entry)
        || DERIVED_PREFIXES
            .iter()
            .any(|found| entry.starts_with(found));
    if is_known {
        return None;
    }
    let advice = match nearest(entry, known) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => format!(
            "expected one of {}, header.NAME, cookie.NAME, query.NAME",
            known.join(", ")
        ),
    };
    let entry = shown(entry);
    Some(format!(
        "{NO_ENTRY}: no request at the proxy has an entry \"{entry}\"; {advice}"
    ))
}

/// Returns a warning for a literal `text` that `entry` can never equal.
fn unmatchable_text(entry: &str, comparison: Comparison, text: &str) -> Option<String> {
    if comparison == Comparison::Regex {
        return None;
    }
    if looks_like_expression(entry, text) {
        let text = shown(text);
        return Some(format!(
            "{NO_MATCH}: this text is compared literally; if it is a regular expression, write {{regex: \"{text}\"}}"
        ));
    }
    let (form, usual) = match entry {
        "path" => usual_path(text)?,
        "method" => ("methods are uppercase", text.to_ascii_uppercase()),
        "host" => ("hosts are lowercase and have no port", bare_host(text)),
        "country" if text.len() == 2 => ("country codes are uppercase", text.to_ascii_uppercase()),
        "ip" | "ip.exact" if text.contains('/') => {
            let network = format!("{{cidr: {text}}}");
            ("networks are matched with `cidr`", network)
        }
        _ => return None,
    };
    let message = || {
        format!(
            "{NO_MATCH}: {form}; write {} for requests of the proxy and of forward-auth",
            shown(&usual)
        )
    };
    (usual != text).then(message)
}

/// Returns whether `text` is probably a regular expression. No entry of a request begins with `^`,
/// and paths do not contain these signs.
fn looks_like_expression(entry: &str, text: &str) -> bool {
    let signs = ["(?", "\\d", "\\w", "\\.", "]+", "]*", "[0-9]", "[^"];
    let is_path =
        entry == "path" && (text.ends_with('$') || signs.iter().any(|s| text.contains(s)));
    text.starts_with('^') || is_path
}

/// Returns how a path must be written, and `text` in that form. Returns `None` if `text` begins
/// with a wildcard, which cannot be normalized.
fn usual_path(text: &str) -> Option<(&'static str, String)> {
    if text.starts_with('*') {
        return None;
    }
    let normal = normalize_path(text).map(|normal| normal.into_owned());
    let form = "paths begin with a slash and are normalized";
    Some(match normal {
        Ok(normal) => (form, normal),
        Err(_) => (
            "paths with the segments `.` and `..` are rejected",
            "the intended path".into(),
        ),
    })
}

/// Returns every condition on a request in `file`: the entry and its pattern.
fn held<'v>(file: &Fields<'v>) -> Vec<(&'v str, Value<'v>)> {
    let quiet = &mut Report::default();
    let mut whens: Vec<Value<'_>> = file
        .get("allow")
        .map_or_else(Vec::new, |allow| allow.one_or_more(quiet));
    for rule in rules(file) {
        let Some(fields) = rule.fields_among(&["when", "allow", "elastic"]) else {
            continue;
        };
        whens.extend(fields.get("when").cloned());
        whens.extend(
            fields
                .get("allow")
                .map_or_else(Vec::new, |allow| allow.one_or_more(quiet)),
        );
        let elastic = fields
            .get("elastic")
            .and_then(|elastic| elastic.fields_among(&["when"]));
        whens.extend(elastic.and_then(|elastic| elastic.get("when").cloned()));
    }
    let upstreams = file
        .get("proxy")
        .and_then(|proxy| proxy.fields_among(&["upstreams"]));
    let upstreams = upstreams.and_then(|proxy| proxy.get("upstreams")?.items(quiet, ""));
    for upstream in upstreams.unwrap_or_default() {
        let Some(fields) = upstream.fields_among(&["when", "adaptive"]) else {
            continue;
        };
        whens.extend(fields.get("when").cloned());
        whens.extend(classes(&fields));
    }
    let pairs = whens.iter().filter_map(|when| when.pairs(quiet, ""));
    let pairs = pairs.flatten();
    pairs
        .filter(|(entry, value)| !conditions::is_schedule(entry, value))
        .collect()
}

/// Returns the conditions of the priority classes of an upstream.
fn classes<'v>(upstream: &Fields<'v>) -> Vec<Value<'v>> {
    let adaptive = upstream.get("adaptive");
    let adaptive = adaptive.and_then(|adaptive| adaptive.fields_among(&["classes"]));
    let classes = adaptive.and_then(|adaptive| {
        let classes = adaptive.get("classes")?;
        classes.items(&mut Report::default(), "")
    });
    let when = |class: &Value<'v>| class.fields_among(&["when"])?.get("when").cloned();
    classes.iter().flatten().filter_map(when).collect()
}

/// Returns the names of the entries that rules are keyed by or take their cost from.
fn counted_by<'v>(file: &Fields<'v>) -> Vec<Value<'v>> {
    let quiet = &mut Report::default();
    let mut names = Vec::new();
    for rule in rules(file) {
        let Some(fields) = rule.fields_among(&["key", "cost"]) else {
            continue;
        };
        names.extend(
            fields
                .get("key")
                .map_or_else(Vec::new, |key| key.one_or_more(quiet)),
        );
        let cost = fields.get("cost").filter(|cost| !cost.looks_like_number());
        names.extend(cost.cloned());
    }
    names
}

fn rules<'v>(file: &Fields<'v>) -> Vec<Value<'v>> {
    let rules = file.get("rules");
    let rules = rules.and_then(|rules| rules.items(&mut Report::default(), ""));
    rules.unwrap_or_default()
}
