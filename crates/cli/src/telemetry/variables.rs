//! The standard variables `OTEL_*` that the exporters themselves do not check.

use std::{env, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;

/// The default of `OTEL_EXPORTER_OTLP_TIMEOUT`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// A kind of telemetry.
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

/// The variables of the environment.
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

    /// Returns the value of a variable. An empty value counts as no value.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    /// Returns the value of the variable for `signal`, such as
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, or else of the variable for all signals.
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

    /// Returns whether `signal` is exported: an endpoint is set, and nothing turns the signal off.
    ///
    /// # Errors
    ///
    /// Returns a message with advice if the exporter or the protocol is not supported.
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

    /// Returns whether the environment names the service.
    pub(super) fn has_service_name(&self) -> bool {
        self.get("OTEL_SERVICE_NAME").is_some() || self.has_resource_attribute("service.name")
    }

    /// Returns whether the environment sets this attribute of the resource.
    pub(super) fn has_resource_attribute(&self, name: &str) -> bool {
        let attributes = self.get("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
        let mut names = attributes
            .split(',')
            .filter_map(|attribute| attribute.split_once('='));
        names.any(|(known, _)| known.trim() == name)
    }

    /// Returns the timeout of one export.
    pub(super) fn timeout(&self, signal: Signal) -> Result<Duration, String> {
        match self.of_signal(signal, "TIMEOUT") {
            Some((name, value)) => millis(&name, &value),
            None => Ok(DEFAULT_TIMEOUT),
        }
    }

    /// Returns the time between two exports of metrics.
    pub(super) fn metrics_interval(&self) -> Result<Duration, String> {
        let name = "OTEL_METRIC_EXPORT_INTERVAL";
        match self.get(name) {
            Some(value) => millis(name, &value),
            None => Ok(DEFAULT_INTERVAL),
        }
    }

    /// Returns the URL for `signal`; empty if no endpoint is set.
    pub(super) fn url(&self, signal: Signal) -> String {
        let signal_name = signal.as_str();
        let own = format!("OTEL_EXPORTER_OTLP_{}_ENDPOINT", signal_name.to_uppercase());
        self.get(&own).unwrap_or_else(|| {
            let base = self.get("OTEL_EXPORTER_OTLP_ENDPOINT").unwrap_or_default();
            format!("{}/v1/{signal_name}", base.trim_end_matches('/'))
        })
    }

    /// Returns the headers for the collector.
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
            // The header can be a secret, so the message does not show it.
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
    fn metrics_have_a_url_and_headers() {
        let variables = Variables::of(|name| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://127.0.0.1:4318/".to_owned()),
            "OTEL_EXPORTER_OTLP_HEADERS" => Some("api-key=a%20b, x=1".to_owned()),
            "OTEL_METRIC_EXPORT_INTERVAL" => Some("5000".to_owned()),
            _ => None,
        });
        let url = variables.url(Signal::Metrics);
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
