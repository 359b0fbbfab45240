//! The limiter of the server, as the layer around the proxy asks it.

use std::sync::Arc;

use tidegate_core::{RuleSet, Timestamp, Verdict};
use tidegate_http::{Gate, HeaderWriter, LimiterLayer};

use crate::{config::Identity, limiter::Limiter, metrics::Door};

/// Asks in the name of the proxy.
#[derive(Debug)]
pub(super) struct ProxyGate(Arc<Limiter>);

/// What stands in the way of every request: the rules, by the word of those whom `identity` believes, and with
/// `headers` on every answer.
pub(super) fn layer(
    limiter: &Arc<Limiter>,
    identity: &Identity,
    headers: HeaderWriter,
) -> LimiterLayer<ProxyGate> {
    let layer = LimiterLayer::new(Arc::new(ProxyGate(Arc::clone(limiter))))
        .trust(identity.trust.clone())
        .headers(headers)
        .tell_inner(false);
    let layer = match &identity.atlas {
        Some(atlas) => layer.atlas(Arc::clone(atlas)),
        None => layer,
    };
    let parts = identity.parts.iter();
    parts.fold(layer, |layer, (name, part)| layer.part(name, part.clone()))
}

impl Gate for ProxyGate {
    type Store = Limiter;

    fn now(&self) -> Timestamp {
        self.0.now()
    }

    fn rules(&self) -> Arc<RuleSet> {
        self.0.rules()
    }

    fn store(&self) -> &Limiter {
        &self.0
    }

    fn observe(&self, verdict: &Verdict<'_>) {
        self.0.observe(Door::Proxy, verdict);
    }
}
