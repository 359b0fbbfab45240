//! `POST /v1/reload`: reloads all configuration files.

use std::sync::Arc;

use hyper::StatusCode;
use serde_json::{Map, Value, json};
use tidegate_envoy::RuleSource;
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Problem, Tls};

use crate::{
    geoip::GeoIp,
    reload::{
        Reloader, inactive_entry_blocks_advice, report_inactive_blocks, report_inactive_overrides,
    },
};

/// The maximum number of warnings in a response. The log contains all warnings.
pub(super) const MAX_WARNINGS: usize = 100;

/// Everything that can be reloaded.
pub(super) struct ReloadTargets {
    pub(super) rules: Option<Arc<Reloader>>,
    pub(super) envoy: Option<Arc<RuleSource>>,
    pub(super) certificates: Vec<Arc<Tls>>,
    pub(super) geoip: Option<Arc<GeoIp>>,
}

impl ReloadTargets {
    pub(super) fn is_empty(&self) -> bool {
        let Self {
            rules,
            envoy,
            certificates,
            geoip,
        } = self;
        rules.is_none() && envoy.is_none() && certificates.is_empty() && geoip.is_none()
    }

    /// Reloads everything, and returns the JSON fields of the response. An invalid file does not
    /// prevent other files from being reloaded. `by` is the operator's name.
    pub(super) fn reload(self, by: &str) -> Result<Map<String, Value>, Problem> {
        let rules = self.rules.map(|rules| {
            let detail = "the rules file cannot be used; the old rules stay active";
            let reloaded = rules.reload(by);
            reloaded
                .map(|reloaded| (reloaded, rules.restart_required()))
                .map_err(|error| refused(detail, error.problems()))
        });
        let domains = self.envoy.and_then(|envoy| {
            let detail = "the configuration of Envoy's rate limit service cannot be used; the old configuration stays active";
            let reloaded = envoy.reload()?;
            let reloaded = reloaded
                .map(|domains| (domains, envoy.warnings()))
                .map_err(|error| refused(detail, error.problems()));
            Some(reloaded)
        });
        // `collect` into a `Vec` reloads all certificates, even after an error.
        let certificates: Vec<Result<(), Problem>> = self
            .certificates
            .iter()
            .map(|tls| {
                let detail =
                    "the certificate of a listener cannot be used; the old certificate stays active";
                tls.reload()
                    .map_err(|error| refused(detail, vec![error.to_string()]))
            })
            .collect();
        let geoip = self.geoip.map(|geoip| {
            let detail = "a GeoIP database cannot be used; the old database stays active";
            geoip
                .reload()
                .map_err(|errors| refused(detail, errors.iter().map(ToString::to_string).collect()))
        });
        let mut members = Map::new();
        let mut warnings: Vec<String> = Vec::new();
        if let Some(rules) = rules {
            let (reloaded, restart_required) = rules?;
            members.insert("rules".into(), json!(reloaded.rules));
            warnings.extend(reloaded.warnings.iter().map(ToString::to_string));
            if !restart_required.is_empty() {
                members.insert("restart_required".into(), json!(restart_required));
            }
        }
        if let Some(domains) = domains {
            let (domains, of_envoy) = domains?;
            members.insert("domains".into(), json!(domains));
            warnings.extend(of_envoy);
        }
        if !certificates.is_empty() {
            certificates.into_iter().collect::<Result<(), Problem>>()?;
            members.insert("certificate".into(), json!("ok"));
        }
        if let Some(geoip) = geoip {
            geoip?;
            members.insert("geoip".into(), json!("ok"));
        }
        if !warnings.is_empty() {
            warnings.truncate(MAX_WARNINGS);
            members.insert("warnings".into(), json!(warnings));
        }
        Ok(members)
    }
}

/// Adds to `members` the blocks and the overrides that have no effect under the new rules, with
/// hints, if there are any.
pub(super) async fn add_inactive(limiter: &Arc<ServerLimiter>, members: &mut Map<String, Value>) {
    let hints = [
        add_inactive_entry_blocks(limiter, members),
        add_inactive_blocks(limiter, members).await,
        add_inactive_overrides(limiter, members).await,
    ];
    let hints: Vec<String> = hints.into_iter().flatten().collect();
    if !hints.is_empty() {
        members.insert("hint".into(), hints.join(". ").into());
    }
}

fn add_inactive_entry_blocks(
    limiter: &ServerLimiter,
    members: &mut Map<String, Value>,
) -> Option<String> {
    let found = limiter.inactive_entry_blocks();
    let advice = inactive_entry_blocks_advice(found)?;
    members.insert("inactive_entry_blocks".into(), found.into());
    Some(advice)
}

async fn add_inactive_blocks(
    limiter: &ServerLimiter,
    members: &mut Map<String, Value>,
) -> Option<String> {
    let found = match report_inactive_blocks(limiter).await {
        Ok(found) => found,
        Err(error) => return Some(error.to_string()),
    };
    let advice = found.advice()?;
    let by_rule = found.0.iter();
    let by_rule = by_rule.map(|(rule, blocks)| json!({"rule": rule, "blocks": blocks}));
    members.insert("inactive_blocks".into(), by_rule.collect());
    Some(advice)
}

async fn add_inactive_overrides(
    limiter: &Arc<ServerLimiter>,
    members: &mut Map<String, Value>,
) -> Option<String> {
    let found = report_inactive_overrides(limiter).await;
    let advice = found.advice()?;
    let by_rule = found.0.iter();
    let by_rule = by_rule.map(|(rule, count)| json!({"rule": rule, "overrides": count}));
    members.insert("inactive_overrides".into(), by_rule.collect());
    Some(advice)
}

pub(super) fn refused(detail: &str, mistakes: Vec<String>) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail).with_mistakes(mistakes)
}
