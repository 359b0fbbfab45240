//! Events about the changes that operators make.

use std::sync::Arc;

use serde_json::{Value, json};
use tidegate_config::EventType;
use tidegate_limiter::ServerLimiter;

use super::{access::Operator, path::KeyTarget};

/// Records the changes that an operator makes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Auditor<'a> {
    limiter: &'a Arc<ServerLimiter>,
    operator: &'a Operator,
}

impl<'a> Auditor<'a> {
    pub(super) fn new(limiter: &'a Arc<ServerLimiter>, operator: &'a Operator) -> Self {
        Self { limiter, operator }
    }

    pub(super) fn limiter(&self) -> &'a Arc<ServerLimiter> {
        self.limiter
    }

    /// Sends an event for a completed change. `change` contains the event's fields, except for the
    /// operator's name.
    pub(super) fn record(&self, kind: EventType, mut change: Value) {
        if let Some(events) = self.limiter.events() {
            change["by"] = json!(&*self.operator.name);
            events.emit(kind, self.limiter.now(), &change);
        }
    }

    /// Sends an event for a change to a key.
    pub(super) fn record_key(&self, kind: EventType, target: KeyTarget<'_>, mut change: Value) {
        if let Some(events) = self.limiter.events() {
            change["rule"] = json!(target.rule);
            change["key"] = events.shown_key(target.key);
            self.record(kind, change);
        }
    }
}
