//! Reads Limitador's limits file: a list of limits.

use std::{
    collections::HashMap,
    ops::RangeInclusive,
    sync::{Arc, OnceLock},
};

use tidegate_config::{
    MAX_FILE_BYTES, Mistake,
    report::Report,
    value::{Shape, Value},
    yaml::{self, YamlContent, YamlDialect, YamlDocument},
};
use tidegate_core::{Algorithm, Limit, LimitError, Limits, Span, Window, bounds};

use super::{
    File, FileMistake, FileMistakes, LoadedConfig,
    expression::{self, ParsedExpression},
    fields::{field, text, wrong},
    of_file,
    scalar::{self, TypedScalar},
};
use crate::{
    Unit,
    rules::{Allowance, DescriptorRule, Detail, RuleLimits, limitador::LimitadorLimit},
};

/// The keys that a limit can have in the file.
const KEYS: [&str; 7] = [
    "id",
    "namespace",
    "max_value",
    "seconds",
    "name",
    "conditions",
    "variables",
];

/// The maximum number of limits in a namespace. Every request is checked against all limits of its
/// namespace.
const MAX_LIMITS: usize = 1_000;

/// The maximum number of conditions in a limit, and also the maximum number of variables.
const MAX_EXPRESSIONS: usize = 64;

/// Reads `files`, sorted by name, as one list of limits.
///
/// # Errors
///
/// Returns the errors in all files, of which at most 1,000 are listed. The list of errors is never
/// empty.
///
/// # Examples
///
/// ```
/// use tidegate_envoy::{File, read_limitador};
///
/// let file = |text: &str| vec![File { name: "limits.yaml".into(), text: text.into() }];
/// let sound = file("- {namespace: api, max_value: 3, seconds: 60, variables: []}");
/// assert_eq!(read_limitador(sound).unwrap().domains(), 1);
///
/// let wrong = file("- {namespace: api, max_value: 3, seconds: 60, conditions: ['a > 3']}");
/// let mistakes = read_limitador(wrong).unwrap_err();
/// assert!(mistakes[0].to_string().starts_with(
///     "limits.yaml: [0].conditions[0] (line 1): this condition is not supported; supported are"
/// ));
/// ```
pub fn read_limitador(mut files: Vec<File>) -> Result<LoadedConfig, Vec<FileMistake>> {
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let (mut loaded, mut mistakes) = (LoadedConfig::default(), FileMistakes::default());
    let mut known = HashMap::new();
    for file in &files {
        match document(&file.text) {
            Ok(document) => {
                let report = read_document(&document, &mut loaded, &mut known);
                let warnings = mistakes.add_report(&file.name, report);
                loaded.warnings.extend(warnings);
            }
            Err(mistake) => mistakes.push(of_file(&file.name, mistake)),
        }
    }
    mistakes.finish(loaded)
}

fn document(text: &str) -> Result<YamlDocument<'_>, Mistake> {
    let wrong = |line, message: String| Mistake {
        path: String::new(),
        line,
        message,
    };
    if text.len() > MAX_FILE_BYTES {
        let length = text.len();
        let message =
            format!("the file has {length} bytes, which exceeds the maximum of {MAX_FILE_BYTES}");
        return Err(wrong(None, message));
    }
    let document = yaml::parse(text, YamlDialect::Lenient)?;
    let root = Value::root(&document.root);
    // If a program rewrites the file in place, the file is empty for a moment. An empty file is
    // therefore rejected, so that it does not remove all limits.
    if root.is_null() {
        let message = "the file is empty; to limit nothing, write `[]`";
        return Err(wrong(None, message.into()));
    }
    if root.shape() == Shape::Map {
        let message = "expected a list of limits, got a map; a file of envoyproxy/ratelimit \
            belongs in `envoy.config`";
        return Err(wrong(Some(1), message.into()));
    }
    Ok(document)
}

/// The identity of a limit. Two limits with the same identity would share their counters.
type LimitIdentity = (String, u64, Vec<Box<str>>, Vec<Box<str>>);

fn read_document(
    document: &YamlDocument<'_>,
    loaded: &mut LoadedConfig,
    known: &mut HashMap<LimitIdentity, usize>,
) -> Report {
    let mut report = Report::default();
    let warnings = document.warnings.iter().cloned();
    warnings.for_each(|warning| report.warn(warning));
    let root = Value::root(&document.root);
    let items = root
        .items(&mut report, "a list of limits")
        .unwrap_or_default();
    for item in &items {
        let Some((namespace, limit)) = limit(item, &mut report) else {
            continue;
        };
        let identity = (
            namespace.to_owned(),
            limit.seconds,
            limit
                .conditions
                .iter()
                .map(|one| one.source.clone())
                .collect(),
            limit
                .variables
                .iter()
                .map(|one| one.source.clone())
                .collect(),
        );
        let limits = &mut loaded.domains.entry(namespace).limitador;
        // Limitador would silently keep only one of two limits with the same identity.
        if let Some(first) = known.get(&identity) {
            let message = format!(
                "has the namespace, the seconds, the conditions and the variables of limit {first}, so both \
                 would have the same counters; remove one of the two"
            );
            item.wrong(&mut report, message);
            continue;
        }
        if limits.len() == MAX_LIMITS {
            let message = format!("exceeds the maximum of {MAX_LIMITS} limits per namespace");
            item.wrong(&mut report, message);
            break;
        }
        known.insert(identity, known.len());
        limits.push(limit);
    }
    report
}

/// Reads a limit. Returns its namespace and the limit.
fn limit<'n>(item: &Value<'n>, report: &mut Report) -> Option<(&'n str, LimitadorLimit)> {
    if item.shape() != Shape::Map {
        let found = item.describe();
        item.wrong(
            report,
            format!("expected a limit, which is a map, got {found}"),
        );
        return None;
    }
    let before = report.count();
    check_keys(item, report);
    let namespace = text(item, "namespace", report);
    if namespace.is_none() {
        let message = "is missing; name the namespace, which is the domain of Envoy's requests";
        wrong(item, "namespace", report, format!("namespace {message}"));
    }
    let max_value = number(item, "max_value", 0..=bounds::MAX_COUNT, report);
    let most = bounds::MAX_PERIOD.as_secs_ceil();
    let seconds = number(item, "seconds", 1..=most, report);
    let mut conditions = expressions(item, "conditions", expression::condition, report);
    let mut variables = expressions(item, "variables", expression::variable, report);
    // As in Limitador, conditions and variables are sets: reordering or repeating them does not
    // select different counters.
    conditions.sort_by(|a, b| a.source.cmp(&b.source));
    conditions.dedup_by(|a, b| a.source == b.source);
    variables.sort_by(|a, b| a.source.cmp(&b.source));
    variables.dedup_by(|a, b| a.source == b.source);
    let (name, id) = (text(item, "name", report), text(item, "id", report));
    if report.count() > before {
        return None;
    }
    let (max_value, seconds) = (max_value?, seconds?);
    let limit = LimitadorLimit {
        id: id.map(Into::into),
        name: name.map(Into::into),
        max_value,
        seconds,
        conditions: conditions.into(),
        variables: variables.into(),
        rule: rule(name, max_value, seconds)
            .map_err(|error| item.wrong(report, error.to_string()))
            .ok()?,
    };
    Some((namespace?, limit))
}

/// Reports an error for each unknown key.
fn check_keys(item: &Value<'_>, report: &mut Report) {
    for (key, value) in item.members() {
        let is_known = match key {
            Some(YamlContent::Plain(name) | YamlContent::Quoted(name)) => KEYS.contains(&&**name),
            _ => false,
        };
        if !is_known {
            let message = format!("is not a key of a limit; use one of {}", KEYS.join(", "));
            value.wrong_key(report, message);
        }
    }
}

/// Builds the rule of a limit. As in Limitador, the fixed window of the rule begins with the first
/// request.
fn rule(
    name: Option<&str>,
    max_value: u64,
    seconds: u64,
) -> Result<Arc<DescriptorRule>, LimitError> {
    let span = Span::from_secs(seconds);
    let limit = Limit::new(Algorithm::FixedWindow {
        limit: max_value,
        window: Window::FirstRequest(span),
    })?;
    let limits = RuleLimits {
        limits: Arc::new(Limits::new(vec![limit])?),
        shadow_limits: None,
        units: [Unit::of_span(span).unwrap_or_default()].into(),
        window_seconds: seconds,
        variants: OnceLock::new(),
    };
    Ok(Arc::new(DescriptorRule {
        allowance: Allowance::Limited(limits),
        name: name.map(Arc::from),
        replaces: Box::default(),
        shadow: false,
        quota: false,
        metadata: None,
        detail: Detail::default(),
        counters: OnceLock::new(),
        overridable: OnceLock::new(),
    }))
}

/// Reads an integer in `range`.
fn number(
    item: &Value<'_>,
    name: &str,
    range: RangeInclusive<u64>,
    report: &mut Report,
) -> Option<u64> {
    let found = field(item, name).and_then(|value| match scalar::of(value.content()) {
        Some(TypedScalar::Whole(number)) => u64::try_from(number).ok(),
        _ => None,
    });
    let number = found.filter(|number| range.contains(number));
    if number.is_none() {
        let (least, most) = (range.start(), range.end());
        let expected = format!("{name}: expected a whole number from {least} to {most}");
        wrong(item, name, report, expected);
    }
    number
}

/// Reads a list of expressions. A missing or empty value is an empty list.
fn expressions<T>(
    item: &Value<'_>,
    name: &str,
    parse: impl Fn(&str) -> Result<ParsedExpression<T>, String>,
    report: &mut Report,
) -> Vec<T> {
    let Some(list) = field(item, name) else {
        return Vec::new();
    };
    let items = list
        .items(report, "a list of expressions")
        .unwrap_or_default();
    if items.len() > MAX_EXPRESSIONS {
        let count = items.len();
        list.wrong(
            report,
            format!("{count} expressions exceed the maximum of {MAX_EXPRESSIONS}"),
        );
        return Vec::new();
    }
    let mut parsed = Vec::with_capacity(items.len());
    for value in &items {
        let Some(source) = value.scalar() else {
            let found = value.describe();
            value.wrong(
                report,
                format!("expected an expression in quotes, got {found}"),
            );
            continue;
        };
        match parse(source) {
            Ok(ParsedExpression {
                value: expression,
                is_legacy,
            }) => {
                if is_legacy {
                    let message = "is in the syntax of Limitador 1, and is read as an entry of \
                        descriptors[0]; Limitador 2 would never apply the limit";
                    value.warn(report, message);
                }
                parsed.push(expression);
            }
            Err(problem) => value.wrong(report, problem),
        }
    }
    parsed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes(text: &str) -> Vec<String> {
        let file = File {
            name: "limits.yaml".to_owned(),
            text: text.to_owned(),
        };
        let found = read_limitador(vec![file]).unwrap_err();
        found.iter().map(ToString::to_string).collect()
    }

    /// If the file is reloaded while another program writes to it, the content may be truncated,
    /// and must then be rejected.
    #[test]
    fn an_empty_file_is_an_error_and_an_empty_list_is_not() {
        for text in ["", "\n", "# limits\n", "---\n", "null\n"] {
            let expected = "limits.yaml: the file is empty; to limit nothing, write `[]`";
            assert_eq!(mistakes(text), [expected], "{text:?}");
        }
        let file = |text: &str| File {
            name: "limits.yaml".to_owned(),
            text: text.to_owned(),
        };
        assert!(read_limitador(vec![file("[]\n")]).is_ok());
    }

    #[test]
    fn every_mistake_names_its_line() {
        let text = "
- namespace: api
  max_value: many
  seconds: 0
  conditions: [\"descriptors[0].a > '1'\", \"descriptors[0].b == 'x'\"]
  variables: [size(a)]
  limit: 5
- max_value: 5
  seconds: 60
- 7
- {namespace: api, max_value: 1, seconds: 60, variables: ['descriptors[0].a']}
- {namespace: api, max_value: 2, seconds: 60, variables: ['descriptors[0].a']}
";
        let found = mistakes(text);
        for (line, expected) in [
            (3, "max_value: expected a whole number from 0 to"),
            (4, "seconds: expected a whole number from 1 to"),
            (5, "[0].conditions[0]"),
            (6, "[0].variables[0]"),
            (7, "is not a key of a limit"),
            (8, "namespace is missing"),
            (10, "expected a limit, which is a map"),
            (12, "would have the same counters"),
        ] {
            let at = format!("(line {line})");
            let is_found = |text: &&String| text.contains(&at) && text.contains(expected);
            assert_eq!(
                found.iter().filter(is_found).count(),
                1,
                "{line} {expected}: {found:#?}"
            );
        }
        assert_eq!(found.len(), 8, "{found:#?}");
        assert!(mistakes("domain: shop")[0].contains("expected a list of limits, got a map"));
    }

    #[test]
    fn the_examples_of_limitador_are_read() {
        let text = "---
- namespace: test_namespace
  max_value: 1000000
  seconds: 60
  conditions:
  variables:
- namespace: test_namespace
  max_value: 5
  seconds: 60
  conditions:
    - \"descriptors[0]['req.method'] == 'POST'\"
  variables:
    - descriptors[0]['user_id']
- {namespace: old, max_value: 5, seconds: 60, conditions: [method == GET], variables: [user_id]}
";
        let file = File {
            name: "limits.yaml".to_owned(),
            text: text.to_owned(),
        };
        let loaded = read_limitador(vec![file]).unwrap();
        assert_eq!(loaded.domains(), 2);
        let limits = &loaded.domains.get("test_namespace").unwrap().limitador;
        assert_eq!(limits.len(), 2);
        assert_eq!(
            &*limits[1].conditions[0].source,
            "descriptors[0]['req.method'] == 'POST'"
        );
        let warnings = loaded.warnings.iter();
        let legacy = warnings.filter(|warning| warning.mistake.message.contains("Limitador 1"));
        assert_eq!(legacy.count(), 2);
    }
}
