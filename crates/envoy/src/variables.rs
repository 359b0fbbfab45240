//! Reads the service settings from the environment variables of envoyproxy/ratelimit.

use std::{collections::BTreeMap, sync::Arc};

use tidegate_config::envoy::{HeaderNames, Ratio, RlsSettings};

/// Environment variables by name.
pub type Variables = BTreeMap<String, String>;

/// Reads environment variables and collects the errors in their values.
#[derive(Debug)]
pub(super) struct VariableReader<'v> {
    variables: &'v Variables,
    pub(super) problems: Vec<String>,
}

impl<'v> VariableReader<'v> {
    pub(super) fn new(variables: &'v Variables) -> Self {
        Self {
            variables,
            problems: Vec::new(),
        }
    }

    /// Returns the value of a variable. An empty variable counts as unset.
    pub(super) fn text(&self, name: &str) -> Option<&'v str> {
        self.variables
            .get(name)
            .map(String::as_str)
            .filter(|text| !text.is_empty())
    }

    /// Reads a boolean variable. An unset variable counts as false.
    pub(super) fn flag(&mut self, name: &str) -> bool {
        self.parsed(name, "true or false", |text| match text {
            "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
            "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
            _ => None,
        })
        .unwrap_or(false)
    }

    /// Parses a variable with `parse`.
    pub(super) fn parsed<T>(
        &mut self,
        name: &str,
        what: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.text(name)?;
        let parsed = parse(text);
        if parsed.is_none() {
            self.problems.push(format!(
                "{name}: expected {what}, got \"{}\"",
                text.escape_debug()
            ));
        }
        parsed
    }
}

/// Reads the settings of the service from `variables`. The variables have the same names as in
/// envoyproxy/ratelimit.
///
/// # Errors
///
/// Returns all errors, each with the name of its variable.
pub fn settings_from_variables(variables: &Variables) -> Result<RlsSettings, Vec<String>> {
    let mut reader = VariableReader::new(variables);
    let settings = settings(&mut reader);
    if reader.problems.is_empty() {
        Ok(settings)
    } else {
        Err(reader.problems)
    }
}

pub(super) fn settings(reader: &mut VariableReader<'_>) -> RlsSettings {
    let ratio = reader.parsed(
        "NEAR_LIMIT_RATIO",
        "a share from 0 to 1, such as 0.8",
        Ratio::parse,
    );
    let bytes = reader.parsed("LOCAL_CACHE_SIZE_IN_BYTES", "a number of bytes", |text| {
        text.parse().ok()
    });
    let mut settings = RlsSettings::default();
    settings.shadow_mode = reader.flag("SHADOW_MODE");
    settings.quota_mode = reader.flag("QUOTA_MODE");
    settings.near_limit_ratio = ratio.unwrap_or_default();
    settings.response_headers = reader
        .flag("LIMIT_RESPONSE_HEADERS_ENABLED")
        .then(|| header_names(reader));
    settings.dynamic_metadata = reader.flag("RESPONSE_DYNAMIC_METADATA");
    settings.healthy_with_a_domain = reader.flag("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED");
    settings.stop_increment = reader.flag("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT");
    settings.local_cache_bytes = bytes.unwrap_or(0);
    settings
}

fn header_names(reader: &mut VariableReader<'_>) -> HeaderNames {
    let default = HeaderNames::default();
    let mut name = |variable: &str, default: Arc<str>| {
        let what = "a header name";
        let valid = |text: &str| {
            hyper::header::HeaderName::try_from(text)
                .is_ok()
                .then(|| Arc::from(text))
        };
        reader.parsed(variable, what, valid).unwrap_or(default)
    };
    HeaderNames {
        limit: name("LIMIT_LIMIT_HEADER", default.limit),
        remaining: name("LIMIT_REMAINING_HEADER", default.remaining),
        reset: name("LIMIT_RESET_HEADER", default.reset),
    }
}
