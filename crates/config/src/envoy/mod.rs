//! `envoy`: Envoy's rate limit service. The rules of the service come from files in
//! envoyproxy/ratelimit's format, from Limitador's limits file, or from a control plane.

mod settings;
mod xds;

use std::{path::PathBuf, sync::Arc};

pub use settings::{HeaderNames, Ratio, RlsSettings, StoreFailure};
pub use xds::{
    KeepAlive, MAX_MESSAGE_BYTES, MAX_NODE_METADATA, MAX_XDS_HEADERS, XdsBackoff, XdsConfig,
    XdsNode, XdsServer, XdsTls, header,
};

use super::{
    report::Report,
    store,
    value::{Fields, Shape, Value},
};

/// The configuration files for Envoy's rate limit service: their path, format and merging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFiles {
    /// The path of a file, or of a folder that is read recursively. Names that start with a dot are
    /// ignored, because a mounted Kubernetes ConfigMap keeps previous versions under such names.
    pub path: PathBuf,
    /// The format of the files.
    pub format: FileFormat,
    /// Whether several files are allowed to define the same domain.
    pub merging: DomainFiles,
}

/// The format of configuration files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileFormat {
    /// The format of envoyproxy/ratelimit: a domain with descriptors.
    #[default]
    Ratelimit,
    /// The format of Limitador: a list of limits.
    Limitador,
}

/// Whether several files, or several control plane resources, are allowed to define the same
/// domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DomainFiles {
    /// Each domain is defined in one file. If two files define the same domain, the second file is
    /// rejected.
    #[default]
    One,
    /// All files that define the same domain are merged, in the order of the file names.
    Merged,
}

/// The source of the service's rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleOrigin {
    /// Files.
    Files(ConfigFiles),
    /// A control plane.
    Xds(Box<XdsConfig>),
}

/// The configured rate limit service.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Envoy {
    /// `envoy.config`, `envoy.limitador` and `envoy.merge_domains`: the source of the service's
    /// rules.
    pub rules: RuleOrigin,
    /// The settings of the service, from the other keys of the section `envoy`.
    pub settings: RlsSettings,
    /// `envoy.start_without_config`: whether the server starts even if the rules cannot be loaded.
    /// Until the rules are loaded, the service responds with errors. Default false.
    pub start_without_config: bool,
}

impl Envoy {
    /// Creates the configuration of a service that gets its rules from `rules`, with default
    /// settings.
    #[must_use]
    pub fn new(rules: RuleOrigin) -> Self {
        Self {
            rules,
            settings: RlsSettings::default(),
            start_without_config: false,
        }
    }
}

const FIELDS: &[&str] = &[
    "config",
    "limitador",
    "merge_domains",
    "start_without_config",
    "healthy_with_a_domain",
    "shadow_mode",
    "quota_mode",
    "near_limit_ratio",
    "response_headers",
    "dynamic_metadata",
    "stop_increment",
    "local_cache",
    "store_failure",
    "metrics",
];

pub(super) fn envoy(file: &Fields<'_>, report: &mut Report) -> Option<Envoy> {
    let value = file.get("envoy")?;
    let what = "a map such as {config: /etc/tidegate/envoy}";
    let fields = value.fields(report, what, FIELDS)?;
    let mut flag = |name| {
        fields
            .get(name)
            .is_some_and(|value| value.flag(report).unwrap_or(false))
    };
    let merging = if flag("merge_domains") {
        DomainFiles::Merged
    } else {
        DomainFiles::One
    };
    let start_without_config = flag("start_without_config");
    let settings = RlsSettings {
        shadow_mode: flag("shadow_mode"),
        quota_mode: flag("quota_mode"),
        dynamic_metadata: flag("dynamic_metadata"),
        stop_increment: flag("stop_increment"),
        healthy_with_a_domain: flag("healthy_with_a_domain"),
        near_limit_ratio: ratio(&fields, report),
        response_headers: response_headers(&fields, report),
        local_cache_bytes: local_cache(&fields, report),
        store_failure: store_failure(&fields, report),
        ratelimit_metrics: ratelimit_metrics(&fields, report),
        limitador_api: fields.get("limitador").is_some(),
    };
    Some(Envoy {
        rules: rules(&fields, merging, report)?,
        settings,
        start_without_config,
    })
}

fn rules(fields: &Fields<'_>, merging: DomainFiles, report: &mut Report) -> Option<RuleOrigin> {
    if let Some(value) = fields.get("limitador") {
        return limitador(value, fields, report);
    }
    let Some(value) = fields.get("config") else {
        let message = "is missing; name the file or folder with envoyproxy/ratelimit's \
            configuration, or a control plane: {xds: {server: \"control-plane:18000\"}}; for \
            Limitador's limits file, use `limitador`";
        fields.wrong(report, "config", message);
        return None;
    };
    if value.shape() == Shape::Map {
        let what = "a path, or a map such as {xds: {server: \"control-plane:18000\"}}";
        let inside = value.fields(report, what, &["xds"])?;
        let Some(value) = inside.get("xds") else {
            if !inside.tries("xds") {
                inside.wrong(report, "xds", "is missing; name a control plane");
            }
            return None;
        };
        let xds = xds::xds(value, merging, report)?;
        return Some(RuleOrigin::Xds(Box::new(xds)));
    }
    let text = value.text(report, "the path of a file or a folder")?;
    let path = store::path_of(value, text, report)?;
    let format = FileFormat::Ratelimit;
    Some(RuleOrigin::Files(ConfigFiles {
        path,
        format,
        merging,
    }))
}

/// The settings that have no effect if the limits come from Limitador's limits file.
const NOT_OF_LIMITADOR: [&str; 5] = [
    "config",
    "merge_domains",
    "quota_mode",
    "stop_increment",
    "dynamic_metadata",
];

/// Reads `limitador`, the path of a limits file.
fn limitador(value: &Value<'_>, fields: &Fields<'_>, report: &mut Report) -> Option<RuleOrigin> {
    for name in NOT_OF_LIMITADOR {
        if let Some(other) = fields.get(name) {
            let message =
                format!("`{name}` cannot be combined with `limitador`; remove one of the two");
            other.wrong(report, message);
        }
    }
    let text = value.text(report, "the path of Limitador's limits file")?;
    Some(RuleOrigin::Files(ConfigFiles {
        path: store::path_of(value, text, report)?,
        format: FileFormat::Limitador,
        merging: DomainFiles::One,
    }))
}

fn ratelimit_metrics(fields: &Fields<'_>, report: &mut Report) -> bool {
    let choices = [("tidegate", false), ("ratelimit", true)];
    let chosen = fields
        .get("metrics")
        .and_then(|value| value.choice(report, &choices));
    chosen.unwrap_or(false)
}

fn ratio(fields: &Fields<'_>, report: &mut Report) -> Ratio {
    let ratio = fields.get("near_limit_ratio").and_then(|value| {
        let what = "a share from 0 to 1 with at most six decimal places, such as 0.8";
        let ratio = value.text(report, what).and_then(Ratio::parse);
        if ratio.is_none() && value.scalar().is_some() {
            value.expected(report, what);
        }
        ratio
    });
    ratio.unwrap_or_default()
}

/// Reads `response_headers`. The value `true` enables the headers with the names in the IETF draft;
/// a map enables them with other names.
fn response_headers(fields: &Fields<'_>, report: &mut Report) -> Option<HeaderNames> {
    let value = fields.get("response_headers")?;
    if let Shape::Scalar | Shape::List = value.shape() {
        return value
            .flag(report)
            .unwrap_or(false)
            .then(HeaderNames::default);
    }
    let names = value.fields(
        report,
        "true, or a map of names",
        &["limit", "remaining", "reset"],
    )?;
    let default = HeaderNames::default();
    let mut name = |field, default: Arc<str>| {
        let read = names
            .get(field)
            .and_then(|value| header_name(value, report));
        read.unwrap_or(default)
    };
    Some(HeaderNames {
        limit: name("limit", default.limit),
        remaining: name("remaining", default.remaining),
        reset: name("reset", default.reset),
    })
}

fn header_name(value: &Value<'_>, report: &mut Report) -> Option<Arc<str>> {
    let text = value.text(report, "a header name")?;
    if http::HeaderName::try_from(text).is_err() {
        value.expected(report, "a header name");
        return None;
    }
    Some(text.into())
}

fn store_failure(fields: &Fields<'_>, report: &mut Report) -> StoreFailure {
    let choices = [
        ("answer", StoreFailure::Answer),
        ("error", StoreFailure::Error),
    ];
    let chosen = fields
        .get("store_failure")
        .and_then(|value| value.choice(report, &choices));
    chosen.unwrap_or_default()
}

fn local_cache(fields: &Fields<'_>, report: &mut Report) -> usize {
    let bytes = fields
        .get("local_cache")
        .and_then(|value| store::size(value, report));
    bytes.unwrap_or(0)
}
