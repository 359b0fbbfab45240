//! A lint that warns about conditions that no request can meet, and about entries that no listener
//! provides.
//!
//! Clients that use `/v1/check` or the Redis protocol can send any entries, so the entries of these
//! clients cannot be checked. The proxy and forward-auth, in contrast, derive the standard entries
//! (such as `path`) from each request themselves, always in the same form. If the proxy is the only
//! listener, only the entries that it derives exist.

use std::collections::HashMap;

use tidegate_identity::{bare_host, normalize_path};
use tidegate_net::{
    TlsFiles,
    input::{nearest, shown},
};

use super::misread::{self, NO_MATCH};
use crate::{
    Config, UpstreamConfig,
    conditions::{self, PatternText, RawCondition, RawWhen, TextComparison},
    proxy::RawUpstream,
    report::Report,
    rules::{RawCost, RawRules},
    source_span::{Scalar, SourceSpan},
};

/// The code of the warning about an entry that no listener derives from requests. Users can search
/// for the code.
const NO_ENTRY: &str = "no-entry";

/// The code of the warning about a method that is probably misspelt. Users can search for the code.
const UNKNOWN_METHOD: &str = "unknown-method";

/// The methods of HTTP.
const METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH",
];

/// The entries with fixed names that the proxy derives from every request.
const PROXY_ENTRIES: &[&str] = &["method", "path", "host", "ip", "ip.exact"];

/// The entries with fixed names that forward-auth derives from a request, and the proxy does not.
const FORWARD_AUTH_ENTRIES: &[&str] = &["scheme", "country", "asn"];

/// The prefixes of entries that are derived from a request's headers, cookies or query parameters.
const DERIVED_PREFIXES: &[&str] = &["header.", "cookie.", "query."];

/// The maximum number of warnings about conditions and entries.
const MAX_WARNINGS: usize = 20;

/// Warns about conditions and keys in the rules `raw`, and about conditions in `upstreams`.
/// `config` is the configuration that was read from the same file.
pub(crate) fn warn(
    raw: &RawRules<'_>,
    upstreams: &[RawUpstream<'_>],
    config: &Config,
    report: &mut Report,
) {
    let headroom_entries: Vec<String> = config
        .proxy
        .iter()
        .flat_map(|proxy| &proxy.upstreams)
        .map(UpstreamConfig::headroom_entry)
        .collect();
    let provided = provided(config, &headroom_entries);
    let known = is_proxy_only(config).then_some(&provided);
    let (conditions, counted) = (conditions_of(raw, upstreams), counted_by(raw));
    let misspelt = match known {
        Some(_) => HashMap::new(),
        None => EntryNames::new(&provided, &counted, &conditions).misspelt(),
    };
    let mut warnings = Warnings {
        remaining: MAX_WARNINGS,
        report,
    };
    for condition in &conditions {
        let RawCondition {
            entry,
            span,
            pattern,
        } = condition.condition;
        for PatternText {
            scalar, comparison, ..
        } in pattern.texts()
        {
            let message = text_message(entry, comparison, scalar.text);
            warnings.of_value(&scalar.span, message);
        }
        let meant = misspelt.get(entry).filter(|_| !condition.is_in_elastic);
        let message = meant.map(|meant| misspelt_condition(entry, meant));
        warnings.of_key(span, message);
        warnings.of_key(span, wrong_case(entry));
        // Skip the `headroom.*` entries of upstreams without `adaptive`, because another lint warns
        // about them (`unknown-headroom`).
        let known = known
            .filter(|_| wrong_case(entry).is_none())
            .filter(|_| !headroom_entries.iter().any(|headroom| headroom == entry));
        let message = known.and_then(|known| unknown_entry(entry, known));
        warnings.of_key(span, message);
    }
    for Scalar {
        span, text: entry, ..
    } in counted
    {
        let meant = misspelt.get(entry);
        warnings.of_value(span, meant.map(|meant| misspelt_key(entry, meant)));
        warnings.of_value(span, wrong_case(entry));
        let known = known.filter(|_| wrong_case(entry).is_none());
        warnings.of_value(span, known.and_then(|known| unknown_entry(entry, known)));
    }
}

/// Adds warnings to a report, up to a maximum number.
struct Warnings<'r> {
    remaining: usize,
    report: &'r mut Report,
}

impl Warnings<'_> {
    fn of_value(&mut self, span: &SourceSpan, message: Option<String>) {
        if let Some(message) = message.filter(|_| self.take_one()) {
            span.warn(self.report, message);
        }
    }

    /// Adds a warning about the key of the value at `span`.
    fn of_key(&mut self, span: &SourceSpan, message: Option<String>) {
        if let Some(message) = message.filter(|_| self.take_one()) {
            span.warn_of_key(self.report, message);
        }
    }

    /// Counts one warning. Returns false if the maximum number of warnings had already been
    /// reached.
    fn take_one(&mut self) -> bool {
        let is_below_maximum = self.remaining > 0;
        self.remaining = self.remaining.saturating_sub(1);
        is_below_maximum
    }
}

/// Returns a warning about `text`, a string in a pattern for `entry`, if `text` can never match or
/// is easily misunderstood.
pub(super) fn text_message(entry: &str, comparison: TextComparison, text: &str) -> Option<String> {
    misread::message(entry, comparison, text)
        .or_else(|| unmatchable_text(entry, comparison, text))
        .or_else(|| misspelt_method(entry, comparison, text))
}

/// Returns whether the proxy is the only listener that applies rules, so that no client can send
/// its own entries.
fn is_proxy_only(config: &Config) -> bool {
    let listen = &config.listen;
    let grpc = listen.grpc.filter(|_| config.grpc.authorization);
    let others = [listen.http, listen.resp, listen.spop, grpc];
    config.proxy.is_some() && others.iter().all(Option::is_none)
}

/// Returns the names of the entries that the proxy provides or that this file defines. Entries with
/// a prefix in [`DERIVED_PREFIXES`] are not included.
fn provided<'c>(config: &'c Config, headroom_entries: &'c [String]) -> Vec<&'c str> {
    let derived = config.identity.derived.iter().map(|(name, _)| &**name);
    let geoip_entries = config.geoip.iter().map(|(span, _)| span.as_str());
    let has_names = |tls: &TlsFiles| tls.client_ca.is_some();
    let tls = config.proxy.as_ref().and_then(|proxy| proxy.tls.as_ref());
    let client = tls.is_some_and(has_names).then_some("tls.client");
    let of_proxy = PROXY_ENTRIES.iter().copied();
    let upstreams = config.proxy.iter().flat_map(|proxy| &proxy.upstreams);
    let headroom_entries = upstreams.zip(headroom_entries);
    let headroom_entries = headroom_entries
        .filter_map(|(upstream, entry)| upstream.adaptive.as_ref().map(|_| &**entry));
    of_proxy
        .chain(derived)
        .chain(geoip_entries)
        .chain(client)
        .chain(headroom_entries)
        .collect()
}

/// Returns a warning for an entry whose name differs from a standard entry only in letter case.
/// Forward-auth and the proxy never derive an entry in the wrong letter case. Only a client of the
/// HTTP or RESP listener could send such an entry.
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

/// The prefixes in [`DERIVED_PREFIXES`] and their probable misspellings, in lower case, each with
/// the correct prefix.
const PREFIXES: [(&str, &str); 8] = [
    ("header.", "header."),
    ("cookie.", "cookie."),
    ("query.", "query."),
    ("headers.", "header."),
    ("cookies.", "cookie."),
    ("params.", "query."),
    ("param.", "query."),
    ("header-", "header."),
];

/// Names that other software uses for the standard entries, each with the name of that entry. The
/// names are in lower case, with `_` between words.
const SYNONYMS: [(&str, &str); 17] = [
    ("client_ip", "ip"),
    ("client_addr", "ip"),
    ("client_address", "ip"),
    ("clientip", "ip"),
    ("remote_ip", "ip"),
    ("remote_addr", "ip"),
    ("remote_address", "ip"),
    ("binary_remote_addr", "ip"),
    ("source_ip", "ip"),
    ("src_ip", "ip"),
    ("ip_addr", "ip"),
    ("ip_address", "ip"),
    ("x_real_ip", "ip"),
    ("x_forwarded_for", "ip"),
    ("request_method", "method"),
    ("request_uri", "path"),
    ("http_host", "host"),
];

/// Common headers without the prefix `x-`, in lower case.
const HEADERS: [&str; 5] = [
    "authorization",
    "content-length",
    "content-type",
    "referer",
    "user-agent",
];

/// Returns the entry that the author probably meant by `entry`. Recognises a header name without a
/// prefix (`X-Customer`), a header with an incorrect prefix (`Header.x-customer`), and another
/// program's name for a standard entry (`remote_addr`).
fn named_otherwise(entry: &str) -> Option<String> {
    let lower = entry.to_ascii_lowercase();
    if let Some((wrong, right)) = PREFIXES.iter().find(|(wrong, _)| lower.starts_with(wrong)) {
        // Converting ASCII letters to lower case does not change the length, so the prefix has the
        // length `wrong.len()` in `entry` too.
        let meant = format!("{right}{}", &entry[wrong.len()..]);
        let meant = conditions::entry_name(&meant);
        return (meant != conditions::entry_name(entry)).then(|| meant.into_owned());
    }
    // Remove the `$` with which the names of nginx variables begin.
    let name = lower.trim_start_matches('$').replace('-', "_");
    if let Some((_, meant)) = SYNONYMS.iter().find(|(known, _)| *known == name) {
        return Some((*meant).to_owned());
    }
    let is_capitalized = |word: &str| word.starts_with(|first: char| first.is_ascii_uppercase());
    let is_header = lower
        .strip_prefix("x-")
        .is_some_and(|rest| !rest.is_empty())
        || HEADERS.contains(&&*lower)
        || entry.contains('-') && entry.split('-').all(is_capitalized);
    is_header.then(|| format!("header.{lower}"))
}

/// Words that are similar to a standard entry's name, but are probably not misspellings, because an
/// application may use them as entry names.
const WORDS: [&str; 8] = [
    "chem", "count", "county", "ghost", "hot", "pat", "patch", "schema",
];

/// A file with more distinct names than this number is not checked for similar names.
const MAX_COMPARED: usize = 1_000;

/// All known entry names, for finding misspelt names and the names that their authors meant. These
/// names are needed if a listener accepts any entries from its clients. At such a listener, an
/// unknown name is not necessarily an error.
struct EntryNames<'p, 'c> {
    /// The entries that the proxy provides or this file defines.
    provided: &'p [&'p str],
    /// The names that rules use. Each name has its number of uses, and the position of its first
    /// use among all uses.
    used: HashMap<&'c str, (usize, usize)>,
    /// Maps each name in lower case to the spelling of this name that rules use most often.
    usual_case: HashMap<String, &'c str>,
}

impl<'p, 'c> EntryNames<'p, 'c> {
    fn new(
        provided: &'p [&'p str],
        counted: &[&Scalar<'c>],
        conditions: &[EntryCondition<'_, 'c>],
    ) -> Self {
        let tested = conditions
            .iter()
            .filter(|condition| !condition.is_in_elastic);
        let names = counted
            .iter()
            .map(|scalar| scalar.text)
            .chain(tested.map(|condition| condition.condition.entry));
        let mut used = HashMap::new();
        for name in names {
            let next = used.len();
            used.entry(name).or_insert((0, next)).0 += 1;
        }
        let mut usual_case = HashMap::new();
        for (name, (count, order)) in &used {
            let usual = usual_case.entry(name.to_ascii_lowercase());
            let usual: &mut &str = usual.or_insert(name);
            let (usual_count, usual_order) = used[usual];
            if (*count, usual_order) > (usual_count, *order) {
                *usual = name;
            }
        }
        Self {
            provided,
            used,
            usual_case,
        }
    }

    /// Returns all misspelt names, each with the name that the author probably meant.
    fn misspelt(&self) -> HashMap<&'c str, String> {
        let meant = |name: &&'c str| Some((*name, self.meant_by(name)?));
        self.used.keys().filter_map(meant).collect()
    }

    /// Returns the name that the author of `entry` probably meant: a standard entry, an entry that
    /// this file defines, or a similar name that rules use more often. Returns `None` if `entry` is
    /// probably not misspelt.
    fn meant_by(&self, entry: &str) -> Option<String> {
        if self.provided.contains(&entry) {
            return None;
        }
        if let Some(meant) = named_otherwise(entry) {
            return Some(meant);
        }
        let mut standard = PROXY_ENTRIES.iter().chain(FORWARD_AUTH_ENTRIES).copied();
        let is_derived = DERIVED_PREFIXES
            .iter()
            .any(|prefix| entry.starts_with(prefix));
        if is_derived
            || WORDS.contains(&entry)
            || standard
                .clone()
                .any(|known| known.eq_ignore_ascii_case(entry))
        {
            return None;
        }
        let provided = || {
            let mut provided = self.provided.iter().copied().take(MAX_COMPARED);
            provided
                .find(|known| known.eq_ignore_ascii_case(entry) || is_slip_between(entry, known))
        };
        let usual_case = || {
            let usual = self.usual_case.get(&entry.to_ascii_lowercase()).copied();
            usual.filter(|usual| *usual != entry)
        };
        let meant = standard
            .find(|known| is_slip_of_standard(entry, known))
            .or_else(provided)
            .or_else(usual_case)
            .or_else(|| self.more_used(entry))?;
        Some(meant.to_owned())
    }

    /// Returns a similar name that rules use more often than `entry`. If both names are used
    /// equally often, the name whose first use is earlier in the file counts as the more common
    /// name.
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

/// Returns whether `word` is probably a misspelling of the standard entry `known`. A misspelling
/// has one letter inserted, one letter missing, or one letter swapped with the next letter. In a
/// long name, one letter may also be substituted, or two letters may be missing. In a name of two
/// or three letters, only a letter may be doubled, because many other short names are similar: `id`
/// and `zip` are probably not meant as `ip`.
fn is_slip_of_standard(word: &str, known: &str) -> bool {
    if known.len() < 4 {
        return has_doubled_letter(word, known);
    }
    if word.len() < 3 || word.len().abs_diff(known.len()) > 2 {
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

/// Returns whether `word` is `known` with one letter twice in a row.
fn has_doubled_letter(word: &str, known: &str) -> bool {
    let (word, known) = (word.as_bytes(), known.as_bytes());
    let is_doubled = |at: usize| {
        word[at] == word[at + 1] && word[..at] == known[..at] && word[at + 1..] == known[at..]
    };
    word.len() == known.len() + 1 && (0..known.len()).any(is_doubled)
}

/// Returns whether two names chosen by an application probably differ only by a typo. Returns false
/// for short names, and for a singular and its plural, because these are probably different
/// entries.
fn is_slip_between(word: &str, other: &str) -> bool {
    let is_plural = |one: &str, other: &str| one.strip_suffix('s') == Some(other);
    word.len().min(other.len()) >= 4
        && !is_plural(word, other)
        && !is_plural(other, word)
        && is_slip(word, other)
}

/// Returns whether `word` is `known` with one letter inserted, one letter missing, or two
/// neighbouring letters swapped. Returns false if one letter is substituted, because the author may
/// have intended both names, for example `key_a` and `key_b`. The running time is linear in the
/// length of the names.
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

/// Returns a warning if `entry` is not in `known` and is not derived from a header, a cookie or a
/// query parameter.
fn unknown_entry(entry: &str, known: &[&str]) -> Option<String> {
    let is_known = known.contains(&entry)
        || DERIVED_PREFIXES
            .iter()
            .any(|found| entry.starts_with(found));
    if is_known {
        return None;
    }
    let in_other_case = || {
        let known = known
            .iter()
            .find(|known| known.eq_ignore_ascii_case(entry))?;
        Some((*known).to_owned())
    };
    let meant = named_otherwise(entry)
        .or_else(in_other_case)
        .or_else(|| nearest(entry, known).map(str::to_owned));
    let advice = match meant {
        Some(meant) => format!("did you mean `{}`?", shown(&meant)),
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

/// Returns a warning if `text` is compared literally, but the value of `entry` can never equal it.
fn unmatchable_text(entry: &str, comparison: TextComparison, text: &str) -> Option<String> {
    if comparison == TextComparison::Regex {
        return None;
    }
    if looks_like_expression(entry, text) {
        let text = shown(text);
        return Some(format!(
            "{NO_MATCH}: this string is compared literally; if it is a regular expression, write {{regex: \"{text}\"}}"
        ));
    }
    let (form, usual) = match entry {
        "path" => usual_path(text)?,
        "method" if text.bytes().any(|byte| byte.is_ascii_lowercase()) => {
            let upper = text.to_ascii_uppercase();
            let usual = misspelt_as(&upper).map_or(upper, str::to_owned);
            ("methods are uppercase", usual)
        }
        "host" => usual_host(text),
        "country" if text.len() == 2 => ("country codes are uppercase", text.to_ascii_uppercase()),
        "ip" | "ip.exact" if text.contains('/') => {
            let network = format!("{{cidr: {text}}}");
            ("an address never equals a network", network)
        }
        _ => return None,
    };
    let message = || {
        format!(
            "{NO_MATCH}: at the proxy and in forward-auth, {form}; write {}",
            shown(&usual)
        )
    };
    (usual != text).then(message)
}

/// Returns a warning if `text` is probably a misspelling of a standard method. A service can have
/// methods of its own, so only a similar name is reported.
fn misspelt_method(entry: &str, comparison: TextComparison, text: &str) -> Option<String> {
    let is_literal = entry == "method" && comparison != TextComparison::Regex;
    let meant = misspelt_as(text).filter(|_| is_literal)?;
    let text = shown(text);
    Some(format!(
        "{UNKNOWN_METHOD}: {text} is not a standard method; did you mean `{meant}`?"
    ))
}

/// Returns the standard method of which `method`, in uppercase, is probably a misspelling. A
/// misspelling has one letter inserted or missing, or two neighbouring letters swapped. In a method
/// of four letters or more, one letter except the first may also be substituted, and in a method of
/// six letters or more, two letters may be missing. With more tolerance, methods of services would
/// be reported: `LIST` and `POST` differ in two letters, `READ` and `HEAD` in one.
fn misspelt_as(method: &str) -> Option<&'static str> {
    const MAX_BYTES: usize = 16;
    /// Methods of well-known software that are similar to a standard method.
    const OTHERS: [&str; 2] = ["TRACK", "BDELETE"];
    let is_glob = method.contains('*');
    if is_glob || method.len() > MAX_BYTES || METHODS.contains(&method) || OTHERS.contains(&method)
    {
        return None;
    }
    let is_misspelling = |known: &&&str| {
        is_slip(method, known)
            || match strsim::damerau_levenshtein(method, known) {
                1 => known.len() > 3 && method.as_bytes().first() == known.as_bytes().first(),
                2 => known.len() >= 6 && known.len() == method.len() + 2,
                _ => false,
            }
    };
    METHODS.iter().find(is_misspelling).copied()
}

/// Returns a description of the form that a host must have, and `text` converted to this form.
fn usual_host(text: &str) -> (&'static str, String) {
    let authority = misread::split_url(text).map_or(text, |(authority, _)| authority);
    let authority = authority.strip_prefix("//").unwrap_or(authority);
    let authority = authority.split(['/', '?', '#']).next().unwrap_or_default();
    // In a URL, a user name and a password may precede the host. Remove them.
    let host = authority.rsplit('@').next().unwrap_or_default();
    if host == text {
        return ("hosts are lowercase and have no port", bare_host(text));
    }
    let form = "a host has no scheme, no path and no user name";
    match bare_host(host) {
        name if name.is_empty() => (form, "only the name, such as example.com".to_owned()),
        name => (form, name),
    }
}

/// Returns whether `text` is probably a regular expression. A text that starts with `^`, or a path
/// that contains one of `signs`, is treated as a regular expression.
fn looks_like_expression(entry: &str, text: &str) -> bool {
    let signs = ["(?", "\\d", "\\w", "\\.", "]+", "]*", "[0-9]", "[^"];
    let is_path =
        entry == "path" && (text.ends_with('$') || signs.iter().any(|s| text.contains(s)));
    text.starts_with('^') || is_path
}

/// Returns a description of the form that a path must have, and `text` converted to this form.
/// Returns `None` if `text` starts with a wildcard, because such a path cannot be converted.
fn usual_path(text: &str) -> Option<(&'static str, String)> {
    if text.starts_with('*') {
        return None;
    }
    let normal = normalize_path(text).map(|normal| normal.into_owned());
    let form = "paths begin with a slash and are normalised";
    Some(match normal {
        Ok(normal) => (form, normal),
        Err(_) => (
            "paths with the segments `.` and `..` are rejected",
            "the intended path".into(),
        ),
    })
}

/// A condition on a request entry.
struct EntryCondition<'r, 'n> {
    condition: &'r RawCondition<'n>,
    /// Whether the condition is part of `elastic.when`. The entries in `elastic.when` are usually
    /// signals that an application sends.
    is_in_elastic: bool,
}

/// Returns all conditions on requests in the file. The conditions in `elastic.when` come last.
fn conditions_of<'r, 'n>(
    raw: &'r RawRules<'n>,
    upstreams: &'r [RawUpstream<'n>],
) -> Vec<EntryCondition<'r, 'n>> {
    let of_rules = raw
        .rules
        .iter()
        .flat_map(|rule| std::iter::once(&rule.when).chain(&rule.allow));
    let of_upstreams = upstreams
        .iter()
        .flat_map(|upstream| std::iter::once(&upstream.when).chain(&upstream.classes));
    let of_requests = raw.allow.iter().chain(of_rules).chain(of_upstreams);
    let of_elastic = raw.rules.iter().map(|rule| &rule.elastic.when);
    let conditions = |when: &'r RawWhen<'n>, is_in_elastic| {
        let conditions = when.conditions.iter();
        conditions.map(move |condition| EntryCondition {
            condition,
            is_in_elastic,
        })
    };
    of_requests
        .flat_map(|when| conditions(when, false))
        .chain(of_elastic.flat_map(|when| conditions(when, true)))
        .collect()
}

/// Returns the names of the entries that rules use in their keys or as their costs.
fn counted_by<'r, 'n>(raw: &'r RawRules<'n>) -> Vec<&'r Scalar<'n>> {
    let mut names = Vec::new();
    for rule in &raw.rules {
        names.extend(rule.key.iter().flat_map(|(_, entries)| entries));
        match &rule.cost {
            RawCost::Entry(entry) => names.push(entry),
            RawCost::Fixed => {}
        }
    }
    names
}
