//! The observers: the parts of the limiter that record decisions.

use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use tidegate_config::DenialsConfig;
use tidegate_core::{Rule, RuleSet, Timestamp};
use tidegate_net::prometheus::Page;

use crate::{
    RequestRecorder, candidate::Candidate, denials::DenialLog, entries::EntryAudit, events::Events,
    metrics::Metrics, top::TopTalkers,
};

/// The metrics, the lists and the other parts that record decisions.
#[derive(Debug)]
pub(crate) struct Observers {
    pub(crate) metrics: Metrics,
    /// Reports the entries of requests that no rule uses.
    pub(crate) audit: ArcSwap<EntryAudit>,
    /// The lists of top talkers; `None` if they are off.
    pub(crate) top: Option<TopTalkers>,
    pub(crate) denials: DenialLog,
    pub(crate) events: Option<Arc<Events>>,
    pub(crate) candidate: ArcSwapOption<Candidate>,
    pub(crate) recorder: Option<RequestRecorder>,
}

impl Observers {
    /// Creates the observers that are always on. `started` is the time of the start of the process.
    pub(crate) fn new(rules: &RuleSet, started: Timestamp) -> Self {
        let metrics = Metrics::new(started);
        metrics.name_rules(rules.iter().map(Rule::name));
        Self {
            audit: ArcSwap::from_pointee(EntryAudit::new(rules, &metrics)),
            metrics,
            top: None,
            denials: DenialLog::new(&DenialsConfig::default()),
            events: None,
            candidate: ArcSwapOption::empty(),
            recorder: None,
        }
    }

    /// Prepares the observers for decisions under the rules `new`, which replace `old`.
    pub(crate) fn swap_rules(&self, old: &RuleSet, new: &RuleSet) {
        self.metrics.name_rules(new.iter().map(Rule::name));
        let audit = EntryAudit::new(new, &self.metrics);
        self.audit.store(Arc::new(audit));
        if let Some(top) = &self.top {
            top.swap_rules(old, new);
        }
    }

    /// Adds the metrics of the observers to `page`. [`Metrics`] are not included, because they need
    /// the state of the limiter.
    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        if let Some(top) = &self.top {
            top.collect(page);
        }
        self.denials.collect(page);
        if let Some(candidate) = &*self.candidate.load() {
            candidate.collect(page);
        }
        if let Some(recorder) = &self.recorder {
            recorder.collect(page);
        }
        if let Some(events) = &self.events {
            events.collect(page);
        }
    }
}
