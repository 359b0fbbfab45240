//! Passes decisions to the observers.
//!
//! [`ServerLimiter::observe`] passes a verdict to the metrics, the denials, the events, the
//! candidate rules and the recorder, so that a listener cannot omit one of them. Top talkers are
//! counted with the decision, and [`ServerLimiter::audit`] audits the entries of a request.

use tidegate::DecidedRequest;
use tidegate_core::{
    BLOCK_KEY, Charge, DESCRIPTOR_KEY, Decision, Limits, OnFailure, Outcome, StoreDecision,
    Timestamp, Verdict,
};

use crate::{
    ServerLimiter,
    denials::{self, DescriptorDenial, ThrottledRequest},
    entries::AuditedRequest,
    metrics::ListenerKind,
    trace,
};

impl ServerLimiter {
    /// Counts a verdict that `listener` is about to return, and records its denials. If configured,
    /// also evaluates the candidate rules on the request, and records the request.
    pub fn observe(
        &self,
        listener: ListenerKind,
        decided: DecidedRequest<'_>,
        verdict: &Verdict<'_>,
    ) {
        self.observers.metrics.observe(listener, decided, verdict);
        trace::record_verdict(listener, verdict);
        if denials::has_denial(verdict) {
            let fails_closed = |limits: &Limits| self.fails_closed(limits);
            self.observers
                .denials
                .record(listener, decided, verdict, fails_closed);
        }
        if let Some(events) = &self.observers.events {
            events.observe(decided, verdict);
        }
        if let Some(candidate) = &*self.observers.candidate.load() {
            candidate.observe(decided, verdict);
        }
        if let Some(recorder) = &self.observers.recorder {
            recorder.record(decided, verdict);
        }
    }

    /// Calls [`Self::observe`] and [`Self::audit`].
    pub fn observe_and_audit(&self, audited: AuditedRequest<'_>, verdict: &Verdict<'_>) {
        self.observe(audited.listener, audited.decided, verdict);
        self.audit(audited, verdict);
    }

    /// Audits the entries of a request that received `verdict`, so that unused entries are
    /// reported.
    pub fn audit(&self, audited: AuditedRequest<'_>, verdict: &Verdict<'_>) {
        self.observers
            .audit
            .load()
            .observe(audited, verdict, &self.observers.metrics);
    }

    /// Counts a decision that `listener` is about to return for a request that contained its own
    /// limits.
    pub fn observe_throttle(
        &self,
        listener: ListenerKind,
        request: ThrottledRequest<'_>,
        decided: &StoreDecision,
    ) {
        self.observers.metrics.observe_throttle(listener, decided);
        let verdict = || decided.verdict(&[*request.charge], request.outcomes);
        trace::record_with(listener, verdict);
        if decided.decision != Decision::Admitted {
            self.observers
                .denials
                .record_throttle(listener, request, decided);
        }
    }

    /// Records that an Envoy rate limit descriptor is over its limit.
    pub fn observe_descriptor_denial(&self, denied: &DescriptorDenial<'_>) {
        self.observers.denials.record_descriptor(denied);
    }

    /// Adds the decisions since the last sample to the 15-minute traffic history, and detects
    /// surges. The server calls this method every second.
    pub fn sample_traffic(&self) {
        let now = self.now();
        self.observers.metrics.sample_traffic(now);
        if let Some(events) = &self.observers.events {
            let total = self.observers.metrics.total_traffic();
            self.observers
                .metrics
                .with_rule_traffic(|rules| events.detect_surges(now, total, rules));
        }
    }

    /// Counts a decision on `charges` for the lists of top talkers. `outcomes` contains one outcome
    /// for each limit, in the order of `charges`. Charges whose limits were not evaluated have no
    /// outcomes and come last.
    #[inline]
    pub(crate) fn record_keys(
        &self,
        now: Timestamp,
        charges: &[Charge<'_>],
        decided: &StoreDecision,
        outcomes: &[Outcome],
    ) {
        let Some(top) = &self.observers.top else {
            return;
        };
        // Do not record the descriptors of Envoy's rate limit service, because the service has its
        // own statistics. A blocked request to which no rule applies has no key.
        let is_counted = |charge: &Charge<'_>| {
            !charge.key.starts_with(&DESCRIPTOR_KEY) && charge.key != BLOCK_KEY
        };
        if charges.first().is_some_and(is_counted) {
            let fails_closed = |limits: &Limits| self.fails_closed(limits);
            top.record(now, charges, decided, outcomes, fails_closed);
        }
    }

    /// Returns whether a rule with these limits denies requests while Redis is unreachable.
    pub(crate) fn fails_closed(&self, limits: &Limits) -> bool {
        let store = self.redis_store();
        store.is_some_and(|store| store.failure_policy(limits) == OnFailure::Closed)
    }

    /// Records the latency of a sampled decision, and what percentage of each limit is used.
    #[inline]
    pub(crate) fn record_sample(
        &self,
        latency: Option<u64>,
        charges: &[Charge<'_>],
        outcomes: &[Outcome],
    ) {
        if let Some(nanos) = latency {
            self.observers
                .metrics
                .observe_sample(nanos, charges, outcomes);
            if let Some(trace_id) = trace::trace_id() {
                self.observers
                    .metrics
                    .keep_exemplar(nanos, trace_id, self.now());
            }
        }
    }
}
