//! Connects the rate limiting layer of `tidegate-tower` to the server's limiter.

use std::sync::Arc;

use tidegate::{DecidedRequest, RateLimiter, Waiters};
use tidegate_config::Identity;
use tidegate_core::{RuleSet, Timestamp, Verdict};
use tidegate_limiter::{ServerLimiter, metrics::ListenerKind};
use tidegate_tower::{HeaderWriter, RateLimitLayer};

/// The server's limiter. In the metrics, its decisions have the label of the proxy listener.
#[derive(Debug)]
pub(crate) struct ProxyLimiter(Arc<ServerLimiter>);

/// Builds the layer that applies the rules to every request. The layer takes client addresses and
/// trusted proxies from `identity`, and adds the rate limit `headers` to every response.
pub(crate) fn layer(
    limiter: &Arc<ServerLimiter>,
    identity: &Identity,
    headers: HeaderWriter,
) -> RateLimitLayer<ProxyLimiter> {
    let layer = RateLimitLayer::new(Arc::new(ProxyLimiter(Arc::clone(limiter))))
        .trust(identity.trust.clone())
        .headers(headers)
        .insert_status(false);
    let layer = match &identity.geoip {
        Some(geoip) => layer.geoip(Arc::clone(geoip)),
        None => layer,
    };
    let derived = identity.derived.iter();
    derived.fold(layer, |layer, (name, entry)| {
        layer.derived(name, entry.clone())
    })
}

impl RateLimiter for ProxyLimiter {
    type Store = ServerLimiter;

    fn now(&self) -> Timestamp {
        self.0.now()
    }

    fn rules(&self) -> Arc<RuleSet> {
        self.0.rules()
    }

    fn store(&self) -> &ServerLimiter {
        &self.0
    }

    fn wait_queues(&self) -> &Waiters {
        self.0.wait_queues()
    }

    fn observe(&self, decided: DecidedRequest<'_>, verdict: &Verdict<'_>) {
        self.0.observe(ListenerKind::Proxy, decided, verdict);
    }
}
