//! Reads the field `limits` of an override: a limit, a list of limits, or a factor.

use tidegate_core::{Factor, LimitError, Replacement, bounds::MAX_LIMITS_PER_RULE};
use tidegate_net::{Problem, input::shown, json::Json};

use super::shell::argument;

/// Reads `limits`.
pub(super) fn read(value: &Json<'_>) -> Result<Replacement, Problem> {
    let wrong = |field: &str, value: &Json<'_>| {
        let problem = format!(
            "expected a string, got {value}; give `limits` as a limit such as \"200/min\" or a factor such as \"2x\", \
             or as a list of limits such as [\"10/s\", \"200/min\"]"
        );
        Problem::bad(field, problem)
    };
    let texts: Vec<&str> = match value {
        Json::Text(text) => vec![text],
        Json::List(items) => {
            let texts = items.iter().enumerate().map(|(at, item)| match item {
                Json::Text(text) => Ok(&**text),
                _ => Err(wrong(&format!("limits[{at}]"), item)),
            });
            texts.collect::<Result<_, _>>()?
        }
        _ => return Err(wrong("limits", value)),
    };
    if let Some(problem) = texts.iter().find_map(|text| several_limits(text)) {
        return Err(Problem::bad("limits", problem));
    }
    if let Some(factor) = texts.iter().find(|text| Factor::is_meant(text)) {
        let factor = factor.parse();
        let factor = factor.map_err(|error: LimitError| Problem::bad("limits", error.problem))?;
        return match texts.len() {
            1 => Ok(Replacement::Factor(factor)),
            _ => Err(Problem::bad(
                "limits",
                "a factor must be the only item of the list, because it multiplies all limits; give either a \
                 factor or limits",
            )),
        };
    }
    if texts.len() > MAX_LIMITS_PER_RULE {
        let problem = format!(
            "{} limits exceed the maximum of {MAX_LIMITS_PER_RULE}",
            texts.len()
        );
        return Err(Problem::bad("limits", problem));
    }
    Ok(Replacement::Limits(
        texts.into_iter().map(Box::from).collect(),
    ))
}

/// Describes a string with several limits, such as `10/h, 20/d`, and how to give each separately.
fn several_limits(text: &str) -> Option<String> {
    let separated = |text: &str| {
        let parts = text.replace(" and ", ",");
        let parts = parts.split([',', ';', '+']).map(str::trim);
        let parts: Vec<String> = parts.map(str::to_owned).collect();
        (parts.len() > 1 && parts.iter().all(|part| is_limit(part))).then_some(parts)
    };
    let words = || {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        (words.len() > 1 && words.iter().all(|word| is_limit(word))).then_some(words)
    };
    let limits = separated(text).or_else(words)?;
    let flags = limits
        .iter()
        .map(|limit| format!("--limit {}", argument(limit)));
    let items = limits.iter().map(|limit| format!("\"{}\"", shown(limit)));
    Some(format!(
        "\"{}\" contains several limits; give each of them separately: {} (`\"limits\": [{}]`)",
        shown(text),
        flags.collect::<Vec<_>>().join(" "),
        items.collect::<Vec<_>>().join(", ")
    ))
}

/// Returns whether `text` begins like a limit: a count and a period, or a number of slots.
pub(super) fn is_limit(text: &str) -> bool {
    let rest = text.trim_start_matches(|first: char| first.is_ascii_digit());
    let has_count = rest.len() < text.len();
    has_count && (rest.starts_with('/') || rest.trim_start() == "at once")
}
