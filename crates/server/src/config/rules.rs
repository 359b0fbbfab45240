//! `rules` and `allow`: from what was written to rules that are indexed.

use tidegate_core::{
    AlgorithmName, Condition, Cost, CostSource, Mode, Pattern, Rule, RuleError, RuleSet, When,
};

use super::{
    limits,
    node::Value,
    read::{Mistakes, Place},
};

const FIELDS: [&str; 8] = [
    "name",
    "when",
    "key",
    "limits",
    "algorithm",
    "mode",
    "cost",
    "allow",
];
const MATCHERS: [&str; 4] = ["not", "cidr", "regex", "present"];

/// The rules of the file; `algorithm` is that of limits which name none.
pub(super) fn rule_set(
    root: &Place<'_>,
    algorithm: AlgorithmName,
    mistakes: &mut Mistakes,
) -> RuleSet {
    let places = root
        .written("rules")
        .map(|rules| rules.items(mistakes, "a list of rules"))
        .unwrap_or_default();
    let before = mistakes.0.len();
    let rules: Vec<Rule> = places
        .iter()
        .filter_map(|place| rule(place, algorithm, mistakes))
        .collect();
    let allow = root
        .written("allow")
        .map(|allow| allow_list(&allow, mistakes))
        .unwrap_or_default();
    if mistakes.0.len() > before {
        // Places in the list are those of the file only while no rule is missing from it.
        return RuleSet::default();
    }
    RuleSet::build(rules, allow).unwrap_or_else(|errors| {
        for error in errors {
            let place = places
                .iter()
                .find(|place| error.field.starts_with(&format!("{}.", place.path)));
            let line = place.map_or(root.node.line, |place| place.node.line);
            mistakes.0.push(super::Mistake {
                path: error.field,
                line: Some(line),
                message: error.problem,
            });
        }
        RuleSet::default()
    })
}

fn rule(place: &Place<'_>, algorithm: AlgorithmName, mistakes: &mut Mistakes) -> Option<Rule> {
    place.expect_keys(&FIELDS, mistakes);
    let Value::Map(_) = place.node.value else {
        return None;
    };
    let field = |name| place.written(name);
    let algorithm = match field("algorithm") {
        Some(field) => limits::algorithm(&field, mistakes).unwrap_or(algorithm),
        None => algorithm,
    };
    let name = required(place, "name", mistakes).and_then(|name| name.text(mistakes, "a name"));
    let limits = required(place, "limits", mistakes)
        .map(|limits| limits::limits(&limits, algorithm, mistakes));
    let when = field("when")
        .map(|when| conditions(&when, mistakes))
        .unwrap_or_default();
    let key = field("key")
        .map(|key| texts(&key, "the name of an entry", mistakes))
        .unwrap_or_default();
    let cost = field("cost")
        .and_then(|field| cost(&field, mistakes))
        .unwrap_or_default();
    let mode = field("mode")
        .and_then(|field| mode(&field, mistakes))
        .unwrap_or_default();
    let allow = field("allow")
        .map(|allow| allow_list(&allow, mistakes))
        .unwrap_or_default();
    let (name, limits) = (name?, limits.filter(|limits| !limits.is_empty())?);
    let built = Rule::new(name, limits)
        .and_then(|rule| rule.keyed_by(&key))
        .and_then(|rule| rule.costing(cost));
    match built {
        Ok(rule) => Some(rule.when(when).in_mode(mode).allowing(allow)),
        Err(error) => {
            mistakes.in_field(place, &error.field, error.problem);
            None
        }
    }
}

fn required<'n>(place: &Place<'n>, name: &str, mistakes: &mut Mistakes) -> Option<Place<'n>> {
    let field = place.written(name);
    if field.is_none() {
        mistakes.in_field(place, name, "is missing");
    }
    field
}

fn allow_list(place: &Place<'_>, mistakes: &mut Mistakes) -> Vec<When> {
    let items = place.one_or_more(mistakes);
    let mut allow = Vec::new();
    for item in items {
        let when = conditions(&item, mistakes);
        if matches!(&item.node.value, Value::Map(entries) if entries.is_empty()) {
            mistakes.at(
                &item,
                "names no entry, and so would let everything pass; write which requests pass",
            );
        }
        allow.push(when);
    }
    allow
}

/// `{path: /api/**, method: [GET, POST]}`: all must hold.
fn conditions(place: &Place<'_>, mistakes: &mut Mistakes) -> When {
    let mut conditions = Vec::new();
    for (key, value) in place.entries(mistakes, "a map from entries to what they must be") {
        if let Some(pattern) = pattern(&value, mistakes) {
            conditions.extend(checked(
                &value,
                Condition::new(&key.text, pattern),
                mistakes,
            ));
        }
    }
    When::all(conditions)
}

fn pattern(place: &Place<'_>, mistakes: &mut Mistakes) -> Option<Pattern> {
    match &place.node.value {
        Value::Scalar { text, .. } => checked(place, Pattern::text(text), mistakes),
        Value::List(_) => {
            let items = place.items(mistakes, "a list");
            let patterns: Vec<Pattern> = items
                .iter()
                .filter_map(|item| pattern(item, mistakes))
                .collect();
            if patterns.len() < items.len() {
                return None;
            }
            checked(place, Pattern::any_of(patterns), mistakes)
        }
        Value::Map(_) => {
            place.expect_keys(&MATCHERS, mistakes);
            let entries = place.entries(mistakes, "a map");
            let known = entries
                .iter()
                .filter(|(key, _)| MATCHERS.contains(&key.text.as_str()));
            let patterns: Option<Vec<Pattern>> = known
                .map(|(key, value)| matcher(&key.text, value, mistakes))
                .collect();
            checked(place, Pattern::all_of(patterns?), mistakes)
        }
        Value::Null => {
            mistakes.at(
                place,
                "expected a text, a list of texts, or one of {not, cidr, regex, present}",
            );
            None
        }
    }
}

fn matcher(name: &str, place: &Place<'_>, mistakes: &mut Mistakes) -> Option<Pattern> {
    match name {
        "not" => Some(pattern(place, mistakes)?.negated()),
        "cidr" => {
            let networks = texts(place, "a network such as 10.0.0.0/8", mistakes);
            checked(place, Pattern::networks(&networks), mistakes)
        }
        "regex" => {
            let source = place.text(mistakes, "a regular expression")?;
            checked(place, Pattern::regex(source), mistakes)
        }
        _ => Some(if place.truth(mistakes)? {
            Pattern::present()
        } else {
            Pattern::absent()
        }),
    }
}

fn cost(place: &Place<'_>, mistakes: &mut Mistakes) -> Option<CostSource> {
    let text = place.text(mistakes, "a number, or the name of an entry that holds one")?;
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(CostSource::Entry(text.into()));
    }
    let cost = Cost::new(place.number(mistakes)?);
    cost.map(CostSource::Fixed)
        .map_err(|error| mistakes.at(place, error.problem))
        .ok()
}

fn mode(place: &Place<'_>, mistakes: &mut Mistakes) -> Option<Mode> {
    place.choice(
        &[("enforce", Mode::Enforce), ("shadow", Mode::Shadow)],
        mistakes,
    )
}

fn texts<'n>(place: &Place<'n>, what: &str, mistakes: &mut Mistakes) -> Vec<&'n str> {
    let items = place.one_or_more(mistakes);
    items
        .iter()
        .filter_map(|item| item.text(mistakes, what))
        .collect()
}

fn checked<T>(
    place: &Place<'_>,
    built: Result<T, RuleError>,
    mistakes: &mut Mistakes,
) -> Option<T> {
    built
        .map_err(|error| mistakes.in_field(place, &error.field, error.problem))
        .ok()
}
