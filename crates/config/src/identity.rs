//! `clients` and `entries`: the settings for identifying clients.

use std::sync::Arc;

use tidegate_core::bounds::MAX_ENTRIES;
use tidegate_identity::{
    AddressHeader, DerivedEntry, GeoIpSource, Proxies, Trust, client_ip::TrustWarning,
};
use tidegate_net::Exempt;

use super::{
    conditions::entry_name,
    report::Report,
    value::{Fields, Value},
};

/// The settings for identifying clients.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// `clients`: the proxies trusted to report the client's address. By default, only the proxy
    /// that sends the forward-auth request is trusted.
    pub trust: Trust,
    /// `entries`: the derived entries. Each derived entry has a name, and is derived from a part of
    /// another entry.
    pub derived: Vec<(Box<str>, DerivedEntry)>,
    /// The GeoIP lookup. [`Config::parse`](crate::Config::parse) leaves this field `None`. The code
    /// that starts the server opens the `geoip` databases and sets this field.
    pub geoip: Option<Arc<dyn GeoIpSource>>,
}

impl Identity {
    /// Returns a function that returns whether a peer is exempt from the connection limit per
    /// client. Trusted proxies are exempt, because they forward requests from many clients.
    #[must_use]
    pub fn exempt(self: &Arc<Self>) -> Exempt {
        let identity = Arc::clone(self);
        Arc::new(move |peer| identity.trust.is_trusted(peer))
    }
}

/// The maximum number of proxies between a client and Tidegate.
const MAX_HOPS: usize = 16;

pub(super) fn identity(file: &Fields<'_>, report: &mut Report) -> Identity {
    let trust = file.get("clients").and_then(|value| trust(value, report));
    let derived = file
        .get("entries")
        .and_then(|value| derived_entries(value, report));
    Identity {
        trust: trust.unwrap_or_default(),
        derived: derived.unwrap_or_default(),
        geoip: None,
    }
}

fn trust(value: &Value<'_>, report: &mut Report) -> Option<Trust> {
    let known = &["proxies", "header", "ipv6_prefix"];
    let fields = value.fields(
        report,
        "a map such as {proxies: 1, header: x-forwarded-for}",
        known,
    )?;
    let proxies = fields
        .get("proxies")
        .and_then(|value| proxies(value, report));
    let header = fields.get("header").and_then(|value| header(value, report));
    let trust = Trust::new(
        proxies.unwrap_or(Proxies::Hops(0)),
        header.unwrap_or(AddressHeader::XForwardedFor),
    );
    let trust = match fields.get("ipv6_prefix") {
        None => trust,
        Some(value) => {
            let bits = value.small_number(report)?;
            let with_prefix = trust.with_ipv6_prefix(bits);
            if with_prefix.is_none() {
                value.wrong(report, format!("must be from 1 to 128, got {bits}"));
            }
            with_prefix?
        }
    };
    for warning in trust.warnings() {
        let field = match warning {
            TrustWarning::RawIpv6 => "ipv6_prefix",
            _ => "proxies",
        };
        if let Some(value) = fields.get(field) {
            value.warn(report, warning.to_string());
        }
    }
    Some(trust)
}

/// Reads the trusted proxies, which are given as a number of hops or as a list of networks.
fn proxies(value: &Value<'_>, report: &mut Report) -> Option<Proxies> {
    if value.looks_like_number() {
        let hops = value.small_number(report)?;
        if hops > MAX_HOPS {
            value.wrong(
                report,
                format!("{hops} hops exceed the maximum of {MAX_HOPS}"),
            );
        }
        return Some(Proxies::Hops(hops));
    }
    let what = "a number of proxies, or their networks, such as [10.0.0.0/8]";
    let nets = value.one_or_more(report);
    let read = nets.iter().filter_map(|net| {
        let text = net.text(report, what)?;
        let parsed = tidegate_identity::client_ip::network(text);
        if parsed.is_none() {
            net.expected(report, what);
        }
        parsed
    });
    Some(Proxies::Nets(read.collect()))
}

fn header(value: &Value<'_>, report: &mut Report) -> Option<AddressHeader> {
    let what = "a header name such as x-forwarded-for, forwarded or cf-connecting-ip";
    let header = AddressHeader::named(value.text(report, what)?);
    if header.is_none() {
        value.expected(report, what);
    }
    header
}

/// Reads the derived entries. For each derived entry, returns its name, and the part of another
/// entry from which it is derived.
fn derived_entries(
    value: &Value<'_>,
    report: &mut Report,
) -> Option<Vec<(Box<str>, DerivedEntry)>> {
    let what = "a map of entries, such as {key_id: {of: header.x-api-key, split: \".\"}}";
    let pairs = value.pairs(report, what)?;
    if pairs.len() > MAX_ENTRIES {
        let problem = format!("{} exceed the maximum of {MAX_ENTRIES}", pairs.len());
        value.wrong(report, problem);
    }
    let read = pairs
        .iter()
        .filter_map(|(name, value)| Some((entry_name(name).into(), part(value, report)?)));
    Some(read.collect())
}

fn part(value: &Value<'_>, report: &mut Report) -> Option<DerivedEntry> {
    let known = &["of", "split", "part", "regex"];
    let fields = value.fields(report, "a map with `of` and `split` or `regex`", known)?;
    let Some(of) = fields.get("of") else {
        if !fields.tries("of") {
            let problem = "is missing; name the entry from which this one is derived";
            fields.wrong(report, "of", problem);
        }
        return None;
    };
    let of = of.text(report, "the name of an entry")?;
    let built = match (fields.get("split"), fields.get("regex")) {
        (Some(split), None) => {
            let number = fields
                .get("part")
                .map_or(Some(1), |part| part.small_number(report))?;
            DerivedEntry::split(of, split.text(report, "a separator")?, number)
        }
        (None, Some(regex)) => {
            if let Some(part) = fields.get("part") {
                part.wrong(report, "applies only to `split`; remove it, because the capture group of `regex` selects the part");
            }
            DerivedEntry::regex(of, regex.text(report, "a regular expression")?)
        }
        (Some(_), Some(regex)) => {
            regex.wrong(report, "conflicts with `split`; remove one of the two");
            return None;
        }
        (None, None) => {
            value.wrong(report, "needs `split` or `regex` to select a part");
            return None;
        }
    };
    built
        .map_err(|error| fields.wrong(report, error.field, error.problem))
        .ok()
}

#[cfg(test)]
mod tests {
    use crate::Config;

    #[test]
    fn the_default_trusts_no_proxy() {
        let config = Config::parse("clients: {}\nentries: {}\n").unwrap();
        assert_eq!(config.identity.trust, Default::default());
        assert!(config.identity.derived.is_empty() && config.warnings.is_empty());
    }

    #[test]
    fn every_mistake_is_reported_with_its_line() {
        let text = "
clients:
  proxies: [10.0.0.0/33]
  header: 'x y'
  ipv6_prefix: 129
entries:
  a: {of: header.a}
  b: {of: header.b, split: '', part: 1}
  c: {of: header.c, split: '.', part: 17}
  d: {of: header.d, regex: '.*'}
  e: {of: header.e, split: '.', regex: '(.*)'}
  f: {split: '.'}
  g: {off: header.g, split: '.'}
";
        let mistakes = Config::parse(text).unwrap_err();
        let mistakes: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
        let expected = [
            "clients.proxies[0] (line 3): expected a number of proxies, or their networks, such as [10.0.0.0/8], got \"10.0.0.0/33\"",
            "clients.header (line 4): expected a header name such as x-forwarded-for, forwarded or cf-connecting-ip, got \"x y\"",
            "clients.ipv6_prefix (line 5): must be from 1 to 128, got 129",
            "entries.a (line 7): needs `split` or `regex` to select a part",
            "entries.b.split (line 8): must not be empty",
            "entries.c.part (line 9): must be from 1 to 16, got 17",
            "entries.d.regex (line 10): must have one capture group around the part to keep, has 0; write other groups as (?:…)",
            "entries.e.regex (line 11): conflicts with `split`; remove one of the two",
            "entries.f.of (line 12): is missing; name the entry from which this one is derived",
            "entries.g.off (line 13): unknown key `off`; did you mean `of`?",
        ];
        assert_eq!(mistakes, expected);
    }

    #[test]
    fn settings_that_help_abusers_are_warnings() {
        let text = "clients:\n  proxies: [0.0.0.0/0]\n  ipv6_prefix: 128\n";
        let warnings = Config::parse(text).unwrap().warnings;
        let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
        assert!(
            warnings[0].starts_with("clients.proxies (line 2): trust-all: "),
            "{warnings:?}"
        );
        assert!(
            warnings[1].starts_with("clients.ipv6_prefix (line 3): raw-ipv6: "),
            "{warnings:?}"
        );
    }
}
