//! Warns about conditions that no request can meet and entries that no listener provides.
//!
//! Callers of `/v1/check` and of the Redis protocol may send any entries, so their entries cannot
//! be checked. The proxy and forward-auth derive the standard entries themselves, always in one
//! form. If the proxy is the only listener, no other entries exist.

use std::collections::HashMap;

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
    let provided = provided(config, &rooms);
    let known = is_closed(config).then_some(&provided);
    let (conditions, counted) = (conditions_of(file), counted_by(file));
    let misspelt = match known {
        Some(_) => HashMap::new(),
        None => EntryNames::new(&provided, &counted, &conditions).misspelt(),
    };
    let mut warnings = Warnings {
        room: MAX_WARNINGS,
        report,
    };
    for condition in &conditions {
        let (entry, pattern) = (condition.entry, &condition.pattern);
        for PatternText {
            value, comparison, ..
        } in conditions::texts(pattern)
        {
            let text = value.scalar();
            let message = text.and_then(|text| text_message(entry, comparison, text));
            warnings.of_value(&value, message);
        }
        let meant = misspelt.get(entry).filter(|_| !condition.is_signal);
        let message = meant.map(|meant| misspelt_condition(entry, meant));
        warnings.of_key(pattern, message);
        warnings.of_key(pattern, wrong_case(entry));
        // A `room.*` entry of an upstream without `adaptive` has a separate warning
        // (`untold-room`).
        let known = known
            .filter(|_| wrong_case(entry).is_none())
            .filter(|_| !rooms.iter().any(|room| room == entry));
        let message = known.and_then(|known| unknown_entry(entry, known));
        warnings.of_key(pattern, message);
    }
    for value in &counted {
        let Some(entry) = value.scalar() else {
            continue;
        };
        let meant = misspelt.get(entry);
        warnings.of_value(value, meant.map(|meant| misspelt_key(entry, meant)));
        warnings.of_value(value, wrong_case(entry));
        let known = known.filter(|_| wrong_case(entry).is_none());
        warnings.of_value(value, known.and_then(|known| unknown_entry(entry, known)));
    }
}

/// Adds warnings to the report, up to a maximum.
struct Warnings<'r> {
    room: usize,
    report: &'r mut Report,
}

impl Warnings<'_> {
    fn of_value(&mut self, value: &Value<'_>, message: Option<String>) {
        if let Some(message) = message.filter(|_| self.has_room()) {
            value.warn(self.report, message);
        }
    }

    /// Adds a warning about the key of `value`.
    fn of_key(&mut self, value: &Value<'_>, message: Option<String>) {
        if let Some(message) = message.filter(|_| self.has_room()) {
            value.warn_of_key(self.report, message);
        }
    }

    /// Takes the room of one warning. Returns whether there was any.
    fn has_room(&mut self) -> bool {
        let has_room = self.room > 0;
        self.room = self.room.saturating_sub(1);
        has_room
    }
}

/// Returns a warning for a `text` that `entry` is compared with, if it can never match or does not
/// mean what it seems to.
pub(super) fn text_message(entry: &str, comparison: Comparison, text: &str) -> Option<String> {
    misread::message(entry, comparison, text).or_else(|| unmatchable_text(entry, comparison, text))
}

/// Returns whether the proxy is the only listener. The callers of the HTTP and RESP listeners
/// choose the entries.
fn is_closed(config: &Config) -> bool {
    config.proxy.is_some() && config.listen.http.is_none() && config.listen.resp.is_none()
}

/// Returns the names of the entries that the proxy and this file provide, except those with
/// [`DERIVED_PREFIXES`].
fn provided<'c>(config: &'c Config, rooms: &'c [String]) -> Vec<&'c str> {
    let derived = config.identity.derived.iter().map(|(name, _)| &**name);
    let places = config.geoip.iter().map(|(place, _)| place.as_str());
    let has_names = |tls: &TlsFiles| tls.client_ca.is_some();
    let tls = config.proxy.as_ref().and_then(|proxy| proxy.tls.as_ref());
    let client = tls.is_some_and(has_names).then_some("tls.client");
    let of_proxy = PROXY_ENTRIES.iter().copied();
    let upstreams = config.proxy.iter().flat_map(|proxy| &proxy.upstreams);
    let rooms = upstreams.zip(rooms);
    let rooms = rooms.filter_map(|(upstream, room)| upstream.adaptive.as_ref().map(|_| &**room));
    of_proxy
        .chain(derived)
        .chain(places)
        .chain(client)
        .chain(rooms)
        .collect()
}

/// Returns a warning for an entry that differs from a standard one only in case. A service might
/// send it, but forward-auth and the proxy never do.
fn wrong_case(entry: &str) -> Option<String> {
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
const NEARLY_FOUND: [(&str, &str); 5] = [
    ("headers.", "header."),
    ("cookies.", "cookie."),
    ("params.", "query."),
    ("param.", "query."),
    ("header-", "header."),
];

/// Words that are similar to a standard entry, but that an application may well use as the name of
/// an entry of its own.
const WORDS: [&str; 8] = [
    "chem", "count", "county", "ghost", "hot", "pat", "patch", "schema",
];

/// The maximum number of different names in a file that are compared with each other.
const MAX_COMPARED: usize = 1_000;

/// The names of entries, to find out which one a misspelt name means. Used if the callers of a
/// listener choose the entries, so that any name may be right.
struct EntryNames<'p, 'c> {
    /// The entries that the proxy and this file provide.
    provided: &'p [&'p str],
    /// The names that rules use: how often, and their order in the file.
    used: HashMap<&'c str, (usize, usize)>,
}

impl<'p, 'c> EntryNames<'p, 'c> {
    fn new(
        provided: &'p [&'p str],
        counted: &[Value<'c>],
        conditions: &[EntryCondition<'c>],
    ) -> Self {
        let tested = conditions.iter().filter(|condition| !condition.is_signal);
        let names = counted
            .iter()
            .filter_map(Value::scalar)
            .chain(tested.map(|condition| condition.entry));
        let mut used = HashMap::new();
        for name in names {
            let next = used.len();
            used.entry(name).or_insert((0, next)).0 += 1;
        }
        Self { provided, used }
    }

    /// Returns the misspelt names, and what each of them probably means.
    fn misspelt(&self) -> HashMap<&'c str, String> {
        let meant = |name: &&'c str| Some((*name, self.meant_by(name)?));
        self.used.keys().filter_map(meant).collect()
    }

    /// Returns the name that the misspelt `entry` probably means: a standard entry, an entry of
    /// this file, or an entry that more rules use. Returns `None` if `entry` is not misspelt.
    fn meant_by(&self, entry: &str) -> Option<String> {
        for (wrong, right) in NEARLY_FOUND {
            if let Some(rest) = entry.strip_prefix(wrong) {
                return Some(format!("{right}{rest}"));
            }
        }
        let mut standard = PROXY_ENTRIES.iter().chain(FORWARD_AUTH_ENTRIES).copied();
        let is_derived = DERIVED_PREFIXES
            .iter()
            .any(|prefix| entry.starts_with(prefix));
        if is_derived
            || WORDS.contains(&entry)
            || self.provided.contains(&entry)
            || standard
                .clone()
                .any(|known| known.eq_ignore_ascii_case(entry))
        {
            return None;
        }
        let provided = || {
            let mut provided = self.provided.iter().copied().take(MAX_COMPARED);
            provided.find(|known| is_slip_between(entry, known))
        };
        let meant = standard
            .find(|known| is_slip_of_standard(entry, known))
            .or_else(provided)
            .or_else(|| self.more_used(entry))?;
        Some(meant.to_owned())
    }

    /// Returns a name similar to `entry` that more rules use, or as many, beginning earlier.
    fn more_used(&self, entry: &str) -> Option<&'c str> {
        if self.used.len() > MAX_COMPARED {
            return None;
        }
        let (count, order) = *self.used.get(entry)?;
        let is_rarer = |(other, first): (usize, usize)| (other, order) > (count, first);
        let similar = self
            .used
            .iter()
            .filter(|(name, of_name)| is_rarer(**of_name) && is_slip_between(entry, name));
        let first = similar.min_by_key(|(_, (_, order))| *order);
        first.map(|(name, _)| *name)
    }
}

fn misspelt_condition(entry: &str, meant: &str) -> String {
    let (entry, meant) = (shown(entry), shown(meant));
    format!(
        "{NO_ENTRY}: no listener derives an entry \"{entry}\" from requests, so a request has it only if a caller \
         sends it; did you mean `{meant}`?"
    )
}

fn misspelt_key(entry: &str, meant: &str) -> String {
    let (entry, meant) = (shown(entry), shown(meant));
    format!(
        "{NO_ENTRY}: no listener derives an entry \"{entry}\" from requests, so this rule applies only if a \
         caller sends it; did you mean `{meant}`?"
    )
}

/// Returns whether `word` is the standard entry `known` with one letter inserted, missing or
/// swapped with the next one. In a long name, one other letter or two missing letters count too.
fn is_slip_of_standard(word: &str, known: &str) -> bool {
    if word.len() < 3 || known.len() < 4 || word.len().abs_diff(known.len()) > 2 {
        return false;
    }
    let is_long = known.len() >= 6;
    is_slip(word, known)
        || is_long
            && match strsim::damerau_levenshtein(word, known) {
                1 => true,
                2 => known.len() == word.len() + 2,
                _ => false,
            }
}

/// Returns whether two names of an application differ by a slip. A short name, and the plural of
/// the other one, may well be another entry.
fn is_slip_between(word: &str, other: &str) -> bool {
    let is_plural = |one: &str, other: &str| one.strip_suffix('s') == Some(other);
    word.len().min(other.len()) >= 4
        && !is_plural(word, other)
        && !is_plural(other, word)
        && is_slip(word, other)
}

/// Returns whether `word` is `known` with one letter inserted, one letter missing, or two
/// neighbouring letters swapped. A substituted letter does not count, because it may be intended,
/// as in `key_a` and `key_b`. Takes time in proportion to the length.
fn is_slip(word: &str, known: &str) -> bool {
    let (word, known) = (word.as_bytes(), known.as_bytes());
    let (short, long) = if word.len() <= known.len() {
        (word, known)
    } else {
        (known, word)
    };
    if long.len() - short.len() > 1 {
        return false;
    }
    let pairs = short.iter().zip(long);
    let same = pairs.take_while(|(one, other)| one == other).count();
    let (short, long) = (&short[same..], &long[same..]);
    match (short, long) {
        ([], []) => false,
        _ if short.len() < long.len() => short == &long[1..],
        ([a, b, rest @ ..], [c, d, other_rest @ ..]) => a == d && b == c && rest == other_rest,
        _ => false,
    }
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
        "host" => usual_host(text),
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

/// Returns how a host must be written, and `text` in that form.
fn usual_host(text: &str) -> (&'static str, String) {
    let authority = misread::split_url(text).map_or(text, |(authority, _)| authority);
    let authority = authority.strip_prefix("//").unwrap_or(authority);
    let authority = authority.split(['/', '?', '#']).next().unwrap_or_default();
    // The host comes after the name and the password of a user.
    let host = authority.rsplit('@').next().unwrap_or_default();
    if host == text {
        return ("hosts are lowercase and have no port", bare_host(text));
    }
    let form = "a host has no scheme, no path and no user name";
    match bare_host(host) {
        name if name.is_empty() => (form, "only the name, such as example.com,".to_owned()),
        name => (form, name),
    }
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

/// A condition on one entry.
struct EntryCondition<'v> {
    entry: &'v str,
    pattern: Value<'v>,
    /// Whether it is part of `elastic.when`, whose entries are usually signals of an application.
    is_signal: bool,
}

/// Returns every condition on a request in `file`.
fn conditions_of<'v>(file: &Fields<'v>) -> Vec<EntryCondition<'v>> {
    let quiet = &mut Report::default();
    let mut signals: Vec<Value<'_>> = Vec::new();
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
        signals.extend(elastic.and_then(|elastic| elastic.get("when").cloned()));
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
    let conditions = |whens: Vec<Value<'v>>, is_signal: bool| {
        let pairs = whens
            .into_iter()
            .filter_map(|when| when.pairs(&mut Report::default(), ""));
        let pairs = pairs.flatten();
        pairs
            .filter(|(entry, value)| !conditions::is_schedule(entry, value))
            .map(move |(entry, pattern)| EntryCondition {
                entry,
                pattern,
                is_signal,
            })
    };
    conditions(whens, false)
        .chain(conditions(signals, true))
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
