//! The format of the case files, described in `vectors/envoy.yaml`.
//!
//! An unknown field is a parse error, so that no expectation is ignored silently.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cases {
    pub(crate) format: u32,
    #[serde(default)]
    pub(crate) cases: Vec<Case>,
    #[serde(default)]
    pub(crate) load_error_cases: Vec<LoadErrorCase>,
    #[serde(default)]
    pub(crate) http_json_cases: Vec<HttpCase>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub(crate) id: String,
    #[serde(rename = "about")]
    _about: Option<String>,
    #[serde(rename = "source")]
    _source: Option<Value>,
    #[serde(default)]
    pub(crate) quirk: String,
    #[serde(default)]
    pub(crate) settings: BTreeMap<String, Value>,
    pub(crate) t0: u64,
    pub(crate) config: Vec<ConfigFile>,
    pub(crate) steps: Vec<Step>,
    #[serde(default)]
    pub(crate) expect_stats: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConfigFile {
    pub(crate) name: String,
    pub(crate) yaml: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Step {
    /// The time of the step, in seconds after the time `t0`.
    pub(crate) at: Option<u64>,
    pub(crate) repeat: Option<u64>,
    #[serde(default)]
    pub(crate) domain: String,
    pub(crate) hits_addend: Option<u32>,
    #[serde(default)]
    pub(crate) descriptors: Vec<DescriptorFields>,
    pub(crate) reload: Option<Vec<ConfigFile>>,
    pub(crate) expect: Expect,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DescriptorFields {
    pub(crate) entries: Vec<(String, String)>,
    pub(crate) limit: Option<LimitFields>,
    pub(crate) hits_addend: Option<u64>,
    #[serde(default)]
    pub(crate) is_negative_hits: bool,
}

/// A limit in a request or a response.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitFields {
    #[serde(default)]
    pub(crate) requests_per_unit: u32,
    #[serde(default = "unknown")]
    pub(crate) unit: String,
    #[serde(default)]
    pub(crate) name: String,
}

fn unknown() -> String {
    "UNKNOWN".into()
}

/// The expected response to a step. Unless an error is expected, every field is compared. A field
/// that is missing in the case must also be missing in the response.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Expect {
    pub(crate) overall_code: Option<String>,
    #[serde(default)]
    pub(crate) statuses: Vec<StatusFields>,
    #[serde(default)]
    pub(crate) response_headers_to_add: Vec<(String, String)>,
    pub(crate) dynamic_metadata: Option<Value>,
    pub(crate) error: Option<String>,
    /// The expected result of a reload: `ok`, or a string that the load error must contain.
    pub(crate) reload: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StatusFields {
    pub(crate) code: String,
    pub(crate) current_limit: Option<LimitFields>,
    #[serde(default)]
    pub(crate) limit_remaining: u32,
    /// The expected time until the reset, in seconds.
    pub(crate) duration_until_reset: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoadErrorCase {
    pub(crate) id: String,
    pub(crate) config: Vec<ConfigFile>,
    pub(crate) error_contains: String,
    #[serde(default)]
    pub(crate) settings: BTreeMap<String, Value>,
    #[serde(default, rename = "yaml_syntax_error")]
    _yaml_syntax_error: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HttpCase {
    pub(crate) id: String,
    pub(crate) method: Option<String>,
    pub(crate) path: Option<String>,
    pub(crate) body: Option<String>,
    #[serde(rename = "note")]
    _note: Option<String>,
    pub(crate) expect_status: u16,
    pub(crate) expect_body: Option<Value>,
    pub(crate) content_type: Option<String>,
}

/// Parses a case file.
pub(crate) fn parse(text: &str) -> Result<Cases, String> {
    let cases: Cases = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    match cases.format {
        1 => Ok(cases),
        other => Err(format!("format {other} is not known here")),
    }
}
