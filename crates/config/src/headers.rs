//! The settings of the rate limit headers.

use tidegate_tower::{HeaderWriter, Legacy, RuleNames};

use super::{report::Report, value::Fields};

/// The rate limit headers in responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// `headers.ratelimit`: whether to send the headers `RateLimit` and `RateLimit-Policy`; default
    /// true.
    pub ratelimit: bool,
    /// `headers.legacy`: whether to send the three `X-RateLimit-*` headers, and in which form;
    /// default off.
    pub legacy: LegacyHeaders,
    /// `headers.rule_names`: whether headers and denials reveal rule names to clients; default
    /// false.
    pub rule_names: bool,
}

impl Default for Headers {
    fn default() -> Self {
        Self {
            ratelimit: true,
            legacy: LegacyHeaders::Off,
            rule_names: false,
        }
    }
}

impl Headers {
    /// Creates a writer for the enabled headers.
    #[must_use]
    pub fn writer(self) -> HeaderWriter {
        let legacy = match self.legacy {
            LegacyHeaders::Off => Legacy::Off,
            LegacyHeaders::Delta => Legacy::Delta,
            LegacyHeaders::Epoch => Legacy::Epoch,
        };
        let names = if self.rule_names {
            RuleNames::Shown
        } else {
            RuleNames::Hidden
        };
        HeaderWriter::new(self.ratelimit, legacy).with_rule_names(names)
    }
}

/// Whether the `X-RateLimit-*` headers are sent, and the form of `X-RateLimit-Reset`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LegacyHeaders {
    /// The headers are not sent.
    #[default]
    Off,
    /// The value is the number of seconds from now, rounded up.
    Delta,
    /// The value is a Unix timestamp in seconds, rounded up.
    Epoch,
}

/// Reads the section `headers`.
pub(super) fn headers(file: &Fields<'_>, report: &mut Report) -> Headers {
    let mut headers = Headers::default();
    let value = file.get("headers");
    let known = &["ratelimit", "legacy", "rule_names"];
    let Some(fields) =
        value.and_then(|value| value.fields(report, "a map such as {legacy: delta}", known))
    else {
        return headers;
    };
    if let Some(ratelimit) = fields.get("ratelimit") {
        headers.ratelimit = ratelimit.flag(report).unwrap_or(headers.ratelimit);
    }
    if let Some(names) = fields.get("rule_names") {
        headers.rule_names = names.flag(report).unwrap_or(headers.rule_names);
    }
    if let Some(legacy) = fields.get("legacy") {
        let choices = [
            ("off", LegacyHeaders::Off),
            ("delta", LegacyHeaders::Delta),
            ("epoch", LegacyHeaders::Epoch),
        ];
        headers.legacy = legacy.choice(report, &choices).unwrap_or_default();
    }
    headers
}
