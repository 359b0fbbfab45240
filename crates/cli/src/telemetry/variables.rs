//! Reads the standard `OTEL_*` variables that the exporter libraries themselves do not check.

use std::{env, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use opentelemetry_sdk::trace::Sampler;
use percent_encoding::percent_decode_str;

/// The default of `OTEL_EXPORTER_OTLP_TIMEOUT`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// A telemetry signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    Traces,
    Logs,
    Metrics,
}

impl Signal {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Traces => "traces",
            Self::Logs => "logs",
            Self::Metrics => "metrics",
        }
    }
}

/// The default of `OTEL_METRIC_EXPORT_INTERVAL`.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(60);

/// Access to the environment variables.
#[derive(Debug)]
pub(super) struct Variables(fn(&str) -> Option<String>);

impl Variables {
    #[expect(
        clippy::disallowed_methods,
        reason = "the exporters are configured by the environment"
    )]
    pub(super) fn of_process() -> Self {
        Self(|name| env::var(name).ok())
    }

    #[cfg(test)]
    pub(super) fn of(read: fn(&str) -> Option<String>) -> Self {
        Self(read)
    }

    /// Returns the value of a variable. An empty variable is treated as unset.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    /// Returns the name and the value of the variable for `signal`, such as
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`. If that variable is unset, returns the one for all
    /// signals, such as `OTEL_EXPORTER_OTLP_ENDPOINT`.
    fn of_signal(&self, signal: Signal, name: &str) -> Option<(String, String)> {
        let own = format!(
            "OTEL_EXPORTER_OTLP_{}_{name}",
            signal.as_str().to_uppercase()
        );
        let general = format!("OTEL_EXPORTER_OTLP_{name}");
        [own, general]
            .into_iter()
            .find_map(|name| self.get(&name).map(|value| (name, value)))
    }

    /// Returns whether `signal` is exported. A signal is exported if an endpoint is set and no
    /// variable disables the signal.
    ///
    /// # Errors
    ///
    /// Returns a message with a suggested fix if the exporter or the protocol is not supported.
    pub(super) fn is_exported(&self, signal: Signal) -> Result<bool, String> {
        let is_disabled = self
            .get("OTEL_SDK_DISABLED")
            .is_some_and(|value| value.eq_ignore_ascii_case("true"));
        if is_disabled || self.of_signal(signal, "ENDPOINT").is_none() {
            return Ok(false);
        }
        let name = format!("OTEL_{}_EXPORTER", signal.as_str().to_uppercase());
        match self.get(&name).as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(false),
            Some(other) => {
                return Err(format!(
                    "{name}: the exporter `{other}` is not supported; use `otlp`, or `none` to export no {}",
                    signal.as_str()
                ));
            }
        }
        match self.of_signal(signal, "PROTOCOL") {
            Some((name, protocol)) if protocol != "http/protobuf" => Err(format!(
                "{name}: the protocol `{protocol}` is not supported; use `http/protobuf`, which collectors accept on \
                 port 4318"
            )),
            _ => Ok(true),
        }
    }

    /// Returns whether an environment variable sets the service name.
    pub(super) fn has_service_name(&self) -> bool {
        self.get("OTEL_SERVICE_NAME").is_some() || self.has_resource_attribute("service.name")
    }

    /// Returns whether `OTEL_RESOURCE_ATTRIBUTES` sets this resource attribute.
    pub(super) fn has_resource_attribute(&self, name: &str) -> bool {
        let attributes = self.get("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
        let mut names = attributes
            .split(',')
            .filter_map(|attribute| attribute.split_once('='));
        names.any(|(known, _)| known.trim() == name)
    }

    /// Returns the timeout of an export.
    pub(super) fn timeout(&self, signal: Signal) -> Result<Duration, String> {
        match self.of_signal(signal, "TIMEOUT") {
            Some((name, value)) => millis(&name, &value),
            None => Ok(DEFAULT_TIMEOUT),
        }
    }

    /// Returns the interval between metrics exports.
    pub(super) fn metrics_interval(&self) -> Result<Duration, String> {
        let name = "OTEL_METRIC_EXPORT_INTERVAL";
        match self.get(name) {
            Some(value) => millis(name, &value),
            None => Ok(DEFAULT_INTERVAL),
        }
    }

    /// Returns the URL for `signal`.
    ///
    /// # Errors
    ///
    /// Returns a message with a suggested fix if the value is not a URL. The message does not
    /// contain the value, because it can contain a credential.
    pub(super) fn url(&self, signal: Signal) -> Result<Uri, String> {
        let signal_name = signal.as_str();
        let own = format!("OTEL_EXPORTER_OTLP_{}_ENDPOINT", signal_name.to_uppercase());
        let general = "OTEL_EXPORTER_OTLP_ENDPOINT";
        let (name, url) = match self.get(&own) {
            Some(url) => (own.as_str(), url),
            None => {
                let base = self.get(general).unwrap_or_default();
                let url = format!("{}/v1/{signal_name}", base.trim_end_matches('/'));
                (general, url)
            }
        };
        let uri: Option<Uri> = url.trim().parse().ok();
        let is_sound =
            |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
        uri.filter(is_sound).ok_or_else(|| {
            format!(
                "{name}: expected a URL such as http://127.0.0.1:4318 or https://collector:4318"
            )
        })
    }

    /// Returns the trace sampler, and a warning if a sampler variable has an unsupported value. For
    /// an unsupported value, the OpenTelemetry specification requires the default sampler and a
    /// warning.
    pub(super) fn sampler(&self) -> (Sampler, Option<String>) {
        let default = || Sampler::ParentBased(Box::new(Sampler::AlwaysOn));
        let Some(name) = self.get("OTEL_TRACES_SAMPLER") else {
            return (default(), None);
        };
        let name = name.trim().to_ascii_lowercase();
        let (is_parent_based, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name.as_str()),
        };
        let (sampler, warning) = match root {
            "always_on" => (Sampler::AlwaysOn, None),
            "always_off" => (Sampler::AlwaysOff, None),
            "traceidratio" => {
                let (ratio, warning) = self.sampled_ratio();
                (Sampler::TraceIdRatioBased(ratio), warning)
            }
            _ => {
                let warning = format!(
                    "OTEL_TRACES_SAMPLER: the sampler `{name}` is not supported, so parentbased_always_on is used; \
                     use always_on, always_off or traceidratio, with or without the prefix parentbased_"
                );
                return (default(), Some(warning));
            }
        };
        match is_parent_based {
            true => (Sampler::ParentBased(Box::new(sampler)), warning),
            false => (sampler, warning),
        }
    }

    /// Returns the fraction of traces to sample, and a warning if the variable is ignored because
    /// its value is invalid.
    fn sampled_ratio(&self) -> (f64, Option<String>) {
        let name = "OTEL_TRACES_SAMPLER_ARG";
        let Some(text) = self.get(name) else {
            return (1.0, None);
        };
        let ratio = text.trim().parse().ok();
        match ratio.filter(|ratio| (0.0..=1.0).contains(ratio)) {
            Some(ratio) => (ratio, None),
            None => {
                let warning = format!(
                    "{name}: expected a number from 0 to 1, got `{text}`, so every trace is sampled"
                );
                (1.0, Some(warning))
            }
        }
    }

    /// Returns the headers to send to the collector.
    pub(super) fn headers(&self, signal: Signal) -> Result<HeaderMap, String> {
        let mut headers = HeaderMap::new();
        let Some((name, list)) = self.of_signal(signal, "HEADERS") else {
            return Ok(headers);
        };
        for pair in list.split(',').filter(|pair| !pair.trim().is_empty()) {
            let header = pair.split_once('=').and_then(|(key, value)| {
                let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
                let key: HeaderName = key.trim().parse().ok()?;
                Some((key, HeaderValue::from_str(&value).ok()?))
            });
            // The message does not contain the header, because it can be a secret.
            let (key, value) = header.ok_or_else(|| {
                format!("{name}: expected headers such as api-key=VALUE, separated by commas")
            })?;
            headers.insert(key, value);
        }
        Ok(headers)
    }
}

fn millis(name: &str, value: &str) -> Result<Duration, String> {
    let millis = value.trim().parse().ok().filter(|millis| *millis > 0);
    millis.map(Duration::from_millis).ok_or_else(|| {
        format!("{name}: expected a number of milliseconds, such as 10000, got `{value}`")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_exported_without_an_endpoint() {
        let none = Variables::of(|_| None);
        assert_eq!(none.is_exported(Signal::Traces), Ok(false));
        let disabled = Variables::of(|name| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://127.0.0.1:4318".to_owned()),
            "OTEL_SDK_DISABLED" => Some("true".to_owned()),
            _ => None,
        });
        assert_eq!(disabled.is_exported(Signal::Traces), Ok(false));
    }

    #[test]
    fn a_signal_has_variables_of_its_own() {
        let traces = Variables::of(|name| match name {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" => {
                Some("http://127.0.0.1:4318/v1/traces".to_owned())
            }
            "OTEL_EXPORTER_OTLP_TIMEOUT" => Some("250".to_owned()),
            _ => None,
        });
        assert_eq!(traces.is_exported(Signal::Traces), Ok(true));
        assert_eq!(traces.is_exported(Signal::Logs), Ok(false));
        let timeout = traces.timeout(Signal::Traces);
        assert_eq!(timeout, Ok(Duration::from_millis(250)));
        let off = Variables::of(|name| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://127.0.0.1:4318".to_owned()),
            "OTEL_LOGS_EXPORTER" => Some("none".to_owned()),
            _ => None,
        });
        assert_eq!(off.is_exported(Signal::Logs), Ok(false));
        assert_eq!(off.is_exported(Signal::Traces), Ok(true));
    }

    #[test]
    fn unsupported_values_are_refused_with_advice() {
        let refused = |read| Variables::of(read).is_exported(Signal::Traces).unwrap_err();
        let grpc = refused(|name| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://127.0.0.1:4317".to_owned()),
            "OTEL_EXPORTER_OTLP_PROTOCOL" => Some("grpc".to_owned()),
            _ => None,
        });
        assert!(
            grpc.starts_with("OTEL_EXPORTER_OTLP_PROTOCOL: the protocol `grpc`"),
            "{grpc}"
        );
        let zipkin = refused(|name| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://127.0.0.1:4318".to_owned()),
            "OTEL_TRACES_EXPORTER" => Some("zipkin".to_owned()),
            _ => None,
        });
        assert!(zipkin.contains("use `otlp`, or `none`"), "{zipkin}");
        let timeout = Variables::of(|_| Some("soon".to_owned())).timeout(Signal::Logs);
        assert!(timeout.unwrap_err().contains("milliseconds"));
    }

    #[test]
    fn an_endpoint_that_is_no_url_is_refused_at_the_start() {
        let refused = |read| Variables::of(read).url(Signal::Metrics).unwrap_err();
        let no_scheme = refused(|name| {
            (name == "OTEL_EXPORTER_OTLP_ENDPOINT").then(|| "collector:4318".to_owned())
        });
        assert!(
            no_scheme.starts_with("OTEL_EXPORTER_OTLP_ENDPOINT: expected a URL such as http://"),
            "{no_scheme}"
        );
        let own = refused(|name| {
            (name == "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT").then(|| "ftp://secret@a b".to_owned())
        });
        assert!(
            own.starts_with("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: ") && !own.contains("secret"),
            "{own}"
        );
    }

    /// Returns the sampler and the warning for the environment variables that `read` returns.
    fn sampler(read: fn(&str) -> Option<String>) -> (String, Option<String>) {
        let (sampler, warning) = Variables::of(read).sampler();
        (format!("{sampler:?}"), warning)
    }

    #[test]
    fn an_unknown_sampler_has_a_warning_and_the_default() {
        let default = sampler(|_| None);
        assert_eq!(default, ("ParentBased(AlwaysOn)".to_owned(), None));
        let off = sampler(|name| {
            (name == "OTEL_TRACES_SAMPLER").then(|| "PARENTBASED_always_off".to_owned())
        });
        assert_eq!(off, ("ParentBased(AlwaysOff)".to_owned(), None));
        let (unknown, warning) =
            sampler(|name| (name == "OTEL_TRACES_SAMPLER").then(|| "xray".to_owned()));
        assert_eq!(unknown, "ParentBased(AlwaysOn)");
        let warning = warning.unwrap();
        assert!(
            warning.starts_with("OTEL_TRACES_SAMPLER: the sampler `xray`"),
            "{warning}"
        );
    }

    #[test]
    fn a_ratio_out_of_range_has_a_warning_and_samples_every_trace() {
        let ratio = sampler(|name| match name {
            "OTEL_TRACES_SAMPLER" => Some("traceidratio".to_owned()),
            "OTEL_TRACES_SAMPLER_ARG" => Some("0.25".to_owned()),
            _ => None,
        });
        assert_eq!(ratio, ("TraceIdRatioBased(0.25)".to_owned(), None));
        for read in [
            (|name| match name {
                "OTEL_TRACES_SAMPLER" => Some("traceidratio".to_owned()),
                _ => Some("-0.5".to_owned()),
            }) as fn(&str) -> Option<String>,
            |name| match name {
                "OTEL_TRACES_SAMPLER" => Some("traceidratio".to_owned()),
                _ => Some("10%".to_owned()),
            },
        ] {
            let (all, warning) = sampler(read);
            assert_eq!(all, "TraceIdRatioBased(1.0)");
            let warning = warning.unwrap();
            assert!(
                warning.starts_with("OTEL_TRACES_SAMPLER_ARG: expected a number from 0 to 1"),
                "{warning}"
            );
        }
    }

    #[test]
    fn metrics_have_a_url_and_headers() {
        let variables = Variables::of(|name| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://127.0.0.1:4318/".to_owned()),
            "OTEL_EXPORTER_OTLP_HEADERS" => Some("api-key=a%20b, x=1".to_owned()),
            "OTEL_METRIC_EXPORT_INTERVAL" => Some("5000".to_owned()),
            _ => None,
        });
        let url = variables.url(Signal::Metrics).unwrap();
        assert_eq!(url, "http://127.0.0.1:4318/v1/metrics");
        let headers = variables.headers(Signal::Metrics).unwrap();
        assert_eq!(
            (&headers["api-key"], &headers["x"]),
            (&"a b".parse().unwrap(), &"1".parse().unwrap())
        );
        let interval = variables.metrics_interval();
        assert_eq!(interval, Ok(Duration::from_secs(5)));
        let wrong = Variables::of(|_| Some("secret".to_owned())).headers(Signal::Metrics);
        let problem = wrong.unwrap_err();
        assert!(
            problem.contains("api-key=VALUE") && !problem.contains("secret"),
            "{problem}"
        );
    }
}
