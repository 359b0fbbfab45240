//! The adaptive concurrency limit of an upstream: permits, load shedding by priority class, and
//! headroom for elastic rules.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use http::{Extensions, Response, request::Parts};
use tidegate::Clock;
use tidegate_core::{LimitError, Timestamp, concurrency::AdaptiveSettings};
use tidegate_tower::{
    ConcurrencyLimiter, ConcurrencyPermit, HeadroomCondition, Load, RateLimitLayer,
    overload_response,
};

use super::{
    error::{ErrorReason, ProxyError},
    rate_limit::ProxyLimiter,
};

/// The adaptive concurrency limit of one upstream.
#[derive(Debug)]
pub(crate) struct UpstreamConcurrency {
    limiter: Arc<ConcurrencyLimiter>,
    settings: AdaptiveSettings,
    classes: Box<[Arc<PriorityClass>]>,
    headroom: Box<[HeadroomCondition]>,
    /// The name of the entry through which rules learn whether the upstream has headroom (spare
    /// capacity).
    pub(crate) entry: Box<str>,
}

/// A priority class of requests.
#[derive(Debug)]
struct PriorityClass {
    settings: tidegate_config::Class,
    shed: Arc<AtomicU64>,
}

/// The priority class of a request, stored as a request extension. Admission control determines the
/// class before the rate limits run.
#[derive(Clone, Debug)]
struct RequestClass(Arc<PriorityClass>);

impl UpstreamConcurrency {
    /// Builds the concurrency limit of `upstream` from `settings`. The new limit inherits the
    /// counters, the permits in use and the learnt limit from `previous`. The new settings take
    /// effect in [`Self::activate`].
    ///
    /// # Errors
    ///
    /// Returns an error if settings are out of range, which is impossible for a parsed
    /// configuration.
    pub(crate) fn inheriting_from(
        settings: &tidegate_config::Adaptive,
        upstream: &tidegate_config::UpstreamConfig,
        previous: Option<&Self>,
        clock: &Clock,
    ) -> Result<Self, LimitError> {
        let limiter = match previous {
            Some(previous) => Arc::clone(&previous.limiter),
            None => Arc::new(ConcurrencyLimiter::new(settings.settings, clock.clone())?),
        };
        let class = |settings: &tidegate_config::Class| {
            let same_class = previous.iter().flat_map(|previous| &previous.classes);
            let mut same_class = same_class.filter(|class| class.settings.name == settings.name);
            Arc::new(PriorityClass {
                shed: same_class
                    .next()
                    .map(|class| Arc::clone(&class.shed))
                    .unwrap_or_default(),
                settings: settings.clone(),
            })
        };
        Ok(Self {
            limiter,
            settings: settings.settings,
            classes: settings.classes.iter().map(class).collect(),
            headroom: settings.headroom.as_slice().into(),
            entry: upstream.headroom_entry().into(),
        })
    }

    /// Applies the new settings, also to requests in flight.
    pub(crate) fn activate(&self) {
        if let Err(error) = self.limiter.change(self.settings) {
            tracing::error!("kept the old settings of `adaptive`: {error}");
        }
    }

    /// Returns whether the upstream has headroom for elastic rules.
    pub(crate) fn has_headroom(&self) -> bool {
        self.headroom
            .iter()
            .all(|room| self.limiter.has_headroom(*room))
    }

    /// Determines the class of the request with this head, and stores the class in the request's
    /// extensions. `layer` evaluates the conditions of the classes.
    ///
    /// # Errors
    ///
    /// Returns the response to send if the request is ambiguous, so that its class cannot be
    /// determined, or if it would exceed the limit. If the request would exceed the limit, it is
    /// counted as shed.
    pub(crate) fn classify(
        &self,
        head: &mut Parts,
        layer: &RateLimitLayer<ProxyLimiter>,
        now: Timestamp,
    ) -> Result<(), Box<Response<Bytes>>> {
        for class in &self.classes {
            let when = &class.settings.when;
            if !when.is_always() && !layer.holds(when, head, now)? {
                continue;
            }
            if !self.limiter.has_free_slot(class.settings.share) {
                class.shed.fetch_add(1, Ordering::Relaxed);
                let mut shed = overload_response(head);
                let reason = ProxyError::Overloaded.as_str();
                shed.extensions_mut().insert(ErrorReason(reason));
                return Err(Box::new(shed));
            }
            head.extensions.insert(RequestClass(Arc::clone(class)));
            break;
        }
        Ok(())
    }

    /// Acquires a permit for the request with these extensions; `None` if the limit is reached.
    pub(crate) fn acquire(&self, extensions: &mut Extensions) -> Option<ConcurrencyPermit> {
        // A reload may have changed the classes or the request's upstream since the class was
        // determined, so look up the class again by name.
        let class = extensions.remove().and_then(|RequestClass(known)| {
            let mut classes = self.classes.iter();
            classes.find(|class| class.settings.name == known.settings.name)
        });
        let class = class.or_else(|| self.classes.last())?;
        let permit = self.limiter.try_acquire(class.settings.share);
        if permit.is_none() {
            class.shed.fetch_add(1, Ordering::Relaxed);
        }
        permit
    }

    pub(crate) fn load(&self) -> Load {
        self.limiter.load()
    }

    /// Returns the name of each class and its number of shed requests.
    pub(crate) fn shed(&self) -> impl Iterator<Item = (&str, u64)> {
        self.classes.iter().map(|class| {
            let shed = class.shed.load(Ordering::Relaxed);
            (&*class.settings.name, shed)
        })
    }
}

#[cfg(test)]
mod tests {
    use tidegate_config::Config;

    use super::*;

    /// Returns a limit fixed at 4 concurrent requests, with the given priority classes.
    fn upstream_concurrency(
        classes: [&str; 2],
        previous: Option<&UpstreamConcurrency>,
    ) -> UpstreamConcurrency {
        let classes = classes.join(", ");
        let text = format!(
            "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: 'http://127.0.0.1:1', adaptive: {{algorithm: aimd, min: 4, max: 4, classes: [{classes}]}}}}]}}\n"
        );
        let proxy = Config::parse(&text).unwrap().proxy.unwrap();
        let upstream = &proxy.upstreams[0];
        let adaptive = upstream.adaptive.as_ref().unwrap();
        let clock = Clock::manual(Timestamp::from_micros(0));
        UpstreamConcurrency::inheriting_from(adaptive, upstream, previous, &clock).unwrap()
    }

    #[test]
    fn a_class_keeps_its_counter_by_name_after_a_reload() {
        let batch = "{name: batch, when: {path: /batch}, share: 25%}";
        let usual = "{name: usual, when: {path: /usual}}";
        let before = upstream_concurrency([batch, usual], None);
        let after = upstream_concurrency([usual, batch], Some(&before));
        let entered = [0; 2].map(|_| {
            let mut extensions = Extensions::new();
            extensions.insert(RequestClass(Arc::clone(&before.classes[0])));
            after.acquire(&mut extensions)
        });
        assert_eq!(entered.each_ref().map(Option::is_some), [true, false]);
        let shed: Vec<_> = after.shed().collect();
        assert_eq!(shed, [("usual", 0), ("batch", 1), ("default", 0)]);
    }
}
