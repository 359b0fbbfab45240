//! The server's status: `/readyz` for probes, `/v1/status` for operators.

use hyper::StatusCode;
use serde_json::{Value, json};
use tidegate_envoy::RuleSource;
use tidegate_limiter::date::date;
use tidegate_net::response::{Answer, json};
use tidegate_redis::Health;

use super::{Admin, access::Operator};
use crate::{geoip::GeoIp, reload::Reloader};

/// Whether the server is ready, and which components are degraded.
#[derive(Debug)]
struct Readiness {
    is_ready: bool,
    /// Whether the server is still waiting for its first configuration from a control plane.
    is_waiting: bool,
    last_reload: &'static str,
    mistakes: Vec<String>,
    degraded: Vec<String>,
    redis: Option<Value>,
}

impl Admin {
    /// Returns 200 as long as the server can make decisions, even if it is degraded. A degraded
    /// server still enforces limits, so it should continue to receive traffic.
    pub(super) fn readyz(&self) -> Answer {
        let readiness = self.readiness();
        let status = if readiness.is_ready {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        json(status, &readiness.document())
    }

    /// Returns the status document.
    pub(super) fn status(&self, operator: &Operator) -> Answer {
        let limiter = &self.limiter;
        let (now, metrics) = (limiter.now(), limiter.metrics());
        let mut document = self.readiness().document();
        let file = self.reloader.as_ref().map(|reloader| reloader.path());
        document["version"] = json!(env!("CARGO_PKG_VERSION"));
        document["started"] = json!(date(metrics.started()));
        document["uptime_ms"] = json!(now.since(metrics.started()).as_micros() / 1_000);
        document["rules"] = json!(limiter.rules().len());
        document["rules_file"] = json!(file.map(|file| file.display().to_string()));
        let restart_required = self.reloader.as_deref().map(Reloader::restart_required);
        document["restart_required"] = json!(restart_required.unwrap_or_default());
        let candidate = self.limiter.candidate();
        document["candidate"] = json!(candidate.map(|one| one.file().display().to_string()));
        let promoted = self.reloader.as_deref().and_then(Reloader::promoted);
        document["promoted"] = json!(promoted.map(|file| file.display().to_string()));
        document["store"] = self.store();
        document["listeners"] = json!(metrics.listeners());
        document["operator"] = json!(&*operator.name);
        document["may_operate"] = operator.may_operate().is_ok().into();
        json(StatusCode::OK, &document)
    }

    fn store(&self) -> Value {
        let stats = self.limiter.local_store().stats();
        let kind = match self.limiter.redis_store() {
            Some(_) => "redis",
            None => "memory",
        };
        // With a Redis backend, the memory store is only the fallback while Redis is unreachable.
        json!({
            "kind": kind,
            "keys_in_process": stats.keys,
            "bytes_in_process": stats.bytes,
            "persistent": self.limiter.are_blocks_persistent(),
            "snapshot": self.limiter.snapshots().is_configured(),
        })
    }

    fn readiness(&self) -> Readiness {
        let reloader = self.reloader.as_deref();
        let of_rules = reloader.map(Reloader::last_mistakes).unwrap_or_default();
        let of_envoy = self.envoy.as_deref().map(RuleSource::last_mistakes);
        let of_envoy = of_envoy.unwrap_or_default();
        let tls = self.certificates.iter();
        let of_tls: Vec<String> = tls.filter_map(|tls| tls.problem()).collect();
        let of_geoip = self.geoip.as_deref().map(GeoIp::problems);
        let of_geoip = of_geoip.unwrap_or_default();
        let failed = self.limiter.metrics().last_reload_failed() || !of_envoy.is_empty();
        let last_reload = if failed {
            "failed; the old rules stay active"
        } else if !of_tls.is_empty() {
            "failed; the old certificate stays active"
        } else if !of_geoip.is_empty() {
            "failed; the old GeoIP database stays active"
        } else {
            "ok"
        };
        let mistakes = [of_rules, of_envoy, of_tls, of_geoip].concat();
        let mut degraded = Vec::new();
        if last_reload != "ok" {
            degraded.push(format!("the last reload {last_reload}"));
        }
        let now = self.limiter.now();
        degraded.extend(self.limiter.snapshots().problem(now));
        degraded.extend(self.envoy.as_deref().and_then(RuleSource::problem));
        let redis = self.limiter.redis_store().map(|redis_store| {
            let document = redis(
                &redis_store.stats().health,
                redis_store.last_server_error(now),
            );
            let state = document["state"].as_str().unwrap_or_default();
            if state != "ok" {
                degraded.push(format!("Redis: {state}"));
            }
            document
        });
        let envoy = self.envoy.as_deref();
        let is_waiting = envoy.is_some_and(RuleSource::is_waiting);
        Readiness {
            is_ready: !is_waiting && !self.shutdown.is_announced(),
            is_waiting,
            last_reload,
            mistakes,
            degraded,
            redis,
        }
    }
}

impl Readiness {
    fn document(self) -> Value {
        let state = match (self.is_ready, self.degraded.is_empty()) {
            (false, _) if self.is_waiting => "waiting for the first configuration",
            (false, _) => "shutting down",
            (true, true) => "ready",
            (true, false) => "degraded",
        };
        let mut document = json!({
            "ready": self.is_ready,
            "state": state,
            "degraded": self.degraded,
            "last_reload": self.last_reload,
            "mistakes": self.mistakes,
        });
        if let Some(redis) = self.redis {
            document["redis"] = redis;
        }
        document
    }
}

/// Serialises the state of Redis. A node that cannot reach Redis stays ready, because it still
/// decides requests according to the `on_failure` policies of the rules. If unreachable Redis made
/// a node not ready, a Redis outage would take all nodes out of service at the same time.
fn redis(health: &Health, refusal: Option<String>) -> Value {
    let state = match (health.up, health.up == health.servers, &refusal) {
        (0, _, _) => "unreachable; the rules' `on_failure` policies apply",
        (_, true, _) if health.unserved_slots > 0 => {
            "some hash slots of the cluster have no node; the rules' `on_failure` policies apply to the keys in these slots"
        }
        (_, true, None) if health.warnings.is_empty() => "ok",
        (_, true, None) => "ok, with warnings",
        (_, true, Some(_)) => {
            "some decisions failed in the last minute; the rules' `on_failure` policies applied"
        }
        (_, false, _) => {
            "some servers are unreachable; the rules' `on_failure` policies apply to the keys on these servers"
        }
    };
    let problem = health.error.as_ref().map(ToString::to_string).or(refusal);
    json!({
        "state": state,
        "servers": health.servers,
        "up": health.up,
        "unserved_slots": health.unserved_slots,
        "problem": problem,
        "warnings": health.warnings,
    })
}
