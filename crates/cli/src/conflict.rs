//! Advice for arguments that cannot be combined. clap only says which arguments conflict.

use clap::{
    builder::StyledStr,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};

/// The arguments that name a key, as clap shows them.
const KEY: [&str; 3] = ["[RULE]", "[VALUES]...", "<RULE>"];

/// Two conflicting arguments, and what to do. An argument is the beginning of the text that clap
/// shows. An empty argument stands for any argument.
const ADVICE: [(&str, &str, &str); 8] = [
    (
        "--for",
        "--until",
        "give either the duration with --for or the end with --until",
    ),
    (
        "--until",
        "KEY",
        "--until needs --entry; to block a key, give the duration with --for",
    ),
    (
        "--wide",
        "KEY",
        "--wide is for a network in --entry; remove --wide to block a key",
    ),
    (
        "--rule",
        "KEY",
        "--rule is for a block by --entry; a key names its rule as the first argument",
    ),
    (
        "--entry",
        "KEY",
        "give either a rule and the values of its key, or --entry; with --entry, select a rule with --rule",
    ),
    (
        "--throttle",
        "KEY",
        "give either a rule and the values of its key, or --throttle",
    ),
    (
        "--remove",
        "",
        "to remove an override, give only --remove with the rule and the key",
    ),
    (
        "--limit",
        "--plan",
        "give either limits with --limit or a plan with --plan",
    ),
];

/// Adds a tip that says what to do to an error about conflicting arguments. Returns any other error
/// unchanged.
pub(crate) fn with_advice(mut error: Error) -> Error {
    if error.kind() != ErrorKind::ArgumentConflict {
        return error;
    }
    let of_kind = |kind| match error.get(kind) {
        Some(ContextValue::String(argument)) => vec![argument.as_str()],
        Some(ContextValue::Strings(arguments)) => arguments.iter().map(String::as_str).collect(),
        _ => Vec::new(),
    };
    let mut arguments = of_kind(ContextKind::InvalidArg);
    arguments.extend(of_kind(ContextKind::PriorArg));
    let tip = StyledStr::from(advice(&arguments).to_owned());
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    error
}

fn advice(arguments: &[&str]) -> &'static str {
    if let [one, other] = arguments
        && one == other
    {
        return "give this argument only once";
    }
    let has = |known: &str| {
        let mut arguments = arguments.iter();
        arguments.any(|argument| match known {
            "KEY" => KEY.contains(argument),
            known => argument.starts_with(known),
        })
    };
    let found = ADVICE.iter().find(|(one, other, _)| has(one) && has(other));
    found.map_or("remove one of these arguments", |(_, _, advice)| advice)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Args;

    fn tip(arguments: &str) -> String {
        let arguments = arguments.split_whitespace();
        let error = Args::try_parse_from(arguments).unwrap_err();
        let text = with_advice(error).to_string();
        let tip = text
            .lines()
            .find_map(|line| line.trim().strip_prefix("tip: "));
        tip.unwrap_or_else(|| panic!("no tip: {text}")).to_owned()
    }

    #[test]
    fn conflicting_arguments_say_what_to_do() {
        for (arguments, expected) in [
            (
                "block login ::1 --for 1h --until 2030-01-01",
                "--until needs --entry; to block a key",
            ),
            (
                "block login --until 2030-01-01",
                "--until needs --entry; to block a key",
            ),
            (
                "block --entry ip=::1 --for 1h --until 2030-01-01",
                "give either the duration with --for",
            ),
            (
                "block login ::1 --wide",
                "--wide is for a network in --entry",
            ),
            (
                "block login ::1 --rule api",
                "--rule is for a block by --entry",
            ),
            (
                "block login --entry ip=::1",
                "give either a rule and the values of its key, or --entry",
            ),
            (
                "unblock login ::1 --entry ip=::1",
                "give either a rule and the values of its key, or --entry",
            ),
            (
                "unblock login --rule api",
                "--rule is for a block by --entry",
            ),
            (
                "override api a --limit 2x --for 1h --until 2030-01-01",
                "give either the duration",
            ),
            (
                "override api a --limit 2x --plan pro",
                "give either limits with --limit or a plan",
            ),
            (
                "override api a --limit 2x --remove",
                "to remove an override, give only --remove",
            ),
            (
                "override api a --remove --reason x",
                "to remove an override, give only --remove",
            ),
            (
                "reset login --throttle x",
                "give either a rule and the values of its key, or --throttle",
            ),
            (
                "serve --config x --config y",
                "give this argument only once",
            ),
            (
                "serve --config x --from-envoy-env",
                "remove one of these arguments",
            ),
            (
                "simulate x --log y --against z --what-if a.limit=3/s",
                "remove one of these arguments",
            ),
        ] {
            let tip = tip(&format!("tidegate {arguments}"));
            assert!(tip.starts_with(expected), "{arguments}: {tip}");
        }
    }

    #[test]
    fn another_error_is_unchanged() {
        let error = || Args::try_parse_from(["tidegate", "blok"]).unwrap_err();
        assert_eq!(with_advice(error()).to_string(), error().to_string());
    }
}
