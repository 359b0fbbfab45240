//! `candidate`: a second rules file, whose rules are evaluated alongside the active rules but never
//! enforced.

use std::path::PathBuf;

use tidegate_core::{Timestamp, notation};

use super::{report::Report, value::Fields};

/// The candidate rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CandidateConfig {
    /// `rules`: the rules file with the candidate rules. The path is relative to the server's
    /// working directory. Only the sections `rules`, `allow` and `defaults` of this file have an
    /// effect.
    pub file: PathBuf,
    /// `until`: the time until which the candidate rules are evaluated; `None` means indefinitely.
    pub until: Option<Timestamp>,
}

/// Reads the section; `None` if the file has no such section, or if the section is invalid.
pub(super) fn candidate(file: &Fields<'_>, report: &mut Report) -> Option<CandidateConfig> {
    let what = "a map such as {rules: candidate.yaml, until: 2030-01-31}";
    let value = file.get("candidate")?;
    let fields = value.fields(report, what, &["rules", "until"])?;
    let until = fields
        .get("until")
        .and_then(|until| until.parsed(report, "a date", notation::instant));
    let Some(rules) = fields.get("rules") else {
        if !fields.tries("rules") {
            let problem = "is missing; name the rules file with the candidate rules";
            fields.wrong(report, "rules", problem);
        }
        return None;
    };
    let path = rules.text(report, "the path of a rules file")?;
    Some(CandidateConfig {
        file: PathBuf::from(path),
        until,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn mistakes(text: &str) -> Vec<String> {
        let mistakes = Config::parse(text).unwrap_err();
        mistakes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_date_is_its_first_instant_in_utc() {
        let config = |until: &str| {
            let text = format!("candidate: {{rules: next.yaml, until: {until}}}");
            Config::parse(&text).unwrap().candidate.unwrap()
        };
        let new_year = Timestamp::from_micros(1_798_761_600_000_000);
        assert_eq!(config("2027-01-01").until, Some(new_year));
        assert_eq!(config("2027-01-01T01:00:00+01:00").until, Some(new_year));
        assert_eq!(config("2027-01-01").file, PathBuf::from("next.yaml"));
        let config = Config::parse("candidate: {rules: next.yaml}").unwrap();
        assert_eq!(config.candidate.unwrap().until, None);
        assert_eq!(Config::parse("rules: []").unwrap().candidate, None);
    }

    #[test]
    fn every_mistake_is_reported_with_its_line() {
        let rules =
            "candidate.rules (line 1): is missing; name the rules file with the candidate rules";
        assert_eq!(mistakes("candidate: {}"), [rules]);
        let until = "expected a date such as 2030-01-31 (00:00 UTC), or a date and time with a time zone \
                     such as 2030-01-31T09:00:00Z, got";
        for bad in ["tomorrow", "2030-02-30", "2030-01-31T09:00:00"] {
            let text = format!("candidate:\n  rules: a.yaml\n  until: {bad}\n");
            let messages = mistakes(&text);
            assert_eq!(messages.len(), 1, "{messages:?}");
            assert!(
                messages[0].starts_with("candidate.until (line 3): "),
                "{messages:?}"
            );
            assert!(messages[0].contains(until), "{messages:?}");
        }
        let messages = mistakes("candidate: next.yaml");
        assert!(
            messages[0].starts_with("candidate (line 1): expected a map such as {rules:"),
            "{messages:?}"
        );
    }
}
