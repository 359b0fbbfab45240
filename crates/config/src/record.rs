//! `record`: the file to which requests are recorded, for simulations.

use std::path::PathBuf;

use super::{
    KeyPrivacy, conditions::entry_name, limits::percent, report::Report, store::size, value::Fields,
};

/// The minimum of `max_bytes`.
const MIN_BYTES: usize = 1 << 20;
/// The maximum of `max_bytes`.
const MAX_BYTES: usize = 1 << 40;

/// Where and how requests are recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordConfig {
    /// `to`: the file. The path is relative to the server's working directory.
    pub to: PathBuf,
    /// `sample`: the sampling percentage, 1 to 100; default 100. Without `by`, `sample` is a
    /// percentage of the requests. With `by`, `sample` is a percentage of the values of the entry.
    pub sample_percent: u32,
    /// `by`: the entry whose values are sampled. All requests with a sampled value are recorded. If
    /// `by` is `None`, each request is sampled independently.
    pub by: Option<String>,
    /// `hash`: the entries whose values are recorded as keyed hashes.
    pub hash: Vec<String>,
    /// `max_bytes`: the maximum total size of the current file and the previous file; default 256
    /// MiB.
    pub max_bytes: usize,
}

/// Reads the section; `None` if the file has no such section, or if the section is invalid.
pub(super) fn record(
    file: &Fields<'_>,
    privacy: &KeyPrivacy,
    report: &mut Report,
) -> Option<RecordConfig> {
    let what = "a map such as {to: requests.jsonl, sample: 1%, by: ip}";
    let known = &["to", "sample", "by", "hash", "max_bytes"];
    let fields = file.get("record")?.fields(report, what, known)?;
    let mut sample_percent = 100;
    if let Some(value) = fields.get("sample")
        && let Some(percent) = percent(value, report)
    {
        if !(1..=100).contains(&percent) {
            value.wrong(report, "must be 1% to 100%");
        }
        sample_percent = percent;
    }
    let mut max_bytes = 256 << 20;
    if let Some(value) = fields.get("max_bytes")
        && let Some(bytes) = size(value, report)
    {
        if !(MIN_BYTES..=MAX_BYTES).contains(&bytes) {
            value.wrong(report, "must be 1MiB to 1024GiB");
        }
        max_bytes = bytes;
    }
    let entry = "the name of an entry, such as ip";
    let by = fields.get("by").and_then(|by| by.text(report, entry));
    let mut hash = Vec::new();
    match fields.get("hash") {
        Some(value) => {
            for item in value.one_or_more(report) {
                hash.extend(
                    item.text(report, entry)
                        .map(|name| entry_name(name).into_owned()),
                );
            }
        }
        None if matches!(privacy, KeyPrivacy::Hashed { .. }) && !fields.tries("hash") => {
            let message = "is missing; because `privacy.keys` is `hashed`, list the entries whose values are \
                           recorded as hashes, or write [] to record all values unchanged";
            fields.wrong(report, "hash", message);
        }
        None => {}
    }
    let Some(to) = fields.get("to") else {
        if !fields.tries("to") {
            fields.wrong(
                report,
                "to",
                "is missing; name the file for the recorded requests",
            );
        }
        return None;
    };
    let to = to.text(report, "the path of a file")?;
    Some(RecordConfig {
        to: PathBuf::from(to),
        sample_percent,
        by: by.map(|by| entry_name(by).into_owned()),
        hash,
        max_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn settings_have_defaults() {
        let config = |text: &str| Config::parse(text).unwrap().record;
        assert_eq!(config("rules: []"), None);
        let expected = RecordConfig {
            to: PathBuf::from("a.jsonl"),
            sample_percent: 100,
            by: None,
            hash: Vec::new(),
            max_bytes: 256 << 20,
        };
        assert_eq!(config("record: {to: a.jsonl}"), Some(expected.clone()));
        let written = "record: {to: a.jsonl, sample: 5%, by: header.X-Api-Key, hash: [ip, header.X-Api-Key], max_bytes: 1MiB}";
        let expected = RecordConfig {
            sample_percent: 5,
            by: Some("header.x-api-key".to_owned()),
            hash: vec!["ip".to_owned(), "header.x-api-key".to_owned()],
            max_bytes: 1 << 20,
            ..expected
        };
        assert_eq!(config(written), Some(expected));
    }

    #[test]
    fn every_mistake_is_reported_with_its_line() {
        let errors = |text: &str| {
            let mistakes = Config::parse(text).unwrap_err();
            mistakes.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            errors("record: {sample: 0%}"),
            [
                "record.sample (line 1): must be 1% to 100%",
                "record.to (line 1): is missing; name the file for the recorded requests",
            ]
        );
        let hidden = errors("privacy: {keys: hashed}\nrecord: {to: a.jsonl}");
        assert_eq!(hidden.len(), 1, "{hidden:?}");
        assert!(
            hidden[0].starts_with("record.hash (line 2): is missing; because"),
            "{hidden:?}"
        );
        assert_eq!(
            errors("record: {to: a.jsonl, max_bytes: 1KiB}"),
            ["record.max_bytes (line 1): must be 1MiB to 1024GiB"]
        );
        assert!(Config::parse("privacy: {keys: hashed}\nrecord: {to: a.jsonl, hash: []}").is_ok());
    }
}
