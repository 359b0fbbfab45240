//! Paths whose segments contain a rule name and key values. Each segment is percent-decoded
//! separately, so that a value may contain a slash.

use std::net::{IpAddr, Ipv4Addr};

use hyper::StatusCode;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde_json::Value;
use tidegate_core::{Rule, RuleSet, former_key};
use tidegate_identity::Trust;
use tidegate_limiter::{KeyMask, entries::Spelling};
use tidegate_net::{
    Problem,
    input::{nearest, shown},
};

use super::{override_limits::is_limit, shell::argument};

/// The maximum number of rule names in the error for an unknown rule.
const MAX_NAMED: usize = 10;

/// The characters that are percent-encoded in the path segments that an error shows.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'*');

pub(super) struct Path(Vec<String>);

impl Path {
    pub(super) fn parse(path: &str) -> Result<Self, Problem> {
        let segments = path.strip_prefix('/').unwrap_or(path).split('/');
        let decoded =
            segments.map(|segment| percent_decode_str(segment).decode_utf8().map(Into::into));
        let decoded = decoded.collect::<Result<_, _>>();
        decoded
            .map(Self)
            .map_err(|_| Problem::bad("path", "a segment is not UTF-8 after percent-decoding"))
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

/// The setting of a key that a request changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Block,
    Override,
}

impl Purpose {
    /// Describes how to set a block or an override for all addresses of `network`, a value in the
    /// key of `target`.
    fn of_network(self, target: &KeyTarget<'_>, rule: &Rule, network: &str) -> String {
        match self {
            Self::Block => {
                let entries = target.pairs(rule);
                let entries: String = entries
                    .map(|(name, value)| {
                        format!(" --entry {}", argument(&format!("{name}={value}")))
                    })
                    .collect();
                let rule = argument(rule.name());
                format!("block it with `tidegate block{entries} --rule {rule} --for 1h`")
            }
            Self::Override => match address_pattern(network) {
                Some(pattern) => format!("override its addresses with the pattern `{pattern}`"),
                None => LIMIT_NETWORK.to_owned(),
            },
        }
    }
}

/// Advice for a network without a pattern that matches exactly its addresses.
const LIMIT_NETWORK: &str = "match the network with `cidr` in the `when` of a rule";

/// Returns the pattern that matches exactly the addresses of `network`, an IPv4 network of size /8,
/// /16 or /24.
fn address_pattern(network: &str) -> Option<String> {
    let (address, bits) = network.split_once('/')?;
    let octets = address.parse::<Ipv4Addr>().ok()?.octets();
    let fixed = match bits {
        "8" => 1,
        "16" => 2,
        "24" => 3,
        _ => return None,
    };
    let fixed: Vec<String> = octets.iter().take(fixed).map(u8::to_string).collect();
    Some(format!("{}.*", fixed.join(".")))
}

/// The rule and the key in the path of a request.
#[derive(Clone, Copy)]
pub(super) struct KeyTarget<'a> {
    pub(super) rule: &'a str,
    /// The values of the key as they appear in the path.
    pub(super) key: &'a [&'a str],
    pub(super) trust: &'a Trust,
}

impl KeyTarget<'_> {
    /// Returns the rule that the path names, and the encoded key.
    pub(super) fn find<'r>(&self, rules: &'r RuleSet) -> Result<(&'r Rule, Vec<u8>), Problem> {
        let rule = rules.rule(self.rule);
        let rule = rule.ok_or_else(|| no_rule(rules, self.rule, self.key))?;
        self.check_count(rule)?;
        Ok((rule, rule.encode_key(self.key)?))
    }

    /// Rejects a key with too many values for `rule`. The error says how to write a value that
    /// contains a slash, because a slash in a path separates two values.
    pub(super) fn check_count(&self, rule: &Rule) -> Result<(), Problem> {
        let (own, given) = (rule.key().len(), self.key.len());
        if own == 0 || given <= own {
            return Ok(());
        }
        let mut surplus = self.key.iter().skip(own);
        let advice = match surplus.find(|value| is_limit(value)) {
            Some(limit) => format!(
                "to give several limits, write --limit before each of them: --limit {}",
                shown(limit)
            ),
            None if own == 1 => {
                let value = self.key.join("/");
                let in_url = utf8_percent_encode(&value, SEGMENT);
                format!(
                    "if a value contains a slash, give it as one value: `{}` (in a URL: `{in_url}`)",
                    shown(&value)
                )
            }
            None => "in a URL, write a slash within a value as %2F".to_owned(),
        };
        let values = shown(&self.key.join(", "));
        let problem = format!(
            "{}, got {given} ({values}); {advice}",
            rule.key_description()
        );
        Err(Problem::bad("key", problem))
    }

    /// Works like [`Self::find`], for the key of a block. If no active rule has such a key, returns
    /// the problem, and encodes the key for a former rule with this name. An operator can lift a
    /// block from the former rule with this key.
    pub(super) fn find_or_former<'r>(
        &self,
        rules: &'r RuleSet,
    ) -> (Result<&'r Rule, Problem>, Vec<u8>) {
        match self.find(rules) {
            Ok((rule, key)) => (Ok(rule), key),
            Err(problem) => (Err(problem), former_key(self.rule, self.key)),
        }
    }

    /// Returns whether the rule exists and has as many key entries as there are values.
    pub(super) fn is_complete(&self, rules: &RuleSet) -> bool {
        let rule = rules.rule(self.rule);
        rule.is_some_and(|rule| rule.key().len() == self.key.len())
    }

    /// Rejects a key that no request can have, because a block on the key would deny nothing.
    /// [`Spelling::Raw`] also permits values that the listeners never produce, because services
    /// that send raw entries may use any value.
    pub(super) fn check(
        &self,
        rule: &Rule,
        spelling: Spelling,
        purpose: Purpose,
    ) -> Result<(), Problem> {
        let foreign = || match spelling {
            Spelling::Normalized => {
                let mut foreign = self.foreign_value(rule)?;
                if let Some(network) = &foreign.network {
                    foreign.instead = purpose.of_network(self, rule, network);
                }
                Some(foreign.refusal())
            }
            Spelling::Raw => None,
        };
        match self.contradiction(rule).or_else(foreign) {
            Some(problem) => Err(Problem::bad("key", problem)),
            None => Ok(()),
        }
    }

    /// Rejects a pattern of addresses that matches no address that the listeners count.
    /// [`Spelling::Raw`] permits every pattern.
    pub(super) fn check_pattern(&self, rule: &Rule, spelling: Spelling) -> Result<(), Problem> {
        let is_wrong = |name: &str, value: &str| {
            matches!(name, "ip" | "ip.exact") && value.contains('*') && !may_match_address(value)
        };
        let wrong = self.pairs(rule).find(|(name, value)| is_wrong(name, value));
        let (Spelling::Normalized, Some((_, value))) = (spelling, wrong) else {
            return Ok(());
        };
        let problem = format!(
            "`{}` matches no address: addresses are written like 203.0.113.9 and 2001:db8:0:7::, in lower case and without leading zeros, so write a pattern such as `203.0.113.*`; if services send the given form with `raw`, pass --raw (`\"raw\": true`)",
            shown(value)
        );
        Err(Problem::bad("key", problem))
    }

    /// Returns a hint if requests with this key are impossible or unlikely.
    fn hint(&self, rule: &Rule, foreign: impl Fn(ForeignValue) -> String) -> Option<String> {
        self.contradiction(rule)
            .or_else(|| self.foreign_value(rule).map(foreign))
            .or_else(|| self.unlikely_value(rule))
    }

    /// Returns a hint if the listeners normalise the key to another form.
    pub(super) fn normalized_form_hint(&self, rule: &Rule) -> Option<String> {
        let foreign = self.foreign_value(rule)?;
        foreign.has_normalized_form.then(|| foreign.lookup_hint())
    }

    /// Returns a hint for a lookup if requests with this key are impossible or unlikely.
    pub(super) fn lookup_hint(&self, rule: &Rule) -> Option<String> {
        self.hint(rule, ForeignValue::lookup_hint)
    }

    fn pairs<'r>(&self, rule: &'r Rule) -> impl Iterator<Item = (&'r str, &str)> {
        rule.key().zip(self.key.iter().copied())
    }

    /// Describes a value in the key that the rule's own conditions exclude.
    fn contradiction(&self, rule: &Rule) -> Option<String> {
        let entry = rule.contradicted_key(self.key)?;
        let (_, value) = self.pairs(rule).find(|(name, _)| *name == entry)?;
        Some(format!(
            "rule \"{}\" applies only to requests with {}, so none of these requests has the {entry} \"{}\"",
            rule.name(),
            rule.applies_when(),
            shown(value)
        ))
    }

    /// Describes a value in the key that the listeners never produce, because they normalise or
    /// reject it.
    fn foreign_value(&self, rule: &Rule) -> Option<ForeignValue> {
        self.pairs(rule).find_map(|(name, value)| {
            if KeyMask::is_hash(value) {
                return Some(ForeignValue {
                    problem: format!("`{value}` is a hash, which lists show in place of the value"),
                    instead: "use the value itself".to_owned(),
                    has_normalized_form: false,
                    network: None,
                });
            }
            let normalized = match name {
                "ip" => self.trust.counted_text(value).ok_or(name),
                _ => match self.trust.normalize(name, value) {
                    Ok(normalized) => Ok(normalized.into_owned()),
                    Err(_) => Err(name),
                },
            };
            let what = match name {
                "ip" | "ip.exact" => "address",
                name => name,
            };
            match normalized {
                Ok(normalized) if normalized == value => None,
                Ok(normalized) => Some(ForeignValue {
                    problem: format!(
                        "the listeners count this {what} as `{}`",
                        shown(&normalized)
                    ),
                    instead: "use the normalised form".to_owned(),
                    has_normalized_form: true,
                    network: None,
                }),
                Err("path") => Some(ForeignValue {
                    problem: "the listeners reject a path with the segments `.` or `..`".to_owned(),
                    instead: "use the resolved path".to_owned(),
                    has_normalized_form: false,
                    network: None,
                }),
                Err(_) if is_network(value) => Some(ForeignValue {
                    problem: "the listeners count single addresses, not a network of this size"
                        .to_owned(),
                    instead: LIMIT_NETWORK.to_owned(),
                    has_normalized_form: false,
                    network: Some(value.to_owned()),
                }),
                Err(_) => Some(not_an_address(rule, name, value)),
            }
        })
    }

    /// Describes a value in the key that can occur only if a service sends its own entries.
    fn unlikely_value(&self, rule: &Rule) -> Option<String> {
        self.pairs(rule).find_map(|(name, value)| {
            let usual = value.to_ascii_uppercase();
            let is_unlikely = matches!(name, "method" | "country") && usual != value;
            is_unlikely.then(|| {
                format!(
                    "the proxy and forward-auth send the {name} in upper case: use `{}` instead, unless services send the given form",
                    shown(&usual)
                )
            })
        })
    }

    /// Adds the hint for a lookup of the key, if there is one, to `document`.
    pub(super) fn hinted(&self, document: Value, rule: &Rule) -> Value {
        with_hints(document, self.lookup_hint(rule))
    }

    /// Adds the hint about the blocked key, if there is one, to `document`.
    pub(super) fn hinted_block(&self, document: Value, rule: &Rule) -> Value {
        with_hints(document, self.hint(rule, ForeignValue::block_hint))
    }

    /// Builds a 404 response, with the hint if there is one.
    pub(super) fn nothing(&self, what: &str, rule: &Rule) -> Problem {
        let hint = self.lookup_hint(rule);
        let hint = hint.map(|hint| format!("; {hint}"));
        let detail = format!("{what}{}", hint.unwrap_or_default());
        Problem::new(StatusCode::NOT_FOUND, detail)
    }
}

/// A value in a key that the listeners never produce. Only a service that sends its entries with
/// `raw` can produce such a value.
struct ForeignValue {
    problem: String,
    /// What the operator can do instead, if no service sends this value with `raw`.
    instead: String,
    /// Whether the listeners normalise the value to another form.
    has_normalized_form: bool,
    /// The value, if it is a network.
    network: Option<String>,
}

impl ForeignValue {
    /// Returns the error for a block on a key with this value.
    fn refusal(self) -> String {
        let Self {
            problem, instead, ..
        } = self;
        format!(
            "{problem}: {instead}; if services send the given form with `raw`, pass --raw (`\"raw\": true`)"
        )
    }

    /// Returns the hint for the case that the operator has blocked a key with this value by setting
    /// `raw`.
    fn block_hint(self) -> String {
        let problem = self.problem;
        format!("{problem}: only requests that services send with `raw` have this key")
    }

    /// Returns the hint for a lookup of a key with this value.
    fn lookup_hint(self) -> String {
        let Self {
            problem, instead, ..
        } = self;
        format!("{problem}: {instead}, unless services send the given form with `raw`")
    }
}

/// Returns false if `pattern` certainly matches no address in the form in which the listeners write
/// addresses.
fn may_match_address(pattern: &str) -> bool {
    let is_of = |allowed: &str| pattern.chars().all(|letter| allowed.contains(letter));
    let may_be_ipv4 = || {
        let mut parts = pattern.split('.');
        let is_octet = |part: &str| part.contains('*') || part.parse::<u8>().is_ok();
        is_of("0123456789.*") && parts.clone().count() <= 4 && parts.all(is_octet)
    };
    may_be_ipv4() || is_of("0123456789abcdef:*")
}

fn is_network(written: &str) -> bool {
    written.split_once('/').is_some_and(|(address, bits)| {
        address.parse::<IpAddr>().is_ok() && bits.parse::<u8>().is_ok()
    })
}

/// Adds `hints` to `document`, before the hints that it already has.
pub(super) fn with_hints(mut document: Value, hints: impl IntoIterator<Item = String>) -> Value {
    let mut hints: Vec<String> = hints.into_iter().collect();
    if let Value::Object(members) = &mut document
        && !hints.is_empty()
    {
        let others = members.get("hint").and_then(Value::as_str);
        hints.extend(others.map(str::to_owned));
        members.insert("hint".to_owned(), hints.join("; ").into());
    }
    document
}

pub(super) fn no_rule(rules: &RuleSet, wanted: &str, key: &[&str]) -> Problem {
    let names: Vec<&str> = rules.iter().map(Rule::name).collect();
    let swapped = key.iter().find(|value| rules.rule(value).is_some());
    let hint = match nearest(wanted, &names) {
        None if let Some(rule) = swapped => {
            format!("\"{rule}\" is a rule: write the rule before the key")
        }
        Some(near) => format!("did you mean \"{near}\"?"),
        None if names.is_empty() => "no rules are loaded".to_owned(),
        None if names.len() <= MAX_NAMED => format!("the rules are {}", names.join(", ")),
        None => {
            let (first, rest) = (names[..MAX_NAMED].join(", "), names.len() - MAX_NAMED);
            format!("the rules are {first} and {rest} more")
        }
    };
    let detail = format!("there is no rule \"{}\"; {hint}", shown(wanted));
    Problem::new(StatusCode::NOT_FOUND, detail)
}

/// Describes a value that is not an address, although the key entry `name` requires one.
fn not_an_address(rule: &Rule, name: &str, value: &str) -> ForeignValue {
    let key: Vec<&str> = rule.key().collect();
    ForeignValue {
        problem: format!("\"{}\" is not an IP address", shown(value)),
        instead: format!(
            "a key of rule \"{}\" consists of ({}), and {name} is an address such as 203.0.113.9",
            rule.name(),
            key.join(", ")
        ),
        has_normalized_form: false,
        network: None,
    }
}
