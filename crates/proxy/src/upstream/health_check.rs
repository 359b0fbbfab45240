//! Active health checks: periodic requests to an endpoint.
//!
//! ```text
//! healthy ── consecutive failed checks ──▶ down ── consecutive good checks ──▶ healthy
//! ```
//!
//! Endpoints that are down receive no requests while the upstream has a healthy endpoint. If no
//! endpoint is healthy, all endpoints receive requests.

use std::{
    future::poll_fn,
    io,
    sync::{Arc, Weak},
};

use arc_swap::ArcSwap;
use http::{HeaderValue, Request, header};
use tidegate_config::{HealthCheck, Proxy};
use tidegate_net::Tasks;
use tokio::time::{sleep, timeout};

use super::{
    config::RuntimeConfig,
    connect::{self, Protocol},
    endpoint::Endpoint,
    outlier::{HealthCheckResult, with_causes},
};
use crate::{headers::target, request_body::Upload};

/// Starts the active health checks that are configured in `current` and not running yet. The checks
/// of an endpoint run until they are no longer configured.
pub(crate) fn start(tasks: &Tasks, current: &Arc<ArcSwap<RuntimeConfig>>) {
    for endpoint in current.load().upstreams.endpoints() {
        if endpoint.claim_health_checks() {
            let (endpoint, current) = (Arc::downgrade(endpoint), Arc::downgrade(current));
            tasks.spawn(move || run(endpoint, current));
        }
    }
}

/// Runs the active health checks of an endpoint, until the endpoint is removed or the checks are no
/// longer configured. Each check uses the settings that are active at its start.
async fn run(endpoint: Weak<Endpoint>, current: Weak<ArcSwap<RuntimeConfig>>) {
    let mut streak = CheckStreak::default();
    while let (Some(endpoint), Some(current)) = (endpoint.upgrade(), current.upgrade()) {
        let settings = Arc::clone(&current.load().settings);
        drop(current);
        let endpoint_settings = Arc::clone(&endpoint.settings());
        let Some(check) = &endpoint_settings.health else {
            endpoint.health.clear_unconfigured(&endpoint_settings);
            endpoint.release_health_checks();
            // A reload may have enabled the checks again while this task was still marked as
            // running.
            if endpoint.claim_health_checks() {
                continue;
            }
            return;
        };
        let result = timeout(check.timeout, run_check(&endpoint, check, &settings)).await;
        let problem = match result {
            Ok(Ok(())) => None,
            // If the proxy's machine is out of resources, the endpoint is not at fault, so ignore
            // the failed check.
            Ok(Err(error)) if connect::is_out_of_resources(&error) => {
                tracing::warn!(upstream = %endpoint_settings.name, %error, "health check skipped: this host has no free file descriptor, port or memory");
                let interval = check.interval;
                drop(endpoint);
                sleep(interval).await;
                continue;
            }
            Ok(Err(error)) => Some(with_causes(&error)),
            Err(_) => Some("no response in time".to_owned()),
        };
        streak.record(&endpoint, check, problem);
        drop(endpoint);
        sleep(check.interval).await;
    }
}

/// The number of health checks passed in a row, and the number failed in a row.
#[derive(Default)]
struct CheckStreak {
    good: u32,
    bad: u32,
}

impl CheckStreak {
    /// Records the result of a `check` of `endpoint`. `problem` is `None` if the check has passed.
    fn record(&mut self, endpoint: &Endpoint, check: &HealthCheck, problem: Option<String>) {
        let health = &endpoint.health;
        health.count_check(match problem {
            None => HealthCheckResult::Good,
            Some(_) => HealthCheckResult::Bad,
        });
        (self.good, self.bad) = match problem {
            None => (self.good.saturating_add(1), 0),
            Some(_) => (0, self.bad.saturating_add(1)),
        };
        if self.bad >= check.unhealthy_after && health.mark_down() {
            tracing::warn!(
                upstream = %endpoint.settings().name,
                endpoint = %endpoint.address.url,
                problem = problem.unwrap_or_default(),
                "health check failed: endpoint marked down, used only if no other endpoint is healthy"
            );
        }
        if self.good >= check.healthy_after && health.mark_up() {
            tracing::info!(upstream = %endpoint.settings().name, endpoint = %endpoint.address.url, "health check passed: endpoint marked up");
        }
    }
}

/// Performs one health check of `endpoint`, on a new connection.
async fn run_check(endpoint: &Endpoint, check: &HealthCheck, settings: &Proxy) -> io::Result<()> {
    let connection = connect::connect(&endpoint.address, settings).await?;
    let status = match connection {
        Protocol::Http1(mut connection) => {
            connection.start(check_request(endpoint, check)?, None);
            poll_fn(|cx| connection.poll_head(cx)).await?.status()
        }
        Protocol::Http2(mut connection) => {
            let response = connection.send(check_request(endpoint, check)?).await;
            let response = response.map_err(|error| io::Error::other(error.into_error()))?;
            response.status()
        }
    };
    let is_good = status.is_success() || status.is_redirection();
    is_good
        .then_some(())
        .ok_or_else(|| io::Error::other(format!("unexpected status {status}")))
}

fn check_request(endpoint: &Endpoint, check: &HealthCheck) -> io::Result<Request<Upload>> {
    let request = Request::get(&*check.path)
        .header(header::HOST, endpoint.address.url.authority())
        .header(header::USER_AGENT, HeaderValue::from_static("tidegate"))
        .body(Upload::empty())
        .map_err(io::Error::other)?;
    if !endpoint.address.http2 {
        return Ok(request);
    }
    let (mut head, body) = request.into_parts();
    let scheme = match endpoint.address.url.scheme {
        tidegate_config::Scheme::Http => http::uri::Scheme::HTTP,
        tidegate_config::Scheme::Https => http::uri::Scheme::HTTPS,
    };
    target::to_http2(&mut head, &scheme).map_err(|_| io::Error::other("the host is invalid"))?;
    Ok(Request::from_parts(head, body))
}
