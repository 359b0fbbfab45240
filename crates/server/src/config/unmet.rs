//! Warnings of conditions that no request meets, and of entries that nobody tells.
//!
//! What `/v1/check` and the Redis protocol are told is the asker's affair. The proxy and forward-auth find the usual entries out for
//! themselves, always in one form; where the proxy is the only door, there are no others either.

use tidegate_http::{bare_host, normal_path};

use super::{
    Config, TlsFiles, Upstream, conditions,
    report::{Report, nearest, shown},
    value::{Fields, Value},
};

/// The names of the warnings, for those who look for them in a log.
const NO_MATCH: &str = "no-match";
const NO_ENTRY: &str = "no-entry";

/// What the proxy tells of every request.
const TOLD: &[&str] = &["method", "path", "host", "ip", "ip.exact"];

/// The entries with a fixed name that forward-auth has besides.
const USUAL: &[&str] = &["scheme", "country", "asn"];

/// What it finds in a request, by what the names begin with.
const FOUND: &[&str] = &["header.", "cookie.", "query."];

/// The most warnings of this kind.
const MAX_WARNINGS: usize = 20;

/// Warns of what stands in `file`, which has been read as `config`.
pub(super) fn warn(file: &Fields<'_>, config: &Config, report: &mut Report) {
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
        for text in conditions::texts(&pattern) {
            let message = text.scalar().and_then(|text| unusual(entry, text));
            say(&text, message);
        }
        say(&pattern, misspelt(entry));
        // Of signs of room that nobody gives another warning speaks.
        let known = known
            .as_ref()
            .filter(|_| misspelt(entry).is_none())
            .filter(|_| !rooms.iter().any(|room| room == entry));
        let message = known.and_then(|known| untold(entry, known));
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
            .and_then(|entry| untold(entry, known.as_ref()?));
        say(&value, message);
    }
}

/// The names of all entries that there can be, besides those of [`FOUND`]; `None` where whoever asks tells what he likes.
fn known<'c>(config: &'c Config, rooms: &'c [String]) -> Option<Vec<&'c str>> {
    let proxy = config.proxy.as_ref()?;
    if config.listen.http.is_some() || config.listen.resp.is_some() {
        return None;
    }
    let parts = config.identity.parts.iter().map(|(name, _)| &**name);
    let places = config.geoip.iter().map(|(place, _)| place.as_str());
    let has_names = |tls: &TlsFiles| tls.client_ca.is_some();
    let client = proxy.tls.as_ref().is_some_and(has_names);
    let client = client.then_some("tls.client");
    let told = TOLD.iter().copied();
    let rooms = proxy.upstreams.iter().zip(rooms);
    let rooms = rooms.filter_map(|(upstream, room)| upstream.adaptive.as_ref().map(|_| &**room));
    let known = told.chain(parts).chain(places).chain(client).chain(rooms);
    Some(known.collect())
}

/// What to say of an entry that differs from a usual one by its capitals alone. A service might send it so, but then forward-auth
/// and the proxy never do.
fn misspelt(entry: &str) -> Option<String> {
    let mut usual = TOLD.iter().chain(USUAL);
    let meant = usual.find(|usual| usual.eq_ignore_ascii_case(entry))?;
    (*meant != entry).then(|| {
        let entry = shown(entry);
        format!(
            "{NO_ENTRY}: entry names are matched exactly, capitals included, and no listener has an entry \"{entry}\"; write `{meant}`"
        )
    })
}

/// Prefixes that are nearly those of entries that are found in a request.
const NEARLY_FOUND: [(&str, &str); 6] = [
    ("headers.", "header."),
    ("cookies.", "cookie."),
    ("params.", "query."),
    ("param.", "query."),
    ("header-", "header."),
    ("header_", "header."),
];

/// What to say of an entry that rules count by although it probably never arrives, where any name may: one that is
/// spelt nearly as a usual one, or as one by which more of the rules count. `names` are those of all rules.
fn unlikely(entry: &str, names: &[&str]) -> Option<String> {
    let prefixed = NEARLY_FOUND.iter().find_map(|(wrong, right)| {
        entry
            .strip_prefix(wrong)
            .map(|rest| format!("{right}{rest}"))
    });
    let is_usual = TOLD.contains(&entry) || USUAL.contains(&entry);
    let count = |name: &str| names.iter().filter(|known| **known == name).count();
    let first = |name: &str| names.iter().position(|known| *known == name);
    let is_rarer = |name: &&str| {
        let (own, other) = (count(entry), count(name));
        own < other || (own == other && first(entry) > first(name))
    };
    let near = |known: &&str| is_slip(entry, known);
    let mut usual = TOLD.iter().chain(USUAL).copied();
    let of_rules = || names.iter().copied().filter(is_rarer).find(near);
    let meant = match prefixed {
        Some(meant) => meant,
        None if is_usual => return None,
        None => usual.find(near).or_else(of_rules)?.to_owned(),
    };
    let (entry, meant) = (shown(entry), shown(&meant));
    Some(format!(
        "{NO_ENTRY}: no listener derives an entry \"{entry}\" from a request, and this rule applies only where a service names \
         it; did you mean `{meant}`?"
    ))
}

/// Whether `word` is `known` with one letter too many, too few, or two exchanged. One letter for another may be on
/// purpose, as in `key_a` and `key_b`.
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

/// What to say of an entry that is none of `known`.
fn untold(entry: &str, known: &[&str]) -> Option<String> {
    let is_told = known.contains(&entry) || FOUND.iter().any(|found| entry.starts_with(found));
    if is_told {
        return None;
    }
    let advice = match nearest(entry, known) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => format!(
            "known are {}, and header.NAME, cookie.NAME, query.NAME",
            known.join(", ")
        ),
    };
    let entry = shown(entry);
    Some(format!(
        "{NO_ENTRY}: no request at the proxy has an entry \"{entry}\"; {advice}"
    ))
}

/// What to say of a text against which `entry` is held in vain.
fn unusual(entry: &str, text: &str) -> Option<String> {
    if looks_like_expression(entry, text) {
        let text = shown(text);
        return Some(format!(
            "{NO_MATCH}: this text is compared as it stands; if it is a regular expression, write {{regex: \"{text}\"}}"
        ));
    }
    let (form, usual) = match entry {
        "path" => usual_path(text)?,
        "method" => ("methods are in capitals", text.to_ascii_uppercase()),
        "host" => (
            "hosts are in small letters and without a port",
            bare_host(text),
        ),
        "country" if text.len() == 2 => ("countries are in capitals", text.to_ascii_uppercase()),
        "ip" | "ip.exact" if text.contains('/') => {
            let network = format!("{{cidr: {text}}}");
            ("a network is held against `cidr`", network)
        }
        _ => return None,
    };
    let message = || {
        format!(
            "{NO_MATCH}: {form}; write {} where the proxy or forward-auth asks",
            shown(&usual)
        )
    };
    (usual != text).then(message)
}

/// Whether `text` is probably a regular expression: no entry of a request begins with `^`, and no path has
/// these signs of one.
fn looks_like_expression(entry: &str, text: &str) -> bool {
    let signs = ["(?", "\\d", "\\w", "\\.", "]+", "]*", "[0-9]", "[^"];
    let is_path =
        entry == "path" && (text.ends_with('$') || signs.iter().any(|s| text.contains(s)));
    text.starts_with('^') || is_path
}

/// How a path is written, and `text` so; `None` if it may be one as it stands, or never.
fn usual_path(text: &str) -> Option<(&'static str, String)> {
    if text.starts_with('*') {
        return None;
    }
    if let Some((path, _)) = text.split_once('?') {
        return Some(("paths end before the query", path.to_owned()));
    }
    let normal = normal_path(text).map(|normal| normal.into_owned());
    let form = "paths begin with a slash, and are in normal form";
    Some(match normal {
        Ok(normal) => (form, normal),
        Err(_) => (
            "paths with segments `.` and `..` are refused",
            "the path that is meant".into(),
        ),
    })
}

/// Every condition on a request in `file`: the entry, and what it is held against.
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

/// The conditions of the classes of an upstream.
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

/// The names of entries that rules count by, or cost.
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
